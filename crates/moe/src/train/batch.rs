//! What the model is run on: packed sequences without padding, and recorded routes.
#![expect(clippy::indexing_slicing, reason = "offsets are checked when the batch is made")]

use std::ops::Range;

/// Sequences one after the other, `N` tokens in all.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PackedBatch {
    tokens: Vec<u32>,
    offsets: Vec<usize>,
    scored: Vec<bool>,
}

/// Arrays of a batch that do not fit together or the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// An array has the wrong length.
    #[error("array `{array}` has {found} entries, expected {expected}")]
    Length {
        /// Which.
        array: &'static str,
        /// Its length.
        found: usize,
        /// The length it should have.
        expected: usize,
    },
    /// Offsets do not rise from 0 to the number of tokens.
    #[error(
        "cu_seqlens must rise from 0 to the number of tokens, each sequence at least one token"
    )]
    Offsets,
    /// A token id the model does not know.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        id: u32,
        /// Where in the packed batch.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A sequence longer than the model's context.
    #[error("sequence {sequence} has {tokens} tokens, more than the model's context of {context}")]
    TooLong {
        /// Which.
        sequence: usize,
        /// Its length.
        tokens: usize,
        /// The model's limit.
        context: usize,
    },
    /// A routing row with an unknown or repeated expert.
    #[error(
        "routing row of token {position}, layer {layer}: ids must be distinct and below {experts}"
    )]
    Route {
        /// Where in the packed batch.
        position: usize,
        /// Index among the `MoE` layers.
        layer: usize,
        /// Experts per layer.
        experts: usize,
    },
}

impl PackedBatch {
    /// Checks and wraps: `tokens [N]`, `offsets [S + 1]` rising from 0 to `N`, and `scored [N]`,
    /// which says of which tokens the log-prob is wanted (the first of a sequence never has one).
    ///
    /// # Errors
    /// If the arrays do not fit together.
    pub fn new(
        tokens: Vec<u32>,
        offsets: Vec<usize>,
        scored: Vec<bool>,
    ) -> Result<Self, BatchError> {
        if scored.len() != tokens.len() {
            let (found, expected) = (scored.len(), tokens.len());
            return Err(BatchError::Length { array: "scored", found, expected });
        }
        let ends = (offsets.first(), offsets.last());
        let rising = offsets.windows(2).all(|pair| pair[0] < pair[1]);
        if ends != (Some(&0), Some(&tokens.len())) || !rising {
            return Err(BatchError::Offsets);
        }
        Ok(Self { tokens, offsets, scored })
    }

    /// Checks token ids and lengths against a model.
    ///
    /// # Errors
    /// Names the first token or sequence that does not fit.
    pub fn check(&self, vocab: usize, context: usize) -> Result<(), BatchError> {
        let unknown = |&(_, &id): &(usize, &u32)| id as usize >= vocab;
        if let Some((position, &id)) = self.tokens.iter().enumerate().find(unknown) {
            return Err(BatchError::Token { id, position, vocab });
        }
        for sequence in 0..self.sequences() {
            let tokens = self.range(sequence).len();
            if tokens > context {
                return Err(BatchError::TooLong { sequence, tokens, context });
            }
        }
        Ok(())
    }

    /// The same tokens, every one of them scored.
    #[must_use]
    pub fn with_all_scored(&self) -> Self {
        let scored = vec![true; self.tokens.len()];
        Self { tokens: self.tokens.clone(), offsets: self.offsets.clone(), scored }
    }

    /// Number of sequences `S`.
    pub fn sequences(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Tokens of one sequence, as places in the packed arrays.
    pub fn range(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    /// Token ids `[N]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whose log-prob is wanted `[N]`.
    pub fn scored(&self) -> &[bool] {
        &self.scored
    }
}

/// Recorded experts of the packed tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    ids: Vec<u16>,
    valid: Vec<bool>,
    layers: usize,
    top_k: usize,
}

impl Routes {
    /// Checks and wraps: `ids [N, layers, top_k]`, `valid [N]`. Ids of invalid rows are not read.
    ///
    /// # Errors
    /// If a length disagrees, or a valid row has an unknown or repeated expert.
    pub fn new(
        ids: Vec<u16>,
        valid: Vec<bool>,
        (layers, top_k, experts): (usize, usize, usize),
    ) -> Result<Self, BatchError> {
        let (found, expected) = (ids.len(), valid.len() * layers * top_k);
        if found != expected {
            return Err(BatchError::Length { array: "routed_experts", found, expected });
        }
        let routes = Self { ids, valid, layers, top_k };
        for position in (0..routes.valid.len()).filter(|&p| routes.valid[p]) {
            for layer in 0..layers {
                let row = routes.layer(position, layer);
                let known = row.iter().all(|&e| usize::from(e) < experts);
                if !known || row.iter().enumerate().any(|(k, e)| row[..k].contains(e)) {
                    return Err(BatchError::Route { position, layer, experts });
                }
            }
        }
        Ok(routes)
    }

    /// Number of rows `N`, invalid ones included.
    pub fn rows(&self) -> usize {
        self.valid.len()
    }

    /// Whether a token has a row.
    pub fn is_valid(&self, position: usize) -> bool {
        self.valid[position]
    }

    /// Ids of a token, all layers: `[layers · top_k]`.
    pub fn row(&self, position: usize) -> &[u16] {
        let width = self.layers * self.top_k;
        &self.ids[position * width..(position + 1) * width]
    }

    /// Ids of a token at one layer: `[top_k]`.
    pub fn layer(&self, position: usize, layer: usize) -> &[u16] {
        &self.row(position)[layer * self.top_k..(layer + 1) * self.top_k]
    }

    /// Layers per row.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Experts per layer of a row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }
}
