//! One worker: its circuit and permits, and a call from permit to reply.

use super::circuit::{Circuit, Event};
use super::placement::{Place, WorkerLoad};
use super::{FleetMember, Shared, WorkerStatus};
use crate::{Engine, EngineError, EngineErrorKind, GenerateRequest, Generation};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Semaphore, watch};

/// What those who wait for a worker look at.
#[derive(Debug, Clone, Copy)]
struct State {
    circuit: Circuit,
    /// Doubts that a probe begun after them has settled.
    settled: u64,
}

/// One worker of a fleet.
#[derive(Debug)]
pub(super) struct Worker {
    name: String,
    engine: Arc<dyn Engine>,
    state: watch::Sender<State>,
    permits: Semaphore,
    /// Calls that broke off, counted.
    doubts: watch::Sender<u64>,
    answered: AtomicU64,
    failed: AtomicU64,
    ejected: AtomicU64,
}

/// How a call ended.
pub(super) enum Asked {
    Answered(Generation),
    /// The caller decides what to do with it.
    Failed(EngineError),
    /// The worker was taken out: another one may answer.
    Away(EngineError),
}

impl Worker {
    pub(super) fn new(member: FleetMember, permits: usize) -> Self {
        let circuit = if member.is_up { Circuit::UP } else { Circuit::Open };
        Self {
            name: member.name,
            engine: member.engine,
            state: watch::Sender::new(State { circuit, settled: 0 }),
            permits: Semaphore::new(permits.clamp(1, Semaphore::MAX_PERMITS)),
            doubts: watch::Sender::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            ejected: AtomicU64::new(0),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The name of one rank's KV cache; a worker without ranks is its own.
    pub(super) fn place_name(&self, rank: usize) -> String {
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

    /// Its state before and after an event.
    pub(super) fn step(&self, event: Event) -> (Circuit, Circuit) {
        let (mut before, mut after) = (Circuit::UP, Circuit::UP);
        self.state.send_if_modified(|state| {
            before = state.circuit;
            after = before.step(event);
            state.circuit = after;
            before != after
        });
        if before.is_member() && !after.is_member() {
            self.ejected.fetch_add(1, Ordering::Relaxed);
        }
        (before, after)
    }

    /// Whoever waits for this hears of every doubt that it lives.
    pub(super) fn doubts(&self) -> watch::Receiver<u64> {
        self.doubts.subscribe()
    }

    /// A probe ended that began after `doubts` doubts; its verdict is in the circuit.
    pub(super) fn settle(&self, doubts: u64) {
        // Every call under way watches this: without news none of them may be woken.
        self.state
            .send_if_modified(|state| std::mem::replace(&mut state.settled, doubts) != doubts);
    }

    /// Resolves when it is not a member any more.
    async fn ejected(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`.
        let _ = state.wait_for(|state| !state.circuit.is_member()).await;
    }

    /// Resolves when a request may be sent: `true`; or when it was taken out: `false`.
    async fn ready(&self) -> bool {
        if self.circuit().is_closed() {
            return true;
        }
        let mut state = self.state.subscribe();
        let found = state.wait_for(|state| state.circuit != Circuit::Syncing).await;
        found.is_ok_and(|state| state.circuit.is_closed())
    }

    /// Has it probed now, and tells whether it still gets requests afterwards.
    async fn survives_doubt(&self) -> bool {
        let mut state = self.state.subscribe();
        let mut mine = 0;
        self.doubts.send_modify(|doubts| {
            *doubts += 1;
            mine = *doubts;
        });
        let settled = |state: &State| !state.circuit.is_member() || state.settled >= mine;
        state.wait_for(settled).await.is_ok_and(|state| state.circuit.is_member())
    }

    fn away(&self, call: &'static str) -> EngineError {
        let words = "it was taken out of the fleet".to_owned();
        EngineError { engine: self.name.clone(), call, kind: EngineErrorKind::Unreachable(words) }
    }
}

/// One call at the place it was given.
pub(super) async fn ask(shared: &Shared, place: Place, request: &mut GenerateRequest) -> Asked {
    const CALL: &str = "/generate";
    let Some(worker) = shared.workers.get(place.worker) else {
        return Asked::Failed(shared.nobody("its place is gone".to_owned()));
    };
    // Waiting calls move on when the worker is taken out; so do those that hold a permit, as a
    // worker that was stopped neither answers nor breaks its connections.
    let call = async {
        loop {
            let permit = worker.permits.acquire().await;
            if !worker.ready().await {
                return None;
            }
            if let Some(version) = shared.version() {
                // The weights it answers with: its own KV of them is what may be reused.
                request.cache_namespace = version;
            }
            let rank = Some(place.rank).filter(|_| worker.engine.data_parallel_ranks() > 1);
            let result = worker.engine.generate_on(&*request, rank).await;
            drop(permit);
            match &result {
                // Its client saw the exchange of weights before we did.
                Err(EngineError { kind: EngineErrorKind::Unfit(_), .. })
                    if !worker.circuit().is_closed() => {}
                Ok(_) | Err(_) => return Some(result),
            }
        }
    };
    let result = tokio::select! {
        biased;
        result = call => result,
        () = worker.ejected() => None,
    };
    let error = match result {
        None => return Asked::Away(worker.away(CALL)),
        Some(Ok(mut reply)) => {
            worker.answered.fetch_add(1, Ordering::Relaxed);
            shared.step(place.worker, Event::Answered);
            reply.worker = worker.place_name(place.rank);
            return Asked::Answered(reply);
        }
        Some(Err(error)) => error,
    };
    worker.failed.fetch_add(1, Ordering::Relaxed);
    match &error.kind {
        EngineErrorKind::Unreachable(_) => {
            // Broken off: by a network that hiccuped, or by a process that is gone?
            if worker.survives_doubt().await {
                shared.step(place.worker, Event::Failed);
                Asked::Failed(error)
            } else {
                Asked::Away(error)
            }
        }
        EngineErrorKind::InvalidReply(_) => {
            shared.step(place.worker, Event::Failed);
            shared.placement().shun(&request.session, place.worker);
            Asked::Failed(error)
        }
        EngineErrorKind::Unfit(_) => {
            shared.step(place.worker, Event::WeightsUnknown);
            Asked::Away(error)
        }
        EngineErrorKind::Refused { status: 500 | 502 | 504, .. } => {
            shared.step(place.worker, Event::Failed);
            Asked::Failed(error)
        }
        // A refusal is an answer; silence for the time of a long generation is left to probes.
        EngineErrorKind::Refused { .. } | EngineErrorKind::TimedOut(_) => Asked::Failed(error),
    }
}
