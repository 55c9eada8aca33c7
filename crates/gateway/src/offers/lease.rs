//! The rules of leases, without I/O.

use super::offered::{Begin, LeaseRecord, OfferEnd, OfferedAttempt, RestoredLease, Returned};
use super::wire::{Problem, Taken};
use crate::registry::{Entry, Registry};
use crate::secret::{SecretDigest, secret};
use orchestrate_types::AttemptId;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Maximum number of ended leases that are remembered.
const MAX_ENDED: usize = 4096;

/// An attempt that is offered.
pub(super) struct Slot {
    pub(super) attempt: AttemptId,
    pub(super) task: Value,
    pub(super) time: Duration,
    begin: Mutex<Option<Begin>>,
    pub(super) phase: watch::Sender<Phase>,
}

/// State of an offer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Phase {
    Waiting,
    Leased {
        /// When the lease ends without a further heartbeat.
        until: Instant,
        /// When the episode must be returned.
        limit: Instant,
    },
    Ended(OfferEnd),
}

impl Slot {
    pub(super) fn new(offered: OfferedAttempt) -> Arc<Self> {
        let OfferedAttempt { attempt, task, time, begin } = offered;
        let phase = watch::Sender::new(Phase::Waiting);
        Arc::new(Self { attempt, task, time, begin: Mutex::new(Some(begin)), phase })
    }

    /// The slot of an episode that was taken from an earlier process.
    pub(super) fn taken(attempt: AttemptId, time: Duration) -> Arc<Self> {
        let phase = watch::Sender::new(Phase::Waiting);
        Arc::new(Self { attempt, task: Value::Null, time, begin: Mutex::default(), phase })
    }
}

/// A lease that a worker holds.
struct Lease {
    slot: Arc<Slot>,
    worker: String,
    until: Instant,
    limit: Instant,
    /// Time without a heartbeat after which it ends.
    silent: Duration,
    /// The request that took it, and its answer; `None` if an earlier process gave it.
    taken: Option<(String, Arc<Taken>)>,
    /// Admits the agent's requests while the lease is held.
    _entry: Entry,
}

/// A lease that is over.
#[derive(Clone)]
enum Over {
    /// A result was returned: its digest, and the outcome once it is stored.
    Returned { digest: [u8; 32], recorded: watch::Receiver<Option<&'static str>> },
    /// The worker gave the episode back.
    Abandoned,
    /// It ended in another way; the reason is for the worker.
    Ended(String),
}

/// All offers and leases.
#[derive(Default)]
pub(super) struct Leases {
    waiting: VecDeque<Arc<Slot>>,
    by_id: HashMap<SecretDigest, Lease>,
    /// Lease ids by the `take_id` of the request that took them.
    takes: HashMap<String, SecretDigest>,
    over: HashMap<SecretDigest, Over>,
    /// Ended leases, oldest first.
    ended: VecDeque<SecretDigest>,
    /// Results that are not stored yet.
    recordings: HashMap<AttemptId, watch::Sender<Option<&'static str>>>,
}

impl Leases {
    pub(super) fn add(&mut self, slot: Arc<Slot>) {
        self.waiting.push_back(slot);
    }

    /// Number of waiting offers, and of leases.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.by_id.len())
    }

    /// Gives a worker the oldest offer, or the same episode again if the request is repeated;
    /// `None` if no offer waits.
    pub(super) fn take(
        &mut self,
        registry: &Registry,
        (worker, take_id): (&str, &str),
        (now, lease): (Instant, Duration),
    ) -> Option<Arc<Taken>> {
        let held = self.takes.get(take_id).and_then(|id| self.by_id.get(id));
        if let Some((_, taken)) = held.and_then(|held| held.taken.as_ref()) {
            return Some(Arc::clone(taken));
        }
        let (lease_id, api_key) = (secret(), secret());
        let (id, key) =
            (SecretDigest::of(lease_id.as_bytes()), SecretDigest::of(api_key.as_bytes()));
        let record = LeaseRecord { lease: id, key, worker: worker.to_owned() };
        let (slot, sampler) = loop {
            let slot = self.waiting.pop_front()?;
            let begin = slot.begin.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(sampler) = begin.and_then(|begin| begin(&record)) {
                break (slot, sampler);
            }
        };
        let path = format!("/e/{api_key}");
        let taken = Arc::new(Taken {
            lease: lease_id,
            attempt: slot.attempt.to_string(),
            task: slot.task.clone(),
            model: sampler.model().to_owned(),
            context: sampler.context(),
            api_key,
            openai_path: format!("{path}/v1"),
            anthropic_path: path,
            lease_s: lease.as_secs_f64(),
            time_s: slot.time.as_secs_f64(),
        });
        let (until, limit) = (now + lease, now + slot.time);
        slot.phase.send_replace(Phase::Leased { until, limit });
        self.takes.insert(take_id.to_owned(), id);
        let held = Lease {
            slot,
            worker: record.worker,
            until,
            limit,
            silent: lease,
            taken: Some((take_id.to_owned(), Arc::clone(&taken))),
            _entry: registry.enter(key, sampler),
        };
        self.by_id.insert(id, held);
        Some(taken)
    }

    /// Restores a lease that an earlier process gave. Its worker could send no heartbeats in between.
    pub(super) fn restore(
        &mut self,
        registry: &Registry,
        restored: RestoredLease,
        (now, lease): (Instant, Duration),
    ) -> Arc<Slot> {
        let RestoredLease { attempt, record, time, left, sampler } = restored;
        let slot = Slot::taken(attempt, time);
        let (until, limit) = (now + lease, now + left);
        slot.phase.send_replace(Phase::Leased { until, limit });
        let held = Lease {
            slot: Arc::clone(&slot),
            worker: record.worker,
            until,
            limit,
            silent: lease,
            taken: None,
            _entry: registry.enter(record.key, sampler),
        };
        self.by_id.insert(record.lease, held);
        slot
    }

    /// Extends a lease.
    pub(super) fn heartbeat(
        &mut self,
        id: SecretDigest,
        now: Instant,
        lease: Duration,
    ) -> Result<(), Problem> {
        self.expire_id(id, now);
        let Some(held) = self.by_id.get_mut(&id) else { return Err(self.why_over(id)) };
        held.until = now + lease;
        held.slot.phase.send_replace(Phase::Leased { until: held.until, limit: held.limit });
        Ok(())
    }

    /// Ends a lease with a result. Repeating the same result has no effect. The receiver gets the
    /// outcome once it is stored.
    pub(super) fn finish(
        &mut self,
        id: SecretDigest,
        returned: Returned,
        now: Instant,
    ) -> Result<watch::Receiver<Option<&'static str>>, Problem> {
        self.expire_id(id, now);
        let Some(held) = self.by_id.get(&id) else {
            return match self.over.get(&id) {
                Some(Over::Returned { digest, recorded }) if *digest == returned.digest => {
                    Ok(recorded.clone())
                }
                Some(Over::Returned { .. }) => Err(Problem::OtherResult),
                _ => Err(self.why_over(id)),
            };
        };
        let (stored, recorded) = watch::channel(None);
        self.recordings.insert(held.slot.attempt, stored);
        let over = Over::Returned { digest: returned.digest, recorded: recorded.clone() };
        self.end(id, over, Some(returned.end));
        Ok(recorded)
    }

    /// Gives an episode back without a result.
    pub(super) fn abandon(&mut self, id: SecretDigest, now: Instant) -> Result<(), Problem> {
        self.expire_id(id, now);
        match self.by_id.get(&id) {
            Some(held) => {
                let end = OfferEnd::Abandoned { worker: held.worker.clone() };
                self.end(id, Over::Abandoned, Some(end));
                Ok(())
            }
            None if matches!(self.over.get(&id), Some(Over::Abandoned)) => Ok(()),
            None => Err(self.why_over(id)),
        }
    }

    pub(super) fn recorded(&mut self, attempt: AttemptId, outcome: &'static str) {
        if let Some(stored) = self.recordings.remove(&attempt) {
            stored.send_replace(Some(outcome));
        }
    }

    /// Removes an offer whose attempt has ended, and ends its lease.
    pub(super) fn withdraw(&mut self, slot: &Arc<Slot>) {
        self.waiting.retain(|waiting| !Arc::ptr_eq(waiting, slot));
        if let Some(id) = self.lease_of(slot) {
            let reason = "the run ended the episode: it is stopping, or its engine failed";
            self.end(id, Over::Ended(reason.to_owned()), None);
        }
    }

    /// Ends the lease of an offer if it has expired.
    pub(super) fn expire(&mut self, slot: &Arc<Slot>, now: Instant) {
        if let Some(id) = self.lease_of(slot) {
            self.expire_id(id, now);
        }
    }

    fn lease_of(&self, slot: &Arc<Slot>) -> Option<SecretDigest> {
        let mut held = self.by_id.iter().filter(|(_, held)| Arc::ptr_eq(&held.slot, slot));
        held.next().map(|(id, _)| *id)
    }

    fn expire_id(&mut self, id: SecretDigest, now: Instant) {
        let Some(held) = self.by_id.get(&id) else { return };
        let worker = held.worker.clone();
        let silent = held.silent;
        let (reason, end) = if now >= held.limit {
            let reason = format!("the episode was not returned within {:?}", held.slot.time);
            (reason, OfferEnd::TimeUp { worker })
        } else if now >= held.until {
            let reason = format!("no heartbeat arrived for {silent:?} (gateway.lease)");
            (reason, OfferEnd::Lost { worker, silent })
        } else {
            return;
        };
        self.end(id, Over::Ended(reason), Some(end));
    }

    /// Ends a lease, and remembers how.
    fn end(&mut self, id: SecretDigest, over: Over, end: Option<OfferEnd>) {
        let Some(held) = self.by_id.remove(&id) else { return };
        if let Some((take_id, _)) = &held.taken {
            self.takes.remove(take_id);
        }
        if let Some(end) = end {
            held.slot.phase.send_replace(Phase::Ended(end));
        }
        self.over.insert(id, over);
        self.ended.push_back(id);
        while self.ended.len() > MAX_ENDED {
            if let Some(oldest) = self.ended.pop_front() {
                self.over.remove(&oldest);
            }
        }
    }

    fn why_over(&self, id: SecretDigest) -> Problem {
        match self.over.get(&id) {
            Some(Over::Ended(reason)) => Problem::Over(reason.clone()),
            Some(Over::Returned { .. }) => Problem::Over("its result was returned".to_owned()),
            Some(Over::Abandoned) => Problem::Over("the worker abandoned it".to_owned()),
            None => Problem::Unknown,
        }
    }
}
