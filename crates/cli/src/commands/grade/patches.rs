//! Grades predictions in sandboxes and writes the files that SWE-bench's harness writes.

use crate::args::GradeArgs;
use crate::config;
use crate::error::{BrokenMeasurement, OutputError, UsageError};
use crate::grader::Grader;
use crate::progress::Progress;
use crate::{output, tables, task_source};
use camino::Utf8Path;
use futures::stream::{self, StreamExt};
use orchestrate_rollout::{GradeError, GradeLogs, GradingRules, write_log_folder};
use orchestrate_tasks::predictions::{self, Prediction};
use orchestrate_tasks::{Origin, Task, printable};
use orchestrate_types::ModelName;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::process::ExitCode;

/// Number of characters of an id or another name that are printed.
const NAME_CHARS: usize = 120;

/// Result of grading one prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Resolved,
    Unresolved,
    /// The patch is empty, so it was not graded.
    Empty,
    /// The harness writes no report: the patch does not apply, or its log cannot be graded.
    Error,
    /// The sandbox failed, so the patch was not graded.
    Broken,
}

pub(super) async fn run(args: &GradeArgs) -> anyhow::Result<ExitCode> {
    let settings = config::load(&args.source)?.check()?;
    let tasks = task_source::tested_of_file(&args.tasks, &settings.tasks.skip)?;
    let by_id: HashMap<&str, &Task> = tasks.iter().map(|task| (task.id.as_str(), task)).collect();
    let mut work = Vec::new();
    for prediction in chosen(args)? {
        match by_id.get(prediction.instance_id.as_str()) {
            Some(task) => work.push((*task, prediction)),
            None => output::say(format!(
                "note: no usable row for `{}` in {}",
                printable(&prediction.instance_id, NAME_CHARS),
                args.tasks
            )),
        }
    }
    anyhow::ensure!(
        !work.is_empty(),
        UsageError::NoPrediction {
            predictions: args.predictions.clone().unwrap_or_default(),
            tasks: args.tasks.clone()
        }
    );
    let rules = GradingRules { harness: args.harness, ..settings.reward.rules() };
    let grader = Grader::connect(&settings, rules).await?;
    let progress = Progress::new(work.len() as u64);
    let mut outcomes: BTreeMap<&ModelName, BTreeMap<&str, Outcome>> = BTreeMap::new();
    {
        let graded = stream::iter(&work)
            .map(|(task, prediction)| {
                let graded = grade(&grader, args, task, prediction);
                async move { (*task, prediction, graded.await) }
            })
            .buffer_unordered(grader.width());
        let mut graded = Box::pin(graded);
        let mut done = 0;
        while let Some((task, prediction, outcome)) = graded.next().await {
            done += 1;
            let outcome = outcome?;
            let id = printable(&task.id, NAME_CHARS);
            progress.line(&format!("{id}: {outcome:?}").to_lowercase());
            progress.update(done, work.len() as u64, &id);
            let of_model = outcomes.entry(&prediction.model_name_or_path).or_default();
            of_model.insert(&task.id, outcome);
        }
    }
    progress.finish();
    grader.shutdown().await?;
    let mut broken = 0;
    for (model, outcomes) in &outcomes {
        let report = report(&tasks, outcomes);
        let name = format!("{}.{}.json", model.file_name(), args.run_id);
        let file = args.out.join(name);
        fs_err::write(&file, format!("{report:#}"))
            .map_err(|source| OutputError { file, source })?;
        if args.json {
            output::json(&report)?;
        } else {
            table(model, &by_id, outcomes);
        }
        broken += outcomes.values().filter(|&&outcome| outcome == Outcome::Broken).count();
    }
    anyhow::ensure!(broken == 0, BrokenMeasurement::Grading { broken });
    Ok(ExitCode::SUCCESS)
}

/// The selected predictions; of several for the same task and model, the last one.
fn chosen(args: &GradeArgs) -> anyhow::Result<Vec<Prediction>> {
    let Some(path) = &args.predictions else { anyhow::bail!("name --predictions or --log") };
    let mut latest = BTreeMap::new();
    for prediction in predictions::read(path)? {
        let wanted = args.instance.as_ref().is_none_or(|id| prediction.instance_id == *id);
        if wanted {
            let key = (prediction.model_name_or_path.clone(), prediction.instance_id.clone());
            latest.insert(key, prediction);
        }
    }
    Ok(latest.into_values().collect())
}

async fn grade(
    grader: &Grader<'_>,
    args: &GradeArgs,
    task: &Task,
    prediction: &Prediction,
) -> anyhow::Result<Outcome> {
    let patch = prediction.model_patch.as_deref().unwrap_or_default();
    if patch.is_empty() {
        return Ok(Outcome::Empty);
    }
    let model = prediction.model_name_or_path.clone();
    let logs = GradeLogs { root: args.out.clone(), model };
    let folders = [logs.folder(&args.run_id, task), logs.earlier_folder(&args.run_id, task)];
    if let Some(known) = folders.iter().find_map(|folder| known(folder, task, patch)) {
        return Ok(known);
    }
    match grader.grade(task, patch).await {
        Ok(graded) => {
            write_log_folder(&logs, &args.run_id, task, &graded)?;
            Ok(match (&graded.problem, graded.verdict.reward > 0.5) {
                (Some(_), _) => Outcome::Error,
                (None, true) => Outcome::Resolved,
                (None, false) => Outcome::Unresolved,
            })
        }
        Err(GradeError::Patch(_) | GradeError::NotApplied(_) | GradeError::TooLarge { .. }) => {
            Ok(Outcome::Error)
        }
        Err(GradeError::Sandbox(error)) => {
            output::say(format!("{}: {error}", printable(&task.id, NAME_CHARS)));
            Ok(Outcome::Broken)
        }
    }
}

/// The outcome of an earlier grading of the same patch, read from `folder`.
fn known(folder: &Utf8Path, task: &Task, patch: &str) -> Option<Outcome> {
    let graded = fs_err::read_to_string(folder.join("patch.diff")).ok()?;
    let report = fs_err::read(folder.join("report.json")).ok()?;
    let report: Value = serde_json::from_slice(&report).ok()?;
    let resolved = match task.origin {
        Origin::SweBench(_) => report.get(task.id.as_str())?.get("resolved")?.as_bool()?,
        Origin::R2e | Origin::Files | Origin::Outside(_) | Origin::Harbor(_) => {
            report.get("reward")?.as_f64()? > 0.5
        }
    };
    let outcome = if resolved { Outcome::Resolved } else { Outcome::Unresolved };
    (graded == patch).then_some(outcome)
}

/// The harness's report on a whole run. Predictions whose sandbox failed are listed as errors, because
/// the format has no other place for undecided ones.
fn report(tasks: &[Task], outcomes: &BTreeMap<&str, Outcome>) -> Value {
    let ids = |wanted: &[Outcome]| -> Vec<&str> {
        let of = outcomes.iter().filter(|(_, outcome)| wanted.contains(outcome));
        of.map(|(id, _)| *id).collect()
    };
    let completed = ids(&[Outcome::Resolved, Outcome::Unresolved]);
    let (resolved, unresolved) = (ids(&[Outcome::Resolved]), ids(&[Outcome::Unresolved]));
    let (empty, errors) = (ids(&[Outcome::Empty]), ids(&[Outcome::Error, Outcome::Broken]));
    let submitted: Vec<&str> = outcomes.keys().copied().collect();
    let all: BTreeSet<&str> = tasks.iter().map(|task| task.id.as_str()).collect();
    let incomplete: Vec<&&str> = all.iter().filter(|id| !outcomes.contains_key(**id)).collect();
    json!({
        "total_instances": all.len(),
        "submitted_instances": submitted.len(),
        "completed_instances": completed.len(),
        "resolved_instances": resolved.len(),
        "unresolved_instances": unresolved.len(),
        "empty_patch_instances": empty.len(),
        "error_instances": errors.len(),
        "completed_ids": completed,
        "incomplete_ids": incomplete,
        "empty_patch_ids": empty,
        "submitted_ids": submitted,
        "resolved_ids": resolved,
        "unresolved_ids": unresolved,
        "error_ids": errors,
        "schema_version": 2,
    })
}

fn table(model: &str, tasks: &HashMap<&str, &Task>, outcomes: &BTreeMap<&str, Outcome>) {
    let mut repositories: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (id, outcome) in outcomes {
        let family = tasks.get(id).map_or("", |task| task.family.as_str());
        let (solved, all) = repositories.entry(family).or_default();
        *solved += usize::from(*outcome == Outcome::Resolved);
        *all += 1;
    }
    let mut table = tables::table(&["repository", "resolved", "of"]);
    for (name, (solved, all)) in &repositories {
        table.add_row([printable(name, NAME_CHARS), solved.to_string(), all.to_string()]);
    }
    let (solved, all) = repositories.values().fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    table.add_row([
        format!("all ({})", printable(model, NAME_CHARS)),
        solved.to_string(),
        all.to_string(),
    ]);
    output::data(table);
}
