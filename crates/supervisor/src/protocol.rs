//! The stream between host and supervisor: frames of `[payload length u32][id u64][kind
//! u8][payload]`, all little-endian. Every request gets exactly one final reply with the same id.
//!
//! The decoder is bounded: a frame longer than [`MAX_FRAME`] is rejected before any of it is
//! stored.

mod connection;

pub use crate::wire::{MAX_FRAME, ProtocolError};
pub use connection::{AgentEvent, HostEvent, MAX_CONNECTIONS, WINDOW};

use crate::disk::{DiskUse, FreeSpace};
use crate::wire::{HEADER, Reader, Writer};
use std::error::Error;
use std::fmt;

/// Version of this protocol, sent in [`Reply::Hello`].
pub const VERSION: u32 = 6;
/// Largest content of a file or an output in one frame, in bytes.
pub const CHUNK: usize = 256 * 1024;

/// Why the supervisor refused a request.
///
/// Errors cross the stream as text, so this is the end of the chain on the host's side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(pub String);

impl Refusal {
    /// A refusal because of `error`.
    pub fn new(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refusal {}

/// A request from the host to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Run a program. Answered by any number of [`Reply::Connection`], then of [`Reply::Output`],
    /// then [`Reply::Done`].
    Exec(ExecRequest),
    /// Shows that the host is alive and checks that the supervisor is. Answered by [`Reply::Ack`].
    Ping,
    /// Write a piece of a file below the working directory. Gets no reply of its own: the
    /// [`Request::WriteEnd`] after it is answered.
    Write {
        /// Path relative to the working directory, see [`is_safe_path`].
        path: String,
        /// Permission bits, or [`LINK_MODE`] for a symbolic link, which has one piece.
        mode: u32,
        /// Whether this is the file's first piece. Later pieces are appended.
        first: bool,
        /// Bytes of this piece, at most [`CHUNK`].
        data: Vec<u8>,
    },
    /// Ends a sequence of writes. Answered by [`Reply::Ack`] with the first failure, if any.
    WriteEnd,
    /// Read all regular files. Answered by [`Reply::TreeFile`] and [`Reply::TreeData`], then
    /// [`Reply::TreeEnd`].
    ReadTree {
        /// Limit of the content and paths together, in bytes.
        cap: u64,
    },
    /// Record the regular files below the working directory, for [`Request::ListChanges`]. Answered
    /// by the content of the files with one name, as to [`Request::ReadFiles`].
    MarkTree {
        /// Names of entries that are left out at any depth; a path after `/` is left out itself.
        skip: Vec<String>,
        /// Name of the files that are sent.
        send: String,
        /// Limit of their content together, in bytes.
        cap: u64,
    },
    /// List what changed since the tree was marked. Answered by [`Reply::TreeItem`], then
    /// [`Reply::TreeEnd`].
    ListChanges,
    /// Read these files. Answered by [`Reply::TreeFile`] and [`Reply::TreeData`], then
    /// [`Reply::TreeEnd`].
    ReadFiles {
        /// Paths relative to the working directory. Those that do not exist are left out.
        paths: Vec<String>,
        /// Limit of the content together, in bytes.
        cap: u64,
    },
    /// Measure what commands have put on the host's disk. Answered by [`Reply::DiskUse`]; ends a command
    /// that still runs.
    DiskUse,
    /// Record every entry of the container's file system that is not a folder, for
    /// [`Request::ListSystem`]. Answered by [`Reply::TreeEnd`].
    MarkSystem {
        /// Paths relative to the root that are left out with what is below them.
        skip: Vec<String>,
    },
    /// List what changed in the file system since it was marked, and forget the mark. Answered by
    /// [`Reply::TreeItem`] with paths relative to the root and modes with the file's type, then
    /// [`Reply::TreeEnd`].
    ListSystem,
    /// Kill every process, wipe every writable folder and verify both. Answered by [`Reply::Ack`].
    Reset,
    /// Move the container's deadline, at most to the end of its lifetime. Answered by
    /// [`Reply::Ack`].
    Deadline {
        /// Milliseconds from now.
        millis: u64,
    },
    /// Something about a connection to the forwarded port of the running command. Gets no reply,
    /// and is ignored if no command runs.
    Connection {
        /// Number of the connection.
        number: u64,
        /// What happened to it.
        event: HostEvent,
    },
    /// Kill the running command now. Gets no reply of its own, and is ignored if no command runs.
    Stop,
    /// Makes the paths of later [`Request::Write`], [`Request::ReadTree`] and
    /// [`Request::ReadFiles`] requests relative to this folder instead of the working directory.
    /// Answered by [`Reply::Ack`]; refused in a container that is reset.
    Root {
        /// Absolute path.
        path: String,
    },
}

/// A command to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program and its arguments.
    pub argv: Vec<String>,
    /// Variables added to the image's environment and the supervisor's defaults.
    pub env: Vec<(String, String)>,
    /// Milliseconds after which the command and everything it started are killed.
    pub timeout_ms: u64,
    /// Bytes of output kept from the start, and as many from the end.
    pub keep: u64,
    /// Bytes of output; the command is killed one second after it has written more.
    pub max_output: u64,
    /// Port of the loopback interface on which this process listens while the command runs, and
    /// whose connections it reports by [`Reply::Connection`]; 0 for none. The command is refused if
    /// it cannot listen there.
    pub forward_port: u16,
}

/// A reply from the supervisor to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The supervisor is ready. The first frame, with id 0.
    Hello {
        /// Protocol version of the supervisor.
        version: u32,
        /// Free space on the file system of the container's root.
        free: FreeSpace,
    },
    /// The file system of the container's writable root is full, so no later result of this
    /// container can be trusted. Sent once, with id 0, at any time.
    DiskFull(FreeSpace),
    /// What commands have put on the host's disk.
    DiskUse(DiskUse),
    /// A piece of a command's output.
    Output {
        /// Whether the piece belongs to the tail (after the cut) or to the head.
        tail: bool,
        /// Raw bytes, at most [`CHUNK`].
        data: Vec<u8>,
    },
    /// Something about a connection to the forwarded port of the running command.
    Connection {
        /// Number of the connection.
        number: u64,
        /// What happened to it.
        event: AgentEvent,
    },
    /// A command ended.
    Done(CommandReport),
    /// The request was carried out, or refused.
    Ack(Result<(), Refusal>),
    /// The request cannot be carried out because of what commands did to the container, with a
    /// description. The final reply to any request but [`Request::Reset`], and only after a command
    /// has run since the start or the last reset.
    Damaged(String),
    /// A regular file follows.
    TreeFile {
        /// Path relative to the working directory.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Bytes of content that follow in [`Reply::TreeData`].
        size: u64,
    },
    /// Content of the file announced last.
    TreeData {
        /// Raw bytes, at most [`CHUNK`].
        data: Vec<u8>,
    },
    /// A file that changed since the tree was marked.
    TreeItem(ChangedItem),
    /// End of the tree.
    TreeEnd(TreeEnd),
}

/// A regular file or symbolic link that differs from the marked tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangedItem {
    /// It does not exist any more, or is neither a regular file nor a symbolic link any more.
    Removed {
        /// Path relative to the working directory.
        path: String,
    },
    /// It is new, or its content or mode differs.
    Written {
        /// Path relative to the working directory.
        path: String,
        /// Permission bits, with [`LINK_MODE`] for a symbolic link, and with the bits of its type for what
        /// is neither that nor a regular file, which has no content.
        mode: u32,
        /// Bytes of content.
        size: u64,
        /// Whether it did not exist in the marked tree.
        is_new: bool,
        /// Whether it starts like a binary file.
        is_binary: bool,
    },
}

/// How reading a tree ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEnd {
    /// All files were sent.
    Complete {
        /// Number of files sent.
        files: u64,
    },
    /// The tree exceeds the cap, which was reached at this path. No file was sent.
    TooLarge(String),
    /// A file or folder could not be read, with the path and the reason.
    Failed(String),
}

/// How a command ended and what it used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandReport {
    /// How it ended.
    pub end: CommandEnd,
    /// Bytes of output it wrote, including those that were not kept.
    pub total_bytes: u64,
    /// Processes that the kernel killed for lack of memory while it ran.
    pub oom_kills: u32,
    /// Microseconds from its start until none of its processes was alive.
    pub elapsed_us: u64,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEnd {
    /// It exited with this code.
    Code(i32),
    /// It was killed by a signal that the supervisor did not send.
    Signal(i32),
    /// It was killed at its deadline.
    TimedOut,
    /// The program could not be started. The reason is sent as its output.
    NotStarted,
    /// It was killed because it kept writing past `max_output`.
    Flooded,
    /// It was killed because the host sent no frame for a minute.
    Abandoned,
    /// It was killed because the host asked for it.
    Stopped,
}

/// The type of a symbolic link in a file's mode, as in git. Its content is its target.
pub const LINK_MODE: u32 = 0o120_000;

/// The bits of a mode that tell the type of a file.
const TYPE_BITS: u32 = 0o170_000;
/// Those of a regular file, which are left out in most modes.
const REGULAR_MODE: u32 = 0o100_000;

/// Whether `mode` is that of a symbolic link.
pub fn is_link(mode: u32) -> bool {
    mode & TYPE_BITS == LINK_MODE
}

/// Whether `mode` is neither that of a symbolic link nor that of a regular file.
pub fn is_special(mode: u32) -> bool {
    !matches!(mode & TYPE_BITS, 0 | REGULAR_MODE | LINK_MODE)
}

/// Whether a path stays below the working directory.
///
/// It must be relative, not empty, shorter than 4,096 bytes, and consist of normal components of
/// less than 256 bytes: no `..`, no `.`, no NUL, no doubled or trailing slash.
pub fn is_safe_path(path: &str) -> bool {
    !path.contains('\0')
        && path.len() < 4096
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() < 256)
}

impl Request {
    /// Encodes this as a frame with the given id.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] if the payload is longer than [`MAX_FRAME`].
    pub fn encode(&self, id: u64) -> Result<Vec<u8>, ProtocolError> {
        let w = Writer::new();
        match self {
            Self::Exec(exec) => {
                let mut w = w.u64(exec.timeout_ms).u64(exec.keep).u64(exec.max_output);
                w = w.u64(exec.argv.len() as u64);
                for arg in &exec.argv {
                    w = w.text(arg);
                }
                w = w.u64(exec.env.len() as u64);
                for (key, value) in &exec.env {
                    w = w.text(key).text(value);
                }
                w.u32(exec.forward_port.into()).frame(id, 1)
            }
            Self::Ping => w.frame(id, 2),
            Self::Write { path, mode, first, data } => {
                w.text(path).u32(*mode).u8(u8::from(*first)).rest(data).frame(id, 3)
            }
            Self::WriteEnd => w.frame(id, 4),
            Self::ReadTree { cap } => w.u64(*cap).frame(id, 5),
            Self::Reset => w.frame(id, 6),
            Self::Deadline { millis } => w.u64(*millis).frame(id, 7),
            Self::MarkTree { skip, send, cap } => w.u64(*cap).text(send).texts(skip).frame(id, 8),
            Self::ListChanges => w.frame(id, 9),
            Self::ReadFiles { paths, cap } => w.u64(*cap).texts(paths).frame(id, 10),
            Self::DiskUse => w.frame(id, 13),
            Self::MarkSystem { skip } => w.texts(skip).frame(id, 11),
            Self::ListSystem => w.frame(id, 12),
            Self::Connection { number, event } => event.write(w.u64(*number)).frame(id, 14),
            Self::Stop => w.frame(id, 15),
            Self::Root { path } => w.text(path).frame(id, 16),
        }
    }

    /// Decodes the payload of a frame.
    ///
    /// # Errors
    /// [`ProtocolError::UnknownKind`], or [`ProtocolError::Malformed`] if the payload does not
    /// match its kind.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, ProtocolError> {
        let r = &mut Reader::new(payload);
        let request = match kind {
            1 => Self::decode_exec(r),
            2 => Some(Self::Ping),
            3 => (|| {
                let (path, mode, first) = (r.text()?, r.u32()?, r.flag()?);
                Some(Self::Write { path, mode, first, data: r.rest() })
            })(),
            4 => Some(Self::WriteEnd),
            5 => r.u64().map(|cap| Self::ReadTree { cap }),
            6 => Some(Self::Reset),
            7 => r.u64().map(|millis| Self::Deadline { millis }),
            8 => (|| {
                let (cap, send) = (r.u64()?, r.text()?);
                Some(Self::MarkTree { skip: r.texts()?, send, cap })
            })(),
            9 => Some(Self::ListChanges),
            10 => (|| {
                let cap = r.u64()?;
                Some(Self::ReadFiles { paths: r.texts()?, cap })
            })(),
            13 => Some(Self::DiskUse),
            11 => r.texts().map(|skip| Self::MarkSystem { skip }),
            12 => Some(Self::ListSystem),
            14 => (|| Some(Self::Connection { number: r.u64()?, event: HostEvent::read(r)? }))(),
            15 => Some(Self::Stop),
            16 => r.text().map(|path| Self::Root { path }),
            _ => return Err(ProtocolError::UnknownKind(kind)),
        };
        complete(request, r, kind)
    }

    fn decode_exec(r: &mut Reader<'_>) -> Option<Self> {
        let (timeout_ms, keep, max_output) = (r.u64()?, r.u64()?, r.u64()?);
        // Every element has its own length, so an excessive count fails at the end of the payload.
        let argv = (0..r.u64()?).map(|_| r.text()).collect::<Option<Vec<_>>>()?;
        let env =
            (0..r.u64()?).map(|_| Some((r.text()?, r.text()?))).collect::<Option<Vec<_>>>()?;
        let forward_port = u16::try_from(r.u32()?).ok()?;
        Some(Self::Exec(ExecRequest { argv, env, timeout_ms, keep, max_output, forward_port }))
    }
}

impl Reply {
    /// Encodes this as a frame with the given id.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] if the payload is longer than [`MAX_FRAME`].
    pub fn encode(&self, id: u64) -> Result<Vec<u8>, ProtocolError> {
        let w = Writer::new();
        match self {
            Self::Hello { version, free } => {
                w.u32(*version).u64(free.bytes).u64(free.files).frame(id, 64)
            }
            Self::DiskFull(free) => w.u64(free.bytes).u64(free.files).frame(id, 71),
            Self::DiskUse(used) => w.u64(used.bytes).u64(used.files).frame(id, 74),
            Self::Output { tail, data } => w.u8(u8::from(*tail)).rest(data).frame(id, 65),
            Self::Done(report) => {
                let (tag, value) = match report.end {
                    CommandEnd::Code(code) => (0, code),
                    CommandEnd::Signal(signal) => (1, signal),
                    CommandEnd::TimedOut => (2, 0),
                    CommandEnd::NotStarted => (3, 0),
                    CommandEnd::Flooded => (4, 0),
                    CommandEnd::Abandoned => (5, 0),
                    CommandEnd::Stopped => (6, 0),
                };
                w.u8(tag)
                    .rest(&value.to_le_bytes())
                    .u64(report.total_bytes)
                    .u32(report.oom_kills)
                    .u64(report.elapsed_us)
                    .frame(id, 66)
            }
            Self::Ack(Ok(())) => w.u8(0).text("").frame(id, 67),
            Self::Ack(Err(Refusal(reason))) => w.u8(1).text(reason).frame(id, 67),
            Self::Damaged(what) => w.text(what).frame(id, 73),
            Self::TreeFile { path, mode, size } => w.text(path).u32(*mode).u64(*size).frame(id, 68),
            Self::TreeData { data } => w.rest(data).frame(id, 69),
            Self::TreeItem(ChangedItem::Removed { path }) => w.u8(0).text(path).frame(id, 72),
            Self::TreeItem(ChangedItem::Written { path, mode, size, is_new, is_binary }) => w
                .u8(1)
                .text(path)
                .u32(*mode)
                .u64(*size)
                .u8(u8::from(*is_new))
                .u8(u8::from(*is_binary))
                .frame(id, 72),
            Self::TreeEnd(TreeEnd::Complete { files }) => w.u8(0).u64(*files).frame(id, 70),
            Self::TreeEnd(TreeEnd::TooLarge(path)) => w.u8(1).text(path).frame(id, 70),
            Self::TreeEnd(TreeEnd::Failed(reason)) => w.u8(2).text(reason).frame(id, 70),
            Self::Connection { number, event } => event.write(w.u64(*number)).frame(id, 75),
        }
    }

    /// Decodes the payload of a frame.
    ///
    /// # Errors
    /// [`ProtocolError::UnknownKind`], or [`ProtocolError::Malformed`] if the payload does not
    /// match its kind.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, ProtocolError> {
        let r = &mut Reader::new(payload);
        let reply = match kind {
            64 => (|| Some(Self::Hello { version: r.u32()?, free: free_space(r)? }))(),
            65 => r.flag().map(|tail| Self::Output { tail, data: r.rest() }),
            66 => Self::decode_done(r),
            67 => (|| {
                let (refused, reason) = (r.flag()?, r.text()?);
                Some(Self::Ack(if refused { Err(Refusal(reason)) } else { Ok(()) }))
            })(),
            68 => (|| Some(Self::TreeFile { path: r.text()?, mode: r.u32()?, size: r.u64()? }))(),
            69 => Some(Self::TreeData { data: r.rest() }),
            70 => (|| {
                Some(Self::TreeEnd(match r.u8()? {
                    0 => TreeEnd::Complete { files: r.u64()? },
                    1 => TreeEnd::TooLarge(r.text()?),
                    2 => TreeEnd::Failed(r.text()?),
                    _ => return None,
                }))
            })(),
            71 => free_space(r).map(Self::DiskFull),
            72 => changed_item(r).map(Self::TreeItem),
            73 => r.text().map(Self::Damaged),
            74 => (|| Some(Self::DiskUse(DiskUse { bytes: r.u64()?, files: r.u64()? })))(),
            75 => (|| Some(Self::Connection { number: r.u64()?, event: AgentEvent::read(r)? }))(),
            _ => return Err(ProtocolError::UnknownKind(kind)),
        };
        complete(reply, r, kind)
    }

    fn decode_done(r: &mut Reader<'_>) -> Option<Self> {
        let (tag, value) = (r.u8()?, r.i32()?);
        let end = match tag {
            0 => CommandEnd::Code(value),
            1 => CommandEnd::Signal(value),
            2 => CommandEnd::TimedOut,
            3 => CommandEnd::NotStarted,
            4 => CommandEnd::Flooded,
            5 => CommandEnd::Abandoned,
            6 => CommandEnd::Stopped,
            _ => return None,
        };
        let (total_bytes, oom_kills, elapsed_us) = (r.u64()?, r.u32()?, r.u64()?);
        Some(Self::Done(CommandReport { end, total_bytes, oom_kills, elapsed_us }))
    }
}

fn changed_item(r: &mut Reader<'_>) -> Option<ChangedItem> {
    match r.u8()? {
        0 => Some(ChangedItem::Removed { path: r.text()? }),
        1 => Some(ChangedItem::Written {
            path: r.text()?,
            mode: r.u32()?,
            size: r.u64()?,
            is_new: r.flag()?,
            is_binary: r.flag()?,
        }),
        _ => None,
    }
}

fn free_space(r: &mut Reader<'_>) -> Option<FreeSpace> {
    Some(FreeSpace { bytes: r.u64()?, files: r.u64()? })
}

fn complete<T>(value: Option<T>, r: &Reader<'_>, kind: u8) -> Result<T, ProtocolError> {
    value.filter(|_| r.is_empty()).ok_or(ProtocolError::Malformed(kind))
}

/// A frame whose payload is not decoded yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Id of the request that it carries or answers.
    pub id: u64,
    /// Number of the request or reply in the wire format.
    pub kind: u8,
    /// Encoded content, at most [`MAX_FRAME`] bytes.
    pub payload: Vec<u8>,
}

/// Splits a byte stream into frames, independently of how the bytes arrive.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameBuffer {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > MAX_FRAME || self.start == self.bytes.len() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next complete frame, or `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`]; the stream cannot be used after that.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let mut r = Reader::new(self.bytes.get(self.start..).unwrap_or_default());
        let (Some(length), Some(id), Some(kind)) = (r.u32(), r.u64(), r.u8()) else {
            return Ok(None);
        };
        let length = length as usize;
        if length > MAX_FRAME {
            return Err(ProtocolError::TooLong(length));
        }
        let Some(payload) = r.take(length as u64).map(<[u8]>::to_vec) else { return Ok(None) };
        self.start += HEADER + length;
        Ok(Some(Frame { id, kind, payload }))
    }
}

#[cfg(test)]
mod tests;
