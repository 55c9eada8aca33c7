//! Sandbox errors: which sandbox failed, why, and whether the caller may retry.

use orchestrate_types::{ByteSize, Retry};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

/// Freeing a full disk takes seconds, and the attempts must not be used up before that.
const DISK_FULL_PAUSE: Duration = Duration::from_secs(10);

const DAEMON_HINT: &str = "start Docker (on Debian as root: `. scripts/lib/docker.sh && \
                           ensure_docker`), or set sandbox.docker_host, sandbox.hosts or DOCKER_HOST";

/// The error that led to a [`SandboxErrorKind`]. It is shared because kinds are cloned.
pub type Cause = Arc<dyn Error + Send + Sync>;

/// What went wrong with a sandbox. [`SandboxError::is_agents_doing`] tells what the commands in the
/// sandbox caused from what they cannot cause.
///
/// The message is complete; [`Error::source`] additionally leads to the error behind it, if any.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SandboxErrorKind {
    /// The Docker daemon cannot be reached.
    #[error("cannot reach the Docker daemon: {0}; {hint}", hint = DAEMON_HINT)]
    NoDaemon(#[source] Cause),
    /// The image with this name is not on the Docker host.
    #[error("image `{0}` is not on the Docker host")]
    ImageMissing(String),
    /// The image is not on the Docker host and could not be pulled.
    #[error("image `{image}` is not on the Docker host and cannot be pulled: {source}")]
    NotPulled {
        /// Image name.
        image: String,
        /// Why it could not be pulled.
        source: Cause,
    },
    /// The name stands for a different image than when the run first used it.
    #[error(
        "image `{image}` is {found} on this host, but was {recorded} when the run first used it; \
         restore that image under its name, or start a new run"
    )]
    ImageChanged {
        /// Image name.
        image: String,
        /// The image in the image lock.
        recorded: String,
        /// The image on the host.
        found: String,
    },
    /// The image lock could not be read or written.
    #[error("cannot look up or record image `{image}` in the image lock: {source}")]
    NotRecorded {
        /// Image name.
        image: String,
        /// Why the image lock failed.
        source: Cause,
    },
    /// A call to the daemon or the supervisor took too long.
    #[error("{call} did not answer within {after:?}")]
    TimedOut {
        /// Name of the call.
        call: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// The daemon or the supervisor refused a call.
    #[error("{call} was refused: {message}")]
    Refused {
        /// Name of the call.
        call: &'static str,
        /// The reason, as the daemon or the supervisor gives it.
        message: String,
    },
    /// A call failed on this machine, before it reached the daemon or the supervisor.
    #[error("{call} failed: {source}")]
    Failed {
        /// Name of the call.
        call: &'static str,
        /// Why it failed.
        source: Cause,
    },
    /// The Docker host's disk is full or nearly full. Nothing is started there, and whatever was
    /// running may have failed for that reason alone.
    #[error("the Docker host's disk is full: {0}")]
    DiskFull(String),
    /// The container ended or was removed while it was in use.
    #[error("the container is gone: {0}")]
    Gone(String),
    /// Commands that ran in the sandbox damaged it, so that it can no longer do what was asked.
    ///
    /// Reported only after a command has run in the sandbox since it was opened, and only for what
    /// commands can cause: process 1 was changed beyond repair or killed because the container's
    /// own memory ran out, no process or descriptor is left to start a command, or the files below
    /// the working directory cannot be read. Everything else keeps the kind that names its cause.
    #[error("the sandbox was damaged by the commands that ran in it: {what}")]
    Damaged {
        /// What is damaged, and how it was noticed.
        what: String,
    },
    /// The supervisor sent something that its protocol does not allow.
    #[error("the supervisor violated its protocol: {0}")]
    Protocol(String),
    /// A reset failed, or its verification found something left over.
    #[error("the sandbox could not be reset: {0}")]
    NotClean(String),
    /// A file or tree is larger than allowed.
    #[error("{what} is larger than {cap}")]
    TooLarge {
        /// Path of the file or folder that exceeded the cap.
        what: String,
        /// Largest allowed size.
        cap: ByteSize,
    },
    /// These cases of the self-test failed, so rewards from this host would be meaningless.
    #[error("self-test cases failed: {0}")]
    SelfTestFailed(String),
}

/// A sandbox error: which sandbox failed, and why.
#[derive(Debug)]
pub struct SandboxError {
    /// Container name, or the Docker host if no container is involved.
    pub sandbox: String,
    /// What went wrong.
    pub kind: SandboxErrorKind,
}

impl std::fmt::Display for SandboxError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sandbox {}: {}", self.sandbox, self.kind)
    }
}

impl Error for SandboxError {
    /// The error behind the kind: the kind's own message is part of this one's.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

impl SandboxErrorKind {
    /// Whether the commands in the sandbox caused this error.
    ///
    /// Such an error is part of the attempt's result: repeating the attempt because of it would
    /// reward breaking the sandbox with a second try. [`Self::Refused`] is not counted,
    /// because only the caller knows whether its request or the state of the sandbox was at fault.
    pub fn is_agents_doing(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::TooLarge { .. } => true,
            Self::NoDaemon(_)
            | Self::ImageMissing(_)
            | Self::NotPulled { .. }
            | Self::ImageChanged { .. }
            | Self::NotRecorded { .. }
            | Self::TimedOut { .. }
            | Self::Refused { .. }
            | Self::Failed { .. }
            | Self::DiskFull(_)
            | Self::Gone(_)
            | Self::Protocol(_)
            | Self::NotClean(_)
            | Self::SelfTestFailed(_) => false,
        }
    }
}

impl SandboxError {
    /// See [`SandboxErrorKind::is_agents_doing`].
    pub fn is_agents_doing(&self) -> bool {
        self.kind.is_agents_doing()
    }

    /// Whether and when the caller may try again, with a *new* sandbox. Never if the sandbox was
    /// damaged from inside: that is a result.
    pub fn retry(&self) -> Retry {
        match &self.kind {
            SandboxErrorKind::ImageMissing(_)
            | SandboxErrorKind::NotPulled { .. }
            | SandboxErrorKind::ImageChanged { .. }
            | SandboxErrorKind::NotRecorded { .. }
            | SandboxErrorKind::Damaged { .. }
            | SandboxErrorKind::SelfTestFailed(_) => Retry::Never,
            SandboxErrorKind::NoDaemon(_) => Retry::After(Duration::from_secs(2)),
            SandboxErrorKind::DiskFull(_) => Retry::After(DISK_FULL_PAUSE),
            SandboxErrorKind::TimedOut { .. }
            | SandboxErrorKind::Refused { .. }
            | SandboxErrorKind::Failed { .. }
            | SandboxErrorKind::Gone(_)
            | SandboxErrorKind::Protocol(_)
            | SandboxErrorKind::NotClean(_)
            | SandboxErrorKind::TooLarge { .. } => Retry::Now,
        }
    }
}

/// The message of `error` with those of its sources that it does not contain already.
pub(crate) fn message_with_sources(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_by_commands_is_a_result_and_never_retried() {
        let error = |kind| SandboxError { sandbox: "x".to_owned(), kind };
        let damaged = error(SandboxErrorKind::Damaged { what: "process 1 is gone".to_owned() });
        assert!(damaged.is_agents_doing());
        assert_eq!(damaged.retry(), Retry::Never);
        let gone = error(SandboxErrorKind::Gone("killed".to_owned()));
        assert!(!gone.is_agents_doing());
        assert_eq!(gone.retry(), Retry::Now);
    }

    #[test]
    fn source_of_a_sandbox_error_leads_to_the_system_error() {
        let missing = std::io::Error::from_raw_os_error(2);
        let kind = SandboxErrorKind::Failed { call: "connect", source: Arc::new(missing) };
        let error = SandboxError { sandbox: "tcp://h:2376".to_owned(), kind };
        assert!(error.to_string().starts_with("sandbox tcp://h:2376: connect failed: No such"));
        let cause = error.source().unwrap().downcast_ref::<Cause>();
        let system = cause.unwrap().downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(system.kind(), std::io::ErrorKind::NotFound);
    }
}
