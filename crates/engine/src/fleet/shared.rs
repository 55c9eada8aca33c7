//! The state that calls, health checks and weight syncs of a fleet share.

use super::circuit::CircuitEvent;
use super::placement::{Placement, WorkerRank};
use super::worker::Worker;
use crate::error::{EngineError, EngineErrorKind};
use crate::request::GenerateRequest;
use camino::Utf8PathBuf;
use orchestrate_types::PolicyVersion;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Instrument as _;

/// How a fleet treats its workers.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// Maximum number of concurrent generations on each worker, at least 1.
    pub max_in_flight: usize,
    /// Time between two health checks of a worker, and the maximum time of one.
    pub probe_interval: Duration,
    /// How long calls wait while no worker is in service.
    pub out_of_service_timeout: Duration,
}

/// The weights that all workers are to serve.
#[derive(Debug, Clone)]
pub(super) struct TargetWeights {
    pub(super) checkpoint: Utf8PathBuf,
    pub(super) version: PolicyVersion,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) workers: Vec<Worker>,
    pub(super) options: FleetOptions,
    /// Held during every weight update of any worker.
    pub(super) syncing: tokio::sync::Mutex<()>,
    placement: Mutex<Placement>,
    /// Changes whenever a worker leaves or returns to service.
    service_changes: watch::Sender<u64>,
    target: Mutex<Option<TargetWeights>>,
}

impl Shared {
    pub(super) fn new(workers: Vec<Worker>, placement: Placement, options: FleetOptions) -> Self {
        Self {
            workers,
            options,
            syncing: tokio::sync::Mutex::new(()),
            placement: Mutex::new(placement),
            service_changes: watch::Sender::new(0),
            target: Mutex::new(None),
        }
    }

    pub(super) fn placement(&self) -> MutexGuard<'_, Placement> {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn target(&self) -> Option<TargetWeights> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_target(&self, target: TargetWeights) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Some(target);
    }

    /// The version that all workers are to serve; `None` before the first sync.
    pub(super) fn version(&self) -> Option<PolicyVersion> {
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        target.as_ref().map(|target| target.version)
    }

    /// Applies an event to one worker, and updates the placement if the worker leaves or returns to
    /// service.
    pub(super) fn step(&self, index: usize, event: CircuitEvent) {
        let Some(worker) = self.workers.get(index) else { return };
        // Under the placement's lock, so that two events of one worker change circuit and placement
        // in the same order.
        let mut placement = self.placement();
        let (before, after) = worker.step(event);
        if before.is_in_service() == after.is_in_service() {
            return;
        }
        if after.is_in_service() {
            placement.put_back(index);
        } else {
            placement.take_out(index);
        }
        drop(placement);
        let (worker, state) = (worker.name(), after.name());
        if after.is_in_service() {
            tracing::info!(engine = worker, state, "worker is back in service");
        } else {
            tracing::warn!(engine = worker, ?event, state, "worker is taken out of service");
        }
        self.service_changes.send_modify(|count| *count += 1);
    }

    /// Starts a call: waits up to `out_of_service_timeout` for a worker in service.
    pub(super) async fn begin_call(
        &self,
        request: &GenerateRequest,
    ) -> Result<CallPlace<'_>, EngineError> {
        let tokens = request.prompt.token_count();
        let begin = || {
            let started = self.placement().begin_call(&request.session, tokens);
            started.map(|place| CallPlace { shared: self, place })
        };
        match begin() {
            Some(place) => Ok(place),
            None => self.wait_for_service(begin).await,
        }
    }

    /// Waits up to `out_of_service_timeout` until `ready` returns something. It is asked at first, and
    /// whenever a worker leaves or returns to service.
    pub(super) async fn wait_for_service<T>(
        &self,
        ready: impl Fn() -> Option<T>,
    ) -> Result<T, EngineError> {
        let mut changes = self.service_changes.subscribe();
        let timeout = self.options.out_of_service_timeout;
        let end = Instant::now() + timeout;
        loop {
            // Marked before the question, so that no change is missed between it and the wait.
            changes.mark_unchanged();
            if let Some(found) = ready() {
                return Ok(found);
            }
            // The sender lives in `self`: the only possible error is the timeout.
            let change = tokio::time::timeout_at(end, changes.changed());
            let change = change.instrument(tracing::info_span!("engines_out_of_service"));
            if !matches!(change.await, Ok(Ok(()))) {
                return Err(self.no_worker(format!("no worker was in service for {timeout:?}")));
            }
        }
    }

    /// The error of a call that found no worker in service.
    pub(super) fn no_worker(&self, message: String) -> EngineError {
        EngineError {
            engine: format!("fleet of {}", self.workers.len()),
            call: "place",
            kind: EngineErrorKind::unreachable(message),
        }
    }
}

/// A started call of a worker. Dropping it ends the call.
pub(super) struct CallPlace<'a> {
    shared: &'a Shared,
    pub(super) place: WorkerRank,
}

impl Drop for CallPlace<'_> {
    fn drop(&mut self) {
        self.shared.placement().end_call(self.place);
    }
}
