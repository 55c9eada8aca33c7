//! Health checks of one worker: periodic probes, and its recovery when it returns.

use super::circuit::{Circuit, CircuitEvent};
use super::shared::Shared;
use super::sync;
use super::worker::Worker;
use crate::api::EngineInfo;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Maximum pause between two attempts to recover a worker, in probe intervals. Pauses double up to
/// it, whether recovery failed or the worker did not stay in service, because each attempt loads
/// weights and moves conversations. They start over once the worker has stayed for this long.
const MAX_BACKOFF: u32 = 16;

/// Checks worker `index` until dropped.
pub(super) async fn run(shared: Arc<Shared>, index: usize) {
    let Some(worker) = shared.workers.get(index) else { return };
    let interval = shared.options.probe_interval;
    let mut requests = worker.probe_requests();
    let mut probed = 0;
    let mut recoveries = 0;
    let mut next = Instant::now() + interval;
    let (mut recovered_at, mut next_recovery) = (Instant::now(), Instant::now());
    loop {
        // Cancel-safe: a probe request stays visible until it is read.
        tokio::select! {
            biased;
            // The sender lives in the worker, so this is never an error.
            _ = requests.changed() => {}
            () = tokio::time::sleep_until(next) => {}
        }
        let started = Instant::now();
        let requested = *requests.borrow_and_update();
        match worker.circuit() {
            Circuit::Closed { .. } => {
                check(&shared, index, worker, requested > probed).await;
                if recovered_at.elapsed() >= interval * MAX_BACKOFF {
                    recoveries = 0;
                }
            }
            Circuit::Open if started >= next_recovery => {
                if probe(worker, interval).await.is_some() {
                    sync::recover(&shared, index).await;
                    recovered_at = Instant::now();
                    next_recovery = recovered_at + interval * (1 << recoveries);
                    recoveries = (recoveries + 1).min(MAX_BACKOFF.ilog2());
                }
            }
            // Either the backoff has not passed, or a running weight sync decides the next state.
            Circuit::Open | Circuit::Syncing | Circuit::Recovering => {}
        }
        // Counted from the start, so that an unresponsive worker is found within three intervals.
        next = started + interval;
        probed = requested;
        worker.finish_probe(probed);
    }
}

/// Probes a worker in service. `connection_broke`: a call requested this probe.
async fn check(shared: &Shared, index: usize, worker: &Worker, connection_broke: bool) {
    let before = shared.version();
    let found = probe(worker, shared.options.probe_interval).await;
    // During a weight sync the worker may have reported the version before it.
    let changed = shared.version() != before || !worker.circuit().accepts_requests();
    match found {
        Some(_) if changed => {}
        Some(info) if before.is_some_and(|version| info.policy_version != Some(version)) => {
            shared.step(index, CircuitEvent::WeightsUnknown);
        }
        Some(_) => shared.step(index, CircuitEvent::ProbeAnswered),
        None if connection_broke => shared.step(index, CircuitEvent::Unreachable),
        None => shared.step(index, CircuitEvent::ProbeMissed),
    }
}

async fn probe(worker: &Worker, timeout: Duration) -> Option<EngineInfo> {
    match tokio::time::timeout(timeout, worker.engine().info()).await {
        Ok(Ok(info)) => Some(info),
        Ok(Err(error)) => {
            tracing::debug!(engine = worker.name(), %error, "health check failed");
            None
        }
        Err(_) => {
            tracing::debug!(engine = worker.name(), ?timeout, "health check was not answered");
            None
        }
    }
}
