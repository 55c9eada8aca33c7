//! `orchestrate runs`: the run folders below a folder, with state and result.

use crate::args::RunsArgs;
use crate::error::InputError;
use crate::run_folder::planned;
use crate::{output, paths, tables, wiring};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{RunError, is_finished, run_kind};
use orchestrate_metrics::MetricsLine;
use orchestrate_report::metrics_lines;
use orchestrate_store::{JOURNAL_FILE, Reader, RunKind, holder};
use orchestrate_types::utc;
use serde::Serialize;
use std::process::ExitCode;

/// Levels of folders that are searched.
const DEPTH: usize = 3;

/// What a run folder holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Training,
    Evaluation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// A process of this machine has the folder open.
    Running,
    /// Nothing is left to do.
    Finished,
    /// It can be resumed.
    Stopped,
}

/// A listed run.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    pub(super) folder: Utf8PathBuf,
    pub(super) name: Option<String>,
    pub(super) tags: Vec<String>,
    pub(super) kind: Kind,
    pub(super) state: State,
    /// The process that has the folder open.
    pub(super) holder: Option<String>,
    /// Closed global steps of a training run, and those that are planned.
    pub(super) step: Option<u32>,
    pub(super) steps: Option<u32>,
    /// Newest Pass@1, from 0 to 1.
    pub(super) pass_at_1: Option<f64>,
    /// Mean reward of the last closed step.
    pub(super) reward: Option<f64>,
    /// When the run was created, µs since the Unix epoch.
    pub(super) created_us: i64,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Listing {
    runs: Vec<Entry>,
    /// Folders that look like runs and cannot be read, with the reason.
    unreadable: Vec<(Utf8PathBuf, String)>,
}

/// Runs the command.
pub(crate) async fn run(args: RunsArgs) -> anyhow::Result<ExitCode> {
    let root = paths::absolute(&args.folder)?;
    let mut folders = Vec::new();
    find(&root, DEPTH, &mut folders)
        .map_err(|source| InputError::Unreadable { file: args.folder.clone(), source })?;
    folders.sort();
    let mut listing = Listing { runs: Vec::new(), unreadable: Vec::new() };
    for folder in folders {
        // As it was written on the command line.
        let shown = folder.strip_prefix(&root).map_or(folder.clone(), |rest| {
            if rest.as_str().is_empty() { args.folder.clone() } else { args.folder.join(rest) }
        });
        match entry(&folder, shown.clone()).await {
            Ok((entry, _)) => listing.runs.push(entry),
            Err(error) => listing.unreadable.push((shown, format!("{error:#}"))),
        }
    }
    if let Some(tag) = &args.tag {
        listing.runs.retain(|entry| entry.tags.contains(tag));
    }
    listing.runs.sort_by_key(|entry| std::cmp::Reverse(entry.created_us));
    if args.json {
        output::json(&listing)?;
        return Ok(ExitCode::SUCCESS);
    }
    if listing.runs.is_empty() {
        output::say(format!("no runs below {}", args.folder));
    } else {
        let mut table = tables::table(&["run", "name, tags", "state", "step", "result", "created"]);
        for entry in &listing.runs {
            table.add_row(row(entry));
        }
        output::data(table);
    }
    for (folder, why) in &listing.unreadable {
        output::say(format!("warning: {folder} cannot be read: {why}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Collects the run folders below `folder`; links are not followed, and what cannot be read is left out.
fn find(folder: &Utf8Path, depth: usize, found: &mut Vec<Utf8PathBuf>) -> std::io::Result<()> {
    if folder.join(JOURNAL_FILE).is_file() {
        found.push(folder.to_owned());
        return Ok(());
    }
    for entry in folder.read_dir_utf8()?.flatten() {
        if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = find(entry.path(), depth - 1, found);
        }
    }
    Ok(())
}

/// What the run in `folder` does.
pub(super) async fn kind(folder: &Utf8Path, reader: &Reader) -> anyhow::Result<Kind> {
    let mut kind = reader.kind().await?;
    if kind.is_none() {
        let settings = planned(folder, reader, &[]).await?.check()?;
        kind = run_kind(reader, wiring::policy(&settings)).await?;
    }
    Ok(match kind {
        Some(RunKind::Evaluation) => Kind::Evaluation,
        Some(RunKind::Training) | None => Kind::Training,
    })
}

/// Describes a run folder, which messages call `shown`. Also returns its metrics.
pub(super) async fn entry(
    folder: &Utf8Path,
    shown: Utf8PathBuf,
) -> anyhow::Result<(Entry, Vec<MetricsLine>)> {
    let reader = Reader::open(folder).await?;
    let created_us = reader.run().await?.created_us;
    let settings = planned(folder, &reader, &[]).await?.check()?;
    let lines = metrics_lines(&reader).await.map_err(RunError::from)?;
    let kind = kind(folder, &reader).await?;
    let evaluations = lines.iter().filter_map(MetricsLine::evaluation);
    let pass_at_1 = evaluations.filter_map(|line| line.eval_pass_at_1).next_back();
    let is_done = match kind {
        Kind::Training => is_finished(&reader, &settings.run).await?,
        Kind::Evaluation => reader.evals().await?.iter().any(|eval| eval.metrics.is_some()),
    };
    let run = settings.run;
    let of_training = |count: u32| (kind == Kind::Training).then_some(count);
    let holder = holder(folder);
    let last = lines.iter().rev().find_map(MetricsLine::step);
    let entry = Entry {
        folder: shown,
        name: run.name,
        tags: run.tags,
        kind,
        state: match (&holder, is_done) {
            (Some(_), _) => State::Running,
            (None, true) => State::Finished,
            (None, false) => State::Stopped,
        },
        holder,
        step: of_training(last.map_or(0, |line| line.global_step)),
        steps: of_training(run.steps),
        pass_at_1,
        reward: last.and_then(|line| line.reward_mean),
        created_us,
    };
    Ok((entry, lines))
}

fn row(entry: &Entry) -> [String; 6] {
    let named = entry.name.iter().chain(&entry.tags);
    let named: Vec<String> = named.map(|word| tables::cell(word)).collect();
    let result = match (entry.pass_at_1, entry.reward) {
        (Some(pass), _) => format!("Pass@1 {pass:.3}"),
        (None, Some(reward)) => format!("reward {reward:.3}"),
        (None, None) => String::new(),
    };
    let folder = tables::cell(entry.folder.as_str());
    let state = entry.state.name().to_owned();
    [folder, named.join(", "), state, entry.step_text(), result, utc(entry.created_us)]
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
        }
    }
}

impl Entry {
    /// How far it is.
    pub(super) fn step_text(&self) -> String {
        match (self.step, self.steps) {
            (Some(step), Some(steps)) => format!("step {step} of {steps}"),
            _ => "evaluation".to_owned(),
        }
    }
}
