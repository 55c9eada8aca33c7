//! Inputs of the model: sequences packed without padding, and recorded routes.
#![expect(clippy::indexing_slicing, reason = "offsets are checked when the batch is created")]

use std::ops::Range;

/// `S` sequences stored one after the other without padding, `N` tokens in total.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PackedBatch {
    tokens: Vec<u32>,
    offsets: Vec<usize>,
    scored: Vec<bool>,
}

/// Batch arrays that do not fit together, or do not fit the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// An array has the wrong length.
    #[error("array `{array}` has {found} entries, expected {expected}")]
    Length {
        /// Name of the array.
        array: &'static str,
        /// Its length.
        found: usize,
        /// The length it should have.
        expected: usize,
    },
    /// Sequence offsets do not rise from 0 to the number of tokens.
    #[error(
        "cu_seqlens must rise from 0 to the number of tokens, each sequence at least one token"
    )]
    Offsets,
    /// A token id is outside the vocabulary.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab}")]
    Token {
        /// The token id.
        id: u32,
        /// Position in the packed batch.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A sequence is longer than the model's context.
    #[error("sequence {sequence} has {tokens} tokens, more than the model's context of {context}")]
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Its length.
        tokens: usize,
        /// The model's context length, in tokens.
        context: usize,
    },
    /// A routing row has an unknown or repeated expert.
    #[error(
        "routing row of token {position}, layer {layer}: ids must be distinct and below {experts}"
    )]
    Route {
        /// Position in the packed batch.
        position: usize,
        /// Index of the `MoE` layer.
        layer: usize,
        /// Number of experts per layer.
        experts: usize,
    },
}

impl PackedBatch {
    /// Creates a batch from `tokens [N]`, `offsets [S + 1]` rising from 0 to `N`, and `scored [N]`,
    /// which marks the tokens whose log-prob is computed (never the first token of a sequence).
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

    /// Checks that token ids are below `vocab` and sequences have at most `context` tokens.
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

    /// A copy of the batch with all tokens scored.
    #[must_use]
    pub fn with_all_scored(&self) -> Self {
        let scored = vec![true; self.tokens.len()];
        Self { tokens: self.tokens.clone(), offsets: self.offsets.clone(), scored }
    }

    /// Number of sequences `S`.
    pub fn sequences(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Positions of one sequence in the packed arrays.
    pub fn range(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    /// Token ids `[N]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Which tokens have their log-prob computed `[N]`.
    pub fn scored(&self) -> &[bool] {
        &self.scored
    }
}

/// Recorded expert choices of the packed tokens, for replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    ids: Vec<u16>,
    valid: Vec<bool>,
    layers: usize,
    top_k: usize,
}

impl Routes {
    /// Creates routes from `ids [N, layers, top_k]` and `valid [N]`. Ids of invalid rows are
    /// ignored.
    ///
    /// # Errors
    /// If an array has the wrong length, or a valid row has an unknown or repeated expert.
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

    /// Number of rows `N`, including invalid ones.
    pub fn rows(&self) -> usize {
        self.valid.len()
    }

    /// Whether the token at `position` has a recorded row.
    pub fn is_valid(&self, position: usize) -> bool {
        self.valid[position]
    }

    /// Expert ids of a token at all layers: `[layers · top_k]`.
    pub fn row(&self, position: usize) -> &[u16] {
        let width = self.layers * self.top_k;
        &self.ids[position * width..(position + 1) * width]
    }

    /// Expert ids of a token at one layer: `[top_k]`.
    pub fn layer(&self, position: usize, layer: usize) -> &[u16] {
        &self.row(position)[layer * self.top_k..(layer + 1) * self.top_k]
    }

    /// Number of layers per row.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Number of experts per layer of a row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }
}
