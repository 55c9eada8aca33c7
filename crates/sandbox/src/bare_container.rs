//! A plain container with Docker's own exec: the baseline with which benchmarks compare sandboxes.

use crate::container::{LABEL_DEADLINE, LABEL_RUN};
use crate::daemon::Daemon;
use crate::error::{SandboxError, SandboxErrorKind};
use crate::provider::DockerProvider;
use bollard::exec::StartExecResults;
use bollard::models::{ContainerCreateBody, ExecConfig, HostConfig};
use bollard::query_parameters::CreateContainerOptions;
use futures::TryStreamExt as _;
use orchestrate_types::unix_micros;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// A bare container ends by itself after this many seconds.
const LIFETIME_SECONDS: i64 = 900;

/// A plain container without supervisor, limits or network.
///
/// Its image must contain `sleep` and `true`. Close it when done; one that is dropped ends by
/// itself after fifteen minutes, and `orchestrate gc` removes it then.
#[derive(Debug)]
pub struct BareContainer {
    daemon: Daemon,
    name: String,
    /// Time from the create request until the daemon reported it as started.
    pub started_in: Duration,
}

impl DockerProvider {
    /// Creates and starts a bare container and measures how long that takes. `number` must be
    /// unique among the bare containers of this process.
    ///
    /// # Errors
    /// Any error of the daemon.
    pub async fn start_bare(
        &self,
        image: &str,
        number: u32,
    ) -> Result<BareContainer, SandboxError> {
        let daemon = self.state.daemon.clone();
        let name = format!("orch-bare-{}-{number}", std::process::id());
        let deadline = unix_micros() / 1_000_000 + LIFETIME_SECONDS;
        let body = ContainerCreateBody {
            image: Some(image.to_owned()),
            cmd: Some(vec!["sleep".to_owned(), LIFETIME_SECONDS.to_string()]),
            labels: Some(HashMap::from([
                (LABEL_RUN.to_owned(), "none".to_owned()),
                (LABEL_DEADLINE.to_owned(), deadline.to_string()),
            ])),
            host_config: Some(HostConfig {
                network_mode: Some("none".to_owned()),
                auto_remove: Some(true),
                ..HostConfig::default()
            }),
            ..ContainerCreateBody::default()
        };
        let options = CreateContainerOptions { name: Some(name.clone()), ..Default::default() };
        let start = Instant::now();
        daemon
            .call(daemon.docker.create_container(Some(options), body))
            .await
            .map_err(|error| error.at(&name, "create"))?;
        let started = daemon.call(daemon.docker.start_container(&name, None)).await;
        let started_in = start.elapsed();
        let bare = BareContainer { daemon, name, started_in };
        match started {
            Ok(()) => Ok(bare),
            Err(error) => {
                let error = error.at(&bare.name, "start");
                bare.close().await?;
                Err(error)
            }
        }
    }
}

impl BareContainer {
    /// Runs `true` with Docker's exec. Returns the time from the request to the end of the stream.
    ///
    /// # Errors
    /// Any error of the daemon, or a stream that does not end within the deadline of a call.
    pub async fn exec_true(&self) -> Result<Duration, SandboxError> {
        let docker = &self.daemon.docker;
        let config = ExecConfig {
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            cmd: Some(vec!["true".to_owned()]),
            ..ExecConfig::default()
        };
        let start = Instant::now();
        let run = async {
            let exec = docker.create_exec(&self.name, config).await?;
            match docker.start_exec(&exec.id, None).await? {
                StartExecResults::Attached { output, .. } => {
                    output.try_for_each(|_| std::future::ready(Ok(()))).await?;
                }
                StartExecResults::Detached => {}
            }
            Ok(exec.id)
        };
        let id = self.daemon.call(run).await.map_err(|error| error.at(&self.name, "exec"))?;
        let elapsed = start.elapsed();
        let ended = self.daemon.call(docker.inspect_exec(&id)).await;
        let ended = ended.map_err(|error| error.at(&self.name, "exec inspect"))?;
        if ended.exit_code == Some(0) {
            return Ok(elapsed);
        }
        let code =
            ended.exit_code.map_or_else(|| "no exit code".to_owned(), |code| code.to_string());
        let message = format!("`true` exited with {code}");
        let kind = SandboxErrorKind::Refused { call: "exec", message };
        Err(SandboxError { sandbox: self.name.clone(), kind })
    }

    /// Removes the container.
    ///
    /// # Errors
    /// Any error of the daemon.
    pub async fn close(self) -> Result<(), SandboxError> {
        self.daemon.remove(&self.name).await.map_err(|error| error.at(&self.name, "remove"))
    }
}
