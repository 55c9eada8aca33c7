//! A daemon's socket on another machine, brought here by one `ssh`.
//!
//! All calls and all open sandboxes of a host are channels of the same connection, so it is made
//! once and not for every call. It ends with this program, whatever ends that: the far side runs
//! `cat`, which ends when our end of its input does.

use crate::host::Destination;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

/// What `cat` sends back, which says that the connection stands and the socket is there.
const ECHO: &str = "orchestrate: connected";
/// A login may greet; more than this is no greeting.
const GREETING_BYTES: u64 = 64 << 10;
/// Of `ssh`'s own words, this much is kept for the error message.
const WORDS_BYTES: usize = 2048;
/// A connection without an answer for three times so long is over.
const ALIVE_EVERY_SECONDS: u32 = 10;
const ALIVE_MISSES: u32 = 3;

/// One `ssh`, begun when it is first needed, and again after it ended.
#[derive(Debug)]
pub(crate) struct Tunnel {
    to: Destination,
    /// Only this user can look into it: whoever can use the socket is root of the other machine.
    folder: TempDir,
    child: tokio::sync::Mutex<Option<Child>>,
}

impl Tunnel {
    pub(crate) fn new(to: Destination) -> std::io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("orchestrate-ssh-").tempdir()?;
        Ok(Self { to, folder, child: tokio::sync::Mutex::default() })
    }

    /// The daemon's socket on this machine.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("docker.sock")
    }

    /// Waits until the connection stands; the words of `ssh` where it does not.
    pub(crate) async fn up(&self) -> Result<(), String> {
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

    /// Cancel-safe: what is dropped half-way is killed.
    async fn start(&self) -> Result<Child, String> {
        let log = self.folder.path().join("log");
        let failed = |error: std::io::Error| format!("cannot run `ssh`: {error}");
        let stderr = std::fs::File::create(&log).map_err(failed)?;
        let mut child = Command::new("ssh")
            .args(arguments(&self.to, &self.socket()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A file, because nobody would empty a pipe.
            .stderr(stderr)
            // What the keyboard sends to this program is not for it: sandboxes are removed first.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        if echoed(&mut child).await {
            return Ok(child);
        }
        let words = std::fs::read_to_string(&log).unwrap_or_default();
        let words: String = words.trim().chars().take(WORDS_BYTES).collect();
        Err(format!(
            "ssh to {}: {}",
            self.to.login,
            if words.is_empty() { "it ended" } else { &words }
        ))
    }
}

/// Whether what was written to the far side comes back.
async fn echoed(child: &mut Child) -> bool {
    let (Some(stdin), Some(stdout)) = (&mut child.stdin, &mut child.stdout) else { return false };
    if stdin.write_all(format!("{ECHO}\n").as_bytes()).await.is_err()
        || stdin.flush().await.is_err()
    {
        return false;
    }
    let mut lines = BufReader::new(stdout.take(GREETING_BYTES)).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == ECHO {
            return true;
        }
    }
    false
}

fn arguments(to: &Destination, socket: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    if let Some(config) = &to.config {
        arguments.extend(["-F".to_owned(), config.clone()]);
    }
    if let Some(port) = to.port {
        arguments.extend(["-p".to_owned(), port.to_string()]);
    }
    for option in [
        // Nobody is there to be asked for a password or about a key.
        "BatchMode=yes".to_owned(),
        "ExitOnForwardFailure=yes".to_owned(),
        // The socket of an earlier connection is in the way of the next.
        "StreamLocalBindUnlink=yes".to_owned(),
        // A shared connection would end with its own master, and not with us.
        "ControlMaster=no".to_owned(),
        "ControlPath=none".to_owned(),
        "RemoteCommand=none".to_owned(),
        format!("ServerAliveInterval={ALIVE_EVERY_SECONDS}"),
        format!("ServerAliveCountMax={ALIVE_MISSES}"),
    ] {
        arguments.extend(["-o".to_owned(), option]);
    }
    let forward = format!("{}:{}", socket.display(), to.socket);
    arguments.extend(["-T".to_owned(), "-L".to_owned(), forward]);
    arguments.extend(["--".to_owned(), to.login.clone(), "cat".to_owned()]);
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_that_is_not_there_is_told_in_the_words_of_ssh() {
        let to = Destination {
            login: "nobody@127.0.0.1".into(),
            port: Some(1),
            socket: "/var/run/docker.sock".into(),
            config: Some("/dev/null".into()),
        };
        let tunnel = Tunnel::new(to).unwrap();
        let words = tunnel.up().await.unwrap_err();
        // Where there is no `ssh` at all, that is said.
        assert!(words.contains("refused") || words.contains("cannot run"), "{words}");
    }
}
