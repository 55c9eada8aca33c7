//! Which worker a conversation is assigned to. Pure: no clock, no I/O, no lock.
//!
//! A conversation stays on the worker and rank that have its KV cache until that worker goes out of
//! service. A new conversation goes where the open conversations have the fewest tokens in total: a
//! conversation between two calls holds no permit, but its tokens still occupy the cache. Members of
//! a group follow the group's first one, whose prompt they share, while its worker has a free permit
//! that neither a call nor a conversation before its first call needs.

use std::collections::HashMap;

/// A data-parallel rank of a worker. Each rank has its own prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct WorkerRank {
    /// Index of the worker.
    pub(super) worker: usize,
    /// Index of the rank on that worker.
    pub(super) rank: usize,
}

#[derive(Debug)]
struct WorkerSlot {
    in_service: bool,
    permits: usize,
    /// Calls that wait for a reply or a permit.
    calls: usize,
    /// Conversations that are assigned here and have not made a call yet.
    before_first_call: usize,
    /// Load of each rank.
    ranks: Vec<RankLoad>,
}

/// Ordered by tokens, then by conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct RankLoad {
    tokens: u64,
    sessions: usize,
}

#[derive(Debug, Default)]
struct Session {
    assigned: Option<WorkerRank>,
    /// The worker whose last reply was invalid.
    avoided: Option<usize>,
    tokens: u64,
    has_called: bool,
    group: Option<String>,
}

impl Session {
    fn set_tokens(&mut self, slots: &mut [WorkerSlot], tokens: usize) {
        let before = std::mem::replace(&mut self.tokens, tokens as u64);
        if let Some(load) = self.assigned.and_then(|place| rank_load(slots, place)) {
            load.tokens = load.tokens.saturating_sub(before) + tokens as u64;
        }
    }
}

#[derive(Debug, Default)]
struct Group {
    /// Where the first member was assigned.
    first: Option<WorkerRank>,
    members: usize,
}

/// All conversations and the workers that they are assigned to.
#[derive(Debug)]
pub(super) struct Placement {
    slots: Vec<WorkerSlot>,
    sessions: HashMap<String, Session>,
    groups: HashMap<String, Group>,
    moves: u64,
}

/// Load of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct WorkerLoad {
    /// Conversations assigned to it.
    pub(super) sessions: usize,
    /// Their tokens.
    pub(super) tokens: u64,
    /// Calls that wait for a reply or a permit.
    pub(super) calls: usize,
}

impl Placement {
    /// No conversations, and all workers in service. Each worker is given as its number of permits
    /// and of ranks, both at least 1.
    pub(super) fn new(workers: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let slot = |(permits, ranks): (usize, usize)| WorkerSlot {
            in_service: true,
            permits: permits.max(1),
            calls: 0,
            before_first_call: 0,
            ranks: vec![RankLoad::default(); ranks.max(1)],
        };
        Self {
            slots: workers.into_iter().map(slot).collect(),
            sessions: HashMap::new(),
            groups: HashMap::new(),
            moves: 0,
        }
    }

    /// Adds a conversation and assigns it; `None` while no worker is in service. A conversation that
    /// is already assigned stays there.
    pub(super) fn open(
        &mut self,
        session: &str,
        group: Option<&str>,
        tokens: usize,
    ) -> Option<WorkerRank> {
        if !self.sessions.contains_key(session) {
            if let Some(group) = group {
                self.groups.entry(group.to_owned()).or_default().members += 1;
            }
            let new = Session {
                tokens: tokens as u64,
                group: group.map(ToOwned::to_owned),
                ..Session::default()
            };
            self.sessions.insert(session.to_owned(), new);
        }
        self.assign(session)
    }

    /// Where a conversation is assigned.
    pub(super) fn assigned(&self, session: &str) -> Option<WorkerRank> {
        self.sessions.get(session)?.assigned
    }

    /// Starts a call: returns where the conversation is assigned, after assigning it again if its
    /// worker is out of service; `None` while no worker is in service. Every call that started must
    /// be ended with [`Placement::end_call`].
    pub(super) fn begin_call(&mut self, session: &str, tokens: usize) -> Option<WorkerRank> {
        // The conversation is nearly always known and assigned.
        let place = match self.assigned(session) {
            Some(place) => place,
            None => self.open(session, None, tokens)?,
        };
        let known = self.sessions.get_mut(session)?;
        let slot = self.slots.get_mut(place.worker)?;
        slot.calls += 1;
        if !std::mem::replace(&mut known.has_called, true) {
            slot.before_first_call = slot.before_first_call.saturating_sub(1);
        }
        known.set_tokens(&mut self.slots, tokens);
        Some(place)
    }

    /// Ends a call that started at `place`.
    pub(super) fn end_call(&mut self, place: WorkerRank) {
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.calls = slot.calls.saturating_sub(1);
        }
    }

    /// Sets the length of a conversation in tokens.
    pub(super) fn set_tokens(&mut self, session: &str, tokens: usize) {
        if let Some(known) = self.sessions.get_mut(session) {
            known.set_tokens(&mut self.slots, tokens);
        }
    }

    /// Removes a conversation.
    pub(super) fn close(&mut self, session: &str) {
        self.release(session);
        let Some(known) = self.sessions.remove(session) else { return };
        let Some(name) = known.group else { return };
        if let Some(group) = self.groups.get_mut(&name) {
            group.members = group.members.saturating_sub(1);
            if group.members == 0 {
                self.groups.remove(&name);
            }
        }
    }

    /// Takes a worker out of service: none of its conversations is assigned any more.
    pub(super) fn take_out(&mut self, worker: usize) {
        if let Some(slot) = self.slots.get_mut(worker) {
            slot.in_service = false;
            slot.before_first_call = 0;
            slot.ranks.fill(RankLoad::default());
        }
        for session in self.sessions.values_mut() {
            if session.assigned.is_some_and(|place| place.worker == worker) {
                session.assigned = None;
            }
        }
        for group in self.groups.values_mut() {
            group.first = group.first.filter(|place| place.worker != worker);
        }
    }

    /// Puts a worker back into service.
    pub(super) fn put_back(&mut self, worker: usize) {
        if let Some(slot) = self.slots.get_mut(worker) {
            slot.in_service = true;
        }
    }

    /// Sends the conversation's next call to another worker, if there is one, because this worker's
    /// reply was invalid.
    pub(super) fn avoid(&mut self, session: &str, worker: usize) {
        let others = self.slots.iter().enumerate().any(|(i, slot)| i != worker && slot.in_service);
        if !others || self.assigned(session).is_none_or(|place| place.worker != worker) {
            return;
        }
        self.release(session);
        if let Some(known) = self.sessions.get_mut(session) {
            known.avoided = Some(worker);
        }
    }

    /// Whether any worker is in service.
    pub(super) fn any_in_service(&self) -> bool {
        self.slots.iter().any(|slot| slot.in_service)
    }

    /// How often a conversation was assigned to a new place after its first call.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Load of a worker over all of its ranks.
    pub(super) fn load(&self, worker: usize) -> WorkerLoad {
        let Some(slot) = self.slots.get(worker) else { return WorkerLoad::default() };
        let sum =
            |(tokens, sessions), load: &RankLoad| (tokens + load.tokens, sessions + load.sessions);
        let (tokens, sessions) = slot.ranks.iter().fold((0, 0), sum);
        WorkerLoad { sessions, tokens, calls: slot.calls }
    }

    fn assign(&mut self, session: &str) -> Option<WorkerRank> {
        let known = self.sessions.get(session)?;
        if known.assigned.is_some() {
            return known.assigned;
        }
        let first = known.group.as_ref().and_then(|name| self.groups.get(name)?.first);
        let follow = first.filter(|place| self.has_room(place.worker));
        let place = match follow.filter(|place| known.avoided != Some(place.worker)) {
            Some(place) => place,
            None => self.least_loaded(known.avoided)?,
        };
        let known = self.sessions.get_mut(session)?;
        known.assigned = Some(place);
        let (tokens, is_new) = (known.tokens, !known.has_called);
        self.moves += u64::from(!is_new);
        if let Some(group) = known.group.as_ref().and_then(|name| self.groups.get_mut(name)) {
            group.first.get_or_insert(place);
        }
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.before_first_call += usize::from(is_new);
        }
        if let Some(load) = rank_load(&mut self.slots, place) {
            load.tokens += tokens;
            load.sessions += 1;
        }
        Some(place)
    }

    fn release(&mut self, session: &str) {
        let Some(known) = self.sessions.get_mut(session) else { return };
        let Some(place) = known.assigned.take() else { return };
        let (tokens, is_new) = (known.tokens, !known.has_called);
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.before_first_call = slot.before_first_call.saturating_sub(usize::from(is_new));
        }
        if let Some(load) = rank_load(&mut self.slots, place) {
            load.tokens = load.tokens.saturating_sub(tokens);
            load.sessions = load.sessions.saturating_sub(1);
        }
    }

    fn has_room(&self, worker: usize) -> bool {
        self.slots.get(worker).is_some_and(|slot| {
            slot.in_service && slot.calls + slot.before_first_call < slot.permits
        })
    }

    /// The rank with the fewest tokens, then the fewest conversations. The avoided worker is chosen
    /// only if no other is in service.
    fn least_loaded(&self, avoided: Option<usize>) -> Option<WorkerRank> {
        let in_service = self.slots.iter().enumerate().filter(|(_, slot)| slot.in_service);
        let places = in_service.flat_map(|(worker, slot)| {
            let place =
                move |(rank, load): (usize, &RankLoad)| (*load, WorkerRank { worker, rank });
            slot.ranks.iter().enumerate().map(place)
        });
        places
            .min_by_key(|(load, place)| (avoided == Some(place.worker), *load, *place))
            .map(|(_, place)| place)
    }
}

fn rank_load(slots: &mut [WorkerSlot], place: WorkerRank) -> Option<&mut RankLoad> {
    slots.get_mut(place.worker)?.ranks.get_mut(place.rank)
}

#[cfg(test)]
mod tests;
