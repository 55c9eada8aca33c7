//! The shape of a Mixture-of-Experts model, as far as routing needs it.

use serde::{Deserialize, Serialize};

/// The shape of a model's routing rows. It is fixed for a run, and dtype and row size follow from
/// it, never from the data.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelShape {
    /// Number of hidden layers, including dense ones (SGLang and vLLM send a part of a row for
    /// each).
    pub hidden_layers: usize,
    /// Global indices of the MoE layers, ascending. A stored row has one part for each.
    pub moe_layers: Vec<usize>,
    /// Number of experts per MoE layer (logical ones, without copies for load balancing).
    pub experts: usize,
    /// Number of experts chosen per token and layer.
    pub top_k: usize,
    /// Vocabulary size; every token id is smaller.
    pub vocab: usize,
    /// Longest sequence that the model may process, in tokens.
    pub context: usize,
}

impl ModelShape {
    /// Size of a stored expert id in bytes: 1 for up to 256 experts, else 2.
    pub fn id_bytes(&self) -> usize {
        if self.experts <= 256 { 1 } else { 2 }
    }

    /// Number of expert ids in a stored row: MoE layers × top-k.
    pub fn ids_per_row(&self) -> usize {
        self.moe_layers.len() * self.top_k
    }

    /// Size of a stored row in bytes.
    pub fn row_bytes(&self) -> usize {
        self.ids_per_row() * self.id_bytes()
    }
}
