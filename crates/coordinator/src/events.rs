//! Events of a run, reported as they happen.

use orchestrate_handoff::protocol::StepState;
use orchestrate_metrics::{EvalLine, StepLine};
use orchestrate_store::{GroupRow, GroupState};
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion, RunId};

/// What the journal has of a stage that starts or continues: nothing, unless the run was resumed in it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StageBefore {
    /// Its groups that were opened.
    pub groups: Vec<(GroupId, GroupState)>,
    /// Outcomes of its episodes that have ended, and of its broken attempts.
    pub outcomes: Vec<Outcome>,
}

impl StageBefore {
    pub(crate) fn new(groups: &[GroupRow], outcomes: Vec<Outcome>) -> Self {
        Self { groups: groups.iter().map(|group| (group.id, group.state)).collect(), outcomes }
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A run starts or is resumed.
    Started {
        /// Its id.
        run: RunId,
        /// How often it was started, from 1.
        epoch: i64,
        /// First global step that is not finished; `steps + 1` if all are.
        next_step: u32,
        /// Global steps in total.
        steps: u32,
    },
    /// An evaluation without training starts or is resumed.
    EvaluationStarted {
        /// Its id.
        run: RunId,
        /// How often it was started, from 1.
        epoch: i64,
    },
    /// Containers of earlier starts were removed.
    Swept {
        /// Number of containers; 0 if none were left.
        removed: usize,
    },
    /// Engines serve new weights from now on.
    WeightsLive {
        /// Version of the weights.
        version: PolicyVersion,
    },
    /// The rollout of a global step starts or continues.
    StepSampling {
        /// Global step, from 1.
        step: u32,
        /// Groups that the step needs.
        groups: u32,
        /// Episodes per group.
        group_size: u16,
        /// What an earlier start of the run made of it.
        before: StageBefore,
    },
    /// An evaluation starts or continues.
    EvalStarted {
        /// Global step after which it runs; 0 = before training.
        round: u32,
        /// Episodes of the evaluation, including those that have already ended.
        episodes: usize,
        /// What an earlier start of the run made of it.
        before: StageBefore,
    },
    /// A group of a training step was opened.
    GroupOpened {
        /// Global step, from 1.
        step: u32,
        /// Id of the group.
        group: GroupId,
        /// Id of its task.
        task_id: String,
    },
    /// An attempt started.
    AttemptStarted {
        /// Id of the attempt.
        attempt: AttemptId,
    },
    /// An attempt ended.
    AttemptEnded {
        /// Id of the attempt.
        attempt: AttemptId,
        /// How it ended.
        outcome: Outcome,
        /// Turns that it made.
        turns: usize,
    },
    /// An episode failed in every attempt and leaves its group.
    EpisodeGivenUp {
        /// Id of the episode.
        episode: EpisodeId,
        /// Error of its last attempt.
        error: String,
    },
    /// All episodes of a group have ended.
    GroupDecided {
        /// Id of the group.
        group: GroupId,
        /// Why it was dropped; `None` if it was kept.
        dropped: Option<String>,
    },
    /// The trainer reported progress on a step.
    Training {
        /// Global step.
        step: u32,
        /// The state that the trainer reported.
        state: StepState,
    },
    /// A global step is closed, whether it was trained or skipped.
    StepFinished {
        /// Its line of `metrics.jsonl`.
        line: Box<StepLine>,
    },
    /// A global step had nothing to train on.
    StepSkipped {
        /// Global step.
        step: u32,
        /// Why there was nothing.
        reason: String,
    },
    /// An evaluation is finished.
    EvalFinished {
        /// Its line of `metrics.jsonl`.
        line: Box<EvalLine>,
    },
    /// A warning for the user; the run continues.
    Warning {
        /// The message.
        message: String,
    },
    /// No more episodes are started; running ones end after their current turn.
    Draining,
}

/// Receives the events of a run. Called from the tasks of the run, so it must not block.
pub trait Reporter: Send + Sync {
    /// Receives one event.
    fn report(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync> Reporter for F {
    fn report(&self, event: &Event) {
        self(event);
    }
}
