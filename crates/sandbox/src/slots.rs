//! Limits how many containers exist at once, and holds the pool of idle ones.
//!
//! A [`Slot`] is held as long as its container exists: in use, idle, or being removed. Some slots
//! are reserved for graders: an agent waits for its grader, so agents must not occupy all of them.

use crate::api::{Purpose, SandboxLimits, SandboxSpec};
use crate::guard::ContainerGuard;
use crate::link::SupervisorLink;
use orchestrate_types::RunId;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Identifies interchangeable sandboxes: an attempt may use any idle one with its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReuseKey {
    image: String,
    purpose: Purpose,
    limits: SandboxLimits,
    workdir: String,
    run: RunId,
    epoch: i64,
}

impl ReuseKey {
    pub(crate) fn of(spec: &SandboxSpec) -> Self {
        Self {
            image: spec.image.clone(),
            purpose: spec.purpose,
            limits: spec.limits,
            workdir: spec.workdir.clone(),
            run: spec.owner.run,
            epoch: spec.owner.epoch,
        }
    }
}

/// A verified container in the pool.
#[derive(Debug)]
pub(crate) struct IdleSandbox {
    pub(crate) key: ReuseKey,
    pub(crate) link: SupervisorLink,
    pub(crate) guard: ContainerGuard,
    /// When its process 1 ends by itself.
    pub(crate) expires_at: Instant,
}

impl IdleSandbox {
    /// Whether it can serve an attempt with this key that may last until `until`.
    fn can_serve(&self, key: &ReuseKey, until: Instant) -> bool {
        self.key == *key && self.expires_at > until
    }

    /// Whether its removal frees a usable slot: with no slot left for agents, only an agent's does.
    fn frees_usable_slot(&self, agents_full: bool) -> bool {
        !agents_full || self.key.purpose == Purpose::Agent
    }
}

#[derive(Debug, Default)]
struct State {
    agents: usize,
    graders: usize,
    names: HashSet<String>,
    /// In order of last use, the most recent last.
    idle: Vec<IdleSandbox>,
    closed: bool,
}

/// The slots and the pool of one provider.
#[derive(Debug)]
pub(crate) struct Slots {
    state: Mutex<State>,
    freed: Arc<Notify>,
    max: usize,
    max_agents: usize,
}

/// The right to have one container, and its reserved name. Dropping it frees both.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Arc<Slots>,
    /// `None` after its capacity was released.
    purpose: Option<Purpose>,
    name: Option<String>,
}

/// What [`Slots::take`] granted.
#[derive(Debug)]
pub(crate) enum Grant {
    /// Reuse this idle sandbox.
    Reuse(Box<IdleSandbox>),
    /// Start a container in this slot.
    Start(Slot),
    /// No slot is free; remove this idle sandbox of another key, then ask again.
    Evict(Box<IdleSandbox>),
}

/// What the slots could grant at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Availability {
    /// Whether an idle sandbox could be reused.
    pub(crate) idle: bool,
    /// Containers in use.
    pub(crate) used: usize,
    /// Largest number of containers that may exist at once.
    pub(crate) capacity: usize,
}

impl Slots {
    /// `freed` is notified whenever a slot or an idle sandbox becomes available.
    pub(crate) fn new(max: usize, freed: Arc<Notify>) -> Arc<Self> {
        let reserved_for_graders = (max / 8).max(1);
        Arc::new(Self {
            state: Mutex::default(),
            freed,
            max,
            max_agents: max.saturating_sub(reserved_for_graders).max(1),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for an idle sandbox with this key, or for a slot. Idle sandboxes that expire before
    /// `until` are not granted. Cancel-safe.
    pub(crate) async fn take(
        self: &Arc<Self>,
        key: &ReuseKey,
        reusable: bool,
        until: Instant,
    ) -> Grant {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Registered before the check, so that a release in between is not missed.
            freed.as_mut().enable();
            if let Some(grant) = self.try_take(key, reusable, until) {
                return grant;
            }
            freed.await;
        }
    }

    /// Like [`Slots::take`], without waiting.
    pub(crate) fn try_take(
        self: &Arc<Self>,
        key: &ReuseKey,
        reusable: bool,
        until: Instant,
    ) -> Option<Grant> {
        let mut state = self.lock();
        // The most recently used one is most likely still in the caches.
        let last = state.idle.iter().rposition(|idle| reusable && idle.can_serve(key, until));
        if let Some(at) = last {
            return Some(Grant::Reuse(Box::new(state.idle.remove(at))));
        }
        let agents_full = self.agents_full(&state, key.purpose);
        if state.agents + state.graders < self.max && !agents_full {
            match key.purpose {
                Purpose::Agent => state.agents += 1,
                Purpose::Grader => state.graders += 1,
            }
            let slot = Slot { slots: Arc::clone(self), purpose: Some(key.purpose), name: None };
            return Some(Grant::Start(slot));
        }
        // The one used longest ago is the least likely to be needed again.
        let at = state.idle.iter().position(|idle| idle.frees_usable_slot(agents_full))?;
        Some(Grant::Evict(Box::new(state.idle.remove(at))))
    }

    fn agents_full(&self, state: &State, purpose: Purpose) -> bool {
        purpose == Purpose::Agent && state.agents >= self.max_agents
    }

    /// What [`Slots::try_take`] could grant now; `None` if nothing.
    pub(crate) fn availability(
        &self,
        key: &ReuseKey,
        reusable: bool,
        until: Instant,
    ) -> Option<Availability> {
        let state = self.lock();
        let held = state.agents + state.graders;
        let agents_full = self.agents_full(&state, key.purpose);
        let idle = state.idle.iter().any(|idle| reusable && idle.can_serve(key, until));
        let free = held < self.max && !agents_full;
        let evictable = || state.idle.iter().any(|idle| idle.frees_usable_slot(agents_full));
        (idle || free || evictable()).then(|| Availability {
            idle,
            used: held.saturating_sub(state.idle.len()),
            capacity: self.max,
        })
    }

    /// Puts a verified container into the pool. After [`Slots::close`] it is dropped instead.
    pub(crate) fn put(&self, idle: IdleSandbox) {
        let mut state = self.lock();
        if state.closed {
            drop(state);
            drop(idle);
        } else {
            state.idle.push(idle);
            drop(state);
            self.freed.notify_waiters();
        }
    }

    /// Closes the pool and returns the containers in it.
    pub(crate) fn close(&self) -> Vec<IdleSandbox> {
        let mut state = self.lock();
        state.closed = true;
        std::mem::take(&mut state.idle)
    }

    /// Number of containers in use (starting and being removed included), and of idle ones.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        let idle = state.idle.len();
        ((state.agents + state.graders).saturating_sub(idle), idle)
    }
}

impl Slot {
    /// Reserves a name until the slot is dropped: `wanted`, with a number appended if an earlier
    /// container of that name still exists.
    pub(crate) fn reserve_name(&mut self, wanted: &str) -> String {
        let mut state = self.slots.lock();
        let (mut name, mut number) = (wanted.to_owned(), 1_u32);
        while state.names.contains(&name) {
            number += 1;
            name = format!("{wanted}-{number}");
        }
        state.names.insert(name.clone());
        drop(state);
        self.name = Some(name.clone());
        name
    }

    /// Lets another container start in its place. The name stays reserved.
    pub(crate) fn release_capacity(&mut self) {
        let Some(purpose) = self.purpose.take() else { return };
        let mut state = self.slots.lock();
        match purpose {
            Purpose::Agent => state.agents -= 1,
            Purpose::Grader => state.graders -= 1,
        }
        drop(state);
        self.slots.freed.notify_waiters();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            self.slots.lock().names.remove(name);
        }
        self.release_capacity();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SandboxSettings;
    use futures::FutureExt as _;

    fn key(purpose: Purpose) -> ReuseKey {
        ReuseKey {
            image: "i".into(),
            purpose,
            limits: SandboxSettings::default().limits(),
            workdir: "/w".into(),
            run: RunId::generate(),
            epoch: 1,
        }
    }

    fn try_start(slots: &Arc<Slots>, purpose: Purpose) -> Option<Slot> {
        match slots.take(&key(purpose), false, Instant::now()).now_or_never() {
            Some(Grant::Start(slot)) => Some(slot),
            Some(Grant::Reuse(_) | Grant::Evict(_)) => panic!("the pool is empty"),
            None => None,
        }
    }

    #[tokio::test]
    async fn agents_cannot_take_the_slot_reserved_for_a_grader() {
        let slots = Slots::new(4, Arc::default());
        let agents: Vec<_> = (0..3).map(|_| try_start(&slots, Purpose::Agent).unwrap()).collect();
        assert!(try_start(&slots, Purpose::Agent).is_none());
        let grader = try_start(&slots, Purpose::Grader).unwrap();
        assert!(try_start(&slots, Purpose::Grader).is_none());
        drop((agents, grader));
        assert_eq!(slots.counts(), (0, 0));
    }

    #[tokio::test]
    async fn take_waits_for_a_slot_to_be_freed() {
        let slots = Slots::new(2, Arc::default());
        let held = try_start(&slots, Purpose::Agent).unwrap();
        let agent = key(Purpose::Agent);
        let mut waiting = std::pin::pin!(slots.take(&agent, false, Instant::now()));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        assert!(matches!(waiting.await, Grant::Start(_)));
    }

    #[tokio::test]
    async fn names_are_unique_while_their_slots_are_held() {
        let slots = Slots::new(8, Arc::default());
        let mut first = try_start(&slots, Purpose::Agent).unwrap();
        let mut second = try_start(&slots, Purpose::Agent).unwrap();
        assert_eq!(first.reserve_name("x"), "x");
        assert_eq!(second.reserve_name("x"), "x-2");
        drop(first);
        let mut third = try_start(&slots, Purpose::Agent).unwrap();
        assert_eq!(third.reserve_name("x"), "x");
    }

    #[tokio::test]
    async fn slot_keeps_its_name_after_its_capacity_was_released() {
        let slots = Slots::new(2, Arc::default());
        let mut lost = try_start(&slots, Purpose::Agent).unwrap();
        assert_eq!(lost.reserve_name("x"), "x");
        assert!(try_start(&slots, Purpose::Agent).is_none());
        lost.release_capacity();
        let mut next = try_start(&slots, Purpose::Agent).unwrap();
        assert_eq!(next.reserve_name("x"), "x-2");
        drop(lost);
        assert_eq!(slots.counts(), (1, 0));
    }
}
