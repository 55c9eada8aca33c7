//! The Docker daemon: every call has a deadline, every error becomes ours here.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::host::{CERTIFICATES, DockerHost, Transport};
use crate::ssh::Tunnel;
use bollard::errors::Error as DriverError;
use bollard::query_parameters::RemoveContainerOptions;
use bollard::{API_DEFAULT_VERSION, Docker};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const HINT: &str = "start Docker (on Debian as root: `. scripts/lib/docker.sh && ensure_docker`), or say \
                    where it is in sandbox.docker_host, sandbox.hosts or DOCKER_HOST";
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
    /// What its host is called.
    pub(crate) host: String,
    local: bool,
    tunnel: Option<Arc<Tunnel>>,
    timeout: Duration,
}

impl Daemon {
    /// Connects and agrees on an API version.
    pub(crate) async fn connect(
        host: &DockerHost,
        timeout: Duration,
    ) -> Result<Self, SandboxError> {
        let refused = |message: String| SandboxError {
            sandbox: host.title().to_owned(),
            kind: SandboxErrorKind::Refused { call: "connect", message },
        };
        let (docker, tunnel) = match host.transport().map_err(refused)? {
            Transport::Plain => (Docker::connect_with_host(&host.url), None),
            Transport::Tls(folder) => {
                let [ca, cert, key] = certificates(&folder).map_err(refused)?;
                // Fails only where a provider is installed already, which serves as well.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let whole = timeout.as_secs();
                (
                    Docker::connect_with_ssl(
                        &host.url,
                        &key,
                        &cert,
                        &ca,
                        whole,
                        API_DEFAULT_VERSION,
                    ),
                    None,
                )
            }
            Transport::Ssh(to) => {
                let tunnel = Tunnel::new(to).map_err(|error| refused(error.to_string()))?;
                deadline(timeout, async { tunnel.up().await.map_err(CallError::Lost) })
                    .await
                    .map_err(|error| error.at(host.title(), "connect"))?;
                let socket = tunnel.socket();
                let socket = socket.to_string_lossy();
                let docker =
                    Docker::connect_with_unix(&socket, timeout.as_secs(), API_DEFAULT_VERSION);
                (docker, Some(Arc::new(tunnel)))
            }
        };
        let docker = docker
            .map_err(|error| CallError::Lost(with_sources(&error)).at(host.title(), "connect"))?;
        // The driver's own time-out covers the wait for headers only, and ours must come first.
        let docker = docker.with_timeout(timeout + Duration::from_secs(5));
        let agreed = async {
            let agreed = docker.negotiate_version().await;
            agreed.map_err(|error| CallError::from_driver(error, timeout))
        };
        let docker =
            deadline(timeout, agreed).await.map_err(|error| error.at(host.title(), "version"))?;
        let (host, local) = (host.title().to_owned(), host.is_local());
        Ok(Self { docker, host, local, tunnel, timeout })
    }

    /// Waits for one call, at most the deadline.
    pub(crate) fn call<T>(
        &self,
        future: impl Future<Output = Result<T, DriverError>>,
    ) -> impl Future<Output = Result<T, CallError>> {
        self.call_within(self.timeout, future)
    }

    /// The driver's futures are large, and would be in those of all who call.
    fn call_within<T>(
        &self,
        within: Duration,
        future: impl Future<Output = Result<T, DriverError>>,
    ) -> impl Future<Output = Result<T, CallError>> {
        let future = Box::pin(future);
        deadline(within, async move {
            if let Some(tunnel) = &self.tunnel {
                tunnel.up().await.map_err(CallError::Lost)?;
            }
            future.await.map_err(|error| CallError::from_driver(error, within))
        })
    }

    /// Whether it answers, and soon.
    pub(crate) async fn ping(&self, within: Duration) -> Result<(), SandboxError> {
        let answer = self.call_within(within.min(self.timeout), self.docker.ping()).await;
        answer.map(|_| ()).map_err(|error| error.at(&self.host, "ping"))
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
        self.local
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
    future: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(after, future).await {
        Ok(result) => result,
        Err(_) => Err(CallError::TimedOut(after)),
    }
}

/// The three files of a folder of certificates. The driver reads two of them only when it connects,
/// and then does not say that one is missing.
fn certificates(folder: &Path) -> Result<[std::path::PathBuf; 3], String> {
    let paths = CERTIFICATES.map(|name| folder.join(name));
    for path in &paths {
        std::fs::File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(paths)
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
        let host = DockerHost::single(Some(&format!("unix://{}", path.display())));
        let after = Duration::from_millis(200);
        let error = Daemon::connect(&host, after).await.unwrap_err();
        assert_eq!(error.sandbox, host.url);
        assert!(
            matches!(error.kind, SandboxErrorKind::TimedOut { call: "version", .. }),
            "{error}"
        );
    }
}
