//! Batch folders, format version 1.
//!
//! A folder holds `manifest.json` ([`Manifest`]) and packed shards `NNNN.safetensors`. A shard of
//! `S` sequences with `N` tokens together has:
//!
//! | tensor | dtype and shape | meaning |
//! |---|---|---|
//! | `token_ids` | u32 `[N]` | |
//! | `loss_mask` | u8 `[N]` | 1 = the policy wrote the token |
//! | `rollout_logprobs` | f32 `[N]` | nats; read only where the mask is 1 |
//! | `policy_versions` | i64 `[N]` | |
//! | `routed_experts` | u8 or u16 `[N, L, K]` | by the model's expert count |
//! | `routing_valid` | u8 `[N]` | 0 = this row holds ids `0..K` that nobody chose |
//! | `cu_seqlens` | i64 `[S + 1]` | offsets of the sequences, from 0 to `N` |
//! | `advantages`, `rewards` | f32 `[S]` | |
//! | `group_ids` | i64 `[S]` | |
//!
//! The header metadata holds `format_version`, `episode_ids` and `moe_layers` (both JSON lists).
//! The row of each sequence's last token is never valid: that token was no input yet.

mod read;
mod write;

pub use read::{Batch, Sequence};
pub use write::write_batch;

use camino::Utf8PathBuf;
use orchestrate_routing::RoutingMask;
use orchestrate_types::{EpisodeId, ModelShape, PolicyVersion, Trajectory};
use serde::{Deserialize, Serialize};

/// Version of the folder format.
pub const FORMAT_VERSION: u32 = 1;
/// Name of the file that makes a folder complete.
pub const MANIFEST_FILE: &str = "manifest.json";

/// What a batch belongs to.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchMeta {
    /// The run's id.
    pub run: String,
    /// Idempotency key of the step.
    pub step_id: String,
    /// Step of the run, from 1.
    pub global_step: u64,
    /// Version the trainer's weights must have before the step.
    pub base_version: PolicyVersion,
    /// Shape of the model; fixes the id width.
    pub shape: ModelShape,
    /// Bytes of tensor data after which a new shard begins; a longer sequence gets its own.
    pub max_shard_bytes: u64,
}

/// One sequence to train on.
#[derive(Debug, Clone)]
pub struct BatchSample {
    /// Where it comes from.
    pub episode_id: EpisodeId,
    /// Number of its group, equal for members of one group.
    pub group: i64,
    /// Tokens, masks, log-probs, versions.
    pub trajectory: Trajectory,
    /// Its routing rows; `None` trains it without replay.
    pub routing: Option<RoutingMask>,
    /// Advantage of the whole sequence.
    pub advantage: f32,
    /// Verifier's reward.
    pub reward: f32,
}

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The run's id.
    pub run: String,
    /// Idempotency key of the step.
    pub step_id: String,
    /// Step of the run.
    pub global_step: u64,
    /// Version the trainer's weights must have before the step.
    pub base_version: PolicyVersion,
    /// Shape of the model.
    pub model: ModelShape,
    /// Dtype of `routed_experts`: `u8` or `u16`.
    pub id_dtype: String,
    /// Sequences of all shards.
    pub sequences: usize,
    /// Tokens of all shards.
    pub tokens: usize,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// One shard in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name in the folder.
    pub file: String,
    /// Sequences `S`.
    pub sequences: usize,
    /// Tokens `N`.
    pub tokens: usize,
    /// File size.
    pub bytes: u64,
    /// BLAKE3 of the file, hexadecimal.
    pub blake3: String,
}

/// A batch that cannot be written or read, and the file that says so.
#[derive(Debug, thiserror::Error)]
#[error("batch file {file}: {kind}")]
pub struct BatchError {
    /// Path of the file.
    pub file: Utf8PathBuf,
    /// What is wrong.
    #[source]
    pub kind: BatchErrorKind,
}

/// What is wrong with a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchErrorKind {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The manifest is not a manifest.
    #[error("it is not a readable manifest")]
    Manifest(#[source] serde_json::Error),
    /// A newer program wrote it.
    #[error("its format version is {0}, this program reads {FORMAT_VERSION}")]
    Version(u32),
    /// The file is not the one the manifest means.
    #[error("its size or digest is not the manifest's; the batch must be written again")]
    Digest,
    /// The safetensors header is broken.
    #[error("it is not a readable safetensors file")]
    Header(#[source] safetensors::SafeTensorError),
    /// A tensor is missing, or has another dtype or shape.
    #[error("tensor `{name}` is {found}, expected {expected}")]
    Tensor {
        /// Its name.
        name: &'static str,
        /// What is there.
        found: String,
        /// What must be there.
        expected: String,
    },
    /// A value that must not be.
    #[error("tensor `{name}`, index {index}: {problem}")]
    Value {
        /// Tensor.
        name: &'static str,
        /// Flat index.
        index: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A field of the manifest or of the header metadata disagrees with the data.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// A sample that must not be trained on.
    #[error("episode {episode}: {problem}")]
    Sample {
        /// Which.
        episode: EpisodeId,
        /// Why.
        problem: &'static str,
    },
    /// Another batch is already published under this name.
    #[error("another batch is already published here; published batches never change")]
    Published,
}

impl BatchErrorKind {
    fn at(self, file: impl Into<Utf8PathBuf>) -> BatchError {
        BatchError { file: file.into(), kind: self }
    }
}

/// Tensors of a shard in file order: wide elements first, so that all are aligned.
pub(crate) fn tensors(
    shape: &ModelShape,
    sequences: usize,
    tokens: usize,
) -> [(&'static str, safetensors::Dtype, Vec<usize>); 10] {
    use safetensors::Dtype;
    let id = if shape.id_bytes() == 1 { Dtype::U8 } else { Dtype::U16 };
    [
        ("cu_seqlens", Dtype::I64, vec![sequences + 1]),
        ("group_ids", Dtype::I64, vec![sequences]),
        ("policy_versions", Dtype::I64, vec![tokens]),
        ("advantages", Dtype::F32, vec![sequences]),
        ("rewards", Dtype::F32, vec![sequences]),
        ("rollout_logprobs", Dtype::F32, vec![tokens]),
        ("token_ids", Dtype::U32, vec![tokens]),
        ("routed_experts", id, vec![tokens, shape.moe_layers.len(), shape.top_k]),
        ("loss_mask", Dtype::U8, vec![tokens]),
        ("routing_valid", Dtype::U8, vec![tokens]),
    ]
}
