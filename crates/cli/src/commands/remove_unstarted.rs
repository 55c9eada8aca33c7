//! `orchestrate remove-unstarted`: a helper process of a coordinator, in case it is killed.
//!
//! Containers stop by themselves when the coordinator's stream closes, except those that it had
//! created and not yet started, in which nothing runs. This helper removes them; otherwise they would
//! stay until the next start of the run, which may be much later.

use crate::args::RemoveUnstartedArgs;
use crate::config::Settings;
use anyhow::Context;
use futures::future::join_all;
use orchestrate_sandbox::{
    DockerHostSection, DockerProvider, SandboxError, SandboxProvider, SandboxSettings,
};
use orchestrate_settings::Setting;
use orchestrate_types::RunId;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use tokio::time::Instant;

/// Message of a coordinator that ends normally.
const DISMISSED: &[u8] = b"dismissed";
/// A busy daemon takes some time to create a requested container, and lists it only then.
const LOOK_FOR: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Runs the command.
pub(crate) async fn run(args: RemoveUnstartedArgs) -> anyhow::Result<ExitCode> {
    let received = tokio::task::spawn_blocking(|| {
        let mut received = Vec::new();
        std::io::stdin().read_to_end(&mut received).map(|_| received)
    });
    if received.await?.context("failed to read standard input")? == DISMISSED {
        return Ok(ExitCode::SUCCESS);
    }
    let hosts: Result<Vec<DockerHostSection>, _> =
        args.hosts.as_deref().map_or(Ok(Vec::new()), serde_json::from_str);
    let hosts = Setting::from_written(hosts.context("failed to parse --hosts")?);
    let config = SandboxSettings { hosts, ..SandboxSettings::default() };
    let until = Instant::now() + LOOK_FOR;
    // A failing daemon may be what killed the coordinator, so an error is not a reason to give up.
    while Instant::now() < until {
        let each = config.docker_hosts();
        let looks = each.iter().map(|host| look(config.on(host), args.run, args.epoch));
        for error in join_all(looks).await.into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "failed to look for unstarted containers");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(ExitCode::SUCCESS)
}

async fn look(config: SandboxSettings, run: RunId, epoch: i64) -> Result<(), SandboxError> {
    let provider = DockerProvider::connect(config).await?;
    provider.sweep_unstarted(run, epoch).await?;
    provider.shutdown().await
}

/// A running helper, as seen by the coordinator.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
}

impl Helper {
    /// Starts a helper. Optional for a run: its next start, or `gc`, removes leftover containers, too.
    pub(crate) fn start(settings: &Settings, run: RunId, epoch: i64) -> Option<Self> {
        let spawn = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["remove-unstarted", "--run", &run.to_string()]);
            command.args(["--epoch", &epoch.to_string()]);
            let hosts = settings.sandbox.docker_hosts().to_written();
            command.args(["--hosts", &serde_json::to_string(&hosts)?]);
            // In a separate process group, so that Ctrl-C does not end it with the coordinator.
            command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
            command.stderr(Stdio::null()).spawn()
        };
        match spawn() {
            Ok(child) => Some(Self { child }),
            Err(error) => {
                tracing::warn!(%error, "no helper: if this process is killed, containers may be left behind until the next start");
                None
            }
        }
    }

    /// Ends the helper, because no container is left.
    pub(crate) fn dismiss(mut self) {
        let written = self.child.stdin.take().map(|mut stdin| stdin.write_all(DISMISSED));
        if let Some(Err(error)) = written {
            tracing::debug!(%error, "the helper had ended already");
        }
        if let Err(error) = self.child.wait() {
            tracing::debug!(%error, "failed to wait for the helper");
        }
    }
}
