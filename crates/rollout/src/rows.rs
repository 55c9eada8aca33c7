//! The routing rows of one sequence: seeded from the prefix cache or from the sequence that it branched from,
//! extended by every reply, and finished as a mask.
//!
//! The invariant: seeded rows, wherever they come from, are kept only once a reply has joined them under
//! the policy version of all of them and, where rows are shared per worker, from the worker of all of
//! them. A sequence that continues across a weight update keeps its rows: its own tokens were sampled over them.

use crate::api::RowCounts;
use orchestrate_engine::Generation;
use orchestrate_routing::{
    MaskBuilder, MixedRows, Passes, PrefixCache, PrefixChain, RoutedRows, RoutingError,
    RoutingMask, RowVersion, SharingScope,
};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// Rules for sharing routing rows between episodes, and for mixed rows.
#[derive(Debug, Clone, Default)]
pub struct RowSharing {
    /// Cache of the rows of common prefixes; `None` = every episode fetches its own.
    pub cache: Option<Arc<PrefixCache>>,
    /// The episodes among which rows are shared: those of one worker, or of the whole fleet.
    pub scope: SharingScope,
    /// Treatment of mixed rows, which were computed while weights or KV cache changed.
    pub mixed: MixedRows,
}

/// Why the rows of a reply were refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowsRefused {
    /// The reply has no rows.
    #[error("routing rows were requested, but the reply has none")]
    Missing,
    /// The rows do not end with the reply's last token but one.
    #[error("routing rows end at {end}, expected {expected}")]
    WrongEnd { end: usize, expected: usize },
    /// The rows do not join those collected so far.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The seeded rows belong to other weights, or to another worker, than the reply. They have
    /// been dropped, so that another try starts at row 0.
    #[error("seeded rows belong to other weights or another worker than the reply")]
    StaleSeed,
}

/// What the rows of a reply join.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct JoinedRows {
    /// Number of rows.
    pub(crate) held: usize,
    /// The rows, if they came from the cache and no reply has confirmed them yet.
    pub(crate) cached: Option<CachedRows>,
}

/// Rows of the cache.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CachedRows {
    /// The worker that computed them, where rows are shared per worker.
    pub(crate) worker: String,
    /// The rows in stored form.
    pub(crate) bytes: Vec<u8>,
}

/// The routing rows that a sequence has collected so far.
#[derive(Debug, Clone)]
pub(crate) struct EpisodeRows {
    shape: Arc<ModelShape>,
    model: String,
    sharing: RowSharing,
    builder: MaskBuilder,
    /// The rows before a fork, kept until a reply to the forked prompt arrives.
    unforked: Option<MaskBuilder>,
    chain: Option<PrefixChain>,
    /// Worker that computed all rows so far, where rows are shared per worker; empty if there is none, or
    /// the whole fleet shares.
    worker: String,
    /// Number of leading rows that came from the cache or from another sequence.
    seeded: usize,
    /// Whether these came from the cache.
    is_cached: bool,
    pub(crate) counts: RowCounts,
}

impl EpisodeRows {
    /// Whether its rows were seeded and no reply has confirmed them yet: the next reply may
    /// be refused.
    pub(crate) fn has_unconfirmed_seed(&self) -> bool {
        self.seeded > 0 && self.builder.rows() == self.seeded
    }

    /// `model` distinguishes the weights of this run from others with the same version number.
    pub(crate) fn new(
        shape: Arc<ModelShape>,
        model: String,
        sharing: RowSharing,
    ) -> Result<Self, RoutingError> {
        Ok(Self {
            builder: MaskBuilder::new(Arc::clone(&shape))?,
            unforked: None,
            shape,
            model,
            sharing,
            chain: None,
            worker: String::new(),
            seeded: 0,
            is_cached: false,
            counts: RowCounts::default(),
        })
    }

    /// The first row to request with the next call.
    pub(crate) fn next_start(&self) -> usize {
        self.builder.next_start()
    }

    /// Prepares for a prompt that shares only the first `tokens` tokens with the sequence so far.
    pub(crate) fn fork(&mut self, tokens: usize) {
        let forked = self.builder.fork(tokens);
        self.unforked = Some(std::mem::replace(&mut self.builder, forked));
        self.seeded = 0;
        self.chain = None;
    }

    /// Seeds the rows of another sequence, which starts with the first `tokens` tokens of this one and
    /// continues with a reply under `version`. Their memory is shared. Rows of several versions or
    /// workers, and mixed ones, are left out.
    pub(crate) fn branch(&self, tokens: usize, version: PolicyVersion) -> Self {
        let mut builder = self.builder.fork(tokens);
        let has_moved = self.sharing.scope == SharingScope::Worker && self.worker.is_empty();
        let is_pure = builder.versions().iter().all(|rows| rows.version == version);
        if has_moved || !is_pure || !builder.mixed().is_empty() {
            builder.truncate(0);
        }
        let seeded = builder.rows();
        Self {
            shape: Arc::clone(&self.shape),
            model: self.model.clone(),
            sharing: self.sharing.clone(),
            builder,
            unforked: None,
            chain: None,
            worker: self.worker.clone(),
            seeded,
            is_cached: false,
            counts: RowCounts::default(),
        }
    }

    /// Whether the rows of `other` are the first ones of these, not others of the same tokens.
    pub(crate) fn begin_with(&self, other: &Self) -> bool {
        self.seeded == other.builder.rows()
    }

    fn start_chain(&mut self, version: PolicyVersion, worker: Option<String>) {
        self.worker = match (self.sharing.scope, worker) {
            (SharingScope::Fleet, _) => String::new(),
            (SharingScope::Worker, Some(worker)) => worker,
            (SharingScope::Worker, None) => return,
        };
        self.chain = Some(PrefixChain::new(&self.shape, &self.model, version, &self.worker));
    }

    /// Takes rows that other episodes fetched for the same tokens under the same weights, unless it has
    /// rows of another sequence. Called before the first request; `worker` is the worker that will answer, if
    /// known.
    pub(crate) async fn seed(
        &mut self,
        prompt: &[TokenId],
        version: PolicyVersion,
        worker: Option<String>,
    ) {
        let Some(cache) = self.sharing.cache.clone().filter(|_| self.seeded == 0) else { return };
        self.start_chain(version, worker);
        let Some(chain) = &mut self.chain else { return };
        chain.extend_to(prompt);
        let chain = chain.clone();
        // A lookup may read files.
        let found = tokio::task::spawn_blocking(move || cache.lookup(&chain)).await;
        self.builder.seed(found.unwrap_or_default(), version);
        self.seeded = self.builder.rows();
        self.is_cached = true;
    }

    /// What the rows of the next reply join.
    pub(crate) fn joined(&self) -> JoinedRows {
        let held = self.builder.rows();
        let is_cached = self.is_cached && self.has_unconfirmed_seed();
        let mask = is_cached.then(|| self.builder.clone().finish(held + 1).ok()).flatten();
        let cached = mask.map(|mask| CachedRows {
            worker: self.worker.clone(),
            bytes: (0..held).filter_map(|row| mask.row(row)).collect::<Vec<_>>().concat(),
        });
        JoinedRows { held, cached }
    }

    /// Has what the rows of a reply joined in an earlier process, for the same `prompt`.
    pub(crate) fn join_again(
        &mut self,
        joined: JoinedRows,
        prompt: &[TokenId],
        version: PolicyVersion,
    ) -> Result<(), RowsRefused> {
        let JoinedRows { held, cached } = joined;
        if let Some(CachedRows { worker, bytes }) = cached {
            self.start_chain(version, Some(worker));
            if let Some(chain) = &mut self.chain {
                chain.extend_to(prompt);
            }
            let rows = RoutedRows::new(&self.shape, 0, &bytes)?;
            self.builder.push(rows, held + 1, version)?;
            self.seeded = held;
            self.is_cached = true;
        } else if held == 0 && self.has_unconfirmed_seed() {
            self.drop_seed();
        }
        let found = self.builder.rows();
        if found == held {
            Ok(())
        } else {
            Err(RowsRefused::WrongEnd { end: found, expected: held })
        }
    }

    fn drop_seed(&mut self) {
        self.builder.truncate(0);
        self.seeded = 0;
        self.chain = None;
    }

    /// Adds the rows of a reply to a prompt of `prompt` tokens. Refused rows change nothing, except
    /// that a stale seed is dropped.
    pub(crate) fn accept(
        &mut self,
        reply: &mut Generation,
        prompt: usize,
        version: PolicyVersion,
    ) -> Result<(), RowsRefused> {
        let total = prompt + reply.output_ids().len();
        let Some(rows) = reply.routed_experts.take() else {
            return Err(RowsRefused::Missing);
        };
        let (start, end) = (rows.start(), rows.start() + rows.rows());
        let expected = total.saturating_sub(1);
        if end != expected {
            return Err(RowsRefused::WrongEnd { end, expected });
        }
        let first = reply.versions().first().map_or(version, |span| span.version);
        let per_worker = self.sharing.scope == SharingScope::Worker;
        let has_moved = per_worker && self.worker != reply.worker;
        let is_stale =
            has_moved || self.builder.versions().iter().any(|rows| rows.version != first);
        if self.has_unconfirmed_seed() && is_stale {
            self.drop_seed();
            return Err(RowsRefused::StaleSeed);
        }
        let is_first = self.builder.rows() == 0;
        let versions = row_versions(reply, prompt, start, end, first);
        self.push(rows, total, &versions, reply.num_retractions)?;
        if is_first {
            self.chain.take_if(|chain| has_moved || chain.version() != first);
            if per_worker {
                self.worker.clone_from(&reply.worker);
            }
        } else if has_moved {
            // Rows of several workers are not shared any more.
            self.worker.clear();
            self.sharing.cache = None;
        }
        let counts = &mut self.counts;
        counts.wire_bytes += reply.routing_wire_bytes as u64;
        counts.reused += reply.cached_tokens.min(end).saturating_sub(start) as u64;
        Ok(())
    }

    fn push(
        &mut self,
        rows: RoutedRows,
        total: usize,
        versions: &[RowVersion],
        retractions: u32,
    ) -> Result<(), RoutingError> {
        let passes = Passes { versions, retracted: retractions > 0 };
        let report = self.builder.push_passes(rows, total, passes)?;
        self.unforked = None;
        self.counts.drift += report.drift_rows as u64;
        self.counts.mixed += report.mixed_rows as u64;
        if self.seeded > 0 && self.counts.shared == 0 {
            self.counts.shared = self.seeded as u64;
            self.counts.reused += self.seeded as u64;
        }
        Ok(())
    }

    /// Offers the rows of all `tokens` to other episodes. Called after a reply was accepted;
    /// `worker` is the worker that answered. An episode that moved between workers stops sharing per
    /// worker.
    pub(crate) async fn offer(&mut self, tokens: &[TokenId], version: PolicyVersion, worker: &str) {
        let Some(cache) = self.sharing.cache.clone() else { return };
        if self.chain.is_none() && self.builder.versions().len() == 1 {
            self.start_chain(version, Some(worker.to_owned()));
        }
        if self.sharing.scope == SharingScope::Worker && self.worker != worker {
            self.sharing.cache = None;
            return;
        }
        let Some(chain) = &mut self.chain else { return };
        chain.extend_to(tokens);
        let (inserted, evicted) = cache.insert_in_memory(chain, &mut self.builder);
        self.counts.shared += inserted.merged_rows as u64;
        self.counts.drift += inserted.drift_rows as u64;
        if !evicted.is_empty() {
            // Another thread writes the evicted blocks. Waiting for it limits the queued writes to one
            // per episode.
            let written = tokio::task::spawn_blocking(move || cache.write(evicted)).await;
            if let Err(error) = written {
                tracing::error!(%error, "writing evicted routing blocks failed");
            }
        }
    }

    /// Ranges of tokens whose rows are mixed.
    pub(crate) fn mixed_tokens(&self) -> Vec<Range<usize>> {
        self.unforked
            .as_ref()
            .unwrap_or(&self.builder)
            .mixed()
            .iter()
            .map(|rows| rows.start + 1..rows.end + 1)
            .collect()
    }

    pub(crate) fn mixed_policy(&self) -> MixedRows {
        self.sharing.mixed
    }

    /// The routing mask of the whole trajectory of `tokens` tokens.
    ///
    /// # Errors
    /// [`RoutingError::Incomplete`] if rows are missing.
    pub(crate) fn finish(self, tokens: usize) -> Result<RoutingMask, RoutingError> {
        self.unforked.unwrap_or(self.builder).finish(tokens)
    }
}

/// Policy version of each row in `start..end`. Row `t` belongs to the pass that sampled token
/// `t + 1`; rows of the prompt belong to the first pass.
fn row_versions(
    reply: &Generation,
    prompt: usize,
    start: usize,
    end: usize,
    first: PolicyVersion,
) -> Vec<RowVersion> {
    let mut versions: Vec<RowVersion> = Vec::new();
    let mut next = start;
    for span in reply.versions() {
        let until = (prompt + span.end).saturating_sub(1).clamp(next, end);
        versions.push(RowVersion { start: next, end: until, version: span.version });
        next = until;
    }
    if versions.is_empty() {
        versions.push(RowVersion { start, end, version: first });
    }
    versions
}
