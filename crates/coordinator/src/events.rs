//! What a person watching the run is told, while it happens.

use orchestrate_handoff::protocol::StepState;
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion, RunId};
use serde_json::Value;

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The run starts or continues.
    Started {
        /// The run.
        run: RunId,
        /// How often it was started.
        epoch: i64,
        /// First global step that is not finished.
        next_step: u32,
        /// Global steps in all.
        steps: u32,
    },
    /// An evaluation without training starts or is resumed.
    EvaluationStarted {
        /// Its id.
        run: RunId,
        /// How often it was started, from 1.
        epoch: i64,
    },
    /// Containers of an earlier start were removed.
    Swept {
        /// How many.
        removed: usize,
    },
    /// Engines serve these weights from now on.
    WeightsLive {
        /// Version.
        version: PolicyVersion,
    },
    /// A global step begins to sample (or continues).
    StepSampling {
        /// Step.
        step: u32,
        /// Groups wanted.
        groups: u32,
        /// Episodes per group.
        group_size: u16,
    },
    /// An evaluation begins (or continues).
    EvalStarted {
        /// Global step after which it runs.
        round: u32,
        /// Episodes it makes.
        episodes: usize,
    },
    /// A group was opened.
    GroupOpened {
        /// Which.
        group: GroupId,
        /// Its task.
        task_id: String,
    },
    /// An attempt begins.
    AttemptStarted {
        /// Which.
        attempt: AttemptId,
    },
    /// An attempt ended.
    AttemptEnded {
        /// Which.
        attempt: AttemptId,
        /// How.
        outcome: Outcome,
        /// Turns it made.
        turns: usize,
    },
    /// An episode failed in every attempt and leaves its group.
    EpisodeGivenUp {
        /// Which.
        episode: EpisodeId,
        /// The last error.
        error: String,
    },
    /// A group is complete.
    GroupDecided {
        /// Which.
        group: GroupId,
        /// Why it was dropped; `None` = kept.
        dropped: Option<String>,
    },
    /// The trainer works on a step.
    Training {
        /// Step.
        step: u32,
        /// Its own word.
        state: StepState,
    },
    /// A global step is finished; the line of `metrics.jsonl`.
    StepFinished {
        /// The line.
        line: Value,
    },
    /// A global step had nothing to train on.
    StepSkipped {
        /// Step.
        step: u32,
        /// Why.
        reason: String,
    },
    /// An evaluation is finished; the line of `metrics.jsonl`.
    EvalFinished {
        /// The line.
        line: Value,
    },
    /// Something a person should know; the run goes on.
    Warning {
        /// What.
        message: String,
    },
    /// No new episodes are begun; running ones end at their next turn border.
    Draining,
}

/// Receives events. Called from the run's tasks: it must not block.
pub trait Reporter: Send + Sync {
    /// Something happened.
    fn report(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync> Reporter for F {
    fn report(&self, event: &Event) {
        self(event);
    }
}
