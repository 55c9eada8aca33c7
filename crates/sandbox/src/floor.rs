//! The least that the daemon can be asked for: a bare container, and an exec of its own. What a
//! sandbox costs on top of these is ours.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::container::{LABEL_DEADLINE, LABEL_RUN};
use crate::daemon::Daemon;
use crate::provider::DockerProvider;
use bollard::exec::StartExecResults;
use bollard::models::{ContainerCreateBody, ExecConfig, HostConfig};
use bollard::query_parameters::CreateContainerOptions;
use futures::TryStreamExt as _;
use orchestrate_types::unix_micros;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// A bare container ends by itself after this time.
const LIFETIME_SECONDS: i64 = 900;

/// A bare container of an image that has `sleep` and `true`. Close it; if it is dropped it ends by
/// itself after fifteen minutes, and `orchestrate gc` finds it then.
#[derive(Debug)]
pub struct BareContainer {
    daemon: Daemon,
    name: String,
    /// From the request to create it until the daemon said that it runs.
    pub started_in: Duration,
}

impl DockerProvider {
    /// Creates and starts a bare container, with no limits and no network, and says how long that
    /// took. `number` tells containers of one process apart.
    ///
    /// # Errors
    /// Whatever the daemon refuses.
    pub async fn start_bare(
        &self,
        image: &str,
        number: u32,
    ) -> Result<BareContainer, SandboxError> {
        let daemon = self.shared.daemon.clone();
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
        let began = Instant::now();
        daemon
            .call(daemon.docker.create_container(Some(options), body))
            .await
            .map_err(|error| error.at(&name, "create"))?;
        let started = daemon.call(daemon.docker.start_container(&name, None)).await;
        let started_in = began.elapsed();
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
    /// Runs `true` as the daemon runs commands; the time from the request to the end of the stream.
    ///
    /// # Errors
    /// Whatever the daemon refuses; a stream that is still open after the daemon's deadline.
    pub async fn exec_true(&self) -> Result<Duration, SandboxError> {
        let docker = &self.daemon.docker;
        let config = ExecConfig {
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            cmd: Some(vec!["true".to_owned()]),
            ..ExecConfig::default()
        };
        let began = Instant::now();
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
        let took = began.elapsed();
        let ended = self.daemon.call(docker.inspect_exec(&id)).await;
        let ended = ended.map_err(|error| error.at(&self.name, "exec inspect"))?;
        if ended.exit_code == Some(0) {
            return Ok(took);
        }
        let message = format!("`true` ended with {:?}", ended.exit_code);
        let kind = SandboxErrorKind::Refused { call: "exec", message };
        Err(SandboxError { sandbox: self.name.clone(), kind })
    }

    /// Removes it.
    ///
    /// # Errors
    /// When the daemon does not remove it in time.
    pub async fn close(self) -> Result<(), SandboxError> {
        self.daemon.remove(&self.name).await.map_err(|error| error.at(&self.name, "remove"))
    }
}
