//! Joins the rows of all replies of one episode, by absolute token position.
//!
//! Which row stands, and under which version:
//!
//! * The first row received for a position stands. It was chosen in the forward pass whose KV the
//!   later tokens were sampled over. A row received again (overlap, resume, re-prefill on another
//!   worker) is compared as a set per layer and counted.
//! * Row `t` carries the version whose weights sampled token `t + 1`: both come from one pass. The
//!   row of a turn's last token therefore belongs to the turn after it.
//! * A range is *mixed* when that link is broken. Weights exchanged while a request ran: rows from
//!   the first change on were chosen over KV of other weights. KV dropped inside a request
//!   (retraction, preemption): SGLang prefills prompt and sampled tokens again and sends those
//!   rows, while the log-probabilities are the first pass's; all new rows of that reply are mixed
//!   and, if the weights changed as well, carry the last version, which computed them. An abort
//!   before an update and a resume after it mix nothing: each reply has one pass under one version.

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
    /// Rows that were already held, and compared.
    pub overlap_rows: usize,
    /// Of these, rows whose expert sets differ in some layer; the first one stands.
    pub drift_rows: usize,
    /// Of the new rows, those marked mixed.
    pub mixed_rows: usize,
}

/// How an engine came to the rows of one reply.
#[derive(Debug, Clone, Copy)]
pub struct Passes<'a> {
    /// Weights by absolute row range, ascending; must cover every row of the reply that is not
    /// held yet.
    pub versions: &'a [RowVersion],
    /// Whether the engine dropped the request's KV on the way and computed it again.
    pub retracted: bool,
}

/// Collects rows. A row, once held, is never overwritten.
#[derive(Debug, Clone)]
pub struct MaskBuilder {
    shape: Arc<ModelShape>,
    blocks: Blocks,
    versions: Vec<RowVersion>,
    mixed: Vec<Range<usize>>,
}

impl MaskBuilder {
    /// Nothing held yet.
    ///
    /// # Errors
    /// [`RoutingError::Shape`] for a model without usable MoE layers.
    pub fn new(shape: Arc<ModelShape>) -> Result<Self, RoutingError> {
        check_shape(&shape)?;
        let blocks = Blocks::new(shape.row_bytes());
        Ok(Self { shape, blocks, versions: Vec::new(), mixed: Vec::new() })
    }

    /// Leading positions that have a row.
    pub fn rows(&self) -> usize {
        self.blocks.rows()
    }

    /// Bytes of rows held, by whether others hold them, too.
    pub fn held(&self) -> HeldBytes {
        self.blocks.held()
    }

    /// First position to ask the next reply for: the last row held, so that one row of overlap
    /// shows whether engine and builder still mean the same positions.
    pub fn next_start(&self) -> usize {
        self.rows().saturating_sub(1)
    }

    /// Policy version per row range; ascending, without gap.
    pub fn versions(&self) -> &[RowVersion] {
        &self.versions
    }

    /// Ranges of rows that are mixed; ascending and apart.
    pub fn mixed(&self) -> &[Range<usize>] {
        &self.mixed
    }

    /// Places the rows of one reply that was computed in one pass under one version, after which
    /// the sequence has `total_tokens` tokens. Rows of positions already held are compared as sets
    /// per layer, and dropped; whole blocks are taken by move.
    ///
    /// # Errors
    /// [`RoutingError::Gap`], [`RoutingError::BeyondEnd`] or [`RoutingError::RowBytes`]; the
    /// builder is then as before.
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

    /// As [`MaskBuilder::push`], for a reply during which weights or KV may have changed.
    ///
    /// # Errors
    /// As [`MaskBuilder::push`], and [`RoutingError::Versions`] when the versions leave out a new
    /// row.
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

    /// Starts an empty builder with full blocks that were computed for the same tokens under
    /// `version` (see [`crate::PrefixCache`]); does nothing if rows are held already.
    pub fn seed(&mut self, blocks: Vec<Block>, version: PolicyVersion) {
        if self.rows() > 0 || blocks.is_empty() {
            return;
        }
        self.blocks.seed(blocks);
        self.versions = vec![RowVersion { start: 0, end: self.rows(), version }];
    }

    /// Cuts the sequence to `tokens` tokens: rows from `tokens − 1` on are dropped, the new last
    /// token is pending again.
    pub fn truncate(&mut self, tokens: usize) {
        let rows = self.rows().min(tokens.saturating_sub(1));
        self.blocks.truncate(rows);
        self.cut_ranges(rows);
    }

    /// A second builder that begins with the first `tokens` tokens of this one. Full blocks are
    /// shared; the token after the fork makes row `tokens − 1` its own.
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

    /// Full blocks whose rows all came from one clean run of passes under `version`, from the
    /// first on: what another sequence with the same tokens may use.
    pub(crate) fn clean_blocks(&self, version: PolicyVersion) -> &[Block] {
        let pure = self.versions.first().filter(|range| range.version == version);
        let clean = self.mixed.first().map_or(usize::MAX, |range| range.start);
        let rows = pure.map_or(0, |range| range.end).min(clean);
        let full = self.blocks.full();
        full.get(..(rows / crate::BLOCK_ROWS).min(full.len())).unwrap_or_default()
    }

    /// Replaces full block `index` by one of equal bytes that others hold.
    pub(crate) fn share(&mut self, index: usize, block: &Block) {
        self.blocks.share(index, block);
    }

    /// Ends the trajectory of `total_tokens` tokens. INV-3: exactly `total_tokens − 1` rows.
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

/// Versions of the new rows, and which of them are mixed.
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
    // Held rows of the same reply count: a change inside them is a change before the new ones.
    let change = passes.versions.windows(2).find_map(|pair| match pair {
        [before, after] if before.version != after.version => Some(after.start),
        _ => None,
    });
    let mixed = change.map_or(new.end, |at| at.clamp(new.start, new.end))..new.end;
    Ok((versions, mixed))
}
