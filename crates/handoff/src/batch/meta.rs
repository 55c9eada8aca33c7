//! Input of a batch: what it belongs to, and its sequences.

use orchestrate_routing::RoutingMask;
use orchestrate_types::{EpisodeId, ModelShape, PolicyVersion, Trajectory};

/// Version of the folder format.
pub const FORMAT_VERSION: u32 = 1;
/// Name of the file whose presence marks a folder as complete.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Run, step and model that a batch belongs to, and how it is written.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchMeta {
    /// Id of the run.
    pub run: String,
    /// Idempotency key of the step.
    pub step_id: String,
    /// Global step of the run, from 1.
    pub global_step: u64,
    /// Version the trainer's weights must have before the step.
    pub base_version: PolicyVersion,
    /// Shape of the model, which determines the id width.
    pub shape: ModelShape,
    /// Bytes of tensor data after which a new shard starts. A longer sequence gets a shard to itself.
    pub max_shard_bytes: u64,
    /// Whether equal prefix rows of a group are written once.
    pub share_prefix_rows: bool,
}

/// One sequence to train on.
#[derive(Debug, Clone)]
pub struct BatchSample {
    /// Id of its episode.
    pub episode_id: EpisodeId,
    /// Number of its group, equal for members of one group.
    pub group: i64,
    /// Tokens `[T]` with loss mask, log-probs in nats and policy versions.
    pub trajectory: Trajectory,
    /// Its `T − 1` routing rows; `None` trains it without replay.
    pub routing: Option<RoutingMask>,
    /// Advantage of the whole sequence.
    pub advantage: f32,
    /// Reward of the episode.
    pub reward: f32,
}
