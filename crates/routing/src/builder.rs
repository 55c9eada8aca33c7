//! Joins the rows of all replies of one episode, by absolute token position.
//!
//! Which row is kept, and under which version:
//!
//! * The first row received for a position is kept. It was chosen in the forward pass whose KV cache
//!   the later tokens were sampled over. A row received again (overlap, resume, re-prefill on another
//!   worker) is compared as a set per layer, and differences are counted.
//! * Row `t` carries the version whose weights sampled token `t + 1`: both come from one pass. The
//!   row of a turn's last token therefore belongs to the turn after it.
//! * A range is *mixed* when that link is broken. If weights are replaced while a request runs, rows
//!   from the first change on were chosen over the KV cache of other weights. If KV is dropped inside
//!   a request (retraction, preemption), SGLang prefills prompt and sampled tokens again and sends
//!   those rows, while the log-probabilities come from the first pass. All new rows of that reply are
//!   then mixed; if the weights changed as well, the rows carry the last version, which computed them.
//!   An abort before an update and a resume after it mix nothing: each reply has one pass under one
//!   version.

use crate::blocks::{Block, Blocks, HeldBytes};
use crate::check::{check_shape, same_sets};
use crate::{RoutedRows, RoutingError, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::ops::Range;
use std::sync::Arc;

/// What one [`MaskBuilder::push`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PushReport {
    /// Rows stored for the first time.
    pub new_rows: usize,
    /// Rows that were already held and were compared.
    pub overlap_rows: usize,
    /// Overlap rows whose expert sets differ in some layer; the held row is kept.
    pub drift_rows: usize,
    /// New rows that are marked mixed.
    pub mixed_rows: usize,
}

/// The forward passes in which an engine computed the rows of one reply.
#[derive(Debug, Clone, Copy)]
pub struct Passes<'a> {
    /// Weights by absolute row range, ascending; must cover every row of the reply that is not
    /// held yet.
    pub versions: &'a [RowVersion],
    /// Whether the engine dropped the request's KV cache during the request and recomputed it.
    pub retracted: bool,
}

/// Collects the rows of one episode by absolute position. A held row is never overwritten.
///
/// ```
/// use orchestrate_routing::{MaskBuilder, RoutedRows};
/// use orchestrate_types::{ModelShape, PolicyVersion};
/// use std::sync::Arc;
///
/// // One MoE layer, 4 experts, top-2: each row is two ids.
/// let shape = Arc::new(ModelShape {
///     hidden_layers: 1,
///     moe_layers: vec![0],
///     experts: 4,
///     top_k: 2,
///     vocab: 100,
///     context: 64,
/// });
/// let mut builder = MaskBuilder::new(Arc::clone(&shape))?;
///
/// // Turn 1 ends at 3 tokens. The last token has no row yet: it was not an input.
/// let rows = RoutedRows::from_ids(&shape, 0, &[0, 1, 2, 3])?;
/// builder.push(rows, 3, PolicyVersion(7))?;
///
/// // Turn 2 ends at 5 tokens. It sends the last row held again, which is compared.
/// assert_eq!(builder.next_start(), 1);
/// let rows = RoutedRows::from_ids(&shape, 1, &[3, 2, 1, 2, 0, 3])?;
/// let report = builder.push(rows, 5, PolicyVersion(8))?;
/// assert_eq!((report.new_rows, report.overlap_rows, report.drift_rows), (2, 1, 0));
///
/// // A mask of 5 tokens has 4 rows.
/// let mask = builder.finish(5)?;
/// assert_eq!(mask.rows(), 4);
/// assert_eq!(mask.experts(2, 0), Some(vec![1, 2]));
/// assert_eq!(mask.versions().len(), 2);
/// # Ok::<(), orchestrate_routing::RoutingError>(())
/// ```
#[derive(Debug, Clone)]
pub struct MaskBuilder {
    shape: Arc<ModelShape>,
    blocks: Blocks,
    versions: Vec<RowVersion>,
    mixed: Vec<Range<usize>>,
}

impl MaskBuilder {
    /// An empty builder for a model of this shape.
    ///
    /// # Errors
    /// [`RoutingError::Shape`] for a model that cannot have routing rows, e.g. without MoE layers.
    pub fn new(shape: Arc<ModelShape>) -> Result<Self, RoutingError> {
        check_shape(&shape)?;
        let blocks = Blocks::new(shape.row_bytes());
        Ok(Self { shape, blocks, versions: Vec::new(), mixed: Vec::new() })
    }

    /// Number of rows held; they cover positions `0..rows()`.
    pub fn rows(&self) -> usize {
        self.blocks.rows()
    }

    /// Bytes of rows held, split by whether other masks, builders or the cache share them.
    pub fn held(&self) -> HeldBytes {
        self.blocks.held()
    }

    /// First position to request with the next reply: the last row held. One row of overlap shows
    /// whether engine and builder still agree on positions.
    pub fn next_start(&self) -> usize {
        self.rows().saturating_sub(1)
    }

    /// Policy version per row range; ascending, without gaps.
    pub fn versions(&self) -> &[RowVersion] {
        &self.versions
    }

    /// Ranges of mixed rows; ascending and not adjacent.
    pub fn mixed(&self) -> &[Range<usize>] {
        &self.mixed
    }

    /// Places the rows of one reply that was computed in one pass under one version, after which
    /// the sequence has `total_tokens` tokens. Rows of positions already held are compared as sets
    /// per layer and dropped; whole blocks are moved, not copied.
    ///
    /// # Errors
    /// [`RoutingError::Gap`], [`RoutingError::BeyondEnd`] or [`RoutingError::RowBytes`]; the
    /// builder is unchanged.
    pub fn push(
        &mut self,
        rows: RoutedRows,
        total_tokens: usize,
        version: PolicyVersion,
    ) -> Result<PushReport, RoutingError> {
        let (start, end) = (rows.start(), rows.start() + rows.rows());
        let one = [RowVersion { start, end, version }];
        self.push_passes(rows, total_tokens, Passes { versions: &one, retracted: false })
    }

    /// Like [`MaskBuilder::push`], for a reply during which weights or KV cache may have changed.
    ///
    /// # Errors
    /// The errors of [`MaskBuilder::push`], and [`RoutingError::Versions`] if the versions do not
    /// cover a new row.
    pub fn push_passes(
        &mut self,
        rows: RoutedRows,
        total_tokens: usize,
        passes: Passes<'_>,
    ) -> Result<PushReport, RoutingError> {
        let row_bytes = self.shape.row_bytes();
        if rows.row_bytes() != row_bytes {
            return Err(RoutingError::RowBytes { found: rows.row_bytes(), expected: row_bytes });
        }
        let (have, start) = (self.rows(), rows.start());
        let end = start + rows.rows();
        if start > have {
            return Err(RoutingError::Gap { have, start });
        }
        if rows.rows() > 0 && end > total_tokens.saturating_sub(1) {
            return Err(RoutingError::BeyondEnd { end, tokens: total_tokens });
        }
        let (versions, mixed) = attribute(have..end.max(have), passes)?;

        let overlap = start..end.min(have);
        let differs = |&position: &usize| match (rows.row(position), self.blocks.row(position)) {
            (Some(offered), Some(held)) => !same_sets(offered, held, &self.shape),
            (Some(_) | None, _) => true,
        };
        let report = PushReport {
            new_rows: end.saturating_sub(have),
            overlap_rows: overlap.len(),
            drift_rows: overlap.filter(differs).count(),
            mixed_rows: mixed.len(),
        };
        let mut at = start;
        for piece in rows.into_pieces() {
            let piece_rows = piece.len() / row_bytes;
            let held = self.rows().saturating_sub(at);
            if held < piece_rows {
                self.blocks.append(piece, held);
            }
            at += piece_rows;
        }
        for range in versions {
            match self.versions.last_mut() {
                Some(last) if last.version == range.version => last.end = range.end,
                Some(_) | None => self.versions.push(range),
            }
        }
        match self.mixed.last_mut() {
            Some(last) if last.end == mixed.start => last.end = mixed.end,
            Some(_) | None if mixed.is_empty() => {}
            Some(_) | None => self.mixed.push(mixed),
        }
        Ok(report)
    }

    /// Fills an empty builder with full blocks that were computed for the same tokens under
    /// `version` (see [`crate::PrefixCache`]); does nothing if rows are held already.
    pub fn seed(&mut self, blocks: Vec<Block>, version: PolicyVersion) {
        if self.rows() > 0 || blocks.is_empty() {
            return;
        }
        self.blocks.seed(blocks);
        self.versions = vec![RowVersion { start: 0, end: self.rows(), version }];
    }

    /// Truncates the sequence to `tokens` tokens: rows from `tokens − 1` on are dropped, and the new
    /// last token waits for its row again.
    pub fn truncate(&mut self, tokens: usize) {
        let rows = self.rows().min(tokens.saturating_sub(1));
        self.blocks.truncate(rows);
        self.cut_ranges(rows);
    }

    /// A second builder that starts with the first `tokens` tokens of this one. Full blocks are
    /// shared. Row `tokens − 1` is not copied, because it depends on the branch that follows.
    #[must_use]
    pub fn fork(&self, tokens: usize) -> Self {
        let rows = self.rows().min(tokens.saturating_sub(1));
        let mut fork = Self {
            shape: Arc::clone(&self.shape),
            blocks: self.blocks.fork(rows),
            versions: self.versions.clone(),
            mixed: self.mixed.clone(),
        };
        fork.cut_ranges(rows);
        fork
    }

    fn cut_ranges(&mut self, rows: usize) {
        self.versions.retain_mut(|range| {
            range.end = range.end.min(rows);
            range.start < range.end
        });
        self.mixed.retain_mut(|range| {
            range.end = range.end.min(rows);
            range.start < range.end
        });
    }

    /// Leading full blocks whose rows all come from unmixed passes under `version`: the blocks that
    /// another sequence with the same tokens may use.
    pub(crate) fn clean_blocks(&self, version: PolicyVersion) -> &[Block] {
        let pure = self.versions.first().filter(|range| range.version == version);
        let clean = self.mixed.first().map_or(usize::MAX, |range| range.start);
        let rows = pure.map_or(0, |range| range.end).min(clean);
        let full = self.blocks.full();
        full.get(..(rows / crate::BLOCK_ROWS).min(full.len())).unwrap_or_default()
    }

    /// Replaces full block `index` by a shared block with equal bytes.
    pub(crate) fn share(&mut self, index: usize, block: &Block) {
        self.blocks.share(index, block);
    }

    /// Finishes the mask of a trajectory of `total_tokens` tokens, which needs exactly
    /// `total_tokens − 1` rows (INV-3).
    ///
    /// # Errors
    /// [`RoutingError::Incomplete`] with any other number of rows.
    pub fn finish(self, total_tokens: usize) -> Result<RoutingMask, RoutingError> {
        let rows = self.rows();
        if total_tokens == 0 || rows != total_tokens - 1 {
            return Err(RoutingError::Incomplete { rows, tokens: total_tokens });
        }
        let Self { shape, blocks, versions, mixed } = self;
        Ok(RoutingMask { shape, rows, blocks: blocks.finish(), versions, mixed })
    }
}

/// The versions of the new rows, and the range of them that is mixed.
fn attribute(
    new: Range<usize>,
    passes: Passes<'_>,
) -> Result<(Vec<RowVersion>, Range<usize>), RoutingError> {
    let mut versions: Vec<RowVersion> = Vec::new();
    let mut next = new.start;
    for range in passes.versions {
        let (start, end) = (range.start.max(new.start), range.end.min(new.end));
        if start < end {
            if start != next {
                return Err(RoutingError::Versions { rows: new.end });
            }
            next = end;
            versions.push(RowVersion { start, end, version: range.version });
        }
    }
    if next != new.end {
        return Err(RoutingError::Versions { rows: new.end });
    }
    if passes.retracted {
        if let Some(last) = versions.pop() {
            versions = vec![RowVersion { start: new.start, ..last }];
        }
        return Ok((versions, new));
    }
    // Rows that were already held count too: a change inside them comes before the new rows.
    let change = passes.versions.windows(2).find_map(|pair| match pair {
        [before, after] if before.version != after.version => Some(after.start),
        _ => None,
    });
    let mixed = change.map_or(new.end, |at| at.clamp(new.start, new.end))..new.end;
    Ok((versions, mixed))
}
