//! `config.json` of a Qwen3-MoE checkpoint in the Hugging Face layout.

use camino::Utf8Path;
use orchestrate_types::ModelShape;
use serde::{Deserialize, Serialize};

/// A checkpoint folder that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint {path}: {problem}")]
pub struct CheckpointError {
    /// The file or folder.
    pub path: String,
    /// What is wrong, and what to do.
    pub problem: String,
    /// The failed file operation, where that is the problem.
    source: Option<std::io::Error>,
}

impl CheckpointError {
    /// An error about `path`.
    pub fn new(path: &Utf8Path, problem: impl std::fmt::Display) -> Self {
        Self { path: path.to_string(), problem: problem.to_string(), source: None }
    }

    /// A file operation on `path` that failed.
    pub(crate) fn io(path: &Utf8Path, source: std::io::Error) -> Self {
        Self { path: path.to_string(), problem: source.to_string(), source: Some(source) }
    }

    /// Whether the disk, or a quota on it, is full.
    pub fn is_disk_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let kind = self.source.as_ref().map(std::io::Error::kind);
        matches!(kind, Some(StorageFull | QuotaExceeded))
    }
}

/// Architecture of a Qwen3-MoE model. Field names are those of `config.json`; the spellings of
/// newer writers (`num_local_experts`, `rope_parameters`, `dtype`) are read too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// `["Qwen3MoeForCausalLM"]`.
    #[serde(default = "architectures")]
    pub architectures: Vec<String>,
    /// `qwen3_moe`.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Hidden width of one expert.
    pub moe_intermediate_size: usize,
    /// Hidden width of dense layers (none in our own models).
    #[serde(default)]
    pub intermediate_size: usize,
    /// Experts per MoE layer.
    #[serde(alias = "num_local_experts")]
    pub num_experts: usize,
    /// Experts chosen per token.
    pub num_experts_per_tok: usize,
    /// Whether gate weights are renormalised over the chosen experts. The class default of the
    /// original library is `false`, so an absent field means `false`.
    #[serde(default)]
    pub norm_topk_prob: bool,
    /// Vocabulary.
    pub vocab_size: usize,
    /// RoPE base.
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Newer place of the RoPE base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_parameters: Option<RopeParameters>,
    /// ε of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Every `decoder_sparse_step`-th layer is MoE.
    #[serde(default = "one")]
    pub decoder_sparse_step: usize,
    /// Layers that are dense all the same.
    #[serde(default)]
    pub mlp_only_layers: Vec<usize>,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Biases in the attention projections; only `false` is supported.
    #[serde(default)]
    pub attention_bias: bool,
    /// `silu`.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Type of the stored weights.
    #[serde(default = "float32", alias = "dtype")]
    pub torch_dtype: String,
}

/// `rope_parameters` of newer configs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeParameters {
    /// RoPE base.
    pub rope_theta: f64,
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

impl ModelConfig {
    /// Reads and checks `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// If it is missing, is not JSON of this form, or describes a model this crate cannot run.
    pub fn load(folder: &Utf8Path) -> Result<Self, CheckpointError> {
        let path = folder.join("config.json");
        let text = fs_err::read_to_string(&path).map_err(|e| CheckpointError::new(&path, e))?;
        let config: Self =
            serde_json::from_str(&text).map_err(|e| CheckpointError::new(&path, e))?;
        config.check().map_err(|problem| CheckpointError::new(&path, problem))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if self.model_type != "qwen3_moe" {
            return Err(format!("model_type `{}` is not `qwen3_moe`", self.model_type));
        }
        if !self.mlp_only_layers.is_empty() || self.decoder_sparse_step != 1 {
            return Err("dense layers are not supported: every layer must be MoE".into());
        }
        if self.attention_bias || self.hidden_act != "silu" {
            return Err("attention_bias and activations other than silu are not supported".into());
        }
        if self.num_experts_per_tok == 0 || self.num_experts_per_tok > self.num_experts {
            return Err("num_experts_per_tok must lie in 1..=num_experts".into());
        }
        let heads = (self.num_attention_heads, self.num_key_value_heads);
        if heads.1 == 0 || !heads.0.is_multiple_of(heads.1) || !self.head_dim.is_multiple_of(2) {
            return Err("query heads must be a multiple of key heads, and head_dim even".into());
        }
        Ok(())
    }

    /// RoPE base, wherever it is written; 10,000 if nowhere.
    pub fn rope_base(&self) -> f64 {
        let newer = self.rope_parameters.as_ref().map(|r| r.rope_theta);
        self.rope_theta.or(newer).unwrap_or(10_000.0)
    }

    /// The shape routing rows have.
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
