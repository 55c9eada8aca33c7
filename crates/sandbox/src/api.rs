//! The traits through which the rest of the program uses sandboxes. No Docker types here.

use crate::error::SandboxError;
pub use orchestrate_supervisor::protocol::LINK_MODE;
use orchestrate_supervisor::protocol::{is_link, is_special};
use orchestrate_types::{AttemptId, ByteSize, RunId};
use std::fmt;
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// What a sandbox is used for. Agent and grader never share a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Runs the policy's commands.
    Agent,
    /// Runs only the hidden tests, on the agent's patch.
    Grader,
}

/// What a sandbox belongs to. It is part of the container's name and labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Id of the run.
    pub run: RunId,
    /// Epoch of the coordinator, which grows with every start of the run.
    pub epoch: i64,
    /// Id of the attempt that opens the sandbox.
    pub attempt: AttemptId,
}

/// Resource limits of one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SandboxLimits {
    /// Memory, without swap.
    pub memory: ByteSize,
    /// CPU time, in thousandths of a core.
    pub cpu_millis: u32,
    /// Number of processes and threads.
    pub pids: u32,
    /// Size of each writable tmpfs.
    pub tmpfs: ByteSize,
}

/// Description of a sandbox to open.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// Image reference. Pulled if the Docker host does not have it and pulling is allowed.
    pub image: String,
    /// Whether it is for the agent or the grader.
    pub purpose: Purpose,
    /// The run and the attempt that it belongs to.
    pub owner: Owner,
    /// Absolute path of the task's folder, the working directory of every command.
    pub workdir: String,
    /// Resource limits of the container.
    pub limits: SandboxLimits,
    /// The container ends by itself after this time, even if this program is gone.
    pub deadline: Duration,
    /// Gives the container a read-only root with a tmpfs on `workdir` and `/tmp`. Such a sandbox
    /// can be reset and verified after use, and then serve another attempt instead of a new
    /// container.
    pub reusable: bool,
}

/// A command that runs in a sandbox's `workdir`.
#[derive(Debug, Clone)]
pub struct Command {
    /// Program and arguments. A shell script is `["/bin/sh", "-c", script]`.
    pub argv: Vec<String>,
    /// Environment variables added to those of the image.
    pub env: Vec<(String, String)>,
    /// Time after which the command and everything it started are killed.
    pub timeout: Duration,
    /// Bytes of merged stdout and stderr kept from the start, and as many from the end; at most 16
    /// MiB.
    pub keep_bytes: usize,
}

impl Command {
    /// A shell script, of whose output the first and last 64 KiB are kept.
    pub fn shell(script: impl Into<String>, timeout: Duration) -> Self {
        Self {
            argv: vec!["/bin/sh".into(), "-c".into(), script.into()],
            env: Vec::new(),
            timeout,
            keep_bytes: 64 * 1024,
        }
    }
}

/// One port of a sandbox's loopback interface that leads to this program while a command runs.
///
/// It is the only way out of a sandbox, and it leads to the receiver of the streams: no process of
/// the sandbox can choose another end.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The port that process 1 listens on at 127.0.0.1, above 1023.
    pub port: u16,
    /// Receives a stream for each connection that a process of the sandbox opens, at most
    /// [`Forward::MAX_CONNECTIONS`] at once. A connection is closed if the channel is full, and all
    /// are if its receiver is dropped. When the command has ended, all streams are at their end.
    pub accepted: mpsc::Sender<DuplexStream>,
    /// Kills the command when it is cancelled, which then ends as [`Exit::Stopped`].
    pub stop: &'a CancellationToken,
}

impl Forward<'_> {
    /// Connections that exist at once. Further ones are closed as soon as they are opened.
    pub const MAX_CONNECTIONS: usize = orchestrate_supervisor::protocol::MAX_CONNECTIONS;
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
    /// It was killed at its deadline, with everything it had started.
    TimedOut,
    /// The program could not be started (missing, not executable).
    NotStarted,
    /// It was killed because its caller asked for it, with everything it had started.
    Stopped,
}

impl fmt::Display for Exit {
    /// What a command ended with, e.g. `exit code 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::TimedOut => f.write_str("a timeout"),
            Self::NotStarted => f.write_str("a failure to start"),
            Self::Stopped => f.write_str("a request to stop"),
        }
    }
}

/// The complete result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecResult {
    /// How it ended.
    pub exit: Exit,
    /// The first `keep_bytes` of its output, raw.
    pub head: Vec<u8>,
    /// The last `keep_bytes` of the output after the head, raw.
    pub tail: Vec<u8>,
    /// Bytes of output in total, including those that were not kept.
    pub total_bytes: u64,
    /// Processes that the kernel killed for lack of memory while it ran.
    pub oom_kills: u32,
    /// Time from its start until none of its processes was alive.
    pub elapsed: Duration,
}

impl ExecResult {
    /// Whether it exited with code 0.
    pub fn success(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    /// The output as text. Invalid UTF-8 is replaced; a line in the middle says how much was cut.
    pub fn text(&self) -> String {
        let kept = (self.head.len() + self.tail.len()) as u64;
        let head = String::from_utf8_lossy(&self.head);
        let tail = String::from_utf8_lossy(&self.tail);
        let cut = self.total_bytes.saturating_sub(kept);
        if cut == 0 {
            format!("{head}{tail}")
        } else {
            format!("{head}\n[{cut} bytes cut]\n{tail}")
        }
    }
}

/// A file with its path relative to a folder: a regular one or a symbolic link, unless a function says that
/// there are others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileEntry {
    /// Relative path with `/` as separator, without `..`.
    pub path: String,
    /// Permission bits, with [`LINK_MODE`] for a symbolic link and the bits of its type for a special file.
    pub mode: u32,
    /// Content of the file; the target of a symbolic link; empty for a special file.
    pub content: Vec<u8>,
}

impl FileEntry {
    /// Whether it is a symbolic link.
    pub fn is_link(&self) -> bool {
        is_link(self.mode)
    }

    /// Whether it is neither a regular file nor a symbolic link: a folder, a FIFO, a socket or a device.
    pub fn is_special(&self) -> bool {
        is_special(self.mode)
    }
}

/// How to mark a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeMark {
    /// Names of entries that are left out of the tree at any depth, here and when changes are
    /// listed; an entry that starts with `/` is the path of one file or folder instead.
    pub skip: Vec<String>,
    /// Name of the files whose content is returned.
    pub send: String,
    /// Limit of that content together.
    pub cap: ByteSize,
}

/// A regular file or symbolic link that is new, or whose content or mode differs from the marked tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedFile {
    /// Relative path with `/` as separator, without `..`.
    pub path: String,
    /// Permission bits, with [`LINK_MODE`] for a symbolic link.
    pub mode: u32,
    /// Size in bytes.
    pub size: u64,
    /// Whether the marked tree has no such file.
    pub is_new: bool,
    /// Whether it starts like a binary file.
    pub is_binary: bool,
}

/// What changed in a tree since it was marked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeChanges {
    /// Files that are new or differ, sorted by path.
    pub written: Vec<ChangedFile>,
    /// Paths of marked files that no longer exist or became something else, sorted.
    pub removed: Vec<String>,
}

/// A container that its daemon fails to remove. Removal is retried in the background.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct QuarantinedContainer {
    /// Container name.
    pub name: String,
    /// Name of the Docker host.
    pub host: String,
    /// The daemon's last error message.
    pub reason: String,
    /// Number of removal attempts.
    pub tries: u32,
}

impl std::fmt::Display for QuarantinedContainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, host, reason, tries } = self;
        write!(f, "{name} on {host}, after {tries} tries: {reason}")
    }
}

/// The containers that a sweep removed, kept and failed to remove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Names of removed containers, sorted.
    pub removed: Vec<String>,
    /// Names of containers of this program that were kept, each with the reason.
    pub kept: Vec<(String, String)>,
    /// Names of containers that the daemon failed to remove, each with its error message.
    pub failed: Vec<(String, String)>,
}

/// Current use of one sandbox host, for metrics.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct HostUsage {
    /// Name of the host.
    pub host: String,
    /// Whether new sandboxes are opened there.
    pub in_service: bool,
    /// Number of times it went out of service.
    pub taken_out: u64,
    /// Largest number of containers that may exist at once.
    pub capacity: usize,
    /// Containers in use, including those that are starting or being removed.
    pub open: usize,
    /// Idle containers in the pool.
    pub idle: usize,
    /// Containers started so far.
    pub started: u64,
}

/// One open sandbox. Close it when done; dropping it only queues the container for removal.
///
/// ```no_run
/// use orchestrate_sandbox::{Command, FileEntry, Sandbox, SandboxError};
/// use orchestrate_types::ByteSize;
/// use std::time::Duration;
///
/// /// Sorts lines with the tools of the image.
/// async fn sorted(
///     mut sandbox: Box<dyn Sandbox>,
///     lines: &str,
/// ) -> Result<Option<Vec<u8>>, SandboxError> {
///     let input = FileEntry { path: "in".into(), mode: 0o644, content: lines.into() };
///     sandbox.write_files(&[input]).await?;
///     sandbox.exec(&Command::shell("sort in > out", Duration::from_secs(10))).await?;
///     let files = sandbox.read_tree(ByteSize::mib(8)).await?;
///     sandbox.close().await?;
///     Ok(files.into_iter().find(|file| file.path == "out").map(|file| file.content))
/// }
/// ```
#[async_trait::async_trait]
pub trait Sandbox: Send + std::fmt::Debug {
    /// Name of the container.
    fn name(&self) -> &str;

    /// Runs one command to its end. Everything it started is dead when this returns.
    async fn exec(&mut self, command: &Command) -> Result<ExecResult, SandboxError>;

    /// Runs one command to its end, as [`Sandbox::exec`] does, and meanwhile carries the connections
    /// to one port. Nothing listens there when this returns.
    ///
    /// Fails with [`Refused`](crate::SandboxErrorKind::Refused) if the port cannot be used.
    async fn exec_forwarding(
        &mut self,
        command: &Command,
        forward: Forward<'_>,
    ) -> Result<ExecResult, SandboxError>;

    /// Writes regular files and symbolic links below the working directory, creating folders as
    /// needed. Symbolic links on the way to a file are refused.
    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError>;

    /// Reads all regular files below the working directory, sorted by path.
    ///
    /// Symlinks, devices, fifos and `__pycache__` are left out. Fails with
    /// [`TooLarge`](crate::SandboxErrorKind::TooLarge) if contents and paths exceed `cap` bytes.
    async fn read_tree(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError>;

    /// Marks the regular files and symbolic links below the working directory as they are, for
    /// [`Sandbox::list_changes`], and returns the regular ones with the name that `mark` asks for.
    ///
    /// The mark is out of reach for commands, and no program of the image takes part in it.
    async fn mark_tree(&mut self, mark: &TreeMark) -> Result<Vec<FileEntry>, SandboxError>;

    /// Lists what commands changed since the tree was marked. Symlinks are never followed. Fails with [`TooLarge`](crate::SandboxErrorKind::TooLarge) if the tree has grown too
    /// much to be walked.
    async fn list_changes(&mut self) -> Result<TreeChanges, SandboxError>;

    /// Marks the whole file system of the container as it is, for
    /// [`Sandbox::list_system_changes`]. Paths in `skip`, relative to the root, are left out with
    /// what is below them. Contents are not read.
    async fn mark_system(&mut self, skip: &[String]) -> Result<(), SandboxError>;

    /// Lists what commands changed in the file system since it was marked, and forgets the mark.
    /// Paths are relative to the root, modes have the bits of the file's type, and everything that is
    /// not a folder is listed, symlinks included. Fails with
    /// [`TooLarge`](crate::SandboxErrorKind::TooLarge) if it has grown too much to be walked.
    async fn list_system_changes(&mut self) -> Result<TreeChanges, SandboxError>;

    /// Reads the files at these paths below the working directory, in this order; those that do not exist
    /// are left out, and special ones ([`FileEntry::is_special`]) have no content. Fails with
    /// [`TooLarge`](crate::SandboxErrorKind::TooLarge) if their contents exceed `cap` bytes.
    async fn read_files(
        &mut self,
        paths: &[String],
        cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError>;

    /// Makes the paths of later calls of [`Sandbox::write_files`], [`Sandbox::read_files`] and
    /// [`Sandbox::read_tree`] relative to the absolute path `path` instead of the working
    /// directory. Commands, marks and lists of changes still use the working directory.
    ///
    /// Fails with [`Refused`](crate::SandboxErrorKind::Refused) in a reusable sandbox.
    async fn set_root(&mut self, path: &str) -> Result<(), SandboxError>;

    /// Gives the sandbox back. A reusable one is reset and verified; any other is removed.
    async fn close(self: Box<Self>) -> Result<(), SandboxError>;
}

/// Opens sandboxes. See the [crate documentation](crate) for an example.
#[async_trait::async_trait]
pub trait SandboxProvider: Send + Sync + std::fmt::Debug {
    /// Opens a sandbox, waiting for a free slot if necessary.
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError>;

    /// Announces the images of coming tasks, the nearest first, so that they can be pulled ahead.
    fn expect_images(&self, _images: &[String]) {}

    /// Removes leftover containers of `run` whose epoch is below `epoch`.
    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError>;

    /// Containers that their daemon fails to remove. They do not occupy a slot.
    fn quarantined(&self) -> Vec<QuarantinedContainer> {
        Vec::new()
    }

    /// Current use of each host; empty for a provider without hosts.
    fn hosts(&self) -> Vec<HostUsage> {
        Vec::new()
    }

    /// Removes all containers that this provider still holds, including idle ones and queued
    /// removals.
    async fn shutdown(&self) -> Result<(), SandboxError>;
}

#[cfg(test)]
mod tests {
    use super::Exit;

    #[test]
    fn ends_of_commands_are_written_for_people() {
        let ends =
            [Exit::Code(3), Exit::Signal(9), Exit::TimedOut, Exit::NotStarted, Exit::Stopped];
        let texts = ends.map(|exit| exit.to_string());
        let expected =
            ["exit code 3", "signal 9", "a timeout", "a failure to start", "a request to stop"];
        assert_eq!(texts, expected);
    }
}
