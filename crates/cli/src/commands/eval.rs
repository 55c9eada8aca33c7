//! `orchestrate eval`: evaluates one checkpoint, without training.

use super::run::{Job, drive, undone_if_failed};
use crate::args::EvalArgs;
use crate::config::{self, ConfigError, Sections, Settings};
use crate::error::BrokenMeasurement;
use crate::exit::STOPPED;
use crate::run_folder::{self, Before, Opened};
use crate::{live, output, paths, tables, task_source};
use camino::Utf8Path;
use comfy_table::Table;
use orchestrate_coordinator::{RunEnd, Stop};
use orchestrate_engine::EngineKind;
use orchestrate_metrics::is_solved;
use orchestrate_report::{EvalPoint, RunReport};
use orchestrate_store::{Reader, RunKind};
use orchestrate_types::{ConfigProblem, Outcome};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;

/// Largest share of broken episodes at which a headline number is given.
const MOST_BROKEN: f64 = 0.01;

/// Runs the command, which was given as `name`.
pub(crate) async fn run(args: EvalArgs, name: &str) -> anyhow::Result<ExitCode> {
    let folder = paths::absolute(&args.run_dir)?;
    let before = (!args.resume).then(|| Before::of(&folder));
    let opened = if args.resume {
        Box::pin(run_folder::resume(&folder, &args.source, RunKind::Evaluation)).await?
    } else {
        Box::pin(create(&args, &folder)).await?
    };
    let settings = opened.settings.clone();
    let stop = Stop::default();
    let driven = Box::pin(drive(opened, &folder, Job::Evaluate, stop.clone()));
    let report = match undone_if_failed(live::until_stopped(stop, driven).await, before).await? {
        RunEnd::Finished(report) => report,
        RunEnd::Stopped(_) => {
            output::say(format!(
                "stopped; resume with: orchestrate {name} --run-dir {folder} --resume"
            ));
            return Ok(ExitCode::from(STOPPED));
        }
    };
    let sums = sums(&settings, &folder).await?;
    if args.json {
        output::json(&Printed { report: &report, repositories: &sums })?;
    } else {
        output::data(repository_table(&sums));
    }
    let (broken, episodes) =
        sums.values().fold((0, 0), |(broken, all), sum| (broken + sum.broken, all + sum.episodes));
    output::say(format!("report: {folder}/report.html"));
    anyhow::ensure!(
        args.allow_broken || broken as f64 <= MOST_BROKEN * episodes as f64,
        BrokenMeasurement::Evaluation { broken, episodes, folder }
    );
    match &report.baseline {
        Some(point) if !args.json => output::data(result_table(point)),
        Some(_) => {}
        None => output::say("note: no episode has a trusted outcome, so there is no Pass@1"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Records the plan of a new evaluation.
async fn create(args: &EvalArgs, folder: &Utf8Path) -> anyhow::Result<Opened> {
    let mut raw: Sections = config::load(&args.source)?;
    if let Some(checkpoint) = &args.checkpoint {
        if raw.check()?.engine.kind == EngineKind::Openai {
            let error = "a chat server has its own weights; remove --checkpoint".to_owned();
            anyhow::bail!(ConfigError::Layer { name: "--checkpoint".into(), error });
        }
        raw.engine.model = Some(paths::absolute(checkpoint)?.into_string());
    }
    if raw.tasks.file.is_some() && raw.tasks.held_out_file.is_none() {
        let remedy = "name rows to evaluate on";
        let problem = ConfigProblem::missing("tasks.held_out_file", remedy);
        anyhow::bail!(ConfigError::Problems(vec![problem]));
    }
    run_folder::create(folder, &raw, RunKind::Evaluation).await
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    report: &'a RunReport,
    repositories: &'a BTreeMap<String, Sum>,
}

/// Results of one repository or family.
#[derive(Debug, Default, Serialize)]
struct Sum {
    tasks: usize,
    episodes: usize,
    solved: usize,
    broken: usize,
}

/// Sums by repository (of generated tasks: family), over the newest evaluation.
async fn sums(settings: &Settings, folder: &Utf8Path) -> anyhow::Result<BTreeMap<String, Sum>> {
    let tasks = task_source::task_set(settings)?;
    let held_out = tasks.held_out.iter().chain(&tasks.held_out_families);
    let family: HashMap<&str, &str> =
        held_out.map(|task| (task.id.as_str(), task.family.as_str())).collect();
    let reader = Reader::open(folder).await?;
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    let round = reader.evals().await?.last().map_or(0, |eval| eval.round);
    for group in reader.groups_of_eval(round).await? {
        let name = family.get(group.task_id.as_str()).copied().unwrap_or("unknown");
        let sum = sums.entry(name.to_owned()).or_default();
        let (mut trusted, mut solved) = (0, 0);
        for attempt in reader.sealed_of_group(group.id).await? {
            if let Some(Outcome::Scored { reward } | Outcome::Truncated { reward, .. }) =
                attempt.outcome
            {
                trusted += 1;
                solved += usize::from(is_solved(reward));
            }
        }
        sum.tasks += 1;
        sum.episodes += usize::from(group.size);
        sum.solved += solved;
        sum.broken += usize::from(group.size) - trusted;
    }
    Ok(sums)
}

fn repository_table(sums: &BTreeMap<String, Sum>) -> Table {
    let mut table = tables::table(&["repository", "tasks", "solved", "of episodes", "broken"]);
    for (name, sum) in sums {
        let counts = [sum.tasks, sum.solved, sum.episodes, sum.broken].map(|n| n.to_string());
        table.add_row([&[tables::cell(name)][..], &counts].concat());
    }
    table
}

/// The headline numbers, with standard errors.
fn result_table(point: &EvalPoint) -> Table {
    let mut table = tables::table(&["result", ""]);
    let pass = format!(
        "{:.4} ± {:.4} ({})",
        point.pass_at_1,
        point.pass_at_1_se,
        output::counted(point.tasks, "held-out task")
    );
    table.add_row(["Pass@1".to_owned(), pass]);
    if let Some(pass) = point.pass_at_k.filter(|_| point.k > 1) {
        table.add_row([format!("Pass@{}", point.k), format!("{pass:.4}")]);
    }
    if let Some(pass) = point.held_out_families_pass_at_1 {
        table.add_row(["Pass@1 on unseen families".to_owned(), format!("{pass:.4}")]);
    }
    table
}
