//! `orchestrate run`: create or open the run folder, wire the parts, follow the coordinator.

mod forecast;

use super::remove_unstarted::Helper;
use crate::args::RunArgs;
use crate::config::{self, Sections, Settings};
use crate::exit::STOPPED;
use crate::{live, output, run_folder, tables, wiring};
use camino::Utf8Path;
use futures::future::BoxFuture;
use orchestrate_coordinator::{RunEnd, RunError, Stop};
use orchestrate_report::RunReport;
use orchestrate_rollout::Scaffold;
use orchestrate_store::Store;
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        if let Some(run_dir) = &args.run_dir {
            run_folder::check_unused(&wiring::absolute(run_dir)?)?;
        }
        return forecast::run(&args.source, args.json).await;
    }
    let Some(run_dir) = &args.run_dir else { anyhow::bail!("--run-dir is missing") };
    let folder = wiring::absolute(run_dir)?;
    let (settings, store) = if args.resume {
        run_folder::resume(&folder, &args.source).await?
    } else {
        let raw: Sections = config::load(&args.source)?;
        raw.check()?.check_training()?;
        run_folder::create(&folder, &raw).await?
    };
    let stop = Stop::default();
    let driven = Box::pin(drive(&settings, &folder, store, Job::Train, stop.clone()));
    match live::until_stopped(stop, driven).await? {
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

/// The work that is done in a run folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// Train and evaluate, until `run.steps` are done.
    Train,
    /// Evaluate `engine.model` once.
    Evaluate,
}

/// Wires the parts and drives the job to its end, or until `stop` ends it.
pub(crate) async fn drive(
    settings: &Settings,
    folder: &Utf8Path,
    store: Store,
    job: Job,
    stop: Stop,
) -> anyhow::Result<RunEnd> {
    if job == Job::Train {
        settings.check_training()?;
    }
    let run = store.reader().run().await?.run;
    // External episodes have no containers.
    let has_containers = settings.rollout.scaffold != Scaffold::Outside;
    let helper = has_containers.then(|| Helper::start(settings, run, store.epoch())).flatten();
    let view = live::View::new(settings.run.steps);
    let mut servers = wiring::servers();
    let parts = wiring::parts(settings, folder, &store, &mut servers, view.image_listener());
    let parts = Box::pin(parts).await?;
    let work: BoxFuture<'static, Result<RunEnd, RunError>> = match job {
        Job::Train => {
            let trainer = wiring::trainer(settings, folder, &mut servers).await?;
            Box::pin(parts.coordinator(settings, folder, store, trainer, view.reporter()).run(stop))
        }
        Job::Evaluate => {
            let evaluation = parts.evaluation(settings, folder, store, view.reporter())?;
            Box::pin(evaluation.run(stop))
        }
    };
    let end = servers.during(async { Ok(work.await?) }).await;
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
        output::data(tables::final_table(report));
    }
    output::say(format!("report: {folder}/report.html"));
    Ok(())
}
