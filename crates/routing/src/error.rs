//! Errors in routing rows, each with its position.

/// Why routing rows were rejected. Nothing of a rejected payload is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// A model of this shape cannot have routing rows.
    #[error("model shape cannot have routing rows: {0}")]
    Shape(&'static str),
    /// The first requested position is beyond the end of the sequence.
    #[error("routing start {start} is beyond the {tokens} tokens of the sequence")]
    StartBeyondEnd {
        /// First position requested.
        start: usize,
        /// Tokens of prompt and output together.
        tokens: usize,
    },
    /// The payload's length does not match the requested rows.
    #[error(
        "routing payload has {found} base64 characters, expected {expected} for {rows} rows of \
         {layers} layers and top-{top_k}{hint}"
    )]
    Length {
        /// Characters found.
        found: usize,
        /// Characters of a valid payload.
        expected: usize,
        /// Rows requested.
        rows: usize,
        /// Hidden layers of the model.
        layers: usize,
        /// Experts per token of the model.
        top_k: usize,
        /// Likely cause, starting with `; `; empty if unknown.
        hint: &'static str,
    },
    /// The payload is not a valid `.npy` file.
    #[error("routing payload is not a valid .npy file: {0}")]
    Npy(&'static str),
    /// The dimensions in a `.npy` header do not match the requested rows.
    #[error("routing payload has shape {found:?}, expected [{rows}, {layers}, {top_k}]{hint}")]
    NpyShape {
        /// Rows, layers and columns found.
        found: [usize; 3],
        /// Rows requested.
        rows: usize,
        /// Hidden layers of the model.
        layers: usize,
        /// Experts per token of the model.
        top_k: usize,
        /// Likely cause, starting with `; `; empty if unknown.
        hint: &'static str,
    },
    /// The routed experts cannot be cut out of the reply's body.
    #[error("the reply's routed experts are not base64 in a JSON string: {0}")]
    Body(&'static str),
    /// The payload is not standard, padded base64.
    #[error(
        "routing payload is not standard padded base64 in the rows from position {position} on"
    )]
    Base64 {
        /// Absolute position of the first row of the block that does not decode.
        position: usize,
    },
    /// A dense layer has values other than zero: the layer numbers are shifted.
    #[error("position {position}: dense layer {layer} has expert ids, so layers are misnumbered")]
    DenseLayer {
        /// Absolute token position.
        position: usize,
        /// Global number of the layer.
        layer: usize,
    },
    /// An expert id is out of range. Physical ids of a load balancer also look like this.
    #[error(
        "position {position}, layer {layer}: expert {id} does not exist among {experts}{}",
        slots_hint(*id, *experts)
    )]
    ExpertRange {
        /// Absolute token position.
        position: usize,
        /// Global number of the layer.
        layer: usize,
        /// The id as a signed number on the wire.
        id: i64,
        /// Number of experts of the model.
        experts: usize,
    },
    /// A router's choice contains one expert twice.
    #[error("position {position}, layer {layer}: expert {id} is chosen twice")]
    Repeated {
        /// Absolute token position.
        position: usize,
        /// Global number of the layer.
        layer: usize,
        /// The repeated id.
        id: usize,
    },
    /// All ids of a choice are zero: nothing was captured.
    #[error(
        "position {position}, layer {layer}: all ids are zero, so the engine captured nothing \
         (its MoE kernel may hide the choice)"
    )]
    NotCaptured {
        /// Absolute token position.
        position: usize,
        /// Global number of the layer.
        layer: usize,
    },
    /// All layers have the same ids in every row: one layer's buffer was sent for all.
    #[error(
        "all {layers} layers have the same ids in each of {rows} rows, so the capture is wrong"
    )]
    LayersIdentical {
        /// Rows inspected.
        rows: usize,
        /// Number of MoE layers.
        layers: usize,
    },
    /// The rows belong to another model.
    #[error("rows have {found} bytes, this model's have {expected}")]
    RowBytes {
        /// Bytes per row found, or a total that is not a multiple of the row size.
        found: usize,
        /// Bytes per row of the model.
        expected: usize,
    },
    /// The rows would leave a gap.
    #[error("rows start at position {start}, but only {have} are held: a gap")]
    Gap {
        /// Leading positions that have a row.
        have: usize,
        /// First position of the rows offered.
        start: usize,
    },
    /// The payload has a row for a token that was never an input.
    #[error("rows reach position {end}, but {tokens} tokens have only {} rows", .tokens.saturating_sub(1))]
    BeyondEnd {
        /// One past the last position of the rows.
        end: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// The number of rows is not tokens − 1 (INV-3).
    #[error("a mask of {tokens} tokens needs {} rows, but {rows} are held", .tokens.saturating_sub(1))]
    Incomplete {
        /// Rows held.
        rows: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// The version ranges do not cover the rows in order and without gaps.
    #[error("policy version ranges of a mask do not cover its {rows} rows in order")]
    Versions {
        /// Rows of the mask.
        rows: usize,
    },
    /// Stored bytes are not a valid mask.
    #[error("stored routing mask cannot be read: {0}")]
    Stored(&'static str),
    /// A newer version of this program stored the mask.
    #[error(
        "stored routing mask has format {major}.{minor}, but this program reads only 1.x and 2.x"
    )]
    StoredVersion {
        /// Major version found.
        major: u16,
        /// Minor version found.
        minor: u16,
    },
}

/// Hint for ids in the range of a load balancer's spare slots, of which there are fewer than experts.
fn slots_hint(id: i64, experts: usize) -> &'static str {
    match usize::try_from(id) {
        Ok(id) if (experts..2 * experts).contains(&id) => {
            "; if experts are load-balanced (EPLB), these are physical slots: serve the logical ids"
        }
        Ok(_) | Err(_) => "",
    }
}
