//! `orchestrate grade`: judges a recorded test log, or predictions in sandboxes.

mod patches;

use crate::args::GradeArgs;
use crate::config;
use crate::error::{InputError, OutputError, UsageError};
use crate::output;
use anyhow::Context;
use camino::Utf8Path;
use fs_err::File;
use orchestrate_rollout::RewardCompat;
use orchestrate_tasks::grade_log;
use orchestrate_tasks::load::{self, Row};
use orchestrate_tasks::predictions;
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::swe::{self, Outcomes, Report, SweRow};
use serde_json::json;
use std::io::BufReader;
use std::process::ExitCode;

/// Bytes read from a log at once.
const BUFFER: usize = 1 << 18;

/// Runs the command.
pub(crate) async fn run(args: GradeArgs) -> anyhow::Result<ExitCode> {
    let (Some(log), Some(instance)) = (&args.log, &args.instance) else {
        return Box::pin(patches::run(&args)).await;
    };
    match find(&args.tasks, instance)? {
        Row::R2e(row) => r2e(&row, log, &args)?,
        Row::Swe(row) => swe_bench(&row, log, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The row of `id`.
///
/// # Errors
/// If the file has no usable row, or none with this id; the reason if the row was refused.
pub(crate) fn find(file: &Utf8Path, id: &str) -> anyhow::Result<Row> {
    let (mut good, mut bad) = (0_usize, 0_usize);
    for row in load::rows(file)? {
        match row {
            Ok(row) if row.id() == id => return Ok(row),
            Ok(_) => good += 1,
            Err(refused) if refused.id.as_deref() == Some(id) => {
                return Err(refused).with_context(|| format!("{file}: this row cannot be used"));
            }
            Err(_) => bad += 1,
        }
    }
    let (id, file) = (id.to_owned(), file.to_owned());
    anyhow::ensure!(good > 0, InputError::NoUsableRow { file, refused: bad, skipped: 0 });
    anyhow::bail!(UsageError::UnknownRow { id, file, usable: good, refused: bad })
}

fn open(log: &Utf8Path) -> Result<BufReader<File>, InputError> {
    let file = File::open(log)
        .map_err(|source| InputError::Unreadable { file: log.to_owned(), source })?;
    Ok(BufReader::with_capacity(BUFFER, file))
}

fn r2e(row: &R2eRow, log: &Utf8Path, args: &GradeArgs) -> anyhow::Result<()> {
    let compat =
        config::load(&args.source)?.reward.check().map_err(config::ConfigError::Problems)?.compat;
    let task = row.to_task()?;
    let verdict = grade_log(open(log)?, &task.expected)
        .map_err(|source| InputError::Unreadable { file: log.to_owned(), source })?;
    let reward = match compat {
        RewardCompat::Strict => verdict.reward,
        RewardCompat::R2e => verdict.official_reward,
    };
    let resolved = reward > 0.5;
    if args.json {
        return output::json(&json!({
            "instance_id": task.id,
            "resolved": resolved,
            "reward": reward,
            "official_reward": verdict.official_reward,
            "tests_status": verdict.statuses,
            "differing": verdict.differing,
        }));
    }
    output::data(format!("{}: {}", task.id, word(resolved)));
    let agree = (verdict.reward - verdict.official_reward).abs() < 0.5;
    if !agree {
        output::data("the strict rule and R2E-Gym's own disagree (reward.compat)");
    }
    list("not as expected", &verdict.differing);
    Ok(())
}

fn swe_bench(row: &SweRow, log: &Utf8Path, args: &GradeArgs) -> anyhow::Result<()> {
    let harness = args.harness;
    let report = if has_patch(row, args)? {
        swe::grade(row, harness, open(log)?)
            .map_err(|source| InputError::Log { log: log.to_owned(), source })?
    } else {
        Report::without_patch(harness)
    };
    if let Some(path) = &args.report {
        fs_err::write(path, serde_json::to_vec_pretty(&report.file(&row.instance_id)?)?)
            .map_err(|source| OutputError { file: path.clone(), source })?;
    }
    if args.json {
        return output::json(&report);
    }
    output::data(format!("{}: {}", row.instance_id, word(report.resolved)));
    if let Some(why) = &report.not_graded {
        output::data(format!("not graded: {why}"));
    }
    if let Some(status) = &report.tests_status {
        for (name, outcomes) in
            [("FAIL_TO_PASS", &status.fail_to_pass), ("PASS_TO_PASS", &status.pass_to_pass)]
        {
            let Outcomes { success, failure } = outcomes;
            output::data(format!("{name}: {} of {}", success.len(), success.len() + failure.len()));
            list("failed", failure);
        }
    }
    Ok(())
}

/// Whether the predictions, if any are given, have a patch for the instance.
fn has_patch(row: &SweRow, args: &GradeArgs) -> anyhow::Result<bool> {
    let Some(path) = &args.predictions else { return Ok(true) };
    let predictions = predictions::read(path)?;
    let of_instance = predictions.iter().find(|p| p.instance_id == row.instance_id);
    let prediction = of_instance.ok_or_else(|| UsageError::NoPrediction {
        predictions: path.clone(),
        tasks: args.tasks.clone(),
    })?;
    Ok(prediction.model_patch.is_some())
}

fn word(resolved: bool) -> &'static str {
    if resolved { "resolved" } else { "not resolved" }
}

fn list(title: &str, tests: &[String]) {
    for test in tests {
        output::data(format!("  {title}: {test}"));
    }
}
