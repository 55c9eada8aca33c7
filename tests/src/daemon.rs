//! A Docker daemon started by a test, which may fill its disk or kill it.

use crate::certificates;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Pauses between two polls of something that sends no events.
pub fn pause(time: Duration) {
    let (_sender, receiver) = std::sync::mpsc::channel::<()>();
    let _ = receiver.recv_timeout(time);
}

/// Runs `docker` with these arguments, on the given host or the usual one.
///
/// # Errors
/// Fails if `docker` cannot be started.
pub fn docker(host: Option<&str>, args: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new("docker");
    command.args(host.map(|host| ["-H", host]).into_iter().flatten()).args(args);
    Ok(command.output()?)
}

/// Names of all containers, or of those with a label, in any state; ids for containers without a
/// name. Containers that a daemon lists but no longer has are left out: see `DockerProvider::list`.
///
/// # Errors
/// Fails if Docker cannot be queried.
pub fn containers(host: Option<&str>, label: Option<&str>) -> anyhow::Result<Vec<String>> {
    let filter = label.map(|label| format!("--filter=label={label}"));
    let mut arguments = vec!["ps", "-a", "--no-trunc", "--format={{.ID}} {{.Names}}"];
    arguments.extend(filter.as_deref());
    let listed = docker(host, &arguments)?;
    anyhow::ensure!(listed.status.success(), "docker ps failed: {}", crate::stderr(&listed));
    let mut names = Vec::new();
    for line in String::from_utf8(listed.stdout)?.lines() {
        match line.split_once(' ').unwrap_or((line, "")) {
            (id, "") => {
                let known = docker(host, &["inspect", "--type", "container", id])?;
                if known.status.success() || !crate::stderr(&known).contains("No such container") {
                    names.push(id.to_owned());
                }
            }
            (_, name) => names.push(name.to_owned()),
        }
    }
    Ok(names)
}

/// Number of files that fit on a small disk.
pub const SMALL_DISK_FILES: u32 = 100_000;

/// A daemon without a container network. Dropping this stops it and removes all of its data.
#[derive(Debug)]
pub struct Daemon {
    folder: tempfile::TempDir,
    child: Option<Child>,
    /// Port on which it also listens, for clients with a certificate.
    tls_port: Option<u16>,
}

impl Daemon {
    /// Starts a daemon; `None` if this machine does not allow it.
    ///
    /// # Errors
    /// Fails if its folder cannot be created.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let mut daemon = Self { folder, child: None, tls_port: None };
        Ok(daemon.spawn()?.then_some(daemon))
    }

    /// Like [`Daemon::start`], and also listens on a loopback port with TLS; `None` also if no
    /// certificates can be created.
    ///
    /// # Errors
    /// The errors of [`Daemon::start`].
    pub fn start_with_tls() -> anyhow::Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        if !certificates::make(folder.path())? {
            return Ok(None);
        }
        let mut daemon = Self { folder, child: None, tls_port: Some(free_port()?) };
        Ok(daemon.spawn()?.then_some(daemon))
    }

    /// Like [`Daemon::start_with_tls`], with its data on a separate file system (ext4 in a file) of
    /// `mib` MiB and [`SMALL_DISK_FILES`] files.
    ///
    /// # Errors
    /// The errors of [`Daemon::start`].
    pub fn start_small(mib: u32) -> anyhow::Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        if !certificates::make(folder.path())? {
            return Ok(None);
        }
        let (disk, data) = (folder.path().join("disk"), folder.path().join("data"));
        std::fs::File::create(&disk)?.set_len(u64::from(mib) << 20)?;
        std::fs::create_dir(&data)?;
        let done = |command: &mut Command| {
            command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        let files = SMALL_DISK_FILES.to_string();
        let made = done(Command::new("mkfs.ext4").args(["-q", "-m0", "-N", &files]).arg(&disk));
        if !made || !done(Command::new("mount").args(["-o", "loop"]).args([&disk, &data])) {
            return Ok(None);
        }
        let mut daemon = Self { folder, child: None, tls_port: Some(free_port()?) };
        Ok(daemon.spawn()?.then_some(daemon))
    }

    /// Its URL with TLS, if it has one.
    pub fn tls_host(&self) -> Option<String> {
        self.tls_port.map(|port| format!("tcp://127.0.0.1:{port}"))
    }

    /// The folder with a client's certificates, by Docker's names.
    pub fn certificates(&self) -> &Path {
        self.folder.path()
    }

    /// Its URL, a Unix socket.
    pub fn host(&self) -> String {
        format!("unix://{}", self.path("docker.sock").display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `docker` with this daemon as its host.
    ///
    /// # Errors
    /// Fails if `docker` cannot be started.
    pub fn docker(&self, args: &[&str]) -> anyhow::Result<Output> {
        docker(Some(&self.host()), args)
    }

    /// Copies an image from the usual daemon.
    ///
    /// # Errors
    /// Fails if either daemon refuses.
    pub fn load(&self, image: &str) -> anyhow::Result<()> {
        let copy = format!("docker save {image} | docker -H {} load", self.host());
        let output = Command::new("sh").args(["-c", &copy]).output()?;
        anyhow::ensure!(output.status.success(), "{}", crate::stderr(&output));
        Ok(())
    }

    /// Starts or restarts the daemon. Returns whether it answers.
    ///
    /// # Errors
    /// Fails if its log file cannot be created.
    pub fn spawn(&mut self) -> anyhow::Result<bool> {
        let argument = |name: &str| self.path(name).display().to_string();
        let log = std::fs::File::create(self.path("log"))?;
        let mut command = Command::new("dockerd");
        if let Some(host) = self.tls_host() {
            command.args(["--host", &host, "--tlsverify"]);
            for (option, file) in
                [("cacert", "ca.pem"), ("cert", "server-cert.pem"), ("key", "server-key.pem")]
            {
                command.arg(format!("--tls{option}")).arg(self.path(file));
            }
        }
        let spawned = command
            .args(["--host", &self.host(), "--data-root", &argument("data")])
            .args(["--exec-root", &argument("exec"), "--pidfile", &argument("pid")])
            .args(["--bridge", "none", "--iptables=false", "--ip6tables=false"])
            .args(["--containerd-namespace", "orchestrate-test"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let Ok(child) = spawned else { return Ok(false) };
        let child = self.child.insert(child);
        let host = format!("unix://{}", self.folder.path().join("docker.sock").display());
        let began = Instant::now();
        while began.elapsed() < Duration::from_mins(2) {
            if docker(Some(&host), &["version"])?.status.success() {
                return Ok(true);
            }
            if child.try_wait()?.is_some() {
                return Ok(false);
            }
            pause(Duration::from_millis(200));
        }
        Ok(false)
    }

    /// Kills it, as the kernel does when memory runs out. Its containers live on.
    ///
    /// # Errors
    /// Fails if it cannot be killed.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        remove_if_there(&self.path("pid"))
    }
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn remove_if_there(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Containers that outlived a kill of the daemon would outlive this one as well.
        if let Ok(left) = self.docker(&["ps", "--all", "--quiet", "--no-trunc"]) {
            let left = String::from_utf8_lossy(&left.stdout).into_owned();
            let ids = left.split_whitespace();
            let _ = self.docker(&["rm", "--force"].into_iter().chain(ids).collect::<Vec<_>>());
        }
        if let Some(child) = &mut self.child {
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            for _ in 0..300 {
                if !matches!(child.try_wait(), Ok(None)) {
                    break;
                }
                pause(Duration::from_millis(100));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        // All processes that it started have this folder among their arguments.
        let folder = self.folder.path().display().to_string();
        let _ = Command::new("pkill").args(["-KILL", "-f", &folder]).status();
        // The daemon mounts its folder and leaves the mount behind; a small disk is another mount.
        let data = self.path("data");
        let unmount = || Command::new("umount").arg("-l").arg(&data).stderr(Stdio::null()).status();
        while unmount().is_ok_and(|status| status.success()) {}
    }
}
