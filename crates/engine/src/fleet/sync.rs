//! New weights: for all workers at once, and for one that returned.
//!
//! Whatever fails, no worker serves weights that are not known: one that could not be given the
//! right ones, or does not name them afterwards, is taken out, and its care tries again.

use super::circuit::{Circuit, Event};
use super::{Shared, Target};
use crate::{Engine, EngineError, EngineErrorKind};
use std::sync::{Arc, PoisonError};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;

/// Workers whose exchange has begun and not ended. Who drops it half-way leaves them in a state
/// nobody knows.
struct Unfinished<'a> {
    shared: &'a Shared,
    workers: Vec<usize>,
}

impl Unfinished<'_> {
    fn end(&mut self, index: usize, event: Event) {
        self.workers.retain(|other| *other != index);
        self.shared.step(index, event);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        for index in std::mem::take(&mut self.workers) {
            self.shared.step(index, Event::SyncFailed);
        }
    }
}

/// Gives every worker that is up the weights. Those that are away get them when they return.
pub(super) async fn sync_all(shared: &Shared, target: Target) -> Result<(), EngineError> {
    let failures = {
        let _one_at_a_time = shared.syncing.lock().await;
        *shared.target.lock().unwrap_or_else(PoisonError::into_inner) = Some(target.clone());
        let mut unfinished = Unfinished { shared, workers: Vec::new() };
        let mut tasks = JoinSet::new();
        for (index, worker) in shared.workers.iter().enumerate() {
            shared.step(index, Event::SyncBegan);
            if worker.circuit() == Circuit::Syncing {
                unfinished.workers.push(index);
                let (engine, target) = (Arc::clone(worker.engine()), target.clone());
                let span = tracing::info_span!("worker", engine = worker.name());
                let exchanged = async move { (index, exchange(engine.as_ref(), &target).await) };
                tasks.spawn(exchanged.instrument(span));
            }
        }
        let (mut served, mut failures) = (0, Vec::new());
        while let Some(joined) = tasks.join_next().await {
            match joined {
                Ok((index, Ok(()))) => {
                    unfinished.end(index, Event::Synced);
                    served += 1;
                }
                Ok((index, Err(error))) => {
                    tracing::warn!(%error, policy_version = target.version.0, "worker not synced");
                    unfinished.end(index, Event::SyncFailed);
                    failures.push(error);
                }
                // A panic: its worker is among the unfinished.
                Err(error) => tracing::error!(%error, "weight sync of a worker ended badly"),
            }
        }
        if served > 0 {
            return Ok(());
        }
        failures
    };
    // Weights that a worker refuses will be refused again; a worker that is away may return.
    let (away, refused): (Vec<_>, Vec<_>) = failures.into_iter().partition(is_away);
    match refused.into_iter().next() {
        Some(error) => Err(error),
        None => wait_for_one(shared, away.into_iter().next()).await,
    }
}

fn is_away(error: &EngineError) -> bool {
    match &error.kind {
        EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
        EngineErrorKind::Refused { status, .. } => matches!(status, 502..=504),
        EngineErrorKind::InvalidReply(_) | EngineErrorKind::Unfit(_) => false,
    }
}

async fn wait_for_one(shared: &Shared, last: Option<EngineError>) -> Result<(), EngineError> {
    let patience = shared.options.away_timeout;
    let end = Instant::now() + patience;
    let mut roster = shared.roster.subscribe();
    loop {
        roster.mark_unchanged();
        if shared.placement().any_up() {
            return Ok(());
        }
        if !matches!(tokio::time::timeout_at(end, roster.changed()).await, Ok(Ok(()))) {
            let words = format!("no worker took the weights within {patience:?}");
            return Err(last.unwrap_or_else(|| shared.nobody(words)));
        }
    }
}

/// Gives a worker that answers again the weights it missed, and lets it serve. If that fails it is
/// away again.
pub(super) async fn wake(shared: &Shared, index: usize) {
    let _one_at_a_time = shared.syncing.lock().await;
    let Some(worker) = shared.workers.get(index) else { return };
    shared.step(index, Event::Returned);
    let mut unfinished = Unfinished { shared, workers: vec![index] };
    let result = match shared.target() {
        Some(target) => exchange(worker.engine().as_ref(), &target).await,
        // Nobody has said what is to be served: what it has is taken at its word.
        None => Ok(()),
    };
    match result {
        Ok(()) => unfinished.end(index, Event::Synced),
        Err(error) => {
            tracing::warn!(engine = worker.name(), %error, "worker cannot be given its weights");
            unfinished.end(index, Event::SyncFailed);
        }
    }
}

/// Gives one worker the weights, and asks it afterwards what it serves: one that restarted in
/// between has its first weights again.
async fn exchange(engine: &dyn Engine, target: &Target) -> Result<(), EngineError> {
    engine.sync_weights(&target.checkpoint, target.version).await?;
    let info = engine.info().await?;
    if info.policy_version == Some(target.version) {
        return Ok(());
    }
    let found = info.policy_version.map_or("no number".to_owned(), |version| version.to_string());
    let wanted = target.version;
    let words = format!("it names policy version {found} after it was given {wanted}");
    Err(EngineError {
        engine: info.engine,
        call: "/model_info",
        kind: EngineErrorKind::InvalidReply(words),
    })
}
