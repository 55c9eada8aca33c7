//! Facts and timings of a Docker host, for `orchestrate doctor` and benchmarks.

use crate::api::{Command, SandboxProvider as _, SandboxSpec};
use crate::disk::free_bytes;
use crate::error::SandboxError;
use crate::isolation::{self, maps_users};
use crate::provider::DockerProvider;
use orchestrate_types::ByteSize;
use std::time::Duration;
use tokio::time::Instant;

/// Facts about a daemon, as it reports them.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DaemonReport {
    /// Name of the Docker host.
    pub host: String,
    /// Engine version, e.g. `20.10.24`.
    pub version: String,
    /// Negotiated API version, e.g. `1.41`.
    pub api: String,
    /// Control group version, `1` or `2`.
    pub cgroup_version: String,
    /// What manages the control groups: `cgroupfs` or `systemd`.
    pub cgroup_driver: String,
    /// Default runtime, e.g. `runc`.
    pub runtime: String,
    /// Names of all runtimes that it offers, sorted.
    pub runtimes: Vec<String>,
    /// Security options, e.g. `name=seccomp,profile=default`.
    pub security: Vec<String>,
    /// Whether containers keep running while the daemon is restarted.
    pub live_restore: bool,
    /// Storage driver, e.g. `overlay2`.
    pub storage_driver: String,
    /// Kernel version of the host.
    pub kernel: String,
    /// Number of CPU cores of the host.
    pub cores: u64,
    /// Memory of the host, in total.
    pub memory: ByteSize,
    /// Free disk space under its data folder; `None` if the folder is not on this machine.
    pub free_disk: Option<ByteSize>,
}

impl DaemonReport {
    /// Whether root in a container is root of the host: users are not mapped, and the runtime
    /// (`runtime`, else the default) has no kernel of its own.
    pub fn root_is_host_root(&self, runtime: Option<&str>) -> bool {
        !maps_users(&self.security) && !runtime.unwrap_or(&self.runtime).starts_with("runsc")
    }
}

/// Measured timings of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ProbeReport {
    /// Time to open the sandbox.
    pub open: Duration,
    /// Time to run a command that does nothing.
    pub command: Duration,
    /// Time to close the sandbox.
    pub close: Duration,
}

impl DockerProvider {
    /// Asks the daemon for its version, configuration and resources.
    ///
    /// # Errors
    /// Any error of the daemon.
    pub async fn doctor(&self) -> Result<DaemonReport, SandboxError> {
        let daemon = &self.state.daemon;
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

    /// Measures how long it takes to open a sandbox, run a command in it and close it.
    ///
    /// # Errors
    /// Any error of these three calls.
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
