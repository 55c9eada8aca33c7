//! One worker of a fleet: its circuit breaker, its permits, and how calls wait for them.

use super::circuit::{Circuit, CircuitEvent};
use super::placement::WorkerLoad;
use crate::api::Engine;
use crate::error::{EngineError, EngineErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// A worker as it joins a fleet.
#[derive(Debug)]
pub struct FleetWorker {
    /// Its name in replies: the base URL.
    pub name: String,
    /// Its client. The client's limit of concurrent generations must not be below the fleet's.
    pub engine: Arc<dyn Engine>,
    /// Whether it is reachable. If not, it is probed until it answers.
    pub is_up: bool,
}

/// Current state of one worker, for display and reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerStatus {
    /// The worker's name.
    pub name: String,
    /// `up`, `syncing`, `out of service` or `recovering`.
    pub state: &'static str,
    /// Number of open conversations assigned to it.
    pub sessions: usize,
    /// Number of tokens of these conversations.
    pub tokens: u64,
    /// Calls that wait for its reply or a permit.
    pub calls: usize,
    /// Replies that passed all checks.
    pub answered: u64,
    /// Calls that failed.
    pub failed: u64,
    /// How often it was taken out of service.
    pub ejected: u64,
}

/// The state that calls wait on.
#[derive(Debug, Clone, Copy)]
struct State {
    circuit: Circuit,
    /// Number of requested probes that have been made.
    probed: u64,
}

/// One worker of a fleet.
#[derive(Debug)]
pub(super) struct Worker {
    name: String,
    engine: Arc<dyn Engine>,
    state: watch::Sender<State>,
    permits: Semaphore,
    /// Number of probes requested by calls whose connection broke.
    requested_probes: watch::Sender<u64>,
    answered: AtomicU64,
    failed: AtomicU64,
    ejected: AtomicU64,
}

impl Worker {
    pub(super) fn new(worker: FleetWorker, permits: usize) -> Self {
        let circuit = if worker.is_up { Circuit::HEALTHY } else { Circuit::Open };
        Self {
            name: worker.name,
            engine: worker.engine,
            state: watch::Sender::new(State { circuit, probed: 0 }),
            permits: Semaphore::new(permits.clamp(1, Semaphore::MAX_PERMITS)),
            requested_probes: watch::Sender::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            ejected: AtomicU64::new(0),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The name of one rank's KV cache; the worker's own name if it has only one rank.
    pub(super) fn rank_name(&self, rank: usize) -> String {
        if self.engine.data_parallel_ranks() > 1 {
            format!("{}#{rank}", self.name)
        } else {
            self.name.clone()
        }
    }

    pub(super) fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    pub(super) fn circuit(&self) -> Circuit {
        self.state.borrow().circuit
    }

    pub(super) fn status(&self, load: WorkerLoad) -> WorkerStatus {
        WorkerStatus {
            name: self.name.clone(),
            state: self.circuit().name(),
            sessions: load.sessions,
            tokens: load.tokens,
            calls: load.calls,
            answered: self.answered.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            ejected: self.ejected.load(Ordering::Relaxed),
        }
    }

    /// Applies an event. Returns the state before and after it.
    pub(super) fn step(&self, event: CircuitEvent) -> (Circuit, Circuit) {
        let (mut before, mut after) = (Circuit::HEALTHY, Circuit::HEALTHY);
        self.state.send_if_modified(|state| {
            before = state.circuit;
            after = before.step(event);
            state.circuit = after;
            before != after
        });
        if before.is_in_service() && !after.is_in_service() {
            self.ejected.fetch_add(1, Ordering::Relaxed);
        }
        (before, after)
    }

    /// Counts a reply that passed all checks.
    pub(super) fn count_answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call that failed.
    pub(super) fn count_failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Receives the number of requested probes whenever it grows.
    pub(super) fn probe_requests(&self) -> watch::Receiver<u64> {
        self.requested_probes.subscribe()
    }

    /// Records the end of a probe that started after `requested` probes had been requested. Its result
    /// is already in the circuit.
    pub(super) fn finish_probe(&self, requested: u64) {
        // Every running call watches this state, so none may be woken without a change.
        self.state
            .send_if_modified(|state| std::mem::replace(&mut state.probed, requested) != requested);
    }

    /// Resolves when the worker is out of service.
    pub(super) async fn out_of_service(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this is never an error.
        let _ = state.wait_for(|state| !state.circuit.is_in_service()).await;
    }

    /// Waits for a permit and for the end of a weight sync; `None` if the worker is then out of
    /// service.
    pub(super) async fn ready(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.permits.acquire().await.ok()?;
        if self.circuit().accepts_requests() {
            return Some(permit);
        }
        let mut state = self.state.subscribe();
        let found = state.wait_for(|state| state.circuit != Circuit::Syncing).await;
        found.is_ok_and(|state| state.circuit.accepts_requests()).then_some(permit)
    }

    /// Requests a probe now. Returns whether the worker is still in service after it.
    pub(super) async fn survives_probe(&self) -> bool {
        let mut state = self.state.subscribe();
        let mut mine = 0;
        self.requested_probes.send_modify(|requested| {
            *requested += 1;
            mine = *requested;
        });
        let decided = |state: &State| !state.circuit.is_in_service() || state.probed >= mine;
        state.wait_for(decided).await.is_ok_and(|state| state.circuit.is_in_service())
    }

    /// The error of a call that was interrupted because the worker went out of service.
    pub(super) fn out_of_service_error(&self, call: &'static str) -> EngineError {
        let kind = EngineErrorKind::unreachable("it was taken out of service");
        EngineError { engine: self.name.clone(), call, kind }
    }
}
