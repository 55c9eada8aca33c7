//! How many containers may live, and which idle ones wait for another attempt.
//!
//! A [`Slot`] lives as long as its container: through use, idleness and removal. Agents may not
//! take all of them: an agent waits for its grader, and the grader must find room.

use crate::api::{Limits, Purpose, SandboxSpec};
use crate::guard::Guard;
use crate::hosts::Offer;
use crate::link::Link;
use orchestrate_types::RunId;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Two sandboxes with the same key are the same to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    image: String,
    purpose: Purpose,
    limits: Limits,
    workdir: String,
    run: RunId,
    epoch: i64,
}

impl Key {
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

/// A clean container without an attempt.
#[derive(Debug)]
pub(crate) struct Idle {
    pub(crate) key: Key,
    pub(crate) link: Link,
    pub(crate) guard: Guard,
    /// When its process 1 ends by itself.
    pub(crate) ends: Instant,
}

impl Idle {
    /// Whether an attempt that may last `until` then can have it.
    fn serves(&self, key: &Key, until: Instant) -> bool {
        self.key == *key && self.ends > until
    }

    /// Whether its removal makes room.
    fn helps(&self, agents_full: bool) -> bool {
        !agents_full || self.key.purpose == Purpose::Agent
    }
}

#[derive(Debug, Default)]
struct State {
    agents: usize,
    graders: usize,
    names: HashSet<String>,
    idle: Vec<Idle>,
    closed: bool,
}

/// All slots of a provider.
#[derive(Debug)]
pub(crate) struct Slots {
    state: Mutex<State>,
    freed: Arc<Notify>,
    max: usize,
    max_agents: usize,
}

/// The right to have one container, with its name.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Arc<Slots>,
    /// `None` once its room was given to others.
    purpose: Option<Purpose>,
    name: Option<String>,
}

/// What [`Slots::take`] found.
#[derive(Debug)]
pub(crate) enum Taken {
    /// A clean container of the same key.
    Idle(Box<Idle>),
    /// Room for a new one.
    Room(Slot),
    /// No room before this idle one of another key is removed.
    Evict(Box<Idle>),
}

impl Slots {
    /// `freed` is told of all that becomes free.
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

    /// Waits for an idle container of this key, or for room. Idle ones that end before `until` are
    /// not handed out. Cancel-safe.
    pub(crate) async fn take(self: &Arc<Self>, key: &Key, reusable: bool, until: Instant) -> Taken {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Listen before looking, or a release in between would be missed.
            freed.as_mut().enable();
            if let Some(taken) = self.try_take(key, reusable, until) {
                return taken;
            }
            freed.await;
        }
    }

    /// As [`Slots::take`], without waiting.
    pub(crate) fn try_take(
        self: &Arc<Self>,
        key: &Key,
        reusable: bool,
        until: Instant,
    ) -> Option<Taken> {
        let mut state = self.lock();
        // The one used last is the warmest.
        if let Some(at) = state.idle.iter().rposition(|idle| reusable && idle.serves(key, until)) {
            return Some(Taken::Idle(Box::new(state.idle.remove(at))));
        }
        let agents_full = self.agents_full(&state, key.purpose);
        if state.agents + state.graders < self.max && !agents_full {
            match key.purpose {
                Purpose::Agent => state.agents += 1,
                Purpose::Grader => state.graders += 1,
            }
            let slot = Slot { slots: Arc::clone(self), purpose: Some(key.purpose), name: None };
            return Some(Taken::Room(slot));
        }
        // The one used longest ago is the least missed.
        let at = state.idle.iter().position(|idle| idle.helps(agents_full))?;
        Some(Taken::Evict(Box::new(state.idle.remove(at))))
    }

    fn agents_full(&self, state: &State, purpose: Purpose) -> bool {
        purpose == Purpose::Agent && state.agents >= self.max_agents
    }

    /// What [`Slots::try_take`] would find; `None` where that is nothing.
    pub(crate) fn offer(&self, key: &Key, reusable: bool, until: Instant) -> Option<Offer> {
        let state = self.lock();
        let held = state.agents + state.graders;
        let agents_full = self.agents_full(&state, key.purpose);
        let idle = state.idle.iter().any(|idle| reusable && idle.serves(key, until));
        let room = held < self.max && !agents_full;
        let found = idle || room || state.idle.iter().any(|idle| idle.helps(agents_full));
        found.then(|| Offer {
            idle,
            image: false,
            used: held.saturating_sub(state.idle.len()),
            capacity: self.max,
        })
    }

    /// Takes a clean container back. After [`Slots::close`] it is dropped instead.
    pub(crate) fn put(&self, idle: Idle) {
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

    /// All idle containers; from now on none comes back.
    pub(crate) fn close(&self) -> Vec<Idle> {
        let mut state = self.lock();
        state.closed = true;
        std::mem::take(&mut state.idle)
    }

    /// Containers in use (or being started or removed), and idle ones.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        let idle = state.idle.len();
        ((state.agents + state.graders).saturating_sub(idle), idle)
    }
}

impl Slot {
    /// Reserves a name for the container's life: the wanted one, or with a number where an earlier
    /// container of that name still lives.
    pub(crate) fn name(&mut self, wanted: &str) -> String {
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

    /// Gives its room to others. Its name stays taken.
    pub(crate) fn free_room(&mut self) {
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
        self.free_room();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SandboxSettings;
    use futures::FutureExt as _;

    fn key(purpose: Purpose) -> Key {
        Key {
            image: "i".into(),
            purpose,
            limits: SandboxSettings::default().limits(),
            workdir: "/w".into(),
            run: RunId::generate(),
            epoch: 1,
        }
    }

    fn try_room(slots: &Arc<Slots>, purpose: Purpose) -> Option<Slot> {
        match slots.take(&key(purpose), false, Instant::now()).now_or_never() {
            Some(Taken::Room(slot)) => Some(slot),
            Some(Taken::Idle(_) | Taken::Evict(_)) => panic!("nothing is idle"),
            None => None,
        }
    }

    #[tokio::test]
    async fn agents_leave_room_for_a_grader() {
        let slots = Slots::new(4, Arc::default());
        let agents: Vec<_> = (0..3).map(|_| try_room(&slots, Purpose::Agent).unwrap()).collect();
        assert!(try_room(&slots, Purpose::Agent).is_none());
        let grader = try_room(&slots, Purpose::Grader).unwrap();
        assert!(try_room(&slots, Purpose::Grader).is_none());
        drop((agents, grader));
        assert_eq!(slots.counts(), (0, 0));
    }

    #[tokio::test]
    async fn a_waiter_gets_the_slot_that_is_freed() {
        let slots = Slots::new(2, Arc::default());
        let held = try_room(&slots, Purpose::Agent).unwrap();
        let agent = key(Purpose::Agent);
        let mut waiting = std::pin::pin!(slots.take(&agent, false, Instant::now()));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        assert!(matches!(waiting.await, Taken::Room(_)));
    }

    #[tokio::test]
    async fn a_name_is_given_once_while_its_container_lives() {
        let slots = Slots::new(8, Arc::default());
        let mut first = try_room(&slots, Purpose::Agent).unwrap();
        let mut second = try_room(&slots, Purpose::Agent).unwrap();
        assert_eq!(first.name("x"), "x");
        assert_eq!(second.name("x"), "x-2");
        drop(first);
        let mut third = try_room(&slots, Purpose::Agent).unwrap();
        assert_eq!(third.name("x"), "x");
    }

    #[tokio::test]
    async fn a_slot_without_room_keeps_its_name() {
        let slots = Slots::new(2, Arc::default());
        let mut lost = try_room(&slots, Purpose::Agent).unwrap();
        assert_eq!(lost.name("x"), "x");
        assert!(try_room(&slots, Purpose::Agent).is_none());
        lost.free_room();
        let mut next = try_room(&slots, Purpose::Agent).unwrap();
        assert_eq!(next.name("x"), "x-2");
        drop(lost);
        assert_eq!(slots.counts(), (1, 0));
    }
}
