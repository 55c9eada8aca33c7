//! The care of one worker: a look at it now and then, and waking it up when it returns.

use super::circuit::{Circuit, Event};
use super::worker::Worker;
use super::{Shared, sync};
use crate::EngineInfo;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Pauses between attempts to wake a worker double up to so many probe intervals, whether it could
/// not be woken or did not stay: each attempt loads weights, and moves conversations. They begin
/// anew once it has stayed for so long.
const MAX_BACKOFF: u32 = 16;

/// Looks after worker `index` until dropped.
pub(super) async fn run(shared: Arc<Shared>, index: usize) {
    let Some(worker) = shared.workers.get(index) else { return };
    let interval = shared.options.probe_interval;
    let mut doubts = worker.doubts();
    let mut settled = 0;
    let mut wakes = 0;
    let mut next = Instant::now() + interval;
    let (mut woken, mut rested) = (Instant::now(), Instant::now());
    loop {
        // Neither branch loses anything: a doubt is kept until it is looked at.
        tokio::select! {
            biased;
            // The sender lives in the worker.
            _ = doubts.changed() => {}
            () = tokio::time::sleep_until(next) => {}
        }
        let begun = Instant::now();
        let doubted = *doubts.borrow_and_update();
        match worker.circuit() {
            Circuit::Closed { .. } => {
                look(&shared, index, worker, doubted > settled).await;
                if woken.elapsed() >= interval * MAX_BACKOFF {
                    wakes = 0;
                }
            }
            Circuit::Open if begun >= rested => {
                if probe(worker, interval).await.is_some() {
                    sync::wake(&shared, index).await;
                    woken = Instant::now();
                    rested = woken + interval * (1 << wakes);
                    wakes = (wakes + 1).min(MAX_BACKOFF.ilog2());
                }
            }
            // It rests; or whoever exchanges its weights says how that ended.
            Circuit::Open | Circuit::Syncing | Circuit::Waking => {}
        }
        // From beginning to beginning: a worker that does not answer is found in three intervals.
        next = begun + interval;
        settled = doubted;
        worker.settle(settled);
    }
}

/// One probe of a worker that gets requests; `broke_off`: because one of them broke off.
async fn look(shared: &Shared, index: usize, worker: &Worker, broke_off: bool) {
    let before = shared.target().map(|target| target.version);
    let found = probe(worker, shared.options.probe_interval).await;
    // Weights were exchanged meanwhile: what was found may be older.
    let changed =
        shared.target().map(|target| target.version) != before || !worker.circuit().is_closed();
    match found {
        Some(_) if changed => {}
        Some(info) if before.is_some_and(|version| info.policy_version != Some(version)) => {
            shared.step(index, Event::WeightsUnknown);
        }
        Some(_) => shared.step(index, Event::Seen),
        None if broke_off => shared.step(index, Event::Gone),
        None => shared.step(index, Event::Missed),
    }
}

async fn probe(worker: &Worker, patience: Duration) -> Option<EngineInfo> {
    match tokio::time::timeout(patience, worker.engine().info()).await {
        Ok(Ok(info)) => Some(info),
        Ok(Err(error)) => {
            tracing::debug!(engine = worker.name(), %error, "probe failed");
            None
        }
        Err(_) => {
            tracing::debug!(engine = worker.name(), ?patience, "probe had no answer");
            None
        }
    }
}
