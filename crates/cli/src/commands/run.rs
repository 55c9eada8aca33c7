//! `orchestrate run`: create or open the run folder, wire the parts, follow the coordinator.

use crate::args::{ConfigSource, RunArgs};
use crate::config::{self, ConfigError, RawConfig, Settings};
use crate::exit::STOPPED;
use crate::wiring::{self, Training};
use crate::{live, output};
use anyhow::Context;
use camino::Utf8Path;
use orchestrate_coordinator::{RunEnd, RunError, RunReport, Stop};
use orchestrate_store::{JOURNAL_FILE, NewRun, Store};
use orchestrate_types::RunId;
use std::process::ExitCode;

/// The recorded plan inside a run folder.
const PLAN_FILE: &str = "plan.toml";

/// Runs the command.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let folder = wiring::absolute(&args.run_dir)?;
    let (settings, store) = if args.resume {
        resume(&folder, &args.source).await?
    } else {
        create(&folder, &args.source).await?
    };
    finish(&settings, &folder, store, Training::Trainer, args.json).await
}

/// Records the plan and creates the journal of a new run.
pub(crate) async fn create(
    folder: &Utf8Path,
    source: &ConfigSource,
) -> anyhow::Result<(Settings, Store)> {
    let raw: RawConfig = config::load(source)?;
    create_from(folder, &raw).await
}

/// As [`create`], from settings that were read already.
pub(crate) async fn create_from(
    folder: &Utf8Path,
    raw: &RawConfig,
) -> anyhow::Result<(Settings, Store)> {
    let raw = raw.with_defaults()?;
    let settings = raw.check()?;
    let plan = toml::to_string(&raw).context("write the plan")?;
    let new = NewRun { run: RunId::generate(), plan_digest: digest(&plan) };
    // The plan comes first, so that a journal never lacks it; a plan alone is no run yet.
    if !folder.join(JOURNAL_FILE).exists() {
        let path = folder.join(PLAN_FILE);
        let written = write_whole(folder, &path, &plan);
        written.map_err(|source| RunError::File { path, source })?;
    }
    Ok((settings, Store::create(folder, &new).await?))
}

/// Opens a run that was stopped, killed or finished.
async fn resume(folder: &Utf8Path, source: &ConfigSource) -> anyhow::Result<(Settings, Store)> {
    anyhow::ensure!(
        source.files.is_empty() && source.sets.is_empty(),
        ConfigError::Layer {
            name: "--resume".into(),
            error: format!(
                "a resumed run keeps the plan in {folder}/{PLAN_FILE}; drop --config and --set"
            ),
        }
    );
    let path = folder.join(PLAN_FILE);
    if path.exists() && !folder.join(JOURNAL_FILE).exists() {
        // Killed between plan and journal: nothing had begun.
        let raw: RawConfig = config::load(&ConfigSource { files: vec![path], sets: vec![] })?;
        return create_from(folder, &raw).await;
    }
    let store = Store::open(folder).await?;
    let text = fs_err::read_to_string(&path)
        .map_err(|error| ConfigError::Unreadable { file: path.clone(), error })?;
    let recorded = store.reader().run().await?.plan_digest;
    anyhow::ensure!(
        digest(&text) == recorded,
        ConfigError::Layer {
            name: path.to_string(),
            error: "was changed after the run began; restore it, or begin a new run".into(),
        }
    );
    let raw: RawConfig = config::parse_layer(path.as_str(), &text)?;
    Ok((raw.check()?, store))
}

fn digest(plan: &str) -> String {
    blake3::hash(plan.as_bytes()).to_hex().to_string()
}

fn write_whole(folder: &Utf8Path, path: &Utf8Path, text: &str) -> std::io::Result<()> {
    fs_err::create_dir_all(folder)?;
    let temporary = path.with_extension("tmp");
    fs_err::write(&temporary, text)?;
    fs_err::File::open(&temporary)?.sync_all()?;
    fs_err::rename(&temporary, path)
}

/// Wires and drives a run to its end, and prints what came of it.
pub(crate) async fn finish(
    settings: &Settings,
    folder: &Utf8Path,
    store: Store,
    training: Training,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let view = live::View::new(settings.run.steps);
    let mut servers = wiring::servers();
    let reporter = view.reporter();
    let built = wiring::coordinator(settings, folder, store, training, &mut servers, reporter);
    let coordinator = Box::pin(built).await?;
    let stop = Stop::default();
    let signals = live::watch_signals(stop.clone());
    let driven = async { Ok(coordinator.run(stop).await?) };
    let end = tokio::select! {
        biased;
        end = servers.during(Box::pin(driven)) => end,
        () = signals => anyhow::bail!("the signal handler ended"),
    };
    view.finish();
    servers.shutdown().await;
    match end? {
        RunEnd::Finished(report) => {
            conclude(&report, folder, json)?;
            Ok(ExitCode::SUCCESS)
        }
        RunEnd::Stopped(report) => {
            conclude(&report, folder, json)?;
            output::say(format!(
                "stopped; go on with: orchestrate run --run-dir {folder} --resume"
            ));
            Ok(ExitCode::from(STOPPED))
        }
    }
}

fn conclude(report: &RunReport, folder: &Utf8Path, json: bool) -> anyhow::Result<()> {
    if json {
        output::json(report)?;
    } else {
        output::data(crate::tables::final_table(report));
    }
    output::say(format!("report: {folder}/report.html"));
    Ok(())
}
