//! A fleet that records the traffic between it and the episodes.

use async_trait::async_trait;
use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineInfo, Fleet, GenerateRequest, Generation, Reply, SessionOpening,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Forwards every call to the fleet and records where conversations run and what the caches hit.
#[derive(Debug)]
pub(super) struct Observed {
    fleet: Arc<Fleet>,
    page_tokens: usize,
    notes: Mutex<Notes>,
    turns: AtomicUsize,
    /// Number of turns in the first half.
    half: usize,
    half_way: Notify,
}

#[derive(Debug, Default)]
struct Notes {
    sessions: HashMap<String, Seen>,
    /// Group prompts that a worker has seen, as (group, worker).
    led: HashSet<(String, String)>,
}

#[derive(Debug, Default)]
struct Seen {
    group: String,
    worker: String,
    has_moved: bool,
    is_open: bool,
    tokens: usize,
    hits: Hits,
}

/// Prompt tokens that were found in the engine's prefix cache (`hit`), and that could have been
/// (`possible`).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hits {
    pub(super) hit: u64,
    pub(super) possible: u64,
}

impl Hits {
    /// Hits as a share of the possible ones; 1 if none was possible.
    pub(super) fn share(self) -> f64 {
        if self.possible == 0 { 1.0 } else { self.hit as f64 / self.possible as f64 }
    }
}

/// Totals over all conversations.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Summary {
    pub(super) all: Hits,
    /// Over conversations that stayed on one worker.
    pub(super) unmoved: Hits,
    pub(super) moved_sessions: usize,
    pub(super) open_sessions: usize,
    /// Number of tokens of open conversations.
    pub(super) open_tokens: usize,
}

impl Observed {
    pub(super) fn new(fleet: Arc<Fleet>, page_tokens: usize, half: usize) -> Self {
        let turns = AtomicUsize::new(0);
        Self { fleet, page_tokens, notes: Mutex::default(), turns, half, half_way: Notify::new() }
    }

    /// Number of turns so far.
    pub(super) fn turns(&self) -> usize {
        self.turns.load(Relaxed)
    }

    /// Waits until half of the turns are done. Only one caller may wait.
    pub(super) async fn half_way(&self) {
        self.half_way.notified().await;
    }

    /// Wakes [`Observed::half_way`], however few turns there were.
    pub(super) fn end_first_half(&self) {
        self.half_way.notify_one();
    }

    pub(super) fn summary(&self) -> Summary {
        let notes = self.lock();
        let mut summary = Summary::default();
        for seen in notes.sessions.values() {
            summary.all.hit += seen.hits.hit;
            summary.all.possible += seen.hits.possible;
            summary.moved_sessions += usize::from(seen.has_moved);
            if !seen.has_moved {
                summary.unmoved.hit += seen.hits.hit;
                summary.unmoved.possible += seen.hits.possible;
            }
            if seen.is_open {
                summary.open_sessions += 1;
                summary.open_tokens += seen.tokens;
            }
        }
        summary
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, session: &str, prompt: usize, reply: &Generation) {
        let whole_pages = |tokens: usize| tokens / self.page_tokens * self.page_tokens;
        let mut notes = self.lock();
        let Notes { sessions, led } = &mut *notes;
        let Some(seen) = sessions.get_mut(session) else { return };
        let is_first = seen.tokens == 0;
        // A conversation that stays on its worker has been counted there.
        let arrives = is_first || seen.worker != reply.worker;
        let leads = arrives && led.insert((seen.group.clone(), reply.worker.clone()));
        let held = match (is_first, leads) {
            // The first member of a group on a worker finds nothing of its prompt there.
            (true, true) => 0,
            (true, false) => prompt - 1,
            // The last sampled token has no KV entry yet.
            (false, _) => seen.tokens - 1,
        };
        let possible = whole_pages(held.min(prompt - 1));
        seen.hits.possible += possible as u64;
        seen.hits.hit += possible.min(reply.cached_tokens) as u64;
        seen.has_moved |= !is_first && seen.worker != reply.worker;
        seen.worker.clone_from(&reply.worker);
        seen.tokens = prompt + reply.output_ids().len();
    }
}

#[async_trait]
impl Engine for Observed {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        self.fleet.info().await
    }

    fn shape(&self) -> &ModelShape {
        self.fleet.shape()
    }

    fn open_session(&self, opening: &SessionOpening<'_>) {
        self.fleet.open_session(opening);
        let group = opening.group.unwrap_or(opening.session).to_owned();
        let seen = Seen { group, is_open: true, ..Seen::default() };
        self.lock().sessions.insert(opening.session.to_owned(), seen);
    }

    fn worker_of(&self, session: &str) -> Option<String> {
        self.fleet.worker_of(session)
    }

    fn close_session(&self, session: &str) {
        self.fleet.close_session(session);
        if let Some(seen) = self.lock().sessions.get_mut(session) {
            seen.is_open = false;
        }
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        let (session, prompt) = (request.session.clone(), request.prompt.token_count());
        let reply = self.fleet.generate(request).await?;
        if let Reply::Tokens(generation) = &reply {
            self.note(&session, prompt, generation);
        }
        // The waiting task is woken once: waking it at each turn would add to the measured time.
        if self.turns.fetch_add(1, Relaxed) + 1 == self.half {
            self.end_first_half();
        }
        Ok(reply)
    }

    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        self.fleet.sync_weights(checkpoint, version).await
    }
}
