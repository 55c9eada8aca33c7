//! `orchestrate run`: create or open the run folder, wire the parts, follow the coordinator.

mod forecast;

use super::remove_unstarted::Helper;
use crate::args::RunArgs;
use crate::config::{self, Sections};
use crate::error::StoppedAtStart;
use crate::exit::{self, STOPPED};
use crate::run_folder::{self, Before, Opened};
use crate::sinks::RunSinks;
use crate::{live, output, paths, status, tables, wiring};
use camino::Utf8Path;
use futures::future::BoxFuture;
use orchestrate_coordinator::{RunEnd, RunError, Stop, is_finished};
use orchestrate_report::RunReport;
use orchestrate_rollout::Scaffold;
use orchestrate_store::RunKind;
use std::process::ExitCode;
use std::time::Duration;
use tracing::Instrument as _;

/// Runs the command.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        if let Some(run_dir) = &args.run_dir {
            run_folder::check_unused(&paths::absolute(run_dir)?)?;
        }
        return forecast::run(&args.source, args.json).await;
    }
    let Some(run_dir) = &args.run_dir else { anyhow::bail!("--run-dir is missing") };
    let folder = paths::absolute(run_dir)?;
    let before = (!args.resume).then(|| Before::of(&folder));
    let opened = if args.resume {
        let opened = run_folder::resume(&folder, &args.source, RunKind::Training).await?;
        if is_concluded(&opened, &folder).await? {
            opened.store.amend(&opened.changes).await?;
            let report = RunReport::from_journal(opened.store.reader()).await;
            conclude(&report.map_err(RunError::from)?, &folder, args.json)?;
            opened.store.closer().close().await;
            return Ok(ExitCode::SUCCESS);
        }
        opened
    } else {
        let raw: Sections = config::load(&args.source)?;
        raw.check()?.check_training()?;
        run_folder::create(&folder, &raw, RunKind::Training).await?
    };
    let stop = Stop::default();
    let driven = Box::pin(drive(opened, &folder, Job::Train, stop.clone()));
    match undone_if_failed(live::until_stopped(stop, driven).await, before).await? {
        RunEnd::Finished(report) => {
            conclude(&report, &folder, args.json)?;
            Ok(ExitCode::SUCCESS)
        }
        RunEnd::Stopped(report) => {
            conclude(&report, &folder, args.json)?;
            output::say(format!(
                "stopped; resume with: orchestrate run --run-dir {folder} --resume"
            ));
            Ok(ExitCode::from(STOPPED))
        }
    }
}

/// Whether nothing is left to do, not even for the report or a sink.
async fn is_concluded(opened: &Opened, folder: &Utf8Path) -> anyhow::Result<bool> {
    let is_written = folder.join("report.html").exists() && !opened.settings.sinks.has_files();
    Ok(is_written && is_finished(opened.store.reader(), &opened.settings.run).await?)
}

/// Removes what a new run left in its folder if it ended before anything was sampled, so that the corrected
/// command can use the same folder. `before` is absent for a resumed run.
pub(crate) async fn undone_if_failed(
    end: anyhow::Result<RunEnd>,
    before: Option<Before>,
) -> anyhow::Result<RunEnd> {
    // After a full disk, a run is resumed when there is space.
    let may_go = end.as_ref().is_err_and(|error| !exit::is_disk_full(error));
    if let (true, Some(before)) = (may_go, before) {
        match before.restore().await {
            Ok(true) => output::say("nothing was sampled: the run folder is as it was before"),
            Ok(false) => output::say("the run folder is kept; resume with --resume"),
            Err(error) => {
                output::say(format!("warning: the run folder was not cleaned up: {error}"));
            }
        }
    }
    end
}

/// Longest time to wait for readers of the journal when a run has ended.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// The work that is done in a run folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// Train and evaluate, until `run.steps` are done.
    Train,
    /// Evaluate `engine.model` once.
    Evaluate,
}

/// Wires the parts and drives the job to its end, or until `stop` ends it. The journal is closed then.
pub(crate) async fn drive(
    opened: Opened,
    folder: &Utf8Path,
    job: Job,
    stop: Stop,
) -> anyhow::Result<RunEnd> {
    let closer = opened.store.closer();
    let end = Box::pin(drive_open(opened, folder, job, stop)).await;
    // A sink that still reads after its time keeps the journal open, which costs no more than a second file.
    let _ = tokio::time::timeout(CLOSE_TIME, closer.close()).await;
    end
}

async fn drive_open(
    opened: Opened,
    folder: &Utf8Path,
    job: Job,
    stop: Stop,
) -> anyhow::Result<RunEnd> {
    let Opened { settings, store, changes } = opened;
    let settings = &settings;
    if job == Job::Train {
        settings.check_training()?;
    }
    let run = store.reader().run().await?.run;
    // External episodes have no containers.
    let has_containers = settings.rollout.scaffold != Scaffold::External;
    let helper = has_containers.then(|| Helper::start(settings, run, store.epoch())).flatten();
    let view = live::View::new(settings.run.steps);
    let counts = view.clone();
    let _status = status::Writer::start(folder, move || counts.counts());
    let mut servers = wiring::servers();
    let parts = wiring::parts(settings, folder, &store, &mut servers, view.image_listener())
        .instrument(tracing::info_span!("start"));
    let parts = unless_stopped(&stop, Box::pin(parts)).await?;
    let reporter = view.reporter();
    let sinks = RunSinks::start(&settings.sinks, folder, &store, &mut servers, &reporter).await?;
    let (reporter, now) = (sinks.reporter(reporter), stop.now.clone());
    let trainer = match job {
        Job::Train => Some(wiring::trainer(settings, folder, &mut servers).await?),
        Job::Evaluate => None,
    };
    // Now that nothing of the start can fail.
    store.amend(&changes).await?;
    let work: BoxFuture<'static, Result<RunEnd, RunError>> = if let Some(trainer) = trainer {
        Box::pin(parts.coordinator(settings, folder, store, trainer, reporter).run(stop))
    } else {
        let evaluation = parts.evaluation(settings, folder, store, reporter)?;
        Box::pin(evaluation.run(stop))
    };
    let end = servers.during(async { Ok(work.await?) }).await;
    tokio::select! {
        biased;
        () = now.cancelled() => {}
        () = sinks.finish() => {}
    }
    view.finish();
    servers.shutdown().await;
    if let (Some(helper), Ok(_)) = (helper, &end) {
        helper.dismiss();
    }
    end
}

/// Does `work`, which waits for servers and images, unless a stop is requested first.
async fn unless_stopped<T>(
    stop: &Stop,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::select! {
        biased;
        () = stop.drain.cancelled() => Err(StoppedAtStart.into()),
        done = work => done,
    }
}

fn conclude(report: &RunReport, folder: &Utf8Path, json: bool) -> anyhow::Result<()> {
    if json {
        output::json(report)?;
    } else {
        output::data(tables::final_table(report, true));
    }
    output::say(format!("report: {folder}/report.html"));
    Ok(())
}
