//! Grades predictions in sandboxes and writes the files that SWE-bench's harness writes.

use super::run_report::{Graded, Outcome, run_report};
use crate::args::GradeArgs;
use crate::config::Settings;
use crate::error::{BrokenMeasurement, OutputError, UsageError};
use crate::grader::Grader;
use crate::progress::Progress;
use crate::{output, tables, task_source, wiring};
use camino::Utf8Path;
use futures::stream::{self, StreamExt};
use orchestrate_rollout::{
    GradeError, GradeLogs, GradingInputs, GradingRules, KnownVerdict, READABLE, known_verdict,
    record_verdict, remove_verdict, replace_file, write_log_folder,
};
use orchestrate_sandbox::{SandboxError, SandboxErrorKind};
use orchestrate_tasks::predictions::{self, Prediction};
use orchestrate_tasks::swe::Harness;
use orchestrate_tasks::{Origin, Task, printable};
use orchestrate_types::ModelName;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of characters of an id or another name that are printed.
const NAME_CHARS: usize = 120;

pub(super) async fn run(
    args: &GradeArgs,
    settings: &Settings,
    harness: Harness,
) -> anyhow::Result<ExitCode> {
    let tasks = task_source::tested_of_file(&args.tasks, &settings.tasks.skip, harness)?;
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
    let rules = GradingRules { harness, ..settings.reward.rules() };
    let grader = Grader::connect(settings, rules).await?;
    let grading = Grading { args, settings, harness, grader, kept: AtomicUsize::new(0) };
    let progress = Progress::new(work.len() as u64);
    let mut results: BTreeMap<&ModelName, BTreeMap<&str, Graded>> = BTreeMap::new();
    {
        let graded = stream::iter(&work)
            .map(|(task, prediction)| {
                let graded = grading.grade(task, prediction);
                async move { (*task, prediction, graded.await) }
            })
            .buffer_unordered(grading.grader.width());
        let mut graded = Box::pin(graded);
        let mut done = 0;
        while let Some((task, prediction, result)) = graded.next().await {
            done += 1;
            let result = result?;
            let id = printable(&task.id, NAME_CHARS);
            progress.line(&format!("{id}: {}", result.outcome.name()));
            progress.update(done, work.len() as u64, &id);
            let of_model = results.entry(&prediction.model_name_or_path).or_default();
            of_model.insert(&task.id, result);
        }
    }
    progress.finish();
    grading.finish().await?;
    let mut broken = 0;
    for (model, results) in &results {
        let report = run_report(&tasks, results, harness);
        let name = format!("{}.{}.json", model.file_name(), args.run_id);
        let file = args.out.join(name);
        replace_file(&file, format!("{report:#}").as_bytes(), READABLE)
            .map_err(|source| OutputError { file, source })?;
        if args.json {
            output::json(&report)?;
        } else {
            table(model, &by_id, results);
        }
        say_failures(results);
        broken += results.values().filter(|graded| graded.outcome == Outcome::Broken).count();
    }
    anyhow::ensure!(broken == 0, BrokenMeasurement::Grading { broken });
    Ok(ExitCode::SUCCESS)
}

/// Says how many unresolved instances show a failure of the environment, which the numbers do not.
fn say_failures(results: &BTreeMap<&str, Graded>) {
    let count = |certain: bool| {
        let shown = results.values().filter(|graded| graded.outcome != Outcome::Broken);
        shown.filter(|graded| graded.infra.is_some_and(|found| found.certain == certain)).count()
    };
    let (certain, ambiguous) = (count(true), count(false));
    if certain + ambiguous > 0 {
        output::say(format!(
            "note: of the instances that are not resolved, {certain} show a failure of the \
             environment in their logs, and {ambiguous} what may be one"
        ));
    }
}

/// The selected predictions; of several for the same task and model, the last one.
pub(super) fn chosen(args: &GradeArgs) -> anyhow::Result<Vec<Prediction>> {
    let Some(path) = &args.predictions else { anyhow::bail!("name --predictions or --log") };
    let (mut latest, mut replaced) = (BTreeMap::new(), 0_usize);
    for prediction in predictions::read(path)? {
        let wanted = args.instance.as_ref().is_none_or(|id| prediction.instance_id == *id);
        if wanted {
            let key = (prediction.model_name_or_path.clone(), prediction.instance_id.clone());
            replaced += usize::from(latest.insert(key, prediction).is_some());
        }
    }
    if replaced > 0 {
        output::say(format!(
            "note: {path}: {replaced} predictions are followed by another one of the same model for \
             the same task, which counts instead"
        ));
    }
    Ok(latest.into_values().collect())
}

/// The outcome that `report`, the content of a task's `report.json`, states.
fn outcome_of(task: &Task, report: &Value) -> Option<Outcome> {
    let resolved = match task.origin {
        Origin::SweBench(_) => report.get(task.id.as_str())?.get("resolved")?.as_bool()?,
        Origin::R2e | Origin::Files | Origin::External(_) | Origin::Harbor(_) => {
            report.get("reward")?.as_f64()? > 0.5
        }
    };
    Some(if resolved { Outcome::Resolved } else { Outcome::Unresolved })
}

/// Why a verdict is not used, if the check of its image failed.
fn image_reason(error: &SandboxError) -> String {
    match &error.kind {
        SandboxErrorKind::ImageChanged { image, recorded, found } => {
            format!("image `{image}` was {recorded} then, and is {found} now")
        }
        _ => error.to_string(),
    }
}

/// The predictions to grade, as grading makes them.
struct Grading<'a> {
    args: &'a GradeArgs,
    settings: &'a Settings,
    harness: Harness,
    grader: Grader<'a>,
    /// Number of verdicts that were used again.
    kept: AtomicUsize,
}

impl Grading<'_> {
    /// Grades one prediction, unless its folder has a verdict with the same inputs.
    async fn grade(&self, task: &Task, prediction: &Prediction) -> anyhow::Result<Graded> {
        let patch = prediction.model_patch.as_deref().unwrap_or_default();
        if patch.is_empty() {
            return Ok(Graded::without_logs(Outcome::Empty));
        }
        let model = prediction.model_name_or_path.clone();
        let logs = GradeLogs { root: self.args.out.clone(), model };
        let folder = logs.folder(&self.args.run_id, task);
        let (compat, limits) = (self.settings.reward.compat, wiring::limits(self.settings));
        let inputs = GradingInputs::new(task, patch, self.harness, compat, limits)?;
        if let Some(known) = self.known(&folder, task, &inputs).await? {
            self.kept.fetch_add(1, Ordering::Relaxed);
            return Ok(known);
        }
        let unwritten = |source| OutputError { file: folder.clone(), source };
        remove_verdict(&folder).map_err(unwritten)?;
        match self.grader.grade(task, patch).await {
            Ok(graded) => {
                write_log_folder(&logs, &self.args.run_id, task, &graded).map_err(unwritten)?;
                let image = self.grader.image(task).await?;
                record_verdict(&folder, &inputs, image).map_err(unwritten)?;
                let outcome = match (&graded.problem, graded.verdict.reward > 0.5) {
                    (Some(_), _) => Outcome::Error,
                    (None, true) => Outcome::Resolved,
                    (None, false) => Outcome::Unresolved,
                };
                Ok(Graded::in_folder(outcome, &folder).map_err(unwritten)?)
            }
            Err(GradeError::Patch(_) | GradeError::NotApplied(_) | GradeError::TooLarge { .. }) => {
                Ok(Graded::without_logs(Outcome::Error))
            }
            Err(error @ (GradeError::Sandbox(_) | GradeError::NoReward(_))) => {
                output::say(format!("{}: {error}", printable(&task.id, NAME_CHARS)));
                Ok(Graded::without_logs(Outcome::Broken))
            }
        }
    }

    /// Removes all sandboxes, and says how many verdicts were used again.
    async fn finish(self) -> anyhow::Result<()> {
        let kept = self.kept.into_inner();
        if kept > 0 {
            output::say(format!(
                "note: {kept} verdicts below {} were made of the same inputs and are used again",
                self.args.out
            ));
        }
        self.grader.shutdown().await
    }

    /// The verdict in `folder`, if it was made of the same inputs. If it was made of others, says
    /// why it is not used.
    async fn known(
        &self,
        folder: &Utf8Path,
        task: &Task,
        inputs: &GradingInputs,
    ) -> anyhow::Result<Option<Graded>> {
        let reason = match known_verdict(folder, inputs) {
            KnownVerdict::None => return Ok(None),
            KnownVerdict::Other(reason) => reason,
            KnownVerdict::Same { image: None, .. } => "its image is not recorded".to_owned(),
            KnownVerdict::Same { report, image: Some(image) } => {
                match self.grader.check_image(task, image).await {
                    Err(error) => image_reason(&error),
                    Ok(()) => match outcome_of(task, &report) {
                        Some(outcome) => return Ok(Some(Graded::in_folder(outcome, folder)?)),
                        None => "its report.json names no outcome".to_owned(),
                    },
                }
            }
        };
        output::say(format!(
            "{}: graded again; the verdict in {folder} is not used: {reason}",
            printable(&task.id, NAME_CHARS)
        ));
        Ok(None)
    }
}

fn table(model: &str, tasks: &HashMap<&str, &Task>, results: &BTreeMap<&str, Graded>) {
    let mut repositories: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (id, graded) in results {
        let family = tasks.get(id).map_or("", |task| task.family.as_str());
        let (solved, all) = repositories.entry(family).or_default();
        *solved += usize::from(graded.outcome == Outcome::Resolved);
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
