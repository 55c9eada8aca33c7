//! Episodes that external workers take, run and return over HTTP.
//!
//! An attempt [`Offers::offer`]s its task and waits for [`Offer::ended`]. A worker takes it under a
//! *lease*: it gets the task and a secret base URL of the gateway, sends heartbeats, and returns a
//! reward or a failure. `routes.rs` has the HTTP routes, `lease.rs` the rules of leases.
//!
//! Invariants: an offer ends exactly once, and belongs to at most one lease; a request for a lease
//! that is over changes nothing and is answered with the reason; a result is acknowledged only
//! after a call of [`Offers::recorded`] reports it as stored, so that an acknowledged result
//! survives a crash.

mod lease;
mod offered;
mod routes;
mod wire;

use crate::registry::Registry;
use axum::Router;
use lease::{Leases, Phase, Slot};
pub use offered::{FailureKind, LeaseRecord, OfferEnd, OfferedAttempt, RestoredLease};
use orchestrate_types::AttemptId;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// The episodes that are offered to workers. Clones share the same offers.
#[derive(Clone)]
pub struct Offers {
    leases: Arc<Mutex<Leases>>,
    registry: Registry,
    /// Time without a heartbeat after which a lease ends.
    lease: Duration,
    /// Version counter: it changes whenever a worker that waits for an episode should look again.
    changes: watch::Sender<u64>,
    closed: CancellationToken,
}

impl fmt::Debug for Offers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, leased) = self.leases().counts();
        let mut out = out.debug_struct("Offers");
        out.field("waiting", &waiting).field("leased", &leased).finish_non_exhaustive()
    }
}

impl Offers {
    /// Creates an empty set of offers. Agents of taken episodes sample through `registry`; a lease
    /// ends after `lease` without a heartbeat.
    pub fn new(registry: Registry, lease: Duration) -> Self {
        let (changes, closed) = (watch::Sender::new(0), CancellationToken::new());
        Self { leases: Arc::default(), registry, lease, changes, closed }
    }

    /// Offers an attempt until it ends, or until the offer is dropped.
    pub fn offer(&self, attempt: OfferedAttempt) -> Offer {
        let slot = Slot::new(attempt);
        self.leases().add(Arc::clone(&slot));
        self.changes.send_modify(|count| *count += 1);
        let phase = slot.phase.subscribe();
        Offer { slot, phase, offers: self.clone() }
    }

    /// Lets requests for these leases of an earlier process wait until [`Offers::restore`] or
    /// [`Offers::forget`] was called for each.
    pub fn expect<'a>(&self, leases: impl IntoIterator<Item = &'a LeaseRecord>) {
        self.registry.expect(leases.into_iter().flat_map(LeaseRecord::secrets));
    }

    /// Restores an episode that a worker took from an earlier process.
    pub fn restore(&self, restored: RestoredLease) -> Offer {
        let secrets = restored.record.secrets();
        let time = (Instant::now(), self.lease);
        let slot = self.leases().restore(&self.registry, restored, time);
        self.registry.settle(secrets);
        let phase = slot.phase.subscribe();
        Offer { slot, phase, offers: self.clone() }
    }

    /// Lets the lease of an earlier process be unknown: it is not restored.
    pub fn forget(&self, lease: &LeaseRecord) {
        self.registry.settle(lease.secrets());
    }

    /// Tells the worker of an attempt, if there is one, that its result is stored. `outcome` is the
    /// outcome's name, e.g. `scored`.
    pub fn recorded(&self, attempt: AttemptId, outcome: &'static str) {
        self.leases().recorded(attempt, outcome);
    }

    /// Closes the offers: workers are told that the run is over.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// The routes for workers below `/v1/episodes`, and for their agents below `/e/SECRET`.
    pub fn router(&self) -> Router {
        routes::router(self.clone())
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt that is offered, or has been taken. Dropping it withdraws it.
pub struct Offer {
    slot: Arc<Slot>,
    phase: watch::Receiver<Phase>,
    offers: Offers,
}

impl fmt::Debug for Offer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Offer").field("attempt", &self.slot.attempt).finish_non_exhaustive()
    }
}

impl Offer {
    /// Waits until the offer ends. Cancel-safe.
    pub async fn ended(&mut self) -> OfferEnd {
        loop {
            let until = match &*self.phase.borrow_and_update() {
                Phase::Ended(end) => return end.clone(),
                Phase::Waiting => None,
                Phase::Leased { until, limit } => Some(*until.min(limit)),
            };
            // The sender lives as long as the slot.
            match until {
                None => drop(self.phase.changed().await),
                Some(until) => tokio::select! {
                    _ = self.phase.changed() => {}
                    () = sleep_until(until) => {
                        self.offers.leases().expire(&self.slot, Instant::now());
                    }
                },
            }
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.offers.leases().withdraw(&self.slot);
    }
}
