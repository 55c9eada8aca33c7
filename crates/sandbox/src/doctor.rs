//! What a Docker host can do, for `orchestrate doctor` and the record of a run.

use crate::api::{Command, SandboxError, SandboxProvider as _, SandboxSpec};
use crate::daemon::Daemon;
use crate::isolation::{self, maps_users};
use crate::provider::DockerProvider;
use orchestrate_types::ByteSize;
use std::time::Duration;
use tokio::time::Instant;

/// The daemon, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DaemonReport {
    /// Where it is.
    pub host: String,
    /// Engine version, like `20.10.24`.
    pub version: String,
    /// Version of its interface that we agreed on, like `1.41`.
    pub api: String,
    /// Control group version, `1` or `2`.
    pub cgroup_version: String,
    /// Who manages the control groups, `cgroupfs` or `systemd`.
    pub cgroup_driver: String,
    /// What runs containers where nothing else is asked for, like `runc`.
    pub runtime: String,
    /// All that it offers to run containers.
    pub runtimes: Vec<String>,
    /// What the daemon says about its defences, like `name=seccomp,profile=default`.
    pub security: Vec<String>,
    /// Whether containers outlive the daemon.
    pub live_restore: bool,
    /// Storage driver, like `overlay2`.
    pub storage_driver: String,
    /// Kernel of the host.
    pub kernel: String,
    /// Cores of the host.
    pub cores: u64,
    /// Memory of the host.
    pub memory: ByteSize,
    /// Free disk under its data folder; `None` where that is another machine's.
    pub free_disk: Option<ByteSize>,
}

impl DaemonReport {
    /// Whether a container's root has the host's user id 0, with no kernel of its own; `runtime` is
    /// what runs it, if not the default.
    pub fn root_is_the_hosts(&self, runtime: Option<&str>) -> bool {
        !maps_users(&self.security) && !runtime.unwrap_or(&self.runtime).starts_with("runsc")
    }
}

/// Times of one sandbox, measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ProbeReport {
    /// From the request to a ready sandbox.
    pub open: Duration,
    /// One command that does nothing.
    pub command: Duration,
    /// Giving it back.
    pub close: Duration,
}

/// Free bytes under the daemon's data folder.
pub(crate) async fn free_disk(daemon: &Daemon) -> Result<Option<ByteSize>, SandboxError> {
    if !daemon.is_local() {
        return Ok(None);
    }
    let info =
        daemon.call(daemon.docker.info()).await.map_err(|error| error.at(&daemon.host, "info"))?;
    // The socket may lead into a virtual machine, whose folders are not here.
    Ok(info.docker_root_dir.and_then(|path| free_bytes(&path)))
}

fn free_bytes(path: &str) -> Option<ByteSize> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(ByteSize(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

impl DockerProvider {
    /// Asks the daemon who it is.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub async fn doctor(&self) -> Result<DaemonReport, SandboxError> {
        let daemon = &self.shared.daemon;
        let info = daemon
            .call(daemon.docker.info())
            .await
            .map_err(|error| error.at(&daemon.host, "info"))?;
        let (local, runtimes) = (daemon.is_local(), isolation::runtimes(&info));
        let api = daemon.docker.client_version();
        Ok(DaemonReport {
            host: daemon.host.clone(),
            version: info.server_version.unwrap_or_default(),
            api: format!("{}.{}", api.major_version, api.minor_version),
            cgroup_driver: info.cgroup_driver.map(|d| d.to_string()).unwrap_or_default(),
            runtimes,
            runtime: info.default_runtime.unwrap_or_default(),
            security: info.security_options.unwrap_or_default(),
            live_restore: info.live_restore_enabled.unwrap_or(false),
            cgroup_version: info.cgroup_version.map(|v| v.to_string()).unwrap_or_default(),
            storage_driver: info.driver.unwrap_or_default(),
            kernel: info.kernel_version.unwrap_or_default(),
            cores: info.ncpu.and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
            memory: ByteSize(info.mem_total.and_then(|n| u64::try_from(n).ok()).unwrap_or(0)),
            free_disk: info.docker_root_dir.filter(|_| local).and_then(|path| free_bytes(&path)),
        })
    }

    /// Opens one sandbox, runs one command, closes it; says how long each took.
    ///
    /// # Errors
    /// Whatever opening, running or closing fails with.
    pub async fn probe(&self, spec: &SandboxSpec) -> Result<ProbeReport, SandboxError> {
        let start = Instant::now();
        let mut sandbox = self.open(spec).await?;
        let opened = Instant::now();
        sandbox.exec(&Command::shell(":", Duration::from_secs(10))).await?;
        let ran = Instant::now();
        sandbox.close().await?;
        Ok(ProbeReport { open: opened - start, command: ran - opened, close: ran.elapsed() })
    }
}
