//! `orchestrate grade`: grades a recorded test log, or predictions in sandboxes.

mod patches;
mod run_report;

use crate::args::GradeArgs;
use crate::config::{self, Settings};
use crate::error::{InputError, OutputError, UsageError};
use crate::output;
use anyhow::Context;
use camino::Utf8Path;
use fs_err::File;
use orchestrate_rollout::RewardCompat;
use orchestrate_tasks::load::{self, Refused, Row};
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::swe::{self, Harness, Outcomes, Report, SweRow};
use orchestrate_tasks::{LINE_BYTES, SummaryRule, grade_log, grade_log_by, printable};
use serde_json::json;
use std::io::{self, BufRead, BufReader, Seek};
use std::process::ExitCode;

/// Size of the read buffer for a log, in bytes.
const BUFFER: usize = 1 << 18;

/// Runs the command.
pub(crate) async fn run(args: GradeArgs) -> anyhow::Result<ExitCode> {
    let settings = config::load(&args.source)?.check()?;
    let harness = chosen_harness(args.harness, &settings)?;
    let (Some(log), Some(instance)) = (&args.log, &args.instance) else {
        return Box::pin(patches::run(&args, &settings, harness)).await;
    };
    if settings.tasks.skip.contains(instance) {
        let id = printable(instance, TEST_CHARS);
        output::say(format!("note: `{id}` is in tasks.skip; its log is graded all the same"));
    }
    match find(load::rows_for(&args.tasks, harness)?, &args.tasks, instance)? {
        Row::R2e(row) => r2e(&row, log, &args, settings.reward.compat)?,
        Row::Swe(row) => swe_bench(&row, log, &args, harness)?,
        Row::Plain(_) => anyhow::bail!(UsageError::GradedExternally { id: instance.clone() }),
        Row::Harbor(row) => anyhow::bail!(UsageError::NotByLog { id: row.id }),
    }
    Ok(ExitCode::SUCCESS)
}

/// The version of SWE-bench's harness that `option` or `reward.harness` names.
///
/// # Errors
/// If both name one, and they differ.
pub(crate) fn chosen_harness(
    option: Option<Harness>,
    settings: &Settings,
) -> Result<Harness, UsageError> {
    let setting = settings.reward.harness;
    match option {
        // A recorded configuration has every key, also those left at their defaults.
        Some(option) if setting != Harness::default() && option != setting => {
            let (option, setting) = (option.version(), setting.version());
            Err(UsageError::TwoHarnesses { option, setting })
        }
        option => Ok(option.unwrap_or(setting)),
    }
}

/// The one of `rows`, those of `file`, whose id is `id`.
///
/// # Errors
/// If the file has no usable row, or none with this id; the reason if the row was refused.
pub(crate) fn find(
    rows: impl Iterator<Item = Result<Row, Refused>>,
    file: &Utf8Path,
    id: &str,
) -> anyhow::Result<Row> {
    let (mut good, mut bad) = (0_usize, 0_usize);
    for row in rows {
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

/// Number of characters of a test name that are printed.
const TEST_CHARS: usize = 400;

/// Maximum size of a log, in bytes. Logs are read several times.
const LOG_BYTES: u64 = 16 << 30;

/// Opens a log, and reports lines that are too long to be read in full.
fn open(log: &Utf8Path) -> Result<BufReader<File>, InputError> {
    let unreadable = |source| InputError::Unreadable { file: log.to_owned(), source };
    let mut file = BufReader::with_capacity(BUFFER, File::open(log).map_err(unreadable)?);
    let about = file.get_ref().metadata().map_err(unreadable)?;
    if !about.is_file() || about.len() > LOG_BYTES {
        return Err(InputError::NotALog { log: log.to_owned(), limit: LOG_BYTES });
    }
    if file.fill_buf().map_err(unreadable)?.starts_with(b"\x1f\x8b") {
        return Err(InputError::CompressedLog { log: log.to_owned() });
    }
    let long = long_lines(&mut file).map_err(unreadable)?;
    if long > 0 {
        output::say(format!(
            "note: {log}: lines longer than {LINE_BYTES} bytes: {long}; of each, only the start, the \
             end and the markers between them are read"
        ));
    }
    file.rewind().map_err(unreadable)?;
    Ok(file)
}

/// Number of lines of more than [`LINE_BYTES`].
fn long_lines(log: &mut impl BufRead) -> io::Result<usize> {
    let (mut long, mut length) = (0, 0);
    loop {
        let part = log.fill_buf()?;
        if part.is_empty() {
            return Ok(long);
        }
        for (n, piece) in part.split(|byte| matches!(byte, b'\n' | b'\r')).enumerate() {
            length = if n == 0 { length } else { 0 };
            long += usize::from(length <= LINE_BYTES && length + piece.len() > LINE_BYTES);
            length += piece.len();
        }
        let read = part.len();
        log.consume(read);
    }
}

fn r2e(row: &R2eRow, log: &Utf8Path, args: &GradeArgs, compat: RewardCompat) -> anyhow::Result<()> {
    for (option, file) in [("--report", &args.report), ("--predictions", &args.predictions)] {
        let id = row.id();
        anyhow::ensure!(file.is_none(), UsageError::NotForR2e { option, id });
    }
    let task = row.to_task()?;
    let rule = match compat {
        RewardCompat::Strict => SummaryRule::Strict,
        RewardCompat::R2e => SummaryRule::R2e,
    };
    let verdict = grade_log_by(rule, open(log)?, &task.expected)
        .map_err(|source| InputError::Unreadable { file: log.to_owned(), source })?;
    let resolved = verdict.reward > 0.5;
    if args.json {
        return output::json(&json!({
            "instance_id": task.id,
            "resolved": resolved,
            "reward": verdict.reward,
            "official_reward": verdict.official_reward,
            "tests_status": verdict.statuses,
            "differing": verdict.differing,
        }));
    }
    output::data(format!("{}: {}", printable(&task.id, TEST_CHARS), outcome(resolved)));
    let other = grade_log(open(log)?, &task.expected)
        .map_err(|source| InputError::Unreadable { file: log.to_owned(), source })?;
    if (other.reward - other.official_reward).abs() > 0.5 {
        output::data("the strict rule and R2E-Gym's own disagree (reward.compat)");
    }
    list("not as expected", &verdict.differing);
    Ok(())
}

fn swe_bench(
    row: &SweRow,
    log: &Utf8Path,
    args: &GradeArgs,
    harness: Harness,
) -> anyhow::Result<()> {
    let report = if has_patch(row, args)? {
        swe::grade(row, harness, open(log)?)
            .map_err(|source| InputError::Log { log: log.to_owned(), source })?
    } else {
        Report::without_patch(harness)
    };
    if let Some(path) = &args.report {
        let real = |path: &Utf8Path| path.canonicalize_utf8().ok();
        let inputs = [Some(&args.tasks), args.log.as_ref(), args.predictions.as_ref()];
        let inputs = inputs.into_iter().flatten().chain(&args.source.files);
        let mut inputs = inputs.filter_map(|input| real(input));
        if real(path).is_some_and(|output| inputs.any(|input| input == output)) {
            return Err(UsageError::OutputIsInput { path: path.clone() }.into());
        }
        fs_err::write(path, serde_json::to_vec_pretty(&report.file(&row.instance_id)?)?)
            .map_err(|source| OutputError { file: path.clone(), source })?;
    }
    if args.json {
        return output::json(&report);
    }
    output::data(format!(
        "{}: {}",
        printable(&row.instance_id, TEST_CHARS),
        outcome(report.resolved)
    ));
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
    let predictions = path.clone();
    match patches::chosen(args)?.as_slice() {
        [] => Err(UsageError::NoPrediction { predictions, tasks: args.tasks.clone() }.into()),
        [prediction] => Ok(prediction.model_patch.as_ref().is_some_and(|patch| !patch.is_empty())),
        several => {
            let models = several.iter().map(|prediction| prediction.model_name_or_path.as_str());
            let models = models.collect::<Vec<_>>().join(", ");
            let id = row.instance_id.clone();
            Err(UsageError::SeveralModels { predictions, id, models }.into())
        }
    }
}

fn outcome(resolved: bool) -> &'static str {
    if resolved { "resolved" } else { "not resolved" }
}

fn list(title: &str, tests: &[String]) {
    for test in tests {
        output::data(format!("  {title}: {}", printable(test, TEST_CHARS)));
    }
}
