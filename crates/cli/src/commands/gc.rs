//! `orchestrate gc`: containers that runs left behind, and images that they pulled.

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
        for (name, reason) in &report.failed {
            output::say(format!("warning: {name} cannot be removed: {reason}"));
        }
        if !report.failed.is_empty() {
            output::say("hint: restart the Docker daemon, then run `orchestrate gc` again");
        }
    }
    if args.images {
        remove_images(&provider, args.dry_run).await?;
    }
    provider.shutdown().await?;
    Ok(ExitCode::SUCCESS)
}

/// Removes what runs pulled, or says what there is.
async fn remove_images(provider: &DockerProvider, dry_run: bool) -> anyhow::Result<()> {
    let (mut removed, mut bytes) = (0, 0);
    for image in provider.remove_pulled_images(dry_run).await? {
        let size = format!("{} MiB", image.bytes.0 >> 20);
        if let Some(reason) = image.kept {
            output::say(format!("kept image {} ({size}): {reason}", image.names));
        } else {
            output::data(format!("{}\t{size}", image.names));
            removed += 1;
            bytes += image.bytes.0;
        }
    }
    let what = if dry_run { "would remove" } else { "removed" };
    output::say(format!("{what} {removed} images, {} MiB", bytes >> 20));
    Ok(())
}
