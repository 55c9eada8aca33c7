//! `manifest.json` and the tensors that follow from it.

use super::{BatchErrorKind, BatchMeta, FORMAT_VERSION};
use orchestrate_types::{ModelShape, PolicyVersion};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// Kind of record that this version writes and reads: a router's choice of experts.
pub(super) const EXPERTS: &str = "experts";
/// Name of the tensor that maps tokens to rows where rows are shared.
pub(super) const ROW_INDEX: &str = "routed_row";

/// Content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the folder format, [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Id of the run.
    pub run: String,
    /// Idempotency key of the step.
    pub step_id: String,
    /// Global step of the run, from 1.
    pub global_step: u64,
    /// Version the trainer's weights must have before the step.
    pub base_version: PolicyVersion,
    /// Shape of the model the batch was sampled from.
    pub model: ModelShape,
    /// Choices that were recorded per token and layer. Readers use the kinds they know and
    /// ignore the others.
    pub records: Vec<RecordEntry>,
    /// Number of sequences in all shards.
    pub sequences: usize,
    /// Number of tokens in all shards.
    pub tokens: usize,
    /// The shards, in order of their sequences.
    pub shards: Vec<ShardEntry>,
}

/// One recorded choice: `per_layer` small numbers per token and layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordEntry {
    /// Meaning of the numbers; `experts` = expert ids that a router chose.
    pub kind: String,
    /// Tensor that holds them, `[rows, layers, per_layer]`.
    pub tensor: String,
    /// Dtype of that tensor, `u8` or `u16`: fixed by the model, not by the data.
    pub dtype: String,
    /// Global numbers of its layers, in order.
    pub layers: Vec<usize>,
    /// Numbers per token and layer; top-k for `experts`.
    pub per_layer: usize,
    /// Tensor `[N]` that gives each token its row; absent where token `t` has row `t`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_index: Option<String>,
}

/// One shard in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name within the batch folder.
    pub file: String,
    /// Number of sequences, `S`.
    pub sequences: usize,
    /// Number of tokens, `N`.
    pub tokens: usize,
    /// Rows of `routed_experts`: `N`, or fewer where prefix rows are shared.
    pub rows: usize,
    /// File size in bytes.
    pub bytes: u64,
    /// BLAKE3 of the file, hexadecimal.
    pub blake3: String,
}

impl Manifest {
    /// The manifest of a batch that consists of `shards`.
    pub(super) fn of(meta: &BatchMeta, shards: Vec<ShardEntry>) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            run: meta.run.clone(),
            step_id: meta.step_id.clone(),
            global_step: meta.global_step,
            base_version: meta.base_version,
            model: meta.shape.clone(),
            records: vec![experts_record(&meta.shape, meta.share_prefix_rows)],
            sequences: shards.iter().map(|shard| shard.sequences).sum(),
            tokens: shards.iter().map(|shard| shard.tokens).sum(),
            shards,
        }
    }

    /// Whether prefix rows are shared, so that `routed_row` gives the row of each token.
    pub fn shares_rows(&self) -> bool {
        self.records.iter().any(|record| record.kind == EXPERTS && record.row_index.is_some())
    }

    /// Reads and checks the text of a manifest.
    pub(super) fn parse(text: &[u8]) -> Result<Self, BatchErrorKind> {
        #[derive(Deserialize)]
        struct Versioned {
            format_version: u32,
        }
        // The version first: a newer manifest may have other fields.
        let versioned: Versioned =
            serde_json::from_slice(text).map_err(BatchErrorKind::Manifest)?;
        if versioned.format_version != FORMAT_VERSION {
            return Err(BatchErrorKind::Version(versioned.format_version));
        }
        let manifest: Self = serde_json::from_slice(text).map_err(BatchErrorKind::Manifest)?;
        manifest.check().map_err(BatchErrorKind::Inconsistent)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), &'static str> {
        let shape = &self.model;
        let ids = shape.moe_layers.len().checked_mul(shape.top_k);
        if ids.is_none_or(|ids| ids == 0 || ids > 1 << 24)
            || shape.top_k > shape.experts
            || shape.experts > 1 << 16
            || !shape.moe_layers.is_sorted_by(|a, b| a < b)
            || shape.moe_layers.last().is_none_or(|&last| last >= shape.hidden_layers)
        {
            return Err("its model shape is not valid for a MoE model");
        }
        let records: Vec<&RecordEntry> =
            self.records.iter().filter(|record| record.kind == EXPERTS).collect();
        let &[record] = records.as_slice() else {
            return Err("it does not have one record of kind `experts`");
        };
        if *record != experts_record(shape, record.row_index.is_some()) {
            return Err("its record of kind `experts` does not follow from the model");
        }
        let sum = |count: fn(&ShardEntry) -> usize| {
            self.shards.iter().map(count).try_fold(0usize, usize::checked_add)
        };
        if sum(|shard| shard.sequences) != Some(self.sequences)
            || sum(|shard| shard.tokens) != Some(self.tokens)
        {
            return Err("its totals do not match its shards");
        }
        let shared = record.row_index.is_some();
        if self.shards.iter().any(|s| s.rows > s.tokens || (!shared && s.rows != s.tokens)) {
            return Err("the row count of a shard does not match its tokens");
        }
        let plain = |file: &str| !file.is_empty() && !file.contains(['/', '\\']) && file != "..";
        if !self.shards.iter().all(|shard| plain(&shard.file)) {
            return Err("the file name of a shard points outside of the folder");
        }
        Ok(())
    }

    /// Compares the batch's model with the reader's.
    pub(super) fn require_model(&self, expected: &ModelShape) -> Result<(), BatchErrorKind> {
        let found = &self.model;
        let differ = |field, found: String, expected: String| {
            Err(BatchErrorKind::Model { field, found, expected })
        };
        if found.moe_layers != expected.moe_layers {
            let show = |layers: &[usize]| format!("{layers:?}");
            return differ("moe_layers", show(&found.moe_layers), show(&expected.moe_layers));
        }
        for (field, found, expected) in [
            ("hidden_layers", found.hidden_layers, expected.hidden_layers),
            ("experts", found.experts, expected.experts),
            ("top_k", found.top_k, expected.top_k),
            ("vocab", found.vocab, expected.vocab),
        ] {
            if found != expected {
                return differ(field, found.to_string(), expected.to_string());
            }
        }
        Ok(())
    }
}

fn experts_record(shape: &ModelShape, shared: bool) -> RecordEntry {
    RecordEntry {
        kind: EXPERTS.to_owned(),
        tensor: "routed_experts".to_owned(),
        dtype: if shape.id_bytes() == 1 { "u8" } else { "u16" }.to_owned(),
        layers: shape.moe_layers.clone(),
        per_layer: shape.top_k,
        row_index: shared.then(|| ROW_INDEX.to_owned()),
    }
}

/// Sizes of a shard's tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Number of sequences, `S`.
    pub(super) sequences: usize,
    /// Number of tokens, `N`.
    pub(super) tokens: usize,
    /// Rows of `routed_experts`.
    pub(super) rows: usize,
    /// Whether the shard has the tensor `routed_row`.
    pub(super) shared: bool,
}

/// A tensor's name, dtype and shape.
pub(super) type TensorPlan = (&'static str, Dtype, Vec<usize>);

/// Tensors of a shard in file order. Wide elements come first, so that all are aligned; the rows
/// come last, so that they can be written before their number is known.
pub(super) fn tensors(shape: &ModelShape, extent: Extent) -> Vec<TensorPlan> {
    let Extent { sequences, tokens, rows, shared } = extent;
    let id = if shape.id_bytes() == 1 { Dtype::U8 } else { Dtype::U16 };
    let mut tensors = vec![
        ("cu_seqlens", Dtype::I64, vec![sequences + 1]),
        ("group_ids", Dtype::I64, vec![sequences]),
        ("policy_versions", Dtype::I64, vec![tokens]),
        ("advantages", Dtype::F32, vec![sequences]),
        ("rewards", Dtype::F32, vec![sequences]),
        ("rollout_logprobs", Dtype::F32, vec![tokens]),
        ("token_ids", Dtype::U32, vec![tokens]),
    ];
    if shared {
        tensors.push((ROW_INDEX, Dtype::U32, vec![tokens]));
    }
    tensors.extend([
        ("loss_mask", Dtype::U8, vec![tokens]),
        ("routing_valid", Dtype::U8, vec![tokens]),
        ("routed_experts", id, vec![rows, shape.moe_layers.len(), shape.top_k]),
    ]);
    tensors
}

/// Size of a tensor in bytes.
pub(super) fn tensor_bytes((_, dtype, dims): &TensorPlan) -> usize {
    dims.iter().product::<usize>() * dtype.bitsize() / 8
}
