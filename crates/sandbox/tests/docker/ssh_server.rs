//! A separate `sshd` on the loopback interface with its own keys, so that the user's are not
//! touched.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The server. It ends when this is dropped.
pub(crate) struct Sshd {
    folder: tempfile::TempDir,
    child: Child,
}

impl Sshd {
    /// Starts a server; `None` if that is not possible on this machine.
    pub(crate) fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host_key", "client_key"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]);
            keygen.status().ok().filter(std::process::ExitStatus::success)?;
        }
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        std::fs::copy(path("client_key.pub"), path("authorized_keys")).unwrap();
        let host_key = std::fs::read_to_string(path("host_key.pub")).unwrap();
        std::fs::write(path("known_hosts"), format!("[127.0.0.1]:{port} {host_key}")).unwrap();
        let server = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nPidFile none\nPermitRootLogin yes\n",
            path("host_key"),
            path("authorized_keys")
        );
        std::fs::write(path("sshd_config"), server).unwrap();
        let client = format!(
            "Host daemon-host\nHostName 127.0.0.1\nPort {port}\nIdentityFile {}\n\
             IdentitiesOnly yes\nUserKnownHostsFile {}\n",
            path("client_key"),
            path("known_hosts")
        );
        std::fs::write(path("ssh_config"), client).unwrap();
        // The Debian package creates this folder when it starts its own server.
        let _ = std::fs::create_dir_all("/run/sshd");
        let child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-f", &path("sshd_config"), "-E", &path("log")])
            .stdin(Stdio::null())
            .spawn()
            .ok()?;
        let mut server = Self { folder, child };
        let start = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            let ended = !matches!(server.child.try_wait(), Ok(None));
            if ended || start.elapsed() > Duration::from_secs(20) {
                return None;
            }
            orchestrate_e2e::pause(Duration::from_millis(50));
        }
        Some(server)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Client configuration under which the server is called `daemon-host`.
    pub(crate) fn config(&self) -> String {
        self.path("ssh_config").display().to_string()
    }

    /// Processes that serve a logged-in connection.
    fn connection_processes(&self) -> Vec<String> {
        let parent = self.child.id().to_string();
        let output = Command::new("pgrep").args(["-P", &parent]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    pub(crate) fn connections(&self) -> usize {
        self.connection_processes().len()
    }

    pub(crate) fn break_connections(&self) {
        for process in self.connection_processes() {
            assert!(Command::new("kill").args(["-9", &process]).status().unwrap().success());
        }
    }

    /// From now on, no key is accepted.
    pub(crate) fn revoke_keys(&self) {
        std::fs::write(self.path("authorized_keys"), "").unwrap();
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
