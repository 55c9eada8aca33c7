//! The seam: what the rest of the program asks of a sandbox. No Docker types here.

use crate::guard::Quarantined;
use orchestrate_types::{AttemptId, ByteSize, Retry, RunId};
use std::time::Duration;

/// Removing what filled a disk takes seconds; attempts are not to be used up by then.
const DISK_PAUSE: Duration = Duration::from_secs(10);

/// What a sandbox is for. Agent and grader sandboxes never share a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The policy's commands run here.
    Agent,
    /// Only the hidden tests run here, on the agent's patch.
    Grader,
}

/// Who a sandbox belongs to; goes into its name and labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The run.
    pub run: RunId,
    /// The coordinator's epoch (grows with every start of the run).
    pub epoch: i64,
    /// The attempt.
    pub attempt: AttemptId,
}

/// Resource limits of one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Memory, with no swap on top.
    pub memory: ByteSize,
    /// CPU share, in thousandths of a core.
    pub cpu_millis: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Size of each writable tmpfs.
    pub tmpfs: ByteSize,
}

/// What to open.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// Image reference; pulled where it is not on the Docker host and may be pulled.
    pub image: String,
    /// Agent or grader.
    pub purpose: Purpose,
    /// Who pays.
    pub owner: Owner,
    /// Folder the task lives in; the working directory of every command.
    pub workdir: String,
    /// Limits.
    pub limits: Limits,
    /// The container ends by itself after this time, whatever happens to us.
    pub deadline: Duration,
    /// Read-only root with a tmpfs on `workdir` and `/tmp`: such a sandbox can be proved clean
    /// after use and given to the next attempt, instead of starting another container.
    pub reusable: bool,
}

/// One command, run by `/bin/sh -c` (or as `argv` where given) in the sandbox's `workdir`.
#[derive(Debug, Clone)]
pub struct Command {
    /// Program and arguments. A shell script is `["/bin/sh", "-c", script]`.
    pub argv: Vec<String>,
    /// Extra environment.
    pub env: Vec<(String, String)>,
    /// The process tree is killed after this time.
    pub timeout: Duration,
    /// Bytes of merged stdout and stderr kept at the head and, again, at the tail; 16 MiB at most.
    pub keep_bytes: usize,
}

impl Command {
    /// A shell script with default caps.
    pub fn shell(script: impl Into<String>, timeout: Duration) -> Self {
        Self {
            argv: vec!["/bin/sh".into(), "-c".into(), script.into()],
            env: Vec::new(),
            timeout,
            keep_bytes: 64 * 1024,
        }
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Killed at its deadline, with all it had started.
    TimedOut,
    /// The program could not be started (absent, not executable).
    NotStarted,
}

/// A command's complete result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecResult {
    /// How it ended.
    pub exit: Exit,
    /// First `keep_bytes` of its output, raw.
    pub head: Vec<u8>,
    /// Last `keep_bytes` of what came after the head, raw.
    pub tail: Vec<u8>,
    /// All bytes it wrote.
    pub total_bytes: u64,
    /// Processes the kernel killed for memory while it ran.
    pub oom_kills: u32,
    /// Time from start to end.
    pub elapsed: Duration,
}

impl ExecResult {
    /// Whether it ended by itself with code 0.
    pub fn success(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    /// Output as text: invalid UTF-8 replaced, a line in the middle that says what was cut.
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

/// A regular file, by its path relative to a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileEntry {
    /// Relative path with `/`; never absolute, never with `..`.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Content.
    pub content: Vec<u8>,
}

/// What went wrong with a sandbox. All of these are ours, never the agent's.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SandboxErrorKind {
    /// The Docker daemon cannot be reached.
    #[error("cannot reach the Docker daemon: {0}")]
    NoDaemon(String),
    /// The image is not on the host.
    #[error("image `{0}` is not on the Docker host")]
    ImageMissing(String),
    /// The image is not on the host, and could not be brought there.
    #[error("image `{image}` is not on the Docker host and cannot be pulled: {message}")]
    NotPulled {
        /// Which image.
        image: String,
        /// Why not.
        message: String,
    },
    /// The name means another image than when the run began.
    #[error(
        "image `{image}` is {found} here, and was {recorded} when the run began; bring that image \
         back under its name, or begin a new run"
    )]
    ImageChanged {
        /// Its name.
        image: String,
        /// What the run began with.
        recorded: String,
        /// What is here.
        found: String,
    },
    /// It could not be written down what an image is.
    #[error("cannot record image `{image}`: {reason}")]
    NotRecorded {
        /// Its name.
        image: String,
        /// Why not.
        reason: String,
    },
    /// A call to the daemon took too long.
    #[error("{call} gave no answer within {after:?}")]
    TimedOut {
        /// Which call.
        call: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The daemon refused.
    #[error("{call} was refused: {message}")]
    Refused {
        /// Which call.
        call: &'static str,
        /// The daemon's words.
        message: String,
    },
    /// The Docker host's disk is full, or nearly: nothing is started there, and what ran there may
    /// have failed for that alone.
    #[error("the Docker host's disk is full: {0}")]
    DiskFull(String),
    /// The container ended or was removed under us.
    #[error("the container is gone: {0}")]
    Gone(String),
    /// The supervisor spoke out of turn.
    #[error("the supervisor broke its protocol: {0}")]
    Protocol(String),
    /// A reset could not be proved.
    #[error("the sandbox could not be proved clean: {0}")]
    NotClean(String),
    /// A file or tree is larger than allowed.
    #[error("{what} is larger than {cap}")]
    TooLarge {
        /// Which file or folder.
        what: String,
        /// The cap.
        cap: ByteSize,
    },
    /// Commands do not end here as they must; rewards of such a host would mean nothing.
    #[error("cases of the battery went wrong: {0}")]
    Unfit(String),
}

/// A sandbox error: which sandbox, and why.
#[derive(Debug, thiserror::Error)]
#[error("sandbox {sandbox}: {kind}")]
pub struct SandboxError {
    /// Container name, or the Docker host where there is no container.
    pub sandbox: String,
    /// What happened.
    pub kind: SandboxErrorKind,
}

impl SandboxError {
    /// What the caller may do (with a *new* sandbox).
    pub fn retry(&self) -> Retry {
        match &self.kind {
            SandboxErrorKind::ImageMissing(_)
            | SandboxErrorKind::NotPulled { .. }
            | SandboxErrorKind::ImageChanged { .. }
            | SandboxErrorKind::NotRecorded { .. }
            | SandboxErrorKind::Unfit(_) => Retry::Never,
            SandboxErrorKind::NoDaemon(_) => Retry::After(Duration::from_secs(2)),
            SandboxErrorKind::DiskFull(_) => Retry::After(DISK_PAUSE),
            SandboxErrorKind::TimedOut { .. }
            | SandboxErrorKind::Refused { .. }
            | SandboxErrorKind::Gone(_)
            | SandboxErrorKind::Protocol(_)
            | SandboxErrorKind::NotClean(_)
            | SandboxErrorKind::TooLarge { .. } => Retry::Now,
        }
    }
}

/// What a sweep removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Names of removed containers.
    pub removed: Vec<String>,
    /// Containers with our label that were left alone, and why.
    pub kept: Vec<(String, String)>,
    /// Containers that the daemon did not remove, and its words.
    pub failed: Vec<(String, String)>,
}

/// One host of sandboxes as it is now, for metrics.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct HostUse {
    /// Its name.
    pub host: String,
    /// Whether new sandboxes are opened there.
    pub in_service: bool,
    /// Times it was taken out of service.
    pub taken_out: u64,
    /// Containers that may be alive at once.
    pub capacity: usize,
    /// In use now, being started and being removed included.
    pub open: usize,
    /// Clean and waiting now.
    pub idle: usize,
    /// Containers started.
    pub started: u64,
}

/// One open sandbox. Close it; dropping only queues it for removal.
#[async_trait::async_trait]
pub trait Sandbox: Send + std::fmt::Debug {
    /// Container name.
    fn name(&self) -> &str;

    /// Runs one command to its end. Everything it started is dead when this returns.
    async fn exec(&mut self, command: &Command) -> Result<ExecResult, SandboxError>;

    /// Writes regular files below the working directory, making folders as needed.
    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError>;

    /// Reads all regular files below the working directory (symlinks, devices, fifos and
    /// `__pycache__` are left out), sorted by path. Fails with `TooLarge` above `cap` bytes.
    async fn read_tree(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError>;

    /// Gives the sandbox back: reset and proved clean if reusable, else removed.
    async fn close(self: Box<Self>) -> Result<(), SandboxError>;
}

/// Opens sandboxes.
#[async_trait::async_trait]
pub trait SandboxProvider: Send + Sync + std::fmt::Debug {
    /// Opens a sandbox, waiting for a free slot.
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError>;

    /// Says which images are asked for next, the nearest first, so that they can be there in time.
    fn expect_images(&self, _images: &[String]) {}

    /// Removes containers of `run` with an epoch below `epoch`.
    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError>;

    /// Containers that their daemon does not let go; they hold nobody up.
    fn quarantined(&self) -> Vec<Quarantined> {
        Vec::new()
    }

    /// The hosts of its sandboxes; none where that means nothing.
    fn hosts(&self) -> Vec<HostUse> {
        Vec::new()
    }

    /// Removes everything this provider still holds (idle containers, queued removals).
    async fn shutdown(&self) -> Result<(), SandboxError>;
}
