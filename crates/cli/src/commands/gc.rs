//! `orchestrate gc`: removes containers that runs left behind, and images that they pulled.

use crate::args::{ConfigSource, GcArgs};
use crate::config::{self, ConfigError, Sections};
use crate::run_folder::{PLAN_FILE, planned};
use crate::{output, paths};
use camino::Utf8Path;
use orchestrate_sandbox::{
    DockerProvider, GcScope, SandboxError, SandboxProvider, SandboxSettings, SweepReport,
};
use orchestrate_store::{Reader, Store};
use orchestrate_types::RunId;
use std::process::ExitCode;

/// Runs the command on every Docker host; one that does not answer does not affect the others.
pub(crate) async fn run(args: GcArgs) -> anyhow::Result<ExitCode> {
    let folder = args.run_dir.as_deref().map(paths::absolute).transpose()?;
    let config = settings(folder.as_deref(), &args.source).await?;
    let only = match &folder {
        Some(folder) => Some(Reader::open(folder).await?.run().await?.run),
        None => None,
    };
    // Opening takes the run's lock, so the containers of a live coordinator are safe.
    let dead = match &folder {
        Some(folder) if args.all => Some(Store::open(folder).await?),
        Some(_) | None => None,
    };
    let scope = match (only, &dead) {
        (Some(run), Some(_)) => GcScope::Run(run),
        (Some(_) | None, _) => GcScope::Expired,
    };
    let hosts = config.docker_hosts();
    let mut failed = None;
    for host in &hosts {
        let title = (hosts.len() > 1).then(|| host.title());
        if let Err(error) = on_host(config.on(host), title, &args, scope, only).await {
            output::say(format!("warning: {error}"));
            failed = failed.or(Some(error));
        }
    }
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// The settings with the Docker hosts: those of the run, or of the command line.
async fn settings(
    folder: Option<&Utf8Path>,
    source: &ConfigSource,
) -> anyhow::Result<SandboxSettings> {
    let raw: Sections = match folder {
        Some(folder) if !source.files.is_empty() || !source.sets.is_empty() => {
            let error =
                "names the Docker hosts of the run already; remove --config and --set".to_owned();
            anyhow::bail!(ConfigError::Layer { name: folder.join(PLAN_FILE).into_string(), error });
        }
        Some(folder) => planned(folder, &Reader::open(folder).await?, &[]).await?,
        None => config::load(source)?,
    };
    let sandbox = raw.sandbox.check().map_err(ConfigError::Problems)?;
    // Other requirements on a host do not matter for removing what is on it.
    let SandboxSettings { docker_host, hosts, call_timeout, .. } = sandbox;
    Ok(SandboxSettings { docker_host, hosts, call_timeout, ..SandboxSettings::default() })
}

/// Cleans one host; `title` names it in messages where there are several.
async fn on_host(
    config: SandboxSettings,
    title: Option<&str>,
    args: &GcArgs,
    scope: GcScope,
    only: Option<RunId>,
) -> Result<(), SandboxError> {
    let at = title.map(|title| format!(" on {title}")).unwrap_or_default();
    let column = title.map(|title| format!("\t{title}")).unwrap_or_default();
    let provider = DockerProvider::connect(config).await?;
    if args.dry_run {
        let mut listed = 0;
        for container in provider.list().await? {
            if only.is_none() || container.run == only {
                listed += 1;
                output::data(format!("{}\t{}{column}", container.name, container.state));
            }
        }
        output::say(format!("{}{at}; nothing was removed", output::counted(listed, "container")));
    } else {
        print_sweep(&provider.sweep_all_orphans(scope).await?, &at, &column);
    }
    if args.images {
        remove_images(&provider, args.dry_run, &at, &column).await?;
    }
    provider.shutdown().await
}

fn print_sweep(report: &SweepReport, at: &str, column: &str) {
    for name in &report.removed {
        output::data(format!("{name}{column}"));
    }
    output::say(format!(
        "removed {}{at}, kept {}",
        output::counted(report.removed.len(), "container"),
        report.kept.len()
    ));
    for (name, reason) in &report.kept {
        output::say(format!("kept {name}{at}: {reason}"));
    }
    for (name, reason) in &report.failed {
        output::say(format!("warning: {name}{at} could not be removed: {reason}"));
    }
    if !report.failed.is_empty() {
        output::say("hint: restart the Docker daemon, then run `orchestrate gc` again");
    }
}

/// Removes the images that runs pulled, or lists them.
async fn remove_images(
    provider: &DockerProvider,
    dry_run: bool,
    at: &str,
    column: &str,
) -> Result<(), SandboxError> {
    let (mut removed, mut bytes) = (0, 0);
    for image in provider.remove_pulled_images(dry_run).await? {
        let size = format!("{} MiB", image.bytes.0 >> 20);
        if let Some(reason) = image.kept {
            output::say(format!("kept image {}{at} ({size}): {reason}", image.names));
        } else {
            output::data(format!("{}\t{size}{column}", image.names));
            removed += 1;
            bytes += image.bytes.0;
        }
    }
    let what = if dry_run { "would remove" } else { "removed" };
    output::say(format!("{what} {}{at}, {} MiB", output::counted(removed, "image"), bytes >> 20));
    Ok(())
}
