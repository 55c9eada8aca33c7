//! The parameters of a Qwen3-MoE model in f32, by their Hugging Face names.
//!
//! Invariant: a [`Weights`] holds every tensor that its configuration requires, in the required
//! shape ([`tensor_shapes`]). Files are read by [`crate::checkpoint`].

use crate::{CheckpointError, ModelConfig};
use camino::Utf8Path;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// Name of the token embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output head.
pub(crate) const HEAD: &str = "lm_head.weight";

/// One parameter tensor, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Values; as many as the product of `shape`.
    pub data: Vec<f32>,
}

impl Tensor {
    fn same_bits(&self, other: &Self) -> bool {
        let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        self.shape == other.shape && self.data.iter().zip(&other.data).all(equal)
    }
}

/// Number of tensors up to which a missing one is named.
const LISTED_TENSORS: usize = 1 << 16;

/// All parameters of one model, with its configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    config: ModelConfig,
    tensors: BTreeMap<String, Tensor>,
}

/// Names and shapes of all parameters a model of this configuration has, in network order:
/// embedding, layers, final norm, and `lm_head.weight` unless it is tied to the embedding.
pub fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, head) = (config.hidden_size, config.head_dim);
    let (wide, narrow) = (config.num_attention_heads * head, config.num_key_value_heads * head);
    let width = config.moe_intermediate_size;
    let mut all = vec![(EMBEDDING.to_owned(), vec![config.vocab_size, hidden])];
    for layer in 0..config.num_hidden_layers {
        let mut put = |name: &str, shape: Vec<usize>| {
            all.push((format!("model.layers.{layer}.{name}"), shape));
        };
        put("input_layernorm.weight", vec![hidden]);
        put("self_attn.q_proj.weight", vec![wide, hidden]);
        put("self_attn.k_proj.weight", vec![narrow, hidden]);
        put("self_attn.v_proj.weight", vec![narrow, hidden]);
        put("self_attn.o_proj.weight", vec![hidden, wide]);
        put("self_attn.q_norm.weight", vec![head]);
        put("self_attn.k_norm.weight", vec![head]);
        put("post_attention_layernorm.weight", vec![hidden]);
        put("mlp.gate.weight", vec![config.num_experts, hidden]);
        for expert in 0..config.num_experts {
            put(&format!("mlp.experts.{expert}.gate_proj.weight"), vec![width, hidden]);
            put(&format!("mlp.experts.{expert}.up_proj.weight"), vec![width, hidden]);
            put(&format!("mlp.experts.{expert}.down_proj.weight"), vec![hidden, width]);
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![hidden]));
    if !config.tie_word_embeddings {
        all.push((HEAD.to_owned(), vec![config.vocab_size, hidden]));
    }
    all
}

impl Weights {
    /// Selects the tensors that a model of this configuration needs and drops the others. `path` is
    /// where the tensors came from; it appears in errors only.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape or a value that is not finite, or if an output head that is tied to the
    /// embedding differs from it: engines disagree about which of the two to use.
    pub fn from_tensors(
        config: ModelConfig,
        mut tensors: BTreeMap<String, Tensor>,
        path: &Utf8Path,
    ) -> Result<Self, CheckpointError> {
        // Listing the tensors of a large model takes long; a file has at most those that it names.
        let expected =
            config.num_hidden_layers.saturating_mul(config.num_experts).saturating_mul(3);
        if expected > tensors.len().max(LISTED_TENSORS) {
            let problem = format!(
                "config.json requires more than {expected} tensors, but there are {}",
                tensors.len()
            );
            return Err(CheckpointError::new(path, problem));
        }
        let mut taken = BTreeMap::new();
        for (name, shape) in tensor_shapes(&config) {
            let tensor = tensors
                .remove(&name)
                .ok_or_else(|| CheckpointError::new(path, format!("tensor `{name}` is missing")))?;
            if tensor.shape != shape {
                let problem = format!(
                    "tensor `{name}` has shape {:?}, but config.json requires {shape:?}",
                    tensor.shape
                );
                return Err(CheckpointError::new(path, problem));
            }
            // A sampler would give tokens of such a model some probability, and nothing would show that it is broken.
            if !tensor.data.iter().all(|value| value.is_finite()) {
                let problem =
                    format!("tensor `{name}` has values that are infinite or not numbers");
                return Err(CheckpointError::new(path, problem));
            }
            taken.insert(name, tensor);
        }
        if config.tie_word_embeddings
            && let (Some(head), Some(embedding)) = (tensors.get(HEAD), taken.get(EMBEDDING))
            && !head.same_bits(embedding)
        {
            let problem = format!(
                "tensor `{HEAD}` differs from the embedding it is tied to; remove it, or set \
                 tie_word_embeddings to false"
            );
            return Err(CheckpointError::new(path, problem));
        }
        Ok(Self { config, tensors: taken })
    }

    /// Initialises a new model: normal values with standard deviation 0.02, divided by
    /// `sqrt(2 × layers)` for projections into the residual stream; norms are 1. The same seed
    /// gives the same model.
    pub fn random(config: ModelConfig, seed: u64) -> Self {
        let residual = 0.02 / (2.0 * config.num_hidden_layers as f64).sqrt();
        Self::sample(config, seed, |name, _| if is_residual(name) { residual } else { 0.02 })
    }

    /// Initialises a new model of small width: standard deviation `0.5 / sqrt(inputs)`, half of
    /// that for projections into the residual stream, 0.1 for embeddings; norms are 1. With the
    /// usual 0.02, attention in a model of width 100 is too weak to learn copying.
    pub fn random_by_width(config: ModelConfig, seed: u64) -> Self {
        Self::sample(config, seed, |name, inputs| {
            if name.ends_with("embed_tokens.weight") {
                0.1
            } else if is_residual(name) {
                0.25 / inputs.sqrt()
            } else {
                0.5 / inputs.sqrt()
            }
        })
    }

    /// Draws every tensor; `deviation` maps its name and number of inputs to a standard deviation.
    fn sample(config: ModelConfig, seed: u64, deviation: impl Fn(&str, f64) -> f64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tensors = BTreeMap::new();
        for (name, shape) in tensor_shapes(&config) {
            let count = shape.iter().product();
            let inputs = shape.last().map_or(1.0, |&n| n as f64);
            let data = if name.ends_with("norm.weight") {
                vec![1.0; count]
            } else {
                normal(&mut rng, count, deviation(&name, inputs))
            };
            tensors.insert(name, Tensor { shape, data });
        }
        Self { config, tensors }
    }

    /// Architecture of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Values of one tensor, row-major; `None` if the model has no tensor of that name.
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(|t| t.data.as_slice())
    }

    /// All tensors by their Hugging Face names.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// Splits the weights into configuration and tensors.
    pub fn into_parts(self) -> (ModelConfig, BTreeMap<String, Tensor>) {
        (self.config, self.tensors)
    }

    /// Total number of parameter values.
    pub fn parameters(&self) -> usize {
        self.tensors.values().map(|t| t.data.len()).sum()
    }
}

fn is_residual(name: &str) -> bool {
    name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight")
}

/// Normal values by Box–Muller, which is short and gives the same values on every machine.
#[expect(clippy::cast_possible_truncation, reason = "weights are stored in f32")]
fn normal(rng: &mut ChaCha8Rng, count: usize, deviation: f64) -> Vec<f32> {
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let (a, b): (f64, f64) = (rng.random(), rng.random());
        let radius = deviation * (-2.0 * libm::log(1.0 - a)).sqrt();
        let angle = std::f64::consts::TAU * b;
        values.push((radius * libm::cos(angle)) as f32);
        values.push((radius * libm::sin(angle)) as f32);
    }
    values.truncate(count);
    values
}
