//! `config.json` of a Qwen3-MoE checkpoint in the Hugging Face layout.

use camino::Utf8Path;
use orchestrate_types::ModelShape;
use serde::{Deserialize, Serialize};

/// A checkpoint file or folder that cannot be read, written or used.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint {path}: {problem}")]
pub struct CheckpointError {
    /// Path of the file or folder.
    pub path: String,
    /// The problem, and what to do about it.
    pub problem: String,
    /// The failed file operation, if that is the cause.
    source: Option<std::io::Error>,
}

impl CheckpointError {
    /// Creates an error about `path`; `problem` completes the sentence `checkpoint {path}: …`.
    pub fn new(path: &Utf8Path, problem: impl std::fmt::Display) -> Self {
        Self { path: path.to_string(), problem: problem.to_string(), source: None }
    }

    /// Creates an error from a failed file operation on `path`, which it keeps as its source.
    pub(crate) fn io(path: &Utf8Path, source: std::io::Error) -> Self {
        Self { path: path.to_string(), problem: source.to_string(), source: Some(source) }
    }

    /// Whether the cause is a full disk or an exhausted quota.
    pub fn is_disk_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let kind = self.source.as_ref().map(std::io::Error::kind);
        matches!(kind, Some(StorageFull | QuotaExceeded))
    }
}

/// Architecture of a Qwen3-MoE model. Field names are those of `config.json`; the newer spellings
/// (`num_local_experts`, `rope_parameters`, `dtype`) are accepted too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the keys of config.json")]
pub struct ModelConfig {
    /// Model classes of Hugging Face transformers; by default `["Qwen3MoeForCausalLM"]`.
    #[serde(default = "architectures")]
    pub architectures: Vec<String>,
    /// Model family; must be `qwen3_moe`.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of transformer layers.
    pub num_hidden_layers: usize,
    /// Number of query heads; a multiple of the number of key and value heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, at least 1.
    pub num_key_value_heads: usize,
    /// Width of one attention head; even.
    pub head_dim: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Inner width of dense layers; unused, since every layer must be MoE.
    #[serde(default)]
    pub intermediate_size: usize,
    /// Number of experts per layer.
    #[serde(alias = "num_local_experts")]
    pub num_experts: usize,
    /// Number of experts chosen per token (top-k), in `1..=num_experts`.
    pub num_experts_per_tok: usize,
    /// Whether gate weights are renormalised over the chosen experts. Defaults to `false`, as in
    /// Hugging Face transformers.
    #[serde(default)]
    pub norm_topk_prob: bool,
    /// Number of token ids in the vocabulary.
    pub vocab_size: usize,
    /// RoPE base; see [`ModelConfig::rope_base`].
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Where newer configs store the RoPE base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_parameters: Option<RopeParameters>,
    /// ε of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output head shares its weights with the token embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Every `decoder_sparse_step`-th layer is MoE; must be 1.
    #[serde(default = "one")]
    pub decoder_sparse_step: usize,
    /// Indices of dense layers; must be empty.
    #[serde(default)]
    pub mlp_only_layers: Vec<usize>,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Whether attention projections have biases; must be `false`.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether attention is limited to a window; must be `false`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub use_sliding_window: bool,
    /// How RoPE is scaled; must be absent or of the type `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Activation function; must be `silu`.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Data type of the stored weights, e.g. `bfloat16`.
    #[serde(default = "float32", alias = "dtype")]
    pub torch_dtype: String,
}

/// The `rope_parameters` object of newer configs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeParameters {
    /// RoPE base (θ).
    pub rope_theta: f64,
    /// How it is scaled; must be absent or `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_type: Option<String>,
}

/// The `rope_scaling` object of older configs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    /// Its type; must be `default`.
    #[serde(alias = "type")]
    pub rope_type: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

fn architectures() -> Vec<String> {
    vec!["Qwen3MoeForCausalLM".into()]
}

fn one() -> usize {
    1
}

fn silu() -> String {
    "silu".into()
}

fn float32() -> String {
    "float32".into()
}

/// Largest width, vocabulary and context of a model.
const LARGEST_WIDTH: usize = 1 << 24;
/// Largest number of layers, and of experts in one.
const LARGEST_DEPTH: usize = 1 << 12;

impl ModelConfig {
    /// Reads and checks `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// If the file is missing, cannot be parsed, or describes a model this crate cannot run.
    pub fn load(folder: &Utf8Path) -> Result<Self, CheckpointError> {
        let path = folder.join("config.json");
        let text = fs_err::read_to_string(&path).map_err(|e| CheckpointError::new(&path, e))?;
        let config: Self =
            serde_json::from_str(&text).map_err(|e| CheckpointError::new(&path, e))?;
        config.check(&path)?;
        Ok(config)
    }

    fn check(&self, path: &Utf8Path) -> Result<(), CheckpointError> {
        let invalid = |problem: &str| Err(CheckpointError::new(path, problem));
        if self.model_type != "qwen3_moe" {
            return invalid(&format!("model_type `{}` must be `qwen3_moe`", self.model_type));
        }
        if !self.mlp_only_layers.is_empty() || self.decoder_sparse_step != 1 {
            return invalid("dense layers are not supported: every layer must be MoE");
        }
        if self.attention_bias || self.hidden_act != "silu" {
            return invalid("attention_bias and activations other than silu are not supported");
        }
        let scalings = [
            self.rope_scaling.as_ref().map(|scaling| &scaling.rope_type),
            self.rope_parameters.as_ref().and_then(|parameters| parameters.rope_type.as_ref()),
        ];
        if let Some(kind) = scalings.into_iter().flatten().find(|kind| *kind != "default") {
            return invalid(&format!("RoPE scaling of the type `{kind}` is not supported"));
        }
        if self.use_sliding_window {
            return invalid("attention in a sliding window is not supported");
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps.is_finite()) {
            return invalid(&format!("rms_norm_eps is {}; must be above 0", self.rms_norm_eps));
        }
        self.check_sizes(path)?;
        if self.num_experts_per_tok == 0 || self.num_experts_per_tok > self.num_experts {
            return invalid("num_experts_per_tok must be in 1..=num_experts");
        }
        let heads = (self.num_attention_heads, self.num_key_value_heads);
        if heads.1 == 0 || !heads.0.is_multiple_of(heads.1) || !self.head_dim.is_multiple_of(2) {
            return invalid(
                "num_attention_heads must be a multiple of num_key_value_heads, and head_dim even",
            );
        }
        Ok(())
    }

    /// Refuses sizes that no model has: products of two others must not overflow.
    fn check_sizes(&self, path: &Utf8Path) -> Result<(), CheckpointError> {
        for (key, size, largest) in [
            ("hidden_size", self.hidden_size, LARGEST_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, LARGEST_DEPTH),
            ("num_attention_heads", self.num_attention_heads, LARGEST_WIDTH),
            ("num_key_value_heads", self.num_key_value_heads, LARGEST_WIDTH),
            ("head_dim", self.head_dim, LARGEST_WIDTH),
            ("moe_intermediate_size", self.moe_intermediate_size, LARGEST_WIDTH),
            ("num_experts", self.num_experts, LARGEST_DEPTH),
            ("vocab_size", self.vocab_size, LARGEST_WIDTH),
            ("max_position_embeddings", self.max_position_embeddings, LARGEST_WIDTH),
        ] {
            if size == 0 || size > largest {
                let problem = format!("{key} is {size}; must be in 1..={largest}");
                return Err(CheckpointError::new(path, problem));
            }
        }
        Ok(())
    }

    /// RoPE base: `rope_theta`, else that of `rope_parameters`, else 10,000.
    pub fn rope_base(&self) -> f64 {
        let newer = self.rope_parameters.as_ref().map(|r| r.rope_theta);
        self.rope_theta.or(newer).unwrap_or(10_000.0)
    }

    /// The shape that routing masks of this model have.
    pub fn shape(&self) -> ModelShape {
        ModelShape {
            hidden_layers: self.num_hidden_layers,
            moe_layers: (0..self.num_hidden_layers).collect(),
            experts: self.num_experts,
            top_k: self.num_experts_per_tok,
            vocab: self.vocab_size,
            context: self.max_position_embeddings,
        }
    }
}
