//! Network, mounts and processes of a test's own Docker daemon, separate from the machine's.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Process 1. It ends, and everything else with it, when its input closes, which happens at the
/// latest when the test dies. Until then it collects orphans. A daemon must not find the machine's
/// containerd.
const INIT: &str = r"
set -e
ip link set lo up
mkdir -p /run/containerd
mount -t tmpfs tmpfs /run/containerd
exec 3<&0
cat <&3 >/dev/null &
echo ready
wait $!
";

/// Namespaces in which only loopback exists, mounts are not seen from outside, and no process
/// outlives the first. Dropping this kills all processes inside and waits until they are gone.
#[derive(Debug)]
pub(crate) struct Namespaces {
    unshare: Child,
}

impl Namespaces {
    /// Creates them; `None` if this machine does not allow it.
    ///
    /// # Errors
    /// Fails if the output of process 1 cannot be read.
    pub(crate) fn create() -> anyhow::Result<Option<Self>> {
        let spawned = Command::new("unshare")
            .args(["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"])
            .args(["sh", "-c", INIT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let Ok(unshare) = spawned else { return Ok(None) };
        let mut namespaces = Self { unshare };
        let mut ready = String::new();
        if let Some(output) = namespaces.unshare.stdout.take() {
            BufReader::new(output).read_line(&mut ready)?;
        }
        Ok((ready == "ready\n").then_some(namespaces))
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.unshare.id().to_string()).join("ns").join(name)
    }

    /// A command that runs `program` inside. Its process is a parent of the program's, which has
    /// other ids inside.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        for (option, name) in [("net", "net"), ("mount", "mnt"), ("pid", "pid_for_children")] {
            command.arg(format!("--{option}={}", self.path(name).display()));
        }
        command.arg(program);
        command
    }

    /// Listens on a loopback port inside; port 0 stands for a free one.
    ///
    /// # Errors
    /// Fails if the port is taken, or this process may not enter the network.
    pub(crate) fn listen(&self, port: u16) -> anyhow::Result<TcpListener> {
        let network = File::open(self.path("net"))?;
        // A socket stays in the network of the thread that made it.
        let enter_and_bind = move || -> anyhow::Result<TcpListener> {
            let kind = rustix::thread::LinkNameSpaceType::Network;
            rustix::thread::move_into_link_name_space(network.as_fd(), Some(kind))?;
            Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?)
        };
        let bound = std::thread::spawn(enter_and_bind).join();
        bound.unwrap_or_else(|_| anyhow::bail!("the thread that binds panicked"))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.unshare.stdin.take());
        if !crate::daemon::ends_within_30_s(&mut self.unshare) {
            let _ = self.unshare.kill();
            let _ = self.unshare.wait();
        }
    }
}
