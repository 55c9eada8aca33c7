//! `orchestrate tasks make`: makes repair tasks from a repository and verifies each in sandboxes.

mod journal;

use super::NAME_CHARS;
use super::verify::{Finding, WHY_CHARS, check};
use crate::args::MakeArgs;
use crate::config;
use crate::error::{InputError, OutputError, UsageError};
use crate::grader::Grader;
use crate::output;
use crate::progress::Progress;
use anyhow::{Context, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use futures::stream::{self, StreamExt};
use journal::{Journal, Outcome};
use orchestrate_rollout::GradedChange;
use orchestrate_tasks::r2e::{R2eRow, write_rows};
use orchestrate_tasks::repair::{Mutant, Rejection, Repository, TaskGenerator, is_held_out};
use orchestrate_tasks::verify::Health;
use orchestrate_tasks::{printable, printable_lines};
use serde_json::json;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::process::ExitCode;

/// Number of log lines that are printed if the tests do not run.
const LOG_LINES: usize = 15;
/// Maximum number of left-out tests that are named.
const NAMED: usize = 10;

/// Reasons why a fault is rejected. Journals and JSON output contain them, so they never change;
/// [`describe`] gives the text that is printed.
const DUPLICATE_LINE: &str = "on a line of another task";
const NOT_VERIFIED: &str = "not proved";
const NO_SUMMARY: &str = "without an end";
const UNDETECTED: &str = "seen by no test";
const TOO_MANY_FAILURES: &str = "seen by most tests";
const UNREADABLE_FAILURES: &str = "unreadable failure report";

/// Runs the command.
pub(super) async fn make(args: MakeArgs) -> anyhow::Result<ExitCode> {
    ensure!((0.0..1.0).contains(&args.held_out), UsageError::HeldOutShare { share: args.held_out });
    let held_out = (args.held_out > 0.0).then(|| sibling(&args.out, "held_out"));
    for path in [Some(&args.out), held_out.as_ref()].into_iter().flatten() {
        ensure!(!path.exists(), UsageError::OutputExists { path: path.clone() });
    }
    let mut settings = config::load(&args.source)?.check()?;
    let jobs = match args.jobs {
        Some(jobs) => jobs.into(),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    // The sandbox settings require at least 2.
    settings.sandbox.max_containers = jobs.max(2);
    let repository = Repository::read(&args.repo)?;
    for path in &args.tests {
        let path = path.trim_end_matches('/');
        let inside = |file: &str| file == path || file.starts_with(&format!("{path}/"));
        ensure!(
            repository.files.iter().any(|file| inside(&file.path)),
            UsageError::NoTestFile { path: path.to_owned(), repo: args.repo.clone() }
        );
    }
    let mut journal = Journal::open(&sibling(&args.out, "partial"), &args, &settings, &repository)?;
    let generator = TaskGenerator::new(repository, args.image.clone(), args.tests.clone());
    let grader = Grader::connect(&settings, settings.reward.rules()).await?;
    let maker = Maker { args: &args, grader: &grader, jobs };
    let made = Box::pin(maker.make(generator, &mut journal)).await;
    grader.shutdown().await?;
    finish(&args, held_out.as_deref(), journal, made?)
}

/// Writes the rows and prints a summary, including why faults were rejected.
fn finish(
    args: &MakeArgs,
    held_out: Option<&Utf8Path>,
    journal: Journal,
    made: Made,
) -> anyhow::Result<ExitCode> {
    let total = made.rows.len();
    let rejected: BTreeMap<String, usize> =
        made.rejected.iter().map(|(reason, n)| (describe(reason).to_owned(), *n)).collect();
    if total == 0 {
        let rejected = listed(&rejected);
        let why = format!("none of {} faults became a task: {rejected}", made.tried);
        bail!(unusable(args, why));
    }
    let mut families: BTreeMap<String, usize> = BTreeMap::new();
    let (mut train, mut held) = (Vec::new(), Vec::new());
    for (is_held, row) in made.rows {
        let family = row.repair.as_ref().map_or("", |repair| repair.family.as_str());
        *families.entry(family.to_owned()).or_default() += 1;
        if is_held { held.push(row) } else { train.push(row) }
    }
    write(&args.out, &train)?;
    if let Some(path) = held_out {
        write(path, &held)?;
    }
    journal.remove()?;
    let wanted = args.count as usize;
    if total < wanted {
        output::say(format!(
            "note: made {total} of {}; all possible faults were tried",
            output::counted(wanted, "task")
        ));
    }
    if args.json {
        output::json(&json!({
            "file": args.out, "train": train.len(),
            "held_out_file": held_out, "held_out": held.len(),
            "families": families, "tried": made.tried, "rejected": made.rejected,
            "flaky": made.flaky, "tests": made.tests, "tests_left_out": made.left_out,
        }))?;
    } else {
        output::data(format!(
            "{}: {}{}, each verified twice (gold patch = 1.0, no patch = 0.0) on {}",
            args.out,
            output::counted(train.len(), "task"),
            held_out.map(|path| format!(", {path}: {}", held.len())).unwrap_or_default(),
            output::counted(made.tests, "test")
        ));
        output::data(format!("faults: {}", listed(&families)));
        output::data(format!(
            "{} tried; rejected: {}",
            output::counted(made.tried, "fault"),
            listed(&rejected)
        ));
        for (id, why) in &made.flaky {
            output::data(format!("  dropped: {id}: {why}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The printed text of a reason for rejecting faults.
fn describe(reason: &str) -> &str {
    match reason {
        DUPLICATE_LINE => "duplicate line",
        NOT_VERIFIED => "not verified",
        NO_SUMMARY => "no test summary",
        UNDETECTED => "detected by no test",
        TOO_MANY_FAILURES => "detected by most tests",
        other => other,
    }
}

fn listed(counts: &BTreeMap<String, usize>) -> String {
    let parts: Vec<String> = counts.iter().map(|(name, n)| format!("{n} {name}")).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

/// `out.WORD.jsonl` for `out.jsonl`.
fn sibling(out: &Utf8Path, word: &str) -> Utf8PathBuf {
    match (out.file_stem(), out.extension()) {
        (Some(stem), Some(extension)) => out.with_file_name(format!("{stem}.{word}.{extension}")),
        (_, _) => Utf8PathBuf::from(format!("{out}.{word}")),
    }
}

/// Tasks made from a repository, and what was left out.
#[derive(Debug, Default)]
struct Made {
    /// Rows, each with whether it is held out.
    rows: Vec<(bool, R2eRow)>,
    /// Number of faults that were tried.
    tried: usize,
    /// Number of rejected faults by reason.
    rejected: BTreeMap<String, usize>,
    /// Problems of each task that could not be verified, by id.
    flaky: BTreeMap<String, String>,
    /// Number of tests that grade every task.
    tests: usize,
    /// Tests that are not run, because they do not pass reliably.
    left_out: Vec<String>,
}

struct Maker<'a> {
    args: &'a MakeArgs,
    grader: &'a Grader<'a>,
    jobs: usize,
}

impl Maker<'_> {
    async fn make(
        &self,
        mut generator: TaskGenerator,
        journal: &mut Journal,
    ) -> anyhow::Result<Made> {
        for path in &generator.repository().left_out {
            let path = printable(path, NAME_CHARS);
            output::say(format!("note: skipped {path}, which is not a UTF-8 text file"));
        }
        let left_out = self.record_baseline(&mut generator).await?;
        let order = generator.mutants(self.args.seed);
        if order.is_empty() {
            bail!(unusable(self.args, "no possible fault found in its functions".to_owned()));
        }
        let tests = generator.expected().len();
        let faults = output::counted(order.len(), "possible fault");
        output::say(format!("passing: {}; {faults}", output::counted(tests, "test")));
        let wanted = u64::from(self.args.count);
        let progress = Progress::new(wanted);
        let mut made = Made { tests, left_out, ..Made::default() };
        let mut lines = HashSet::new();
        let known = journal.known();
        let mut outcomes = Box::pin(
            stream::iter(&order)
                .enumerate()
                .map(|(n, (path, mutant))| {
                    let known = known.get(&n).cloned();
                    let generator = &generator;
                    async move {
                        match known {
                            Some(outcome) => Ok(outcome),
                            None => self.outcome(generator, path, mutant).await,
                        }
                    }
                })
                // In order, so that the tasks depend only on the seed, not on the number of jobs.
                .buffered(self.jobs)
                .zip(stream::iter(&order)),
        );
        while let Some((outcome, (path, mutant))) = outcomes.next().await {
            let outcome = outcome.context(
                "a sandbox failed before a fault was tested; run the same command again to resume",
            )?;
            journal.record(made.tried, &outcome)?;
            made.tried += 1;
            match outcome {
                Outcome::Row(_) if !lines.insert((*path, mutant.line)) => {
                    *made.rejected.entry(DUPLICATE_LINE.to_owned()).or_default() += 1;
                }
                Outcome::Row(row) => {
                    let held =
                        is_held_out(self.args.seed, path, &mutant.function, self.args.held_out);
                    made.rows.push((held, *row));
                }
                Outcome::Rejected(why) => *made.rejected.entry(why).or_default() += 1,
                Outcome::Unverified { id, why } => {
                    let (name, reason) = (printable(&id, NAME_CHARS), printable(&why, WHY_CHARS));
                    progress.line(&format!("{name}: dropped: {reason}"));
                    *made.rejected.entry(NOT_VERIFIED.to_owned()).or_default() += 1;
                    made.flaky.insert(id, why);
                }
            }
            let done = made.rows.len() as u64;
            progress.update(done, wanted, &format!("{} tried", made.tried));
            if done == wanted {
                break;
            }
        }
        drop(outcomes);
        progress.finish();
        Ok(made)
    }

    /// Runs the tests of the unmodified repository: twice to find those that pass reliably, and
    /// once more with only these. Returns the tests that are left out.
    async fn record_baseline(&self, generator: &mut TaskGenerator) -> anyhow::Result<Vec<String>> {
        let baseline = generator.baseline_task();
        let first = self.grader.grade(&baseline, "").await?;
        let second = self.grader.grade(&baseline, "").await?;
        let elapsed = first.test_time.max(second.test_time);
        let image = &self.args.image;
        let left_out = match generator.record_baseline([&first.log, &second.log], elapsed) {
            Ok(left_out) => left_out,
            Err(Rejection::NoSummary) => {
                let why = format!(
                    "its tests do not run in image {image}; choose an --image with Python, pytest and \
                     everything they import; end of the log:\n{}",
                    tail(&first.log)
                );
                bail!(unusable(self.args, why));
            }
            Err(
                Rejection::Undetected
                | Rejection::TooManyFailures { .. }
                | Rejection::UnreadableFailures { .. },
            ) => {
                let why = format!(
                    "no test passes in image {image}; choose other --tests or another --image; end of \
                     the log:\n{}",
                    tail(&first.log)
                );
                bail!(unusable(self.args, why));
            }
        };
        if !left_out.is_empty() {
            let names: Vec<String> =
                left_out.iter().take(NAMED).map(|name| printable(name, NAME_CHARS)).collect();
            output::say(format!(
                "note: {} left out for unreliable results: {}{}",
                output::counted(left_out.len(), "test"),
                names.join(", "),
                if left_out.len() > NAMED { ", …" } else { "" }
            ));
        }
        let repeated = self.grader.grade(&generator.baseline_task(), "").await?;
        if repeated.verdict.reward <= 0.5 {
            bail!(unusable(self.args, third_run(&repeated)));
        }
        Ok(left_out)
    }

    /// The outcome of one mutant.
    ///
    /// # Errors
    /// If a sandbox failed, so that the outcome is unknown.
    async fn outcome(
        &self,
        generator: &TaskGenerator,
        path: &str,
        mutant: &Mutant,
    ) -> anyhow::Result<Outcome> {
        let Some(candidate) = generator.candidate_task(path, mutant) else {
            bail!("{path} has changed since its faults were found");
        };
        let graded = self.grader.grade(&candidate, "").await?;
        let row = match generator.make_row(path, mutant, &graded.log) {
            Ok(row) => row,
            Err(Rejection::NoSummary) => {
                return Ok(Outcome::Rejected(NO_SUMMARY.to_owned()));
            }
            Err(Rejection::Undetected) => {
                return Ok(Outcome::Rejected(UNDETECTED.to_owned()));
            }
            Err(Rejection::TooManyFailures { .. }) => {
                return Ok(Outcome::Rejected(TOO_MANY_FAILURES.to_owned()));
            }
            Err(Rejection::UnreadableFailures { .. }) => {
                return Ok(Outcome::Rejected(UNREADABLE_FAILURES.to_owned()));
            }
        };
        let task = row.to_task()?;
        match Box::pin(check(self.grader, &task, None)).await {
            Finding::Known(Health::Sound) => Ok(Outcome::Row(Box::new(row))),
            Finding::Known(Health::Unsound(why) | Health::Flaky(why)) => {
                Ok(Outcome::Unverified { id: task.id.into(), why: why.join("; ") })
            }
            Finding::Broken(error) => Err(error.into()),
        }
    }
}

fn write(file: &Utf8Path, rows: &[R2eRow]) -> Result<(), OutputError> {
    write_rows(file, rows)
        .map_err(|error| OutputError { file: file.to_owned(), source: io::Error::other(error) })
}

fn unusable(args: &MakeArgs, why: String) -> InputError {
    InputError::Repository { repo: args.repo.clone(), why }
}

/// The last [`LOG_LINES`] lines of `log`, for a terminal.
fn tail(log: &[u8]) -> String {
    let text = String::from_utf8_lossy(log);
    let lines: Vec<&str> = text.lines().collect();
    let end = lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default();
    printable_lines(&end.join("\n"))
}
/// Why the tests that passed twice did not pass a third time.
fn third_run(graded: &GradedChange) -> String {
    let verdict = &graded.verdict;
    if !verdict.differing.is_empty() {
        let differing = printable(&verdict.differing.join(", "), WHY_CHARS);
        return format!(
            "some tests gave other results in a third run: {differing}; choose reliable tests with \
             --tests"
        );
    }
    let findings: Vec<&str> = verdict.suspicious.iter().map(|finding| finding.name()).collect();
    let problem = match findings.as_slice() {
        [] => "a third run of its tests has no result (it may have timed out on a busy machine); repeat \
               the command, or choose fewer --tests"
            .to_owned(),
        names => format!(
            "a third run of its tests was refused: {}, which tests of the repository can cause \
             themselves, for example by a value that is equal to everything; -v prints the reason, and \
             --tests leaves such tests out",
            names.join(", ")
        ),
    };
    format!("{problem}; end of the log:\n{}", tail(&graded.log))
}
