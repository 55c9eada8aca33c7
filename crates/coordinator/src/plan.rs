//! The checked settings of a run, and its tasks.

use crate::config::{DiagnosticsSettings, RunSettings};
use orchestrate_handoff::{AlgorithmSettings, HandoffSettings};
use orchestrate_rollout::RolloutSettings;
use orchestrate_tasks::Task;
use orchestrate_types::ModelName;
use std::sync::Arc;

/// How episodes are sampled: the coordinator's part of `[rollout]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingPlan {
    /// Episodes per training group, at least 1.
    pub group_size: u16,
    /// Groups with a gradient that a global step needs, at least 1.
    pub groups_per_step: u32,
    /// Groups that a global step samples at most.
    pub max_groups_per_step: u32,
    /// Episodes that may run at the same time.
    pub max_in_flight: u32,
    /// Attempts that an episode may have.
    pub max_attempts: u16,
    /// Sampling temperature of training episodes, ≥ 0.
    pub temperature: f32,
}

impl From<&RolloutSettings> for SamplingPlan {
    fn from(rollout: &RolloutSettings) -> Self {
        Self {
            group_size: rollout.group_size,
            groups_per_step: rollout.groups_per_step,
            max_groups_per_step: rollout.max_groups_per_step,
            max_in_flight: rollout.max_in_flight,
            max_attempts: rollout.max_attempts,
            temperature: rollout.temperature,
        }
    }
}

/// The checked settings that the run loop uses.
#[derive(Debug, Clone)]
pub struct Plan {
    /// `[run]`: steps, evaluations, shutdown.
    pub run: RunSettings,
    /// How training episodes are sampled.
    pub sampling: SamplingPlan,
    /// `[algorithm]`.
    pub algorithm: AlgorithmSettings,
    /// `[handoff]`.
    pub handoff: HandoffSettings,
    /// `[diagnostics]`.
    pub diagnostics: DiagnosticsSettings,
    /// Name of the model in `predictions.jsonl`.
    pub model_name: ModelName,
}

/// The checked settings that an evaluation uses.
#[derive(Debug, Clone)]
pub struct EvaluationPlan {
    /// `[run]`: seeds, tasks, samples, retries.
    pub run: RunSettings,
    /// How episodes are sampled, but for the temperature, which is `run.eval_temperature`.
    pub sampling: SamplingPlan,
    /// Name of the model in `predictions.jsonl`.
    pub model_name: ModelName,
}

impl Plan {
    /// The settings that evaluations of this run use.
    pub(crate) fn evaluation(&self) -> EvaluationPlan {
        EvaluationPlan {
            run: self.run.clone(),
            sampling: self.sampling.clone(),
            model_name: self.model_name.clone(),
        }
    }

    /// Whether training episodes collect routing rows: to replay them, or to compare the trainer's own
    /// routes with them.
    pub fn want_routing(&self) -> bool {
        self.needs_routing() || self.diagnostics.no_replay_every > 0
    }

    /// Whether a trajectory without routing rows may be trained on.
    pub fn needs_routing(&self) -> bool {
        self.algorithm.routing_replay().replays_rollout()
    }

    /// Whether the trainer also measures `step` without replay.
    pub fn measures_no_replay(&self, step: u32) -> bool {
        let every = self.diagnostics.no_replay_every;
        every > 0 && step.saturating_sub(1).is_multiple_of(every)
    }

    /// Whether an evaluation follows global step `step` (0 = before training).
    pub fn evaluates_after(&self, step: u32) -> bool {
        self.run.evaluates_after(step)
    }
}

/// The tasks of a run. The order of each part is fixed.
#[derive(Debug, Clone, Default)]
pub struct TaskSet {
    /// Tasks to train on.
    pub train: Vec<Arc<Task>>,
    /// Tasks to evaluate: held out from the families that are trained on.
    pub held_out: Vec<Arc<Task>>,
    /// Tasks to evaluate: of families that are not trained on.
    pub held_out_families: Vec<Arc<Task>>,
}
