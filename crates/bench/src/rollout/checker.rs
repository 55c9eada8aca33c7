//! Checks finished episodes and drops them, on a separate thread on the engines' processors.

use super::observers::Observer;
use super::processors::keep_thread_to;
use anyhow::Context;
use orchestrate_rollout::EpisodeReport;
use orchestrate_synthetic::expected_rows;
use orchestrate_types::{ModelShape, Outcome, PolicyVersion};
use rustix::process::{Pid, setpriority_process};
use rustix::thread::gettid;
use std::sync::mpsc::{self, Receiver, Sender};

/// Nice value of the checking thread: the lowest priority.
const NICE: i32 = 19;

/// Compares every row of every mask with its expected value.
#[derive(Debug)]
pub(super) struct Checker {
    reports: Sender<EpisodeReport>,
    thread: Observer<anyhow::Result<Checked>>,
}

/// Results over all episodes.
#[derive(Debug, Default)]
pub(super) struct Checked {
    pub(super) episodes: usize,
    /// Number of episodes without a reward or without all rows.
    pub(super) lost: usize,
    pub(super) rows: usize,
    /// Number of rows that differ from the expected ones, missing and surplus rows among them.
    pub(super) wrong: usize,
    /// Number of rows that were shared with another episode.
    pub(super) shared_rows: u64,
    pub(super) routing_wire_bytes: u64,
    /// Why the first lost episode was lost; empty if none was.
    pub(super) note: String,
}

impl Checker {
    pub(super) fn begin(
        shape: ModelShape,
        version: PolicyVersion,
        processors: Vec<usize>,
    ) -> anyhow::Result<Self> {
        let (reports, finished) = mpsc::channel();
        let place = move || {
            keep_thread_to(&processors)?;
            Ok(setpriority_process(Some(gettid()), NICE)?)
        };
        let thread = Observer::begin(place, move || check_all(&shape, version, &finished))?;
        Ok(Self { reports, thread })
    }

    /// Id of the checking thread.
    pub(super) fn thread(&self) -> Pid {
        self.thread.id()
    }

    pub(super) fn take(&self, report: EpisodeReport) {
        // If the thread has failed, `end` reports why.
        let _ = self.reports.send(report);
    }

    /// Waits until all episodes are checked.
    pub(super) fn end(self) -> anyhow::Result<Checked> {
        drop(self.reports);
        self.thread.end().context("failed to check rows")?
    }
}

fn check_all(
    shape: &ModelShape,
    version: PolicyVersion,
    reports: &Receiver<EpisodeReport>,
) -> anyhow::Result<Checked> {
    let mut checked = Checked::default();
    for report in reports {
        checked.add(shape, version, &report)?;
    }
    Ok(checked)
}

impl Checked {
    fn add(
        &mut self,
        shape: &ModelShape,
        version: PolicyVersion,
        report: &EpisodeReport,
    ) -> anyhow::Result<()> {
        self.episodes += 1;
        self.shared_rows += report.routing_rows_shared;
        self.routing_wire_bytes += report.routing_wire_bytes;
        let scored = matches!(report.outcome, Outcome::Scored { .. });
        let (Some(trajectory), Some(mask), true) =
            (&report.trajectory(), &report.routing(), scored)
        else {
            self.lost += 1;
            if self.note.is_empty() {
                self.note = format!("{:?} {:?}", report.outcome, report.routing_problem);
            }
            return Ok(());
        };
        let tokens = trajectory.token_ids();
        let rows = tokens.len().checked_sub(1).context("the trajectory is empty")?;
        let expected = expected_rows(shape, version, tokens, 0..rows)?;
        let expected: Vec<u8> = expected.chunks().flatten().copied().collect();
        let found = mask.to_vec();
        let row = shape.row_bytes();
        let pairs = expected.chunks(row).zip(found.chunks(row));
        self.wrong += pairs.filter(|(expected, found)| expected != found).count();
        self.wrong += expected.len().abs_diff(found.len()) / row;
        self.rows += rows;
        Ok(())
    }
}
