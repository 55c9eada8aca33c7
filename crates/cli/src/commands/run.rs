//! `orchestrate run`: create or open the run folder, wire the parts, follow the coordinator.

mod forecast;

use super::remove_unstarted::Helper;
use crate::args::{ConfigSource, RunArgs};
use crate::config::{self, ConfigError, Sections, Settings};
use crate::exit::STOPPED;
use crate::wiring::{self, Training};
use crate::{live, output};
use anyhow::Context;
use camino::Utf8Path;
use orchestrate_coordinator::{RunEnd, RunError, RunReport, Stop};
use orchestrate_store::{JOURNAL_FILE, NewRun, Store};
use orchestrate_tasks::load;
use orchestrate_types::RunId;
use std::process::ExitCode;

/// The recorded plan inside a run folder.
pub(crate) const PLAN_FILE: &str = "plan.toml";

/// Runs the command.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        return forecast::run(&args.source, args.json).await;
    }
    let Some(run_dir) = &args.run_dir else { anyhow::bail!("name a folder by --run-dir") };
    let folder = wiring::absolute(run_dir)?;
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
    let raw: Sections = config::load(source)?;
    raw.check()?.check_training()?;
    create_from(folder, &raw).await
}

/// As [`create`], from settings that were read already.
pub(crate) async fn create_from(
    folder: &Utf8Path,
    raw: &Sections,
) -> anyhow::Result<(Settings, Store)> {
    let mut raw = raw.with_defaults()?;
    pin_data_sets(&mut raw).await?;
    let settings = raw.check()?;
    let plan = toml::to_string(&raw).context("write the plan")?;
    let new = NewRun { run: RunId::generate(), plan_digest: digest(&plan) };
    // The plan comes first, so that a journal never lacks it; a plan alone is no run yet.
    if !folder.join(JOURNAL_FILE).exists() {
        write_whole(&folder.join(PLAN_FILE), &plan)?;
    }
    Ok((settings, Store::create(folder, &new).await?))
}

/// A data set on a hub may change while a run goes on; the plan names its commit.
async fn pin_data_sets(raw: &mut Sections) -> anyhow::Result<()> {
    for file in [&mut raw.tasks.file, &mut raw.tasks.held_out_file].into_iter().flatten() {
        let named = file.clone();
        *file = tokio::task::spawn_blocking(move || load::pinned(&named)).await??;
    }
    Ok(())
}

/// Opens a run that was stopped, killed or finished; `source` must be empty.
pub(crate) async fn resume(
    folder: &Utf8Path,
    source: &ConfigSource,
) -> anyhow::Result<(Settings, Store)> {
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
        let raw = config::load_plan(&path)?;
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
    let raw: Sections = config::parse_layer(path.as_str(), &text)?;
    Ok((raw.check()?, store))
}

fn digest(plan: &str) -> String {
    blake3::hash(plan.as_bytes()).to_hex().to_string()
}

/// Writes a file that is there as a whole or not at all, and the folders it lies in.
pub(crate) fn write_whole(path: &Utf8Path, text: &str) -> Result<(), RunError> {
    let write = || {
        fs_err::create_dir_all(path.parent().unwrap_or(path))?;
        let temporary = path.with_extension("tmp");
        fs_err::write(&temporary, text)?;
        fs_err::File::open(&temporary)?.sync_all()?;
        fs_err::rename(&temporary, path)
    };
    write().map_err(|source| RunError::File { path: path.to_owned(), source })
}

/// Wires and drives a run to its end, and prints what came of it.
pub(crate) async fn finish(
    settings: &Settings,
    folder: &Utf8Path,
    store: Store,
    training: Training,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let stop = Stop::default();
    let driven = Box::pin(drive(settings, folder, store, training, stop.clone()));
    match live::until_stopped(stop, driven).await? {
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

/// Wires and drives a run to its end, or until `stop` says so.
pub(crate) async fn drive(
    settings: &Settings,
    folder: &Utf8Path,
    store: Store,
    training: Training,
    stop: Stop,
) -> anyhow::Result<RunEnd> {
    let helper = Helper::start(settings, store.reader().run().await?.run, store.epoch());
    let view = live::View::new(settings.run.steps);
    let mut servers = wiring::servers();
    let heard = (view.reporter(), view.image_listener());
    let built = wiring::coordinator(settings, folder, store, training, &mut servers, heard);
    let coordinator = Box::pin(built).await?;
    let driven = async { Ok(coordinator.run(stop).await?) };
    let end = servers.during(Box::pin(driven)).await;
    view.finish();
    servers.shutdown().await;
    if let (Some(helper), Ok(_)) = (helper, &end) {
        helper.dismiss();
    }
    end
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
