//! The routing rows of one attempt: begun with rows other episodes fetched, filled by replies,
//! and finished or refused.
//!
//! The invariant: a seed from the cache stands only once a reply under the seed's policy version,
//! and in the scope of one worker from that worker, has joined it.

use crate::api::RowCounts;
use orchestrate_engine::Generation;
use orchestrate_routing::{
    MaskBuilder, MixedRows, Passes, PrefixCache, PrefixChain, RoutedRows, RoutingError,
    RoutingMask, RowVersion, SharingScope,
};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// What episodes do with routing rows beyond collecting their own.
#[derive(Debug, Clone, Default)]
pub struct RowSharing {
    /// Where rows of common prefixes are found; `None` = every episode fetches its own.
    pub cache: Option<Arc<PrefixCache>>,
    /// Among which episodes they are shared.
    pub scope: SharingScope,
    /// What is done with mixed rows.
    pub mixed: MixedRows,
}

/// Why the rows of a reply were not taken.
pub(crate) enum RowsRefused {
    /// The rows themselves are at fault.
    Rows(String),
    /// The seed is of other weights than the reply, or of a worker that did not answer; it is
    /// gone, and another try begins at row 0.
    Seed,
}

/// Rows collected so far.
#[derive(Debug)]
pub(crate) struct EpisodeRows {
    shape: Arc<ModelShape>,
    model: String,
    sharing: RowSharing,
    builder: MaskBuilder,
    /// The rows without a fork, until a reply to the forked prompt has come.
    unforked: Option<MaskBuilder>,
    chain: Option<PrefixChain>,
    /// Worker of the chain's scope; empty for the fleet.
    worker: String,
    seeded: usize,
    pub(crate) counts: RowCounts,
}

impl EpisodeRows {
    /// `model` tells this run's weights from any others of equal version.
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
            counts: RowCounts::default(),
        })
    }

    /// First row to ask the next reply for.
    pub(crate) fn next_start(&self) -> usize {
        self.builder.next_start()
    }

    /// The next prompt has only the first `tokens` tokens in common with what there is.
    pub(crate) fn fork(&mut self, tokens: usize) {
        let forked = self.builder.fork(tokens);
        self.unforked = Some(std::mem::replace(&mut self.builder, forked));
        self.seeded = 0;
        self.chain = None;
    }

    fn begin_chain(&mut self, version: PolicyVersion, worker: Option<String>) {
        self.worker = match (self.sharing.scope, worker) {
            (SharingScope::Fleet, _) => String::new(),
            (SharingScope::Worker, Some(worker)) => worker,
            (SharingScope::Worker, None) => return,
        };
        self.chain = Some(PrefixChain::new(&self.shape, &self.model, version, &self.worker));
    }

    /// Before the first call: takes the rows that other episodes fetched for the same tokens under
    /// the same weights. `worker` is the one that will answer, where that is known beforehand.
    pub(crate) async fn seed(
        &mut self,
        prompt: &[TokenId],
        version: PolicyVersion,
        worker: Option<String>,
    ) {
        let Some(cache) = self.sharing.cache.clone() else { return };
        self.begin_chain(version, worker);
        let Some(chain) = &mut self.chain else { return };
        chain.extend_to(prompt);
        let chain = chain.clone();
        // A lookup may read files.
        let found = tokio::task::spawn_blocking(move || cache.lookup(&chain)).await;
        self.builder.seed(found.unwrap_or_default(), version);
        self.seeded = self.builder.rows();
    }

    /// Takes the rows of a reply to a prompt of `prompt` tokens. A refused reply leaves no trace.
    pub(crate) fn accept(
        &mut self,
        reply: &mut Generation,
        prompt: usize,
        version: PolicyVersion,
    ) -> Result<(), RowsRefused> {
        let total = prompt + reply.output_ids().len();
        let Some(rows) = reply.routed_experts.take() else {
            let words = "routing rows were asked for, none came";
            return Err(RowsRefused::Rows(words.to_owned()));
        };
        let (start, end) = (rows.start(), rows.start() + rows.rows());
        let needed = total.saturating_sub(1);
        if end != needed {
            let words = format!("routing rows end at {end}, needed {needed}");
            return Err(RowsRefused::Rows(words));
        }
        let first = reply.versions().first().map_or(version, |span| span.version);
        let moved = self.sharing.scope == SharingScope::Worker && self.worker != reply.worker;
        let seed_is_other =
            self.chain.as_ref().is_some_and(|chain| moved || chain.version() != first);
        if self.seeded > 0 && self.builder.rows() == self.seeded && seed_is_other {
            self.builder.truncate(0);
            self.seeded = 0;
            self.chain = None;
            return Err(RowsRefused::Seed);
        }
        self.push(rows, total, &versions(reply, prompt, start, end, first), reply.num_retractions)
            .map_err(|error| RowsRefused::Rows(error.to_string()))?;
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

    /// After a reply was taken: offers the rows of all `tokens` to other episodes. `worker` is the
    /// one that answered; once an episode was moved, its rows are of no one worker.
    pub(crate) async fn offer(&mut self, tokens: &[TokenId], version: PolicyVersion, worker: &str) {
        let Some(cache) = self.sharing.cache.clone() else { return };
        if self.chain.is_none() && self.builder.versions().len() == 1 {
            self.begin_chain(version, Some(worker.to_owned()));
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
            // Written by another thread; waited for, so that no more waits to be written than
            // there are episodes.
            let written = tokio::task::spawn_blocking(move || cache.write(evicted)).await;
            if let Err(error) = written {
                tracing::error!(%error, "writing evicted routing blocks failed");
            }
        }
    }

    /// Tokens whose row is mixed.
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

    /// The mask of the whole trajectory.
    ///
    /// # Errors
    /// [`RoutingError::Incomplete`] when rows are missing.
    pub(crate) fn finish(self, tokens: usize) -> Result<RoutingMask, RoutingError> {
        self.unforked.unwrap_or(self.builder).finish(tokens)
    }
}

/// Weights by row: row `t` belongs to the pass that sampled token `t + 1`; rows of the prompt to
/// the first one.
fn versions(
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
