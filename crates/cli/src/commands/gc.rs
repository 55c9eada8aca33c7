//! `orchestrate gc`: containers that runs left behind.

use crate::args::GcArgs;
use crate::{output, wiring};
use orchestrate_sandbox::{DockerProvider, GcScope, SandboxConfig, SandboxProvider};
use orchestrate_store::{Reader, Store};
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: GcArgs) -> anyhow::Result<ExitCode> {
    let scope = match &args.run_dir {
        Some(run_dir) if args.all => {
            let folder = wiring::absolute(run_dir)?;
            // Opening takes the run's lock: a live coordinator keeps its containers.
            let store = Store::open(&folder).await?;
            GcScope::Run(store.reader().run().await?.run)
        }
        Some(_) | None => GcScope::Expired,
    };
    let only = match &args.run_dir {
        Some(run_dir) => Some(Reader::open(&wiring::absolute(run_dir)?).await?.run().await?.run),
        None => None,
    };
    let provider = DockerProvider::connect(SandboxConfig::default()).await?;
    if args.dry_run {
        for container in provider.list().await? {
            if only.is_none() || container.run == only {
                output::data(format!("{}\t{}", container.name, container.state));
            }
        }
    } else {
        let report = provider.sweep_all_orphans(scope).await?;
        for name in &report.removed {
            output::data(name);
        }
        output::say(format!(
            "removed {} containers, kept {}",
            report.removed.len(),
            report.kept.len()
        ));
        for (name, reason) in &report.kept {
            output::say(format!("kept {name}: {reason}"));
        }
    }
    provider.shutdown().await?;
    Ok(ExitCode::SUCCESS)
}
