//! `orchestrate tasks make`: repair tasks from a repository, each proved in sandboxes.

mod journal;

use super::verify::{Finding, check};
use crate::args::MakeArgs;
use crate::config;
use crate::grader::Grader;
use crate::output;
use crate::progress::Progress;
use anyhow::{Context, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use futures::stream::{self, StreamExt};
use journal::{Journal, Outcome};
use orchestrate_tasks::r2e::{R2eRow, write_rows};
use orchestrate_tasks::repair::{Bench, Mutant, Rejection, Repository, is_held_out};
use orchestrate_tasks::verify::Health;
use serde_json::json;
use std::collections::{BTreeMap, HashSet};
use std::process::ExitCode;

/// Lines of a log that are shown where tests do not run.
const LOG_LINES: usize = 15;
/// Names of tests that are shown where many are left out.
const NAMED: usize = 10;

/// Makes the tasks.
pub(super) async fn make(args: MakeArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        (0.0..1.0).contains(&args.held_out),
        "--held-out {} is not a share: it must be at least 0 and below 1",
        args.held_out
    );
    let held_out = (args.held_out > 0.0).then(|| sibling(&args.out, "held_out"));
    for path in [Some(&args.out), held_out.as_ref()].into_iter().flatten() {
        ensure!(!path.exists(), "{path} is there already; remove it or name another --out");
    }
    let mut settings = config::load(&args.source)?.check()?;
    let jobs = match args.jobs {
        Some(jobs) => jobs.into(),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    // Never below what the settings' own check allows.
    settings.sandbox.max_containers = jobs.max(2);
    let repository = Repository::read(&args.repo)?;
    for path in &args.tests {
        let path = path.trim_end_matches('/');
        let inside = |file: &str| file == path || file.starts_with(&format!("{path}/"));
        ensure!(
            repository.files.iter().any(|file| inside(&file.path)),
            "--tests {path}: no such file or folder in {}",
            args.repo
        );
    }
    let mut journal = Journal::open(&sibling(&args.out, "partial"), &args, &repository)?;
    let bench = Bench::new(repository, args.image.clone(), args.tests.clone());
    let grader = Grader::connect(&settings, settings.reward.rules()).await?;
    let maker = Maker { args: &args, grader: &grader, jobs };
    let made = Box::pin(maker.make(bench, &mut journal)).await;
    grader.shutdown().await?;
    finish(&args, held_out.as_deref(), journal, made?)
}

/// Writes the rows and says what became of all that was tried.
fn finish(
    args: &MakeArgs,
    held_out: Option<&Utf8Path>,
    journal: Journal,
    made: Made,
) -> anyhow::Result<ExitCode> {
    let total = made.rows.len();
    ensure!(total > 0, "none of {} faults makes a task: {}", made.tried, listed(&made.rejected));
    let mut families: BTreeMap<String, usize> = BTreeMap::new();
    let (mut train, mut held) = (Vec::new(), Vec::new());
    for (is_held, row) in made.rows {
        let family = row.repair.as_ref().map_or("", |repair| repair.family.as_str());
        *families.entry(family.to_owned()).or_default() += 1;
        if is_held { held.push(row) } else { train.push(row) }
    }
    write_rows(&args.out, &train)?;
    if let Some(path) = held_out {
        write_rows(path, &held)?;
    }
    journal.remove()?;
    let wanted = args.count as usize;
    if total < wanted {
        output::say(format!(
            "note: {total} tasks instead of {wanted}: no more faults are possible"
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
            "{}: {} tasks{}, each proved twice (gold patch = 1.0, no patch = 0.0) on {} tests",
            args.out,
            train.len(),
            held_out.map(|path| format!(", {path}: {}", held.len())).unwrap_or_default(),
            made.tests
        ));
        output::data(format!("faults: {}", listed(&families)));
        output::data(format!("{} tried, not used: {}", made.tried, listed(&made.rejected)));
        for (id, why) in &made.flaky {
            output::data(format!("  dropped: {id}: {why}"));
        }
    }
    Ok(ExitCode::SUCCESS)
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

/// What came of a repository.
#[derive(Debug, Default)]
struct Made {
    /// Rows, with whether they are held out.
    rows: Vec<(bool, R2eRow)>,
    tried: usize,
    /// Number of rejected candidates by reason.
    rejected: BTreeMap<String, usize>,
    /// Tasks that the proof did not hold for, and what it says.
    flaky: BTreeMap<String, String>,
    /// Tests that every task is judged by.
    tests: usize,
    left_out: Vec<String>,
}

struct Maker<'a> {
    args: &'a MakeArgs,
    grader: &'a Grader<'a>,
    jobs: usize,
}

impl Maker<'_> {
    async fn make(&self, mut bench: Bench, journal: &mut Journal) -> anyhow::Result<Made> {
        for path in &bench.repository().left_out {
            output::say(format!("note: {path} is left out: not a file of UTF-8 text"));
        }
        let left_out = self.learn(&mut bench).await?;
        let order = bench.mutants(self.args.seed);
        ensure!(!order.is_empty(), "no function of {} can be changed", self.args.repo);
        let tests = bench.expected().len();
        output::say(format!("{tests} tests pass, {} possible faults", order.len()));
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
                    let bench = &bench;
                    async move {
                        match known {
                            Some(outcome) => Ok(outcome),
                            None => self.outcome(bench, path, mutant).await,
                        }
                    }
                })
                // In order, so that the same seed makes the same tasks with any number of jobs.
                .buffered(self.jobs)
                .zip(stream::iter(&order)),
        );
        while let Some((outcome, (path, mutant))) = outcomes.next().await {
            let outcome = outcome.context(
                "a sandbox failed, and nothing is known of the fault; the same command goes on here",
            )?;
            journal.put(made.tried, &outcome)?;
            made.tried += 1;
            match outcome {
                Outcome::Row(_) if !lines.insert((*path, mutant.line)) => {
                    *made.rejected.entry("on a line of another task".to_owned()).or_default() += 1;
                }
                Outcome::Row(row) => {
                    let held =
                        is_held_out(self.args.seed, path, &mutant.function, self.args.held_out);
                    made.rows.push((held, *row));
                }
                Outcome::Rejected(why) => *made.rejected.entry(why).or_default() += 1,
                Outcome::Unproved { id, why } => {
                    progress.line(&format!("{id}: dropped: {why}"));
                    *made.rejected.entry("not proved".to_owned()).or_default() += 1;
                    made.flaky.insert(id, why);
                }
            }
            let done = made.rows.len() as u64;
            progress.update(done, wanted, format!("{} tried", made.tried));
            if done == wanted {
                break;
            }
        }
        drop(outcomes);
        progress.finish();
        Ok(made)
    }

    /// Runs the untouched repository's tests: twice to learn which can be relied on, and once more
    /// with these alone.
    async fn learn(&self, bench: &mut Bench) -> anyhow::Result<Vec<String>> {
        let untouched = bench.untouched();
        let first = self.grader.grade(&untouched, "").await?;
        let second = self.grader.grade(&untouched, "").await?;
        let elapsed = first.test_time.max(second.test_time);
        let image = &self.args.image;
        let left_out = match bench.learn([&first.log, &second.log], elapsed) {
            Ok(left_out) => left_out,
            Err(Rejection::NoEnd) => bail!(
                "the tests of {} do not run in image {image}, which must have Python, pytest and what \
                 they import (--image); the end of their log:\n{}",
                self.args.repo,
                tail(&first.log)
            ),
            Err(Rejection::Unseen | Rejection::TooMuch { .. }) => bail!(
                "no test of {} passes in image {image} (--tests, --image); the end of the log:\n{}",
                self.args.repo,
                tail(&first.log)
            ),
        };
        if !left_out.is_empty() {
            let names: Vec<&str> = left_out.iter().take(NAMED).map(String::as_str).collect();
            output::say(format!(
                "note: {} tests are left out, as they do not pass reliably: {}{}",
                left_out.len(),
                names.join(", "),
                if left_out.len() > NAMED { ", …" } else { "" }
            ));
        }
        let proof = self.grader.grade(&bench.untouched(), "").await?;
        ensure!(
            proof.verdict.reward > 0.5,
            "the tests of {} do not give the same results again: {} (--tests names those to use)",
            self.args.repo,
            proof.verdict.differing.join(", ")
        );
        Ok(left_out)
    }

    /// The outcome of one mutant; an error only if it is not known.
    async fn outcome(&self, bench: &Bench, path: &str, mutant: &Mutant) -> anyhow::Result<Outcome> {
        let Some(candidate) = bench.candidate(path, mutant) else {
            bail!("{path} is not the text that it was");
        };
        let graded = self.grader.grade(&candidate, "").await?;
        let row = match bench.judge(path, mutant, &graded.log) {
            Ok(row) => row,
            Err(Rejection::NoEnd) => return Ok(Outcome::Rejected("without an end".to_owned())),
            Err(Rejection::Unseen) => return Ok(Outcome::Rejected("seen by no test".to_owned())),
            Err(Rejection::TooMuch { .. }) => {
                return Ok(Outcome::Rejected("seen by most tests".to_owned()));
            }
        };
        let task = row.to_task()?;
        match Box::pin(check(self.grader, &task, None)).await {
            Finding::Known(Health::Sound) => Ok(Outcome::Row(Box::new(row))),
            Finding::Known(Health::Unsound(why) | Health::Flaky(why)) => {
                Ok(Outcome::Unproved { id: task.id, why: why.join("; ") })
            }
            Finding::Broken(why) => bail!("{}: {why}", task.id),
        }
    }
}

fn tail(log: &[u8]) -> String {
    let text = String::from_utf8_lossy(log);
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default().join("\n")
}
