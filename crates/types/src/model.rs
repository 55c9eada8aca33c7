//! The shape of a Mixture-of-Experts model, as far as routing needs it.

use serde::{Deserialize, Serialize};

/// What the routing rows of a model look like. Fixed for a run: dtype and row size follow from
/// this, never from the data.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelShape {
    /// All hidden layers, dense ones included (SGLang and vLLM send a row part for each).
    pub hidden_layers: usize,
    /// Global numbers of the MoE layers, ascending; a stored row has one part for each of these.
    pub moe_layers: Vec<usize>,
    /// Experts per MoE layer (logical, before any load-balancing copies).
    pub experts: usize,
    /// Experts chosen per token and layer.
    pub top_k: usize,
    /// Vocabulary size; every token id is below it.
    pub vocab: usize,
    /// Longest sequence the model may process, in tokens.
    pub context: usize,
}

impl ModelShape {
    /// Bytes per stored expert id: 1 up to 256 experts, else 2.
    pub fn id_bytes(&self) -> usize {
        if self.experts <= 256 { 1 } else { 2 }
    }

    /// Expert ids in one stored row: MoE layers × top-k.
    pub fn ids_per_row(&self) -> usize {
        self.moe_layers.len() * self.top_k
    }

    /// Bytes of one stored row.
    pub fn row_bytes(&self) -> usize {
        self.ids_per_row() * self.id_bytes()
    }
}
