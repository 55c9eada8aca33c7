//! Decoded, validated and narrowed rows of one engine reply.

use crate::RoutingError;
use crate::check::check_rows;
use orchestrate_types::ModelShape;

/// How the rows of a payload relate to the requested rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadForm {
    /// Exactly the requested rows.
    Exact,
    /// One surplus row at the end, which was dropped (sent by speculating engines when they stop).
    SurplusRow,
    /// All rows from position 0 although only later ones were requested. Only the requested tail was
    /// decoded; the rows before it were not inspected.
    WholeSequence,
}

/// Rows per block. Row `p` of a sequence is in block `p / BLOCK_ROWS`, regardless of the reply.
pub const BLOCK_ROWS: usize = 64;

/// Rows of positions `start .. start + rows`, row-major `[rows, moe layers, top_k]`, one byte per
/// id up to 256 experts, otherwise two (little-endian).
///
/// The bytes are split into pieces wherever an absolute position is a multiple of [`BLOCK_ROWS`], so
/// that whole blocks can be moved into a mask. A piece that starts a block has capacity for a full
/// one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedRows {
    start: usize,
    rows: usize,
    row_bytes: usize,
    pieces: Vec<Vec<u8>>,
    form: PayloadForm,
}

impl RoutedRows {
    /// Rows in stored form: `data` is `[rows, moe layers, top_k]` of `shape.id_bytes()` bytes
    /// each, little-endian.
    ///
    /// # Errors
    /// [`RoutingError`] if the length is not a multiple of the row size, an id is out of range, or a
    /// choice repeats an expert.
    pub fn new(shape: &ModelShape, start: usize, data: &[u8]) -> Result<Self, RoutingError> {
        check_rows(data, shape, start)?;
        Ok(Self::from_checked(shape, start, data, PayloadForm::Exact))
    }

    /// Splits checked rows into pieces.
    pub(crate) fn from_checked(
        shape: &ModelShape,
        start: usize,
        data: &[u8],
        form: PayloadForm,
    ) -> Self {
        let row_bytes = shape.row_bytes();
        let mut pieces = PieceWriter::new(start, data.len() / row_bytes, row_bytes);
        let mut rest = data;
        while let Some(piece) = pieces.next_piece() {
            let (taken, later) = rest.split_at(piece.rows * row_bytes);
            piece.bytes.extend_from_slice(taken);
            rest = later;
        }
        pieces.finish(form)
    }

    /// Rows from plain ids `[rows, moe layers, top_k]`, narrowed to the model's width.
    ///
    /// # Errors
    /// The errors of [`RoutedRows::new`].
    pub fn from_ids(shape: &ModelShape, start: usize, ids: &[u16]) -> Result<Self, RoutingError> {
        let mut data = Vec::with_capacity(ids.len() * shape.id_bytes());
        for (index, &id) in ids.iter().enumerate() {
            if shape.id_bytes() == 1 {
                data.push(u8::try_from(id).map_err(|_| {
                    let (cell, layers) = (index / shape.top_k.max(1), shape.moe_layers.len());
                    RoutingError::ExpertRange {
                        position: start + cell / layers.max(1),
                        layer: shape.moe_layers.get(cell % layers.max(1)).copied().unwrap_or(0),
                        id: i64::from(id),
                        experts: shape.experts,
                    }
                })?);
            } else {
                data.extend_from_slice(&id.to_le_bytes());
            }
        }
        Self::new(shape, start, &data)
    }

    /// Absolute token position of the first row.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Number of rows, possibly 0.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of one row: MoE layers × top-k × id width.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Drops the last `rows` rows, or all if there are fewer.
    pub fn drop_last(&mut self, rows: usize) {
        self.rows = self.rows.saturating_sub(rows);
        let mut left = self.rows * self.row_bytes;
        self.pieces.retain_mut(|piece| {
            piece.truncate(left);
            left -= piece.len();
            !piece.is_empty()
        });
    }

    /// The bytes in order, one slice per block touched; every slice holds whole rows.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(Vec::as_slice)
    }

    /// The bytes in order, one vector per block touched. The first and the last may hold only a part
    /// of their block; a vector that starts a block has capacity for [`BLOCK_ROWS`] rows.
    pub fn into_pieces(self) -> Vec<Vec<u8>> {
        self.pieces
    }

    /// A copy of the bytes in one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        self.pieces.concat()
    }

    /// The row at absolute position `position`; `None` outside of these rows.
    pub fn row(&self, position: usize) -> Option<&[u8]> {
        position.checked_sub(self.start)?;
        let piece = (position / BLOCK_ROWS).checked_sub(self.start / BLOCK_ROWS)?;
        let first = (position - position % BLOCK_ROWS).max(self.start);
        let at = (position - first).checked_mul(self.row_bytes)?;
        self.pieces.get(piece)?.get(at..at.checked_add(self.row_bytes)?)
    }

    /// How the rows of a payload relate to the requested rows.
    pub fn form(&self) -> PayloadForm {
        self.form
    }
}

/// Hands out the empty pieces of rows `start .. start + rows`, one at a time, to be filled.
#[derive(Debug)]
pub(crate) struct PieceWriter {
    start: usize,
    rows: usize,
    row_bytes: usize,
    given: usize,
    pieces: Vec<Vec<u8>>,
}

/// An empty piece to fill.
#[derive(Debug)]
pub(crate) struct EmptyPiece<'a> {
    /// Number of rows to append.
    pub(crate) rows: usize,
    /// Destination, with sufficient capacity.
    pub(crate) bytes: &'a mut Vec<u8>,
}

impl PieceWriter {
    pub(crate) fn new(start: usize, rows: usize, row_bytes: usize) -> Self {
        let blocks = (start % BLOCK_ROWS + rows).div_ceil(BLOCK_ROWS);
        Self { start, rows, row_bytes, given: 0, pieces: Vec::with_capacity(blocks) }
    }

    /// The next piece; `None` after the last one. The caller fills it before the next call.
    pub(crate) fn next_piece(&mut self) -> Option<EmptyPiece<'_>> {
        let position = self.start + self.given;
        let to_boundary = BLOCK_ROWS - position % BLOCK_ROWS;
        let rows = to_boundary.min(self.rows - self.given);
        if rows == 0 {
            return None;
        }
        self.given += rows;
        self.pieces.push(Vec::with_capacity(to_boundary * self.row_bytes));
        self.pieces.last_mut().map(|bytes| EmptyPiece { rows, bytes })
    }

    /// Returns the rows after every piece has been requested and filled.
    pub(crate) fn finish(self, form: PayloadForm) -> RoutedRows {
        let Self { start, rows, row_bytes, pieces, given } = self;
        debug_assert_eq!(given, rows);
        debug_assert_eq!(pieces.iter().map(Vec::len).sum::<usize>(), rows * row_bytes);
        RoutedRows { start, rows, row_bytes, pieces, form }
    }
}
