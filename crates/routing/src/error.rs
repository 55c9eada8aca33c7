//! What can be wrong with routing rows, and where.

/// Rows that cannot be used. Nothing of a refused payload is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// The model's shape itself makes no rows.
    #[error("model shape cannot have routing rows: {0}")]
    Shape(&'static str),
    /// Rows were asked for from beyond the sequence.
    #[error("routing start {start} lies beyond the {tokens} tokens of the sequence")]
    StartBeyondEnd {
        /// First position asked for.
        start: usize,
        /// Tokens of prompt and output together.
        tokens: usize,
    },
    /// The payload's length is not that of the rows asked for.
    #[error(
        "routing payload has {found} base64 characters, expected {expected} for {rows} rows of \
         {layers} layers and top-{top_k}{hint}"
    )]
    Length {
        /// Characters found.
        found: usize,
        /// Characters of a right payload.
        expected: usize,
        /// Rows asked for.
        rows: usize,
        /// Hidden layers by the model's configuration.
        layers: usize,
        /// Experts per token by the model's configuration.
        top_k: usize,
        /// What it looks like instead, or nothing.
        hint: &'static str,
    },
    /// The payload is not the `.npy` file that was announced.
    #[error("routing payload is not a usable .npy file: {0}")]
    Npy(&'static str),
    /// The dimensions in a `.npy` header are not those of the rows asked for.
    #[error(
        "routing payload has the shape {found:?}, expected is [{rows}, {layers}, {top_k}]{hint}"
    )]
    NpyShape {
        /// Rows, layers and columns found.
        found: [usize; 3],
        /// Rows asked for.
        rows: usize,
        /// Hidden layers by the model's configuration.
        layers: usize,
        /// Experts per token by the model's configuration.
        top_k: usize,
        /// What it looks like instead, or nothing.
        hint: &'static str,
    },
    /// The routed experts cannot be cut out of the reply's body.
    #[error("reply's routed experts are not base64 in a JSON string: {0}")]
    Body(&'static str),
    /// The payload is not standard, padded base64.
    #[error(
        "routing payload is not standard padded base64 in the rows from position {position} on"
    )]
    Base64 {
        /// Absolute position of the first row of the block that does not decode.
        position: usize,
    },
    /// A dense layer carries something else than zeros: the layer numbers are shifted.
    #[error("position {position}: dense layer {layer} has expert ids, so layers are misnumbered")]
    DenseLayer {
        /// Absolute token position.
        position: usize,
        /// Global layer number.
        layer: usize,
    },
    /// An id that no expert has (physical ids of a load balancer look like this, too).
    #[error(
        "position {position}, layer {layer}: expert {id} does not exist among {experts}{}",
        places_hint(*id, *experts)
    )]
    ExpertRange {
        /// Absolute token position.
        position: usize,
        /// Global layer number.
        layer: usize,
        /// The id, as the signed number on the wire.
        id: i64,
        /// Number of experts.
        experts: usize,
    },
    /// One expert twice in one router's choice.
    #[error("position {position}, layer {layer}: expert {id} is chosen twice")]
    Repeated {
        /// Absolute token position.
        position: usize,
        /// Global layer number.
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
        /// Global layer number.
        layer: usize,
    },
    /// Every layer carries the same ids in every row: one layer's buffer was sent for all.
    #[error(
        "all {layers} layers carry the same ids in each of {rows} rows, so the capture is wrong"
    )]
    LayersIdentical {
        /// Rows looked at.
        rows: usize,
        /// MoE layers.
        layers: usize,
    },
    /// Rows of another model.
    #[error("rows have {found} bytes, this model's have {expected}")]
    RowBytes {
        /// Bytes per row found, or bytes that are no whole number of rows.
        found: usize,
        /// Bytes per row of the model.
        expected: usize,
    },
    /// Rows that would leave a hole.
    #[error("rows start at position {start}, but only {have} are held: a gap")]
    Gap {
        /// Leading positions that have a row.
        have: usize,
        /// First position of the rows offered.
        start: usize,
    },
    /// A row for a token that was never an input.
    #[error("rows reach position {end}, but {tokens} tokens have only {} rows", .tokens.saturating_sub(1))]
    BeyondEnd {
        /// One past the last position of the rows.
        end: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// INV-3: a finished mask has tokens − 1 rows.
    #[error("a mask of {tokens} tokens needs {} rows, {rows} are held", .tokens.saturating_sub(1))]
    Incomplete {
        /// Rows held.
        rows: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// Version ranges that do not cover the rows without gap, in order.
    #[error("policy version ranges of a mask do not cover its {rows} rows in order")]
    Versions {
        /// Rows of the mask.
        rows: usize,
    },
    /// Stored bytes that are not a mask of a known format.
    #[error("stored routing mask is not readable: {0}")]
    Stored(&'static str),
    /// Stored by a newer program.
    #[error("stored routing mask has format {major}.{minor}, this program reads 1.x and 2.x")]
    StoredVersion {
        /// Major version found.
        major: u16,
        /// Minor version found.
        minor: u16,
    },
}

/// Load balancers copy experts to spare places, of which there are fewer than experts.
fn places_hint(id: i64, experts: usize) -> &'static str {
    match usize::try_from(id) {
        Ok(id) if (experts..2 * experts).contains(&id) => {
            "; if experts are load-balanced (EPLB), these are places: serve the logical ids"
        }
        Ok(_) | Err(_) => "",
    }
}
