//! The stream between host and supervisor: frames of `[payload length u32][id u64][kind u8][payload]`,
//! all little-endian. Every request gets exactly one final reply with the same id.
//!
//! The decoder is bounded: a frame above [`MAX_FRAME`] is an error before a byte of it is stored.

use crate::disk::Free;
use crate::wire::{HEADER, Reader, Writer};
use std::fmt;

/// Version spoken; said in [`Reply::Hello`].
pub const VERSION: u32 = 2;
/// Largest payload of one frame, in bytes. Anything longer travels in several.
pub const MAX_FRAME: usize = 1 << 20;
/// Bytes of file or output content put into one frame.
pub const CHUNK: usize = 256 * 1024;

/// Bytes that are no valid frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// A payload longer than [`MAX_FRAME`] bytes.
    TooLong(usize),
    /// A kind that this version does not know.
    UnknownKind(u8),
    /// A payload that ends early, has bytes left over or holds invalid text.
    Malformed(u8),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(bytes) => write!(f, "a frame of {bytes} bytes"),
            Self::UnknownKind(kind) => write!(f, "a frame of unknown kind {kind}"),
            Self::Malformed(kind) => write!(f, "a malformed frame of kind {kind}"),
        }
    }
}

impl std::error::Error for ProtocolError {}

/// What the host asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Run a program. Answered by any number of [`Reply::Output`], then [`Reply::Done`].
    Exec(ExecRequest),
    /// The host is alive; also a question whether we are. Answered by [`Reply::Ack`].
    Ping,
    /// A piece of a file below the working directory. Not answered until [`Request::WriteEnd`].
    Write {
        /// Relative path, see [`is_safe_path`].
        path: String,
        /// Permission bits.
        mode: u32,
        /// Whether this is the file's first piece; later ones are appended.
        first: bool,
        /// Content.
        data: Vec<u8>,
    },
    /// All pieces were sent. Answered by [`Reply::Ack`] with the first failure, if any.
    WriteEnd,
    /// Read all regular files. Answered by [`Reply::TreeFile`] and [`Reply::TreeData`], then [`Reply::TreeEnd`].
    ReadTree {
        /// Bytes of content and paths, at most.
        cap: u64,
    },
    /// Kill everything, wipe everything writable, prove it. Answered by [`Reply::Ack`].
    Reset,
    /// End the container this many milliseconds from now, never later than its lifetime.
    Deadline {
        /// Milliseconds from now.
        millis: u64,
    },
}

/// One command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the image's and ours.
    pub env: Vec<(String, String)>,
    /// Time until all of it is killed, in milliseconds.
    pub timeout_ms: u64,
    /// Bytes of output kept at the head and, again, at the tail.
    pub keep: u64,
    /// Total output after which the command has one more second.
    pub max_output: u64,
}

/// What the supervisor answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// First frame, id 0: ready.
    Hello {
        /// Protocol version.
        version: u32,
        /// What is left of the disk under the container's root.
        free: Free,
    },
    /// The disk under the container's root is full, and the root can be written: no result of this
    /// container means anything any more. Said once, id 0, whatever is under way.
    DiskFull(Free),
    /// A piece of a command's output.
    Output {
        /// Whether it belongs to the tail (after what was cut) or to the head.
        tail: bool,
        /// Raw bytes.
        data: Vec<u8>,
    },
    /// A command's end.
    Done(Done),
    /// Done, or refused with the reason.
    Ack(Result<(), String>),
    /// A regular file follows.
    TreeFile {
        /// Relative path.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Bytes that follow in [`Reply::TreeData`].
        size: u64,
    },
    /// Content of the file announced last.
    TreeData {
        /// Raw bytes.
        data: Vec<u8>,
    },
    /// End of the tree.
    TreeEnd(TreeEnd),
}

/// How reading a tree ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEnd {
    /// All files were sent.
    Complete {
        /// How many.
        files: u64,
    },
    /// The cap was passed at this path; nothing was sent.
    TooLarge(String),
    /// Something could not be read.
    Failed(String),
}

/// The record of a finished command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// How it ended.
    pub end: End,
    /// All bytes it wrote.
    pub total_bytes: u64,
    /// Processes the kernel killed for memory while it ran.
    pub oom_kills: u32,
    /// Microseconds from start to end.
    pub elapsed_us: u64,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, with this code.
    Code(i32),
    /// By a signal that was not ours.
    Signal(i32),
    /// Killed at its deadline.
    TimedOut,
    /// The program could not be started; the reason is its output.
    NotStarted,
    /// Killed, because it went on writing past `max_output`.
    Flooded,
    /// Killed, because no frame came from the host for a minute.
    Abandoned,
}

/// Whether a path may be written or was read below the working directory: relative, not empty, of
/// normal components only (no `..`, no `.`, no NUL, no doubled or trailing slash).
pub fn is_safe_path(path: &str) -> bool {
    !path.contains('\0')
        && path.len() < 4096
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() < 256)
}

impl Request {
    /// The frame with this id.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] when the payload is above [`MAX_FRAME`].
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
                w.frame(id, 1)
            }
            Self::Ping => w.frame(id, 2),
            Self::Write { path, mode, first, data } => {
                w.text(path).u32(*mode).u8(u8::from(*first)).rest(data).frame(id, 3)
            }
            Self::WriteEnd => w.frame(id, 4),
            Self::ReadTree { cap } => w.u64(*cap).frame(id, 5),
            Self::Reset => w.frame(id, 6),
            Self::Deadline { millis } => w.u64(*millis).frame(id, 7),
        }
    }

    /// Reads a payload back.
    ///
    /// # Errors
    /// Unknown kinds, and payloads that do not fit their kind.
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
            _ => return Err(ProtocolError::UnknownKind(kind)),
        };
        complete(request, r, kind)
    }

    fn decode_exec(r: &mut Reader<'_>) -> Option<Self> {
        let (timeout_ms, keep, max_output) = (r.u64()?, r.u64()?, r.u64()?);
        // Every element needs a length of its own, so a false count ends at the payload's end.
        let argv = (0..r.u64()?).map(|_| r.text()).collect::<Option<Vec<_>>>()?;
        let env =
            (0..r.u64()?).map(|_| Some((r.text()?, r.text()?))).collect::<Option<Vec<_>>>()?;
        Some(Self::Exec(ExecRequest { argv, env, timeout_ms, keep, max_output }))
    }
}

impl Reply {
    /// The frame with this id.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] when the payload is above [`MAX_FRAME`].
    pub fn encode(&self, id: u64) -> Result<Vec<u8>, ProtocolError> {
        let w = Writer::new();
        match self {
            Self::Hello { version, free } => {
                w.u32(*version).u64(free.bytes).u64(free.files).frame(id, 64)
            }
            Self::DiskFull(free) => w.u64(free.bytes).u64(free.files).frame(id, 71),
            Self::Output { tail, data } => w.u8(u8::from(*tail)).rest(data).frame(id, 65),
            Self::Done(done) => {
                let (tag, value) = match done.end {
                    End::Code(code) => (0, code),
                    End::Signal(signal) => (1, signal),
                    End::TimedOut => (2, 0),
                    End::NotStarted => (3, 0),
                    End::Flooded => (4, 0),
                    End::Abandoned => (5, 0),
                };
                w.u8(tag)
                    .rest(&value.to_le_bytes())
                    .u64(done.total_bytes)
                    .u32(done.oom_kills)
                    .u64(done.elapsed_us)
                    .frame(id, 66)
            }
            Self::Ack(Ok(())) => w.u8(0).text("").frame(id, 67),
            Self::Ack(Err(reason)) => w.u8(1).text(reason).frame(id, 67),
            Self::TreeFile { path, mode, size } => w.text(path).u32(*mode).u64(*size).frame(id, 68),
            Self::TreeData { data } => w.rest(data).frame(id, 69),
            Self::TreeEnd(TreeEnd::Complete { files }) => w.u8(0).u64(*files).frame(id, 70),
            Self::TreeEnd(TreeEnd::TooLarge(path)) => w.u8(1).text(path).frame(id, 70),
            Self::TreeEnd(TreeEnd::Failed(reason)) => w.u8(2).text(reason).frame(id, 70),
        }
    }

    /// Reads a payload back.
    ///
    /// # Errors
    /// Unknown kinds, and payloads that do not fit their kind.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, ProtocolError> {
        let r = &mut Reader::new(payload);
        let reply = match kind {
            64 => (|| Some(Self::Hello { version: r.u32()?, free: free(r)? }))(),
            65 => r.flag().map(|tail| Self::Output { tail, data: r.rest() }),
            66 => Self::decode_done(r),
            67 => (|| {
                let (refused, reason) = (r.flag()?, r.text()?);
                Some(Self::Ack(if refused { Err(reason) } else { Ok(()) }))
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
            71 => free(r).map(Self::DiskFull),
            _ => return Err(ProtocolError::UnknownKind(kind)),
        };
        complete(reply, r, kind)
    }

    fn decode_done(r: &mut Reader<'_>) -> Option<Self> {
        let (tag, value) = (r.u8()?, r.i32()?);
        let end = match tag {
            0 => End::Code(value),
            1 => End::Signal(value),
            2 => End::TimedOut,
            3 => End::NotStarted,
            4 => End::Flooded,
            5 => End::Abandoned,
            _ => return None,
        };
        let (total_bytes, oom_kills, elapsed_us) = (r.u64()?, r.u32()?, r.u64()?);
        Some(Self::Done(Done { end, total_bytes, oom_kills, elapsed_us }))
    }
}

fn free(r: &mut Reader<'_>) -> Option<Free> {
    Some(Free { bytes: r.u64()?, files: r.u64()? })
}

fn complete<T>(value: Option<T>, r: &Reader<'_>, kind: u8) -> Result<T, ProtocolError> {
    value.filter(|_| r.is_empty()).ok_or(ProtocolError::Malformed(kind))
}

/// One undecoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The request's id.
    pub id: u64,
    /// Which request or reply.
    pub kind: u8,
    /// At most [`MAX_FRAME`] bytes.
    pub payload: Vec<u8>,
}

/// Cuts a byte stream into frames, however it was split on the way.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameBuffer {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > MAX_FRAME || self.start == self.bytes.len() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete frame, or `None` until more bytes came.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`]; the stream is then lost.
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
