//! The Docker daemon: every call has a deadline, every error becomes ours here.

use crate::api::{SandboxError, SandboxErrorKind};
use bollard::Docker;
use bollard::errors::Error as DriverError;
use bollard::query_parameters::RemoveContainerOptions;
use std::time::Duration;
use tokio::time::Instant;

const DEFAULT_HOST: &str = "unix:///var/run/docker.sock";
const HINT: &str = "start Docker (on Debian as root: `. scripts/lib/docker.sh && ensure_docker`), or say \
                    where it is in sandbox.docker_host or DOCKER_HOST";
/// Waits between looks at a removal that the daemon says is under way.
const REMOVAL_LOOK: Duration = Duration::from_millis(50);
const REMOVAL_LOOKS: u32 = 100;
/// Waits between looks for a daemon that is away.
const RETURN_LOOK: Duration = Duration::from_millis(500);

/// How a call to the daemon failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// No answer in time.
    TimedOut(Duration),
    /// An answer with an error status.
    Status(u16, String),
    /// No connection, or it broke.
    Lost(String),
}

impl CallError {
    /// What the driver says, after waiting so long.
    pub(crate) fn from_driver(error: DriverError, waited: Duration) -> Self {
        match error {
            DriverError::DockerResponseServerError { status_code, message } => {
                Self::Status(status_code, message)
            }
            // In the middle of an answer that had begun well.
            DriverError::DockerStreamError { error } => Self::Status(500, error),
            DriverError::RequestTimeoutError => Self::TimedOut(waited),
            other => Self::Lost(with_sources(&other)),
        }
    }

    /// For a person.
    pub(crate) fn words(self) -> String {
        match self {
            Self::TimedOut(after) => format!("no answer within {after:?}"),
            Self::Status(_, words) | Self::Lost(words) => words,
        }
    }

    /// In the words of the seam.
    pub(crate) fn at(self, sandbox: &str, call: &'static str) -> SandboxError {
        let kind = match self {
            Self::TimedOut(after) => SandboxErrorKind::TimedOut { call, after },
            Self::Status(_, message) => SandboxErrorKind::Refused { call, message },
            Self::Lost(reason) => SandboxErrorKind::NoDaemon(format!("{reason}; {HINT}")),
        };
        SandboxError { sandbox: sandbox.to_owned(), kind }
    }
}

/// A connection to one daemon.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub(crate) docker: Docker,
    /// Where it is.
    pub(crate) host: String,
    timeout: Duration,
}

impl Daemon {
    /// Connects and agrees on an API version.
    pub(crate) async fn connect(
        host: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, SandboxError> {
        let host = host
            .map(str::to_owned)
            .or_else(|| std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty()))
            .unwrap_or_else(|| DEFAULT_HOST.to_owned());
        let lost =
            |error: &dyn std::fmt::Display| CallError::Lost(error.to_string()).at(&host, "connect");
        let docker = Docker::connect_with_host(&host).map_err(|e| lost(&e))?;
        // The driver's own time-out covers the wait for headers only, and ours must come first.
        let docker = docker.with_timeout(timeout + Duration::from_secs(5));
        let docker = deadline(timeout, docker.negotiate_version())
            .await
            .map_err(|error| error.at(&host, "version"))?;
        Ok(Self { docker, host, timeout })
    }

    /// Waits for one call, at most the deadline.
    pub(crate) async fn call<T>(
        &self,
        future: impl Future<Output = Result<T, DriverError>>,
    ) -> Result<T, CallError> {
        deadline(self.timeout, future).await
    }

    /// Waits for a daemon that is away, as it is while it restarts; whether it answers before `until`.
    pub(crate) async fn returns(&self, until: Instant) -> bool {
        while Instant::now() < until {
            tokio::time::sleep(RETURN_LOOK).await;
            if self.call(self.docker.ping()).await.is_ok() {
                return true;
            }
        }
        false
    }

    /// Whether this daemon shares our file system (and its disk can be looked at).
    pub(crate) fn is_local(&self) -> bool {
        self.host.starts_with("unix://")
    }

    /// Removes a container by force. That it is gone already, or going, is success.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), CallError> {
        let options = RemoveContainerOptions { force: true, v: true, link: false };
        let mut looks = 0;
        loop {
            match self.call(self.docker.remove_container(name, Some(options.clone()))).await {
                Ok(()) | Err(CallError::Status(404, _)) => return Ok(()),
                Err(CallError::Status(409, message)) if message.contains("already in progress") => {
                    looks += 1;
                    if looks > REMOVAL_LOOKS {
                        return Err(CallError::Status(409, message));
                    }
                    tokio::time::sleep(REMOVAL_LOOK).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

async fn deadline<T>(
    after: Duration,
    future: impl Future<Output = Result<T, DriverError>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(after, future).await {
        Ok(result) => result.map_err(|error| CallError::from_driver(error, after)),
        Err(_) => Err(CallError::TimedOut(after)),
    }
}

/// The driver hides the reason ("connection refused") in its sources.
fn with_sources(error: &DriverError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
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

    #[tokio::test]
    async fn a_daemon_that_accepts_and_never_answers_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("docker.sock");
        let _listener = tokio::net::UnixListener::bind(&path).unwrap();
        let host = format!("unix://{}", path.display());
        let after = Duration::from_millis(200);
        let error = Daemon::connect(Some(&host), after).await.unwrap_err();
        assert_eq!(error.sandbox, host);
        assert!(
            matches!(error.kind, SandboxErrorKind::TimedOut { call: "version", .. }),
            "{error}"
        );
    }
}
