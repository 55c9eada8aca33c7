//! The Docker daemon: every call has a deadline, and driver errors are converted here.

use crate::error::{SandboxError, SandboxErrorKind, message_with_sources};
use crate::host::{CERTIFICATE_FILES, DockerHost, Transport};
use crate::ssh::{Tunnel, TunnelError};
use bollard::errors::Error as DriverError;
use bollard::models::ImageInspect;
use bollard::query_parameters::RemoveContainerOptions;
use bollard::{API_DEFAULT_VERSION, Docker};
use orchestrate_types::without_credentials;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Pause between checks of a removal that the daemon reports as in progress, and how many there
/// are.
const REMOVAL_CHECK_PAUSE: Duration = Duration::from_millis(50);
const REMOVAL_CHECKS: u32 = 100;
/// Pause between pings of a daemon that does not answer.
const PING_PAUSE: Duration = Duration::from_millis(500);

/// How a call to the daemon failed. The message is complete.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The daemon answered with an error status.
    #[error("{1}")]
    Status(u16, String),
    /// The connection could not be made, or it broke.
    #[error("{}", message_with_sources(.0))]
    Connection(#[source] Box<DriverError>),
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
}

impl CallError {
    /// Converts the driver's error for a call with this time limit.
    pub(crate) fn from_driver(error: DriverError, limit: Duration) -> Self {
        match error {
            DriverError::DockerResponseServerError { status_code, message } => {
                Self::Status(status_code, message)
            }
            // An error within the stream of a response whose status was a success.
            DriverError::DockerStreamError { error } => Self::Status(500, error),
            DriverError::RequestTimeoutError => Self::TimedOut(limit),
            other => Self::Connection(Box::new(other)),
        }
    }

    /// Whether there is no connection to the daemon.
    pub(crate) fn is_unreachable(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Tunnel(_) => true,
            Self::TimedOut(_) | Self::Status(..) => false,
        }
    }

    /// The error of this call on a sandbox or host.
    pub(crate) fn at(self, sandbox: &str, call: &'static str) -> SandboxError {
        let kind = match self {
            Self::TimedOut(after) => SandboxErrorKind::TimedOut { call, after },
            Self::Status(_, message) => SandboxErrorKind::Refused { call, message },
            Self::Connection(_) | Self::Tunnel(_) => SandboxErrorKind::NoDaemon(Arc::new(self)),
        };
        SandboxError { sandbox: sandbox.to_owned(), kind }
    }
}

/// A certificate or key for TLS that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
struct CertificateError {
    path: PathBuf,
    source: std::io::Error,
}

/// A connection to one daemon.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub(crate) docker: Docker,
    /// Name of its host, for messages and metrics.
    pub(crate) host: String,
    local: bool,
    tunnel: Option<Arc<Tunnel>>,
    timeout: Duration,
}

impl Daemon {
    /// Connects and negotiates an API version. `timeout` is the deadline of each call.
    pub(crate) async fn connect(
        host: &DockerHost,
        timeout: Duration,
    ) -> Result<Self, SandboxError> {
        let (docker, tunnel) = match host.transport().map_err(|error| connect_error(host, error))? {
            Transport::Plain => (Docker::connect_with_host(&host.url), None),
            Transport::Tls(folder) => {
                let [ca, cert, key] =
                    certificates(&folder).map_err(|error| connect_error(host, error))?;
                // This fails only if a provider is installed already, which works as well.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let docker = Docker::connect_with_ssl(
                    &host.url,
                    &key,
                    &cert,
                    &ca,
                    timeout.as_secs(),
                    API_DEFAULT_VERSION,
                );
                (docker, None)
            }
            Transport::Ssh(destination) => {
                let tunnel =
                    Tunnel::new(destination).map_err(|error| connect_error(host, error))?;
                deadline(timeout, async { Ok(tunnel.ensure_connected().await?) })
                    .await
                    .map_err(|error| error.at(host.title(), "connect"))?;
                let socket = tunnel.socket();
                let socket = socket.to_string_lossy();
                let docker =
                    Docker::connect_with_unix(&socket, timeout.as_secs(), API_DEFAULT_VERSION);
                (docker, Some(Arc::new(tunnel)))
            }
        };
        let docker =
            docker.map_err(|e| CallError::Connection(Box::new(e)).at(host.title(), "connect"))?;
        // The driver's timeout covers only the wait for response headers, and ours must expire
        // first.
        let docker = docker.with_timeout(timeout + Duration::from_secs(5));
        let negotiation = async {
            let negotiated = docker.negotiate_version().await;
            negotiated.map_err(|error| CallError::from_driver(error, timeout))
        };
        let docker = deadline(timeout, negotiation)
            .await
            .map_err(|error| error.at(host.title(), "version"))?;
        let (host, local) = (host.title().to_owned(), host.is_local());
        Ok(Self { docker, host, local, tunnel, timeout })
    }

    /// An error of this host.
    pub(crate) fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.host.clone(), kind }
    }

    /// Performs one call, with the connection's deadline.
    pub(crate) fn call<T>(
        &self,
        future: impl Future<Output = Result<T, DriverError>>,
    ) -> impl Future<Output = Result<T, CallError>> {
        self.call_within(self.timeout, future)
    }

    /// The driver's futures are large; boxing them keeps the futures of all callers small.
    fn call_within<T>(
        &self,
        limit: Duration,
        future: impl Future<Output = Result<T, DriverError>>,
    ) -> impl Future<Output = Result<T, CallError>> {
        let future = Box::pin(future);
        deadline(limit, async move {
            if let Some(tunnel) = &self.tunnel {
                tunnel.ensure_connected().await?;
            }
            future.await.map_err(|error| CallError::from_driver(error, limit))
        })
    }

    /// Checks that the daemon answers within `limit`.
    pub(crate) async fn ping(&self, limit: Duration) -> Result<(), SandboxError> {
        let answer = self.call_within(limit.min(self.timeout), self.docker.ping()).await;
        answer.map(|_| ()).map_err(|error| error.at(&self.host, "ping"))
    }

    /// Pings an unreachable daemon until it answers. `false` if it does not before `until`.
    pub(crate) async fn wait_until_reachable(&self, until: Instant) -> bool {
        while Instant::now() < until {
            tokio::time::sleep(PING_PAUSE).await;
            if self.call(self.docker.ping()).await.is_ok() {
                return true;
            }
        }
        false
    }

    /// Whether the daemon listens on a socket of this machine, so that its folders may be visible.
    pub(crate) fn is_local(&self) -> bool {
        self.local
    }

    /// Removes a container by force. A container that is already gone or being removed is a
    /// success.
    pub(crate) async fn remove(&self, container: &str) -> Result<(), CallError> {
        let options = RemoveContainerOptions { force: true, v: true, link: false };
        let mut checks = 0;
        loop {
            match self.call(self.docker.remove_container(container, Some(options.clone()))).await {
                Ok(()) | Err(CallError::Status(404, _)) => return Ok(()),
                Err(CallError::Status(409, message)) if message.contains("already in progress") => {
                    checks += 1;
                    if checks > REMOVAL_CHECKS {
                        return Err(CallError::Status(409, message));
                    }
                    tokio::time::sleep(REMOVAL_CHECK_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The daemon's description of an image; `None` if it does not have the image.
    pub(crate) async fn inspect_image(
        &self,
        image: &str,
    ) -> Result<Option<ImageInspect>, SandboxError> {
        match self.call(self.docker.inspect_image(image)).await {
            Ok(found) => Ok(Some(found)),
            Err(CallError::Status(404, _)) => Ok(None),
            Err(error) => Err(error.at(image, "image inspect")),
        }
    }
}

fn connect_error(
    host: &DockerHost,
    error: impl std::error::Error + Send + Sync + 'static,
) -> SandboxError {
    SandboxError {
        sandbox: without_credentials(host.title()).into_owned(),
        kind: SandboxErrorKind::Failed { call: "connect", source: Arc::new(error) },
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

/// Paths of the certificates in a folder, checked for readability: the driver reads two of them
/// only when it connects, and then does not report which one is missing.
fn certificates(folder: &Path) -> Result<[PathBuf; 3], CertificateError> {
    let paths = CERTIFICATE_FILES.map(|name| folder.join(name));
    for path in &paths {
        std::fs::File::open(path)
            .map_err(|source| CertificateError { path: path.clone(), source })?;
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[tokio::test]
    async fn connect_gives_up_on_a_daemon_that_accepts_and_never_answers() {
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

    #[tokio::test]
    async fn connect_names_the_missing_certificate_and_keeps_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let host = DockerHost {
            certificates: Some(dir.path().display().to_string()),
            ..DockerHost::single(Some("tcp://127.0.0.1:1"))
        };
        let error = Daemon::connect(&host, Duration::from_secs(1)).await.unwrap_err();
        assert!(error.to_string().contains("ca.pem: No such file"), "{error}");
        assert!(error.source().unwrap().source().unwrap().is::<std::io::Error>());
    }
}
