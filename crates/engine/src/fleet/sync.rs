//! New weights: for all workers at once, and for a worker that returned.
//!
//! No worker ever serves unknown weights. A worker that cannot be given the current weights, or does
//! not report them afterwards, goes out of service, and its health checks try again.

use super::circuit::{Circuit, CircuitEvent};
use super::shared::{Shared, TargetWeights};
use crate::api::Engine;
use crate::error::{EngineError, EngineErrorKind};
use std::sync::Arc;
use tokio::task::JoinSet;
use tracing::Instrument;

/// Workers whose update has started and not ended. Those left when this is dropped have unknown
/// weights.
struct PendingSyncs<'a> {
    shared: &'a Shared,
    workers: Vec<usize>,
}

impl PendingSyncs<'_> {
    fn end(&mut self, index: usize, event: CircuitEvent) {
        self.workers.retain(|other| *other != index);
        self.shared.step(index, event);
    }
}

impl Drop for PendingSyncs<'_> {
    fn drop(&mut self) {
        for index in std::mem::take(&mut self.workers) {
            self.shared.step(index, CircuitEvent::SyncFailed);
        }
    }
}

/// Gives the weights to every worker in service. The others get them when they return.
pub(super) async fn sync_all(shared: &Shared, target: TargetWeights) -> Result<(), EngineError> {
    let failures = {
        let _one_at_a_time = shared.syncing.lock().await;
        shared.set_target(target.clone());
        let mut pending = PendingSyncs { shared, workers: Vec::new() };
        let mut tasks = JoinSet::new();
        for (index, worker) in shared.workers.iter().enumerate() {
            shared.step(index, CircuitEvent::SyncStarted);
            if worker.circuit() == Circuit::Syncing {
                pending.workers.push(index);
                let (engine, target) = (Arc::clone(worker.engine()), target.clone());
                let span = tracing::info_span!("worker", engine = worker.name());
                let update = async move { (index, sync_worker(engine.as_ref(), &target).await) };
                tasks.spawn(update.instrument(span));
            }
        }
        let (mut synced, mut failures) = (0, Vec::new());
        while let Some(joined) = tasks.join_next().await {
            match joined {
                Ok((index, Ok(()))) => {
                    pending.end(index, CircuitEvent::SyncSucceeded);
                    synced += 1;
                }
                Ok((index, Err(error))) => {
                    let policy_version = target.version.0;
                    tracing::warn!(%error, policy_version, "weight sync of a worker failed");
                    pending.end(index, CircuitEvent::SyncFailed);
                    failures.push(error);
                }
                // After a panic the worker is still pending, and goes out of service at the end.
                Err(error) => tracing::error!(%error, "weight sync of a worker panicked"),
            }
        }
        if synced > 0 {
            return Ok(());
        }
        failures
    };
    // A worker that refused the weights will refuse them again. An unreachable one may return.
    let (unreachable, refused): (Vec<_>, Vec<_>) = failures.into_iter().partition(is_unreachable);
    match refused.into_iter().next() {
        Some(error) => Err(error),
        None => wait_for_any(shared, unreachable.into_iter().next()).await,
    }
}

fn is_unreachable(error: &EngineError) -> bool {
    match &error.kind {
        EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
        EngineErrorKind::Refused { status, .. } => matches!(status, 502..=504),
        EngineErrorKind::ContextFull(_)
        | EngineErrorKind::InvalidReply(_)
        | EngineErrorKind::GenerationFailed(_)
        | EngineErrorKind::Unsupported(_) => false,
    }
}

/// Waits until any worker is in service, which implies that it has the current weights.
async fn wait_for_any(shared: &Shared, last: Option<EngineError>) -> Result<(), EngineError> {
    let any = || shared.placement().any_in_service().then_some(());
    shared.wait_for_service(any).await.map_err(|_| {
        let timeout = shared.options.out_of_service_timeout;
        let message = format!("no worker took the weights within {timeout:?}");
        last.unwrap_or_else(|| shared.no_worker(message))
    })
}

/// Gives a worker that answers again the weights that it missed, and puts it back into service. If
/// that fails, it stays out of service.
pub(super) async fn recover(shared: &Shared, index: usize) {
    let _one_at_a_time = shared.syncing.lock().await;
    let Some(worker) = shared.workers.get(index) else { return };
    shared.step(index, CircuitEvent::Returned);
    let mut pending = PendingSyncs { shared, workers: vec![index] };
    let result = match shared.target() {
        Some(target) => sync_worker(worker.engine().as_ref(), &target).await,
        // Before the first sync any weights are accepted.
        None => Ok(()),
    };
    match result {
        Ok(()) => pending.end(index, CircuitEvent::SyncSucceeded),
        Err(error) => {
            tracing::warn!(engine = worker.name(), %error, "recovery of a worker failed");
            pending.end(index, CircuitEvent::SyncFailed);
        }
    }
}

/// Gives one worker the weights, and then asks what it serves: a worker that restarted in between
/// has its first weights again.
async fn sync_worker(engine: &dyn Engine, target: &TargetWeights) -> Result<(), EngineError> {
    engine.sync_weights(&target.checkpoint, target.version).await?;
    let info = engine.info().await?;
    if info.policy_version == Some(target.version) {
        return Ok(());
    }
    let found = info.policy_version.map_or("no version".to_owned(), |version| version.to_string());
    let message = format!("it reports {found} after a sync of policy version {}", target.version);
    Err(EngineError {
        engine: info.engine,
        call: "/model_info",
        kind: EngineErrorKind::invalid_reply(message),
    })
}
