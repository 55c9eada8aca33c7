//! Layout of all parameters in one flat buffer. Gradients and optimizer moments use the same
//! layout, so the optimizer and the gradient norm are plain loops.
#![expect(clippy::indexing_slicing, reason = "ranges are built over the buffer they index")]

use super::real::Real;
use crate::weights::{Tensor, Weights, tensor_shapes};
use crate::{CheckpointError, ModelConfig};
use camino::Utf8Path;
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of one layer's parameters. Adjacent projections of the same input form one matrix.
#[derive(Debug, Clone)]
pub(crate) struct LayerSlots {
    pub(crate) attention_norm: Range<usize>,
    /// Query, key and value projections, stacked: `[(H + 2·KV)·head_dim, hidden]`.
    pub(crate) qkv: Range<usize>,
    pub(crate) output: Range<usize>,
    pub(crate) query_norm: Range<usize>,
    pub(crate) key_norm: Range<usize>,
    pub(crate) moe_norm: Range<usize>,
    pub(crate) router: Range<usize>,
    pub(crate) experts: Vec<ExpertSlots>,
}

/// Ranges of one expert's parameters.
#[derive(Debug, Clone)]
pub(crate) struct ExpertSlots {
    /// Gate and up projections, stacked: `[2·width, hidden]`.
    pub(crate) gate_up: Range<usize>,
    pub(crate) down: Range<usize>,
}

/// Ranges of all parameters in the flat buffer.
#[derive(Debug, Clone)]
pub struct Layout {
    entries: Vec<(String, Vec<usize>, Range<usize>)>,
    pub(crate) embedding: Range<usize>,
    pub(crate) layers: Vec<LayerSlots>,
    pub(crate) norm: Range<usize>,
    /// The range of the embedding if the head is tied to it.
    pub(crate) head: Range<usize>,
    total: usize,
}

impl Layout {
    /// Computes the layout for a model configuration.
    pub fn new(config: &ModelConfig) -> Self {
        let mut entries = Vec::new();
        let mut total = 0;
        for (name, shape) in tensor_shapes(config) {
            let end = total + shape.iter().product::<usize>();
            entries.push((name, shape, total..end));
            total = end;
        }
        // Parameters are laid out in the order of `tensor_shapes`.
        let mut walk = entries.iter().map(|(_, _, range)| range.clone());
        let mut next = || walk.next().unwrap_or_default();
        let embedding = next();
        let layers = (0..config.num_hidden_layers)
            .map(|_| LayerSlots {
                attention_norm: next(),
                qkv: join(&next(), &[next(), next()]),
                output: next(),
                query_norm: next(),
                key_norm: next(),
                moe_norm: next(),
                router: next(),
                experts: (0..config.num_experts)
                    .map(|_| ExpertSlots { gate_up: join(&next(), &[next()]), down: next() })
                    .collect(),
            })
            .collect();
        let norm = next();
        let head = if config.tie_word_embeddings { embedding.clone() } else { next() };
        Self { entries, embedding, layers, norm, head, total }
    }

    /// Total number of parameter values.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Name, shape and range of every tensor, in network order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &[usize], Range<usize>)> {
        self.entries.iter().map(|(name, shape, r)| (name.as_str(), shape.as_slice(), r.clone()))
    }

    /// Copies weights into one flat buffer.
    pub fn flatten<T: Real>(&self, weights: &Weights) -> Vec<T> {
        let mut flat = vec![T::ZERO; self.total];
        for (name, _, range) in self.entries() {
            let values = weights.get(name).unwrap_or_default();
            for (to, &from) in flat[range].iter_mut().zip(values) {
                *to = T::from_f64(f64::from(from));
            }
        }
        flat
    }

    /// Splits a flat buffer into named f32 tensors.
    #[expect(clippy::cast_possible_truncation, reason = "stored in f32")]
    pub fn unflatten<T: Real>(&self, flat: &[T]) -> BTreeMap<String, Tensor> {
        self.entries()
            .map(|(name, shape, range)| {
                let data = flat[range].iter().map(|v| v.to_f64() as f32).collect();
                (name.to_owned(), Tensor { shape: shape.to_vec(), data })
            })
            .collect()
    }

    /// Converts a flat buffer to weights.
    ///
    /// # Errors
    /// If `config` is not the configuration of this layout.
    pub fn weights<T: Real>(
        &self,
        config: &ModelConfig,
        flat: &[T],
    ) -> Result<Weights, CheckpointError> {
        Weights::from_tensors(config.clone(), self.unflatten(flat), Utf8Path::new("trainer"))
    }
}

fn join(first: &Range<usize>, others: &[Range<usize>]) -> Range<usize> {
    first.start..others.last().map_or(first.end, |last| last.end)
}
