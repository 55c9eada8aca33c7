//! Which worker a conversation is on. Pure: no clock, no I/O, no lock.
//!
//! A conversation stays where its KV cache is, `session → (worker, rank)`, until that worker goes
//! away. A new one goes where the fewest tokens of open conversations lie: between its calls a
//! conversation holds no permit, but its tokens are still in that worker's cache. Members of one
//! group go where the first of them went, whose prompt is theirs, while that worker has room: a
//! permit that neither a call nor a conversation without its first call lays claim to.

use std::collections::HashMap;

/// Where a conversation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    /// Index of the worker.
    pub(crate) worker: usize,
    /// Data-parallel rank on that worker; each rank has a prefix cache of its own.
    pub(crate) rank: usize,
}

#[derive(Debug)]
struct Slot {
    is_up: bool,
    permits: usize,
    /// Calls that wait for an answer or a permit.
    calls: usize,
    /// Conversations placed here that have made no call yet.
    expected: usize,
    /// Tokens and conversations by rank.
    ranks: Vec<Load>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Load {
    tokens: u64,
    sessions: usize,
}

#[derive(Debug, Default)]
struct Session {
    place: Option<Place>,
    /// The worker its last reply from was no good.
    shunned: Option<usize>,
    tokens: u64,
    has_called: bool,
    group: Option<String>,
}

impl Session {
    fn grow(&mut self, slots: &mut [Slot], tokens: usize) {
        let before = std::mem::replace(&mut self.tokens, tokens as u64);
        if let Some(load) = self.place.and_then(|place| slots.load(place)) {
            load.tokens = load.tokens.saturating_sub(before) + tokens as u64;
        }
    }
}

#[derive(Debug, Default)]
struct Group {
    lead: Option<Place>,
    members: usize,
}

/// Conversations and their places.
#[derive(Debug)]
pub(crate) struct Placement {
    slots: Vec<Slot>,
    sessions: HashMap<String, Session>,
    groups: HashMap<String, Group>,
    moves: u64,
}

/// Load of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct WorkerLoad {
    pub(crate) sessions: usize,
    pub(crate) tokens: u64,
    pub(crate) calls: usize,
}

impl Placement {
    /// No conversations yet; each worker with its permits and its number of ranks, at least 1 each.
    pub(crate) fn new(workers: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let slot = |(permits, ranks): (usize, usize)| Slot {
            is_up: true,
            permits: permits.max(1),
            calls: 0,
            expected: 0,
            ranks: vec![Load::default(); ranks.max(1)],
        };
        Self {
            slots: workers.into_iter().map(slot).collect(),
            sessions: HashMap::new(),
            groups: HashMap::new(),
            moves: 0,
        }
    }

    /// Makes a conversation known and gives its place; `None` while no worker is up. A known one
    /// keeps its place.
    pub(crate) fn open(
        &mut self,
        session: &str,
        group: Option<&str>,
        tokens: usize,
    ) -> Option<Place> {
        if !self.sessions.contains_key(session) {
            if let Some(group) = group {
                self.groups.entry(group.to_owned()).or_default().members += 1;
            }
            let known = Session {
                tokens: tokens as u64,
                group: group.map(ToOwned::to_owned),
                ..Session::default()
            };
            self.sessions.insert(session.to_owned(), known);
        }
        self.settle(session)
    }

    /// Where a conversation is now.
    pub(crate) fn place(&self, session: &str) -> Option<Place> {
        self.sessions.get(session)?.place
    }

    /// A call begins: gives the conversation's place, a new one where its worker is away, `None`
    /// while none is up. A place that is given is to be followed by [`Placement::end_call`].
    pub(crate) fn begin_call(&mut self, session: &str, tokens: usize) -> Option<Place> {
        // Nearly always it is known, and has its place.
        let place = match self.place(session) {
            Some(place) => place,
            None => self.open(session, None, tokens)?,
        };
        let known = self.sessions.get_mut(session)?;
        let slot = self.slots.get_mut(place.worker)?;
        slot.calls += 1;
        if !std::mem::replace(&mut known.has_called, true) {
            slot.expected = slot.expected.saturating_sub(1);
        }
        known.grow(&mut self.slots, tokens);
        Some(place)
    }

    /// A call that began at `place` is over.
    pub(crate) fn end_call(&mut self, place: Place) {
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.calls = slot.calls.saturating_sub(1);
        }
    }

    /// The conversation has `tokens` tokens now.
    pub(crate) fn grow(&mut self, session: &str, tokens: usize) {
        if let Some(known) = self.sessions.get_mut(session) {
            known.grow(&mut self.slots, tokens);
        }
    }

    /// The conversation is over.
    pub(crate) fn close(&mut self, session: &str) {
        self.unsettle(session);
        let Some(known) = self.sessions.remove(session) else { return };
        let Some(name) = known.group else { return };
        if let Some(group) = self.groups.get_mut(&name) {
            group.members = group.members.saturating_sub(1);
            if group.members == 0 {
                self.groups.remove(&name);
            }
        }
    }

    /// The worker takes no more calls: all of its conversations lose their place.
    pub(crate) fn leave(&mut self, worker: usize) {
        if let Some(slot) = self.slots.get_mut(worker) {
            slot.is_up = false;
            slot.expected = 0;
            slot.ranks.fill(Load::default());
        }
        for session in self.sessions.values_mut() {
            if session.place.is_some_and(|place| place.worker == worker) {
                session.place = None;
            }
        }
        for group in self.groups.values_mut() {
            group.lead = group.lead.filter(|place| place.worker != worker);
        }
    }

    /// The worker takes calls again.
    pub(crate) fn join(&mut self, worker: usize) {
        if let Some(slot) = self.slots.get_mut(worker) {
            slot.is_up = true;
        }
    }

    /// A worker's reply was no good: the conversation's next call goes to another one, if any.
    pub(crate) fn shun(&mut self, session: &str, worker: usize) {
        let others = self.slots.iter().enumerate().any(|(i, slot)| i != worker && slot.is_up);
        if !others || self.place(session).is_none_or(|place| place.worker != worker) {
            return;
        }
        self.unsettle(session);
        if let Some(known) = self.sessions.get_mut(session) {
            known.shunned = Some(worker);
        }
    }

    /// Whether any worker is up.
    pub(crate) fn any_up(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_up)
    }

    /// Times a conversation was given another place than it had called before.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// What lies on a worker.
    pub(crate) fn load(&self, worker: usize) -> WorkerLoad {
        let Some(slot) = self.slots.get(worker) else { return WorkerLoad::default() };
        let sum =
            |(tokens, sessions), load: &Load| (tokens + load.tokens, sessions + load.sessions);
        let (tokens, sessions) = slot.ranks.iter().fold((0, 0), sum);
        WorkerLoad { sessions, tokens, calls: slot.calls }
    }

    fn settle(&mut self, session: &str) -> Option<Place> {
        let known = self.sessions.get(session)?;
        if known.place.is_some() {
            return known.place;
        }
        let lead = known.group.as_ref().and_then(|name| self.groups.get(name)?.lead);
        let follow = lead.filter(|place| self.has_room(place.worker));
        let place = match follow.filter(|place| known.shunned != Some(place.worker)) {
            Some(place) => place,
            None => self.least_loaded(known.shunned)?,
        };
        let known = self.sessions.get_mut(session)?;
        known.place = Some(place);
        let (tokens, is_new) = (known.tokens, !known.has_called);
        self.moves += u64::from(!is_new);
        if let Some(group) = known.group.as_ref().and_then(|name| self.groups.get_mut(name)) {
            group.lead.get_or_insert(place);
        }
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.expected += usize::from(is_new);
        }
        if let Some(load) = self.slots.load(place) {
            load.tokens += tokens;
            load.sessions += 1;
        }
        Some(place)
    }

    fn unsettle(&mut self, session: &str) {
        let Some(known) = self.sessions.get_mut(session) else { return };
        let Some(place) = known.place.take() else { return };
        let (tokens, is_new) = (known.tokens, !known.has_called);
        if let Some(slot) = self.slots.get_mut(place.worker) {
            slot.expected = slot.expected.saturating_sub(usize::from(is_new));
        }
        if let Some(load) = self.slots.load(place) {
            load.tokens = load.tokens.saturating_sub(tokens);
            load.sessions = load.sessions.saturating_sub(1);
        }
    }

    fn has_room(&self, worker: usize) -> bool {
        self.slots
            .get(worker)
            .is_some_and(|slot| slot.is_up && slot.calls + slot.expected < slot.permits)
    }

    /// The place with the fewest tokens, then the fewest conversations; `shunned` only if no other
    /// worker is up.
    fn least_loaded(&self, shunned: Option<usize>) -> Option<Place> {
        let up = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_up);
        let places = up.flat_map(|(worker, slot)| {
            let rank = move |(rank, load): (usize, &Load)| (*load, Place { worker, rank });
            slot.ranks.iter().enumerate().map(rank)
        });
        places
            .min_by_key(|(load, place)| (shunned == Some(place.worker), *load, *place))
            .map(|(_, place)| place)
    }
}

trait Loads {
    fn load(&mut self, place: Place) -> Option<&mut Load>;
}

impl Loads for [Slot] {
    fn load(&mut self, place: Place) -> Option<&mut Load> {
        self.get_mut(place.worker)?.ranks.get_mut(place.rank)
    }
}

#[cfg(test)]
mod tests;
