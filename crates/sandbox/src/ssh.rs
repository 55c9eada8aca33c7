//! Forwards a daemon's socket from another machine through one `ssh` process.
//!
//! All calls and all open sandboxes of a host share the connection. It always ends with this
//! program: the remote side runs `cat`, which ends when its input is closed.

use crate::host::Destination;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

/// `cat` sends this line back, which shows that the connection works and the socket is forwarded.
const ECHO: &str = "orchestrate: connected";
/// Limit of the bytes of a login banner that are read before the echo.
const BANNER_BYTES: u64 = 64 << 10;
/// Limit of the characters of `ssh`'s own output in an error message.
const LOG_CHARS: usize = 2048;
/// Interval of `ssh`'s keep-alive messages, and how many may stay unanswered.
const KEEP_ALIVE_SECONDS: u32 = 10;
const KEEP_ALIVE_MISSES: u32 = 3;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TunnelError {
    #[error("cannot create a folder for the ssh connection: {0}")]
    Folder(#[source] std::io::Error),
    #[error("cannot run `ssh`: {0}")]
    Run(#[source] std::io::Error),
    /// `ssh` ended without a connection, with its own message.
    #[error("ssh to {login}: {message}")]
    Ended { login: String, message: String },
}

/// One `ssh` process, started when it is first needed and again after it ended.
#[derive(Debug)]
pub(crate) struct Tunnel {
    destination: Destination,
    /// Readable by this user only, because access to the socket means root on the other machine.
    folder: TempDir,
    child: tokio::sync::Mutex<Option<Child>>,
}

impl Tunnel {
    pub(crate) fn new(destination: Destination) -> Result<Self, TunnelError> {
        let folder = tempfile::Builder::new().prefix("orchestrate-ssh-").tempdir();
        let folder = folder.map_err(TunnelError::Folder)?;
        Ok(Self { destination, folder, child: tokio::sync::Mutex::default() })
    }

    /// Path of the forwarded socket on this machine.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("docker.sock")
    }

    /// Connects if there is no connection. Fails with the message of `ssh`.
    pub(crate) async fn ensure_connected(&self) -> Result<(), TunnelError> {
        let mut child = self.child.lock().await;
        if let Some(running) = child.as_mut()
            && matches!(running.try_wait(), Ok(None))
        {
            return Ok(());
        }
        *child = None;
        *child = Some(self.start().await?);
        Ok(())
    }

    /// Cancel-safe: the process is killed if this future is dropped.
    async fn start(&self) -> Result<Child, TunnelError> {
        let log = self.folder.path().join("log");
        let stderr = std::fs::File::create(&log).map_err(TunnelError::Run)?;
        let mut child = Command::new("ssh")
            .args(arguments(&self.destination, &self.socket()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A file, because nothing would read a pipe.
            .stderr(stderr)
            // Its own process group, so that Ctrl-C does not end it before the sandboxes are
            // removed.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(TunnelError::Run)?;
        if is_echoing(&mut child).await {
            return Ok(child);
        }
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let mut message: String = text.trim().chars().take(LOG_CHARS).collect();
        if message.is_empty() {
            "it ended without a message".clone_into(&mut message);
        }
        Err(TunnelError::Ended { login: self.destination.login.clone(), message })
    }
}

/// Whether the remote side sends back what was written to it.
async fn is_echoing(child: &mut Child) -> bool {
    let (Some(stdin), Some(stdout)) = (&mut child.stdin, &mut child.stdout) else { return false };
    if stdin.write_all(format!("{ECHO}\n").as_bytes()).await.is_err()
        || stdin.flush().await.is_err()
    {
        return false;
    }
    let mut lines = BufReader::new(stdout.take(BANNER_BYTES)).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == ECHO {
            return true;
        }
    }
    false
}

fn arguments(destination: &Destination, socket: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    if let Some(config) = &destination.config {
        arguments.extend(["-F".to_owned(), config.clone()]);
    }
    if let Some(port) = destination.port {
        arguments.extend(["-p".to_owned(), port.to_string()]);
    }
    for option in [
        // Fail instead of asking for a password or for trust in a host key.
        "BatchMode=yes".to_owned(),
        "ExitOnForwardFailure=yes".to_owned(),
        // Replace the socket of an earlier connection.
        "StreamLocalBindUnlink=yes".to_owned(),
        // A shared connection would end with its own master instead of this program.
        "ControlMaster=no".to_owned(),
        "ControlPath=none".to_owned(),
        "RemoteCommand=none".to_owned(),
        format!("ServerAliveInterval={KEEP_ALIVE_SECONDS}"),
        format!("ServerAliveCountMax={KEEP_ALIVE_MISSES}"),
    ] {
        arguments.extend(["-o".to_owned(), option]);
    }
    let forward = format!("{}:{}", socket.display(), destination.socket);
    arguments.extend(["-T".to_owned(), "-L".to_owned(), forward]);
    arguments.extend(["--".to_owned(), destination.login.clone(), "cat".to_owned()]);
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unreachable_host_is_reported_with_the_message_of_ssh() {
        let destination = Destination {
            login: "user@127.0.0.1".into(),
            port: Some(1),
            socket: "/var/run/docker.sock".into(),
            config: Some("/dev/null".into()),
        };
        let tunnel = Tunnel::new(destination).unwrap();
        let message = tunnel.ensure_connected().await.unwrap_err().to_string();
        // The second form: `ssh` is not installed.
        assert!(message.contains("refused") || message.contains("cannot run"), "{message}");
    }
}
