//! What a coordinator is told, all checked before.

use crate::config::{DiagnosticsSettings, RunSettings};
use orchestrate_handoff::{AlgorithmSettings, HandoffSettings};
use orchestrate_rollout::RolloutSettings;
use orchestrate_tasks::Task;
use std::sync::Arc;

/// How episodes are sampled; the coordinator's part of `[rollout]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingPlan {
    /// Episodes per training group, at least 1.
    pub group_size: u16,
    /// Groups with a gradient wanted per global step, at least 1.
    pub groups_per_step: u32,
    /// Groups sampled per global step at most.
    pub max_groups_per_step: u32,
    /// Episodes under way at the same time.
    pub max_in_flight: u32,
    /// Attempts per episode.
    pub max_attempts: u16,
    /// Temperature of training episodes.
    pub temperature: f32,
}

impl From<&RolloutSettings> for SamplingPlan {
    fn from(rollout: &RolloutSettings) -> Self {
        Self {
            // Member numbers are 16 bits wide in every id.
            group_size: u16::try_from(rollout.group_size).unwrap_or(u16::MAX),
            groups_per_step: rollout.groups_per_step,
            max_groups_per_step: rollout.max_groups_per_step,
            max_in_flight: rollout.max_in_flight,
            max_attempts: rollout.max_attempts,
            temperature: rollout.temperature,
        }
    }
}

/// Everything the run loop decides by.
#[derive(Debug, Clone)]
pub struct Plan {
    /// `[run]`.
    pub run: RunSettings,
    /// Sampling.
    pub sampling: SamplingPlan,
    /// `[algorithm]`.
    pub algorithm: AlgorithmSettings,
    /// `[handoff]`.
    pub handoff: HandoffSettings,
    /// `[diagnostics]`.
    pub diagnostics: DiagnosticsSettings,
    /// Name of the model in `predictions.jsonl`.
    pub model_name: String,
}

impl Plan {
    /// Whether training episodes collect routing rows: to replay them, or to measure how far the
    /// trainer's own routes are from them.
    pub fn want_routing(&self) -> bool {
        self.needs_routing() || self.diagnostics.no_replay_every > 0
    }

    /// Whether a trajectory without routing rows may be trained on.
    pub fn needs_routing(&self) -> bool {
        self.algorithm.routing_replay().replays_rollout()
    }

    /// Whether `step` also measures the mismatch without replay.
    pub fn measures_no_replay(&self, step: u32) -> bool {
        let every = self.diagnostics.no_replay_every;
        every > 0 && step.saturating_sub(1).is_multiple_of(every)
    }

    /// Whether an evaluation follows global step `step` (0 = before training).
    pub fn evaluates_after(&self, step: u32) -> bool {
        self.run.evaluates_after(step)
    }
}

/// The tasks of a run, each part in a fixed order.
#[derive(Debug, Clone, Default)]
pub struct TaskSet {
    /// Trained on.
    pub train: Vec<Arc<Task>>,
    /// Evaluated: unseen tasks of known families.
    pub held_out: Vec<Arc<Task>>,
    /// Evaluated: unseen families.
    pub held_out_families: Vec<Arc<Task>>,
}
