//! A Docker daemon started by a test, which may fill its disk or kill it.

use crate::certificates;
use crate::namespaces::Namespaces;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
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

/// Starts the name of every folder and control group that belongs to a test's daemon, by which
/// `scripts/lib/machine.py` recognises those of a killed test.
const NAME: &str = "orchestrate-daemon-";

/// Runs a daemon with its arguments.
const DAEMON: &str = r#"exec dockerd "$@""#;

/// The same with a socket on standard input, which it inherits as from systemd.
const DAEMON_WITH_LISTENER: &str = r#"
exec 3<&0 </dev/null
export LISTEN_FDS=1 LISTEN_PID=$$
exec dockerd --host fd:// "$@"
"#;

/// A daemon without a container network, in namespaces of its own: it sees neither interfaces nor
/// mounts nor processes of the machine, and cannot change them. Its Unix socket and its TLS port
/// are reachable as usual. Dropping this stops it and removes all of its data.
#[derive(Debug)]
pub struct Daemon {
    folder: tempfile::TempDir,
    /// `None` once they are gone.
    namespaces: Option<Namespaces>,
    /// The parent of the daemon's process.
    child: Option<Child>,
    /// Port on which it also listens, for clients with a certificate; 0 before it is known.
    tls_port: Option<u16>,
}

impl Daemon {
    /// Starts a daemon; `None` if this machine does not allow it.
    ///
    /// # Errors
    /// Fails if its folder cannot be created.
    pub fn start() -> anyhow::Result<Option<Self>> {
        Self::start_in(folder()?, None)
    }

    /// Like [`Daemon::start`], and also listens on a loopback port with TLS; `None` also if no
    /// certificates can be created.
    ///
    /// # Errors
    /// The errors of [`Daemon::start`].
    pub fn start_with_tls() -> anyhow::Result<Option<Self>> {
        let folder = folder()?;
        if !certificates::make(folder.path())? {
            return Ok(None);
        }
        Self::start_in(folder, Some(0))
    }

    /// Like [`Daemon::start_with_tls`], with its data on a separate file system (ext4 in a file) of
    /// `mib` MiB and [`SMALL_DISK_FILES`] files.
    ///
    /// # Errors
    /// The errors of [`Daemon::start`].
    pub fn start_small(mib: u32) -> anyhow::Result<Option<Self>> {
        let folder = folder()?;
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
        // Mounted outside as well: the program under test reads how much space is free.
        if !made || !done(Command::new("mount").args(["-o", "loop"]).args([&disk, &data])) {
            return Ok(None);
        }
        Self::start_in(folder, Some(0))
    }

    fn start_in(folder: tempfile::TempDir, tls_port: Option<u16>) -> anyhow::Result<Option<Self>> {
        let mut daemon = Self { folder, namespaces: None, child: None, tls_port };
        daemon.namespaces = Namespaces::create()?;
        Ok((daemon.namespaces.is_some() && daemon.spawn()?).then_some(daemon))
    }

    /// Listens on a loopback port of the daemon's network, where it finds servers of the test such
    /// as a registry; port 0 stands for a free one.
    ///
    /// # Errors
    /// Fails if the port is taken, or this process may not enter the network.
    pub fn listen(&self, port: u16) -> anyhow::Result<TcpListener> {
        self.namespaces()?.listen(port)
    }

    fn namespaces(&self) -> anyhow::Result<&Namespaces> {
        self.namespaces.as_ref().ok_or_else(|| anyhow::anyhow!("the daemon was never started"))
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

    /// The name of its folder and its control group.
    fn name(&self) -> String {
        let name = self.folder.path().file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
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
    /// Fails if its log file cannot be created, or its port is taken.
    pub fn spawn(&mut self) -> anyhow::Result<bool> {
        let argument = |name: &str| self.path(name).display().to_string();
        let log = std::fs::File::create(self.path("log"))?;
        let listener = match self.tls_port {
            Some(port) => Some(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?),
            None => None,
        };
        let port = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let mut command = self.namespaces()?.command("sh");
        if let Some(listener) = listener {
            command.args(["-c", DAEMON_WITH_LISTENER, "sh", "--tlsverify"]);
            for (option, file) in
                [("cacert", "ca.pem"), ("cert", "server-cert.pem"), ("key", "server-key.pem")]
            {
                command.arg(format!("--tls{option}")).arg(self.path(file));
            }
            command.stdin(OwnedFd::from(listener));
        } else {
            command.args(["-c", DAEMON, "sh"]).stdin(Stdio::null());
        }
        let spawned = command
            .args(["--host", &self.host(), "--data-root", &argument("data")])
            .args(["--exec-root", &argument("exec"), "--pidfile", &argument("pid")])
            .args(["--bridge", "none", "--iptables=false", "--ip6tables=false"])
            .args(["--containerd-namespace", "orchestrate-test"])
            // systemd would take the process ids for its own.
            .args(["--exec-opt", "native.cgroupdriver=cgroupfs"])
            .args(["--cgroup-parent", &format!("/{}", self.name())])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        // Closes this process's copy of the listener: a killed daemon must refuse connections.
        drop(command);
        self.tls_port = port.map(|address| address.port());
        let host = self.host();
        let Ok(child) = spawned else { return Ok(false) };
        let child = self.child.insert(child);
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
            let parent = child.id().to_string();
            let killed = Command::new("pkill").args(["-KILL", "--parent", &parent]).status()?;
            anyhow::ensure!(killed.success(), "the daemon had ended before it was killed");
            child.wait()?;
        }
        remove_if_there(&self.path("pid"))
    }
}

fn folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(NAME).tempdir()
}

/// Whether a process ends in time.
pub(crate) fn ends_within_30_s(child: &mut Child) -> bool {
    for _ in 0..300 {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        pause(Duration::from_millis(100));
    }
    false
}

/// Removes a control group of this name and those inside, below every hierarchy.
fn remove_control_groups(name: &str) {
    let root = Path::new("/sys/fs/cgroup");
    for hierarchy in folders(root).into_iter().chain([root.to_owned()]) {
        remove_control_group(&hierarchy.join(name));
    }
}

fn remove_control_group(group: &Path) {
    for inside in folders(group) {
        remove_control_group(&inside);
    }
    let _ = std::fs::remove_dir(group);
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().map_while(Result::ok);
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
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
        // Ends the daemon and all that it started.
        self.namespaces = None;
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
        remove_control_groups(&self.name());
        let unmount = Command::new("umount").arg(self.path("data")).stderr(Stdio::null()).status();
        drop(unmount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    const IMAGE: &str = "orchestrate/micro:latest";

    /// Index of the interface of Docker's default network. An interface that replaces it has another.
    fn bridge() -> Option<String> {
        std::fs::read_to_string("/sys/class/net/docker0/ifindex").ok()
    }

    /// Mounts, processes and control groups of the machine whose names contain `name`.
    fn left(name: &str) -> Vec<String> {
        let processes = folders(Path::new("/proc")).into_iter().filter_map(|process| {
            std::fs::read(process.join("cmdline"))
                .ok()
                .map(|line| String::from_utf8_lossy(&line).into_owned())
        });
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = folders(root).into_iter().chain([root.to_owned()]);
        let groups = hierarchies.flat_map(|hierarchy| folders(&hierarchy));
        let groups = groups.map(|group| group.display().to_string());
        let all = processes.chain(mounts.lines().map(str::to_owned)).chain(groups);
        all.filter(|text| text.contains(name)).collect()
    }

    #[test]
    fn docker_daemon_leaves_interfaces_mounts_processes_and_control_groups_as_they_were() {
        let test = "docker_daemon_leaves_interfaces_mounts_processes_and_control_groups";
        if !crate::docker_or_skip(test).unwrap() {
            return;
        }
        let before = bridge();
        let Some(mut daemon) = Daemon::start_with_tls().unwrap() else {
            crate::skip::skip_test(test, "daemons", "no second daemon can be started");
            return;
        };
        let (name, port) = (daemon.name(), daemon.tls_port.unwrap());
        daemon.load(IMAGE).unwrap();
        daemon.kill().unwrap();
        // Nothing accepts connections for a dead daemon.
        let refused = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert!(daemon.spawn().unwrap() || daemon.spawn().unwrap(), "the daemon did not restart");
        assert_eq!(daemon.tls_port, Some(port));
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();

        drop(daemon.listen(0).unwrap());
        let started = daemon.docker(&["run", "-d", "--network=none", IMAGE, "sleep", "1000"]);
        assert!(started.as_ref().unwrap().status.success(), "{started:?}");
        let seen = left(&name);
        assert!(seen.iter().any(|text| text.starts_with("/sys/fs/cgroup")), "{seen:?}");
        assert!(!seen.iter().any(|text| text.contains("overlay")), "a visible mount: {seen:?}");
        // The container outlives the daemon, but not the test.
        daemon.kill().unwrap();
        let folder = daemon.folder.path().to_owned();
        drop(daemon);
        assert_eq!(left(&name), Vec::<String>::new());
        assert!(!folder.exists(), "{} is left", folder.display());
        assert_eq!(bridge(), before, "docker0 was removed or replaced");
    }
}
