//! `orchestrate remove-unstarted`: a process beside a coordinator, for the moment of its death.
//!
//! Containers end by themselves when their coordinator's stream closes, all but those that it had
//! created and not yet started: nothing runs in them. Nobody else may come for a long time.

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

/// What a coordinator says that needs no help.
const DISMISSED: &[u8] = b"dismissed";
/// A busy daemon takes some time to create what it was asked for, and lists it only then.
const LOOK_FOR: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Waits, then removes.
pub(crate) async fn run(args: RemoveUnstartedArgs) -> anyhow::Result<ExitCode> {
    let heard = tokio::task::spawn_blocking(|| {
        let mut heard = Vec::new();
        std::io::stdin().read_to_end(&mut heard).map(|_| heard)
    });
    if heard.await?.context("read standard input")? == DISMISSED {
        return Ok(ExitCode::SUCCESS);
    }
    let hosts: Result<Vec<DockerHostSection>, _> =
        args.hosts.as_deref().map_or(Ok(Vec::new()), serde_json::from_str);
    let hosts = Setting::from_written(hosts.context("read --hosts")?);
    let config = SandboxSettings { hosts, ..SandboxSettings::default() };
    let until = Instant::now() + LOOK_FOR;
    // What may have ended the coordinator, a daemon in trouble, is no reason to give up at once.
    while Instant::now() < until {
        let each = config.docker_hosts();
        let looks = each.iter().map(|host| look(config.on(host), args.run, args.epoch));
        for error in join_all(looks).await.into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "cannot look for unstarted containers");
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

/// Such a process, seen from the coordinator.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
}

impl Helper {
    /// Starts one. A run can do without: its next start, or `gc`, removes what was left.
    pub(crate) fn start(settings: &Settings, run: RunId, epoch: i64) -> Option<Self> {
        let spawn = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["remove-unstarted", "--run", &run.to_string()]);
            command.args(["--epoch", &epoch.to_string()]);
            command.args([
                "--hosts",
                &serde_json::to_string(&settings.sandbox.docker_hosts().to_written())?,
            ]);
            // A group of its own: what ends the coordinator by the keyboard is not to end it.
            command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
            command.stderr(Stdio::null()).spawn()
        };
        match spawn() {
            Ok(child) => Some(Self { child }),
            Err(error) => {
                tracing::warn!(%error, "nobody will look after containers should this be killed");
                None
            }
        }
    }

    /// Sends it away: all containers are gone.
    pub(crate) fn dismiss(mut self) {
        let said = self.child.stdin.take().map(|mut stdin| stdin.write_all(DISMISSED));
        if let Some(Err(error)) = said {
            tracing::debug!(%error, "the helper had ended");
        }
        if let Err(error) = self.child.wait() {
            tracing::debug!(%error, "the helper's end");
        }
    }
}
