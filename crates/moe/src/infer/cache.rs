//! Prefix cache: maps token sequences to the slots of their keys, values and routing rows.
//!
//! One radix tree over tokens per namespace, exact to the token. It owns slots of the
//! [`KvPool`](super::model::KvPool); since routing rows are stored by slot, a hit includes them.
//! Nodes on the path of a running request are pinned; the others are evicted, least recently used
//! leaf first. Invariant: every slot is in the free list, in exactly one tree node, or owned by
//! exactly one running request.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

/// Sequences share cached prefixes only if both strings are equal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Namespace {
    pub(crate) extra_key: String,
    pub(crate) cache_salt: String,
}

/// A tree node whose path from the root must not be evicted; release it with
/// [`PrefixCache::unpin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pin(usize);

#[derive(Debug, Default)]
struct Node {
    tokens: Vec<u32>,
    slots: Vec<u32>,
    children: BTreeMap<u32, usize>,
    parent: Option<usize>,
    pins: usize,
    used: u64,
}

/// Radix trees of all namespaces, and the free slots.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    nodes: Vec<Node>,
    spare: Vec<usize>,
    roots: HashMap<Namespace, usize>,
    free: Vec<u32>,
    capacity: usize,
    evictable: usize,
    clock: u64,
}

/// Result of [`PrefixCache::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inserted {
    /// Number of leading tokens that were already cached: the caller still owns its slots for them.
    pub(crate) existing: usize,
    /// Pin on the end of the sequence.
    pub(crate) pin: Pin,
}

impl PrefixCache {
    /// Creates an empty cache over slots `0..capacity`.
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            nodes: Vec::new(),
            spare: Vec::new(),
            roots: HashMap::new(),
            free: (0..capacity).rev().collect(),
            capacity: capacity as usize,
            evictable: 0,
            clock: 0,
        }
    }

    /// Number of slots that can be allocated: free ones, and those of unpinned nodes.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.evictable
    }

    /// Number of slots in use by running requests or the trees.
    pub(crate) fn used(&self) -> usize {
        self.capacity - self.free.len()
    }

    /// Takes `count` slots, evicting nodes if needed. Returns `None`, and evicts nothing, if fewer
    /// than `count` are available.
    pub(crate) fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        if count > self.available() {
            return None;
        }
        if count > self.free.len() {
            // Evict more than requested, because finding victims visits all nodes.
            let extra = self.capacity / 16;
            self.evict((count - self.free.len() + extra).min(self.evictable));
        }
        Some(self.free.split_off(self.free.len() - count))
    }

    /// Returns slots to the free list.
    pub(crate) fn release(&mut self, slots: impl IntoIterator<Item = u32>) {
        self.free.extend(slots);
    }

    /// The slots of the longest cached prefix of `tokens`, and a pin on its end.
    pub(crate) fn lookup(&mut self, namespace: &Namespace, tokens: &[u32]) -> (Vec<u32>, Pin) {
        let (end, slots) = self.walk(namespace, tokens);
        self.pin(end);
        (slots, Pin(end))
    }

    /// Length of the longest cached prefix of `tokens`, without changing the cache.
    pub(crate) fn cached_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let Some(&root) = self.roots.get(namespace) else { return 0 };
        let (mut node, mut found) = (root, 0);
        loop {
            let rest = tokens.get(found..).unwrap_or(&[]);
            let next = rest.first().and_then(|t| self.node(node)?.children.get(t));
            let Some(child) = next.and_then(|&child| self.node(child)) else { return found };
            let common = common_len(&child.tokens, rest);
            found += common;
            if common < child.tokens.len() {
                return found;
            }
            node = next.copied().unwrap_or(node);
        }
    }

    /// Adds a sequence. The tree takes ownership of the slots after [`Inserted::existing`].
    pub(crate) fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        slots: &[u32],
    ) -> Inserted {
        let (mut end, found) = self.walk(namespace, tokens);
        let existing = found.len();
        let (rest, slots) = (tokens.get(existing..), slots.get(existing..));
        if let (Some(rest @ [first, ..]), Some(slots)) = (rest, slots) {
            let leaf = self.add(Node {
                tokens: rest.to_vec(),
                slots: slots.to_vec(),
                parent: Some(end),
                used: self.clock,
                ..Node::default()
            });
            if let Some(node) = self.node_mut(end) {
                node.children.insert(*first, leaf);
            }
            self.evictable += rest.len();
            end = leaf;
        }
        self.pin(end);
        Inserted { existing, pin: Pin(end) }
    }

    /// Releases a pin.
    pub(crate) fn unpin(&mut self, pin: Pin) {
        let mut at = Some(pin.0);
        while let Some(node) = at.and_then(|i| self.nodes.get_mut(i)) {
            node.pins = node.pins.saturating_sub(1);
            if node.pins == 0 {
                self.evictable += node.tokens.len();
            }
            at = node.parent;
        }
    }

    /// Removes all sequences. Nothing may be pinned.
    pub(crate) fn flush(&mut self) {
        debug_assert!(self.nodes.iter().all(|n| n.pins == 0));
        for node in self.nodes.drain(..) {
            self.free.extend(node.slots);
        }
        self.spare.clear();
        self.roots.clear();
        self.evictable = 0;
    }

    fn node(&self, index: usize) -> Option<&Node> {
        self.nodes.get(index)
    }

    fn node_mut(&mut self, index: usize) -> Option<&mut Node> {
        self.nodes.get_mut(index)
    }

    fn add(&mut self, node: Node) -> usize {
        if let Some(index) = self.spare.pop()
            && let Some(place) = self.nodes.get_mut(index)
        {
            *place = node;
            return index;
        }
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn pin(&mut self, end: usize) {
        let mut at = Some(end);
        while let Some(node) = at.and_then(|i| self.nodes.get_mut(i)) {
            if node.pins == 0 {
                self.evictable -= node.tokens.len();
            }
            node.pins += 1;
            at = node.parent;
        }
    }

    /// Follows `tokens` as far as they are cached, and splits the node in which they diverge.
    fn walk(&mut self, namespace: &Namespace, tokens: &[u32]) -> (usize, Vec<u32>) {
        self.clock += 1;
        let clock = self.clock;
        let mut node = self.roots.get(namespace).copied().unwrap_or_else(|| {
            let root = self.add(Node::default());
            self.roots.insert(namespace.clone(), root);
            root
        });
        let mut slots = Vec::new();
        loop {
            let Some(here) = self.node_mut(node) else { return (node, slots) };
            here.used = clock;
            let rest = tokens.get(slots.len()..).unwrap_or(&[]);
            let next = rest.first().and_then(|t| here.children.get(t)).copied();
            let Some(next) = next else { return (node, slots) };
            let Some(child) = self.node(next) else { return (node, slots) };
            let common = common_len(&child.tokens, rest);
            node = if common < child.tokens.len() { self.split(next, common) } else { next };
            if let Some(reached) = self.node(node) {
                slots.extend_from_slice(&reached.slots);
            }
        }
    }

    /// Splits a node in two. The lower part keeps the index, so that pins stay valid.
    fn split(&mut self, index: usize, at: usize) -> usize {
        let Some(lower) = self.node_mut(index) else { return index };
        let upper = Node {
            tokens: lower.tokens.drain(..at).collect(),
            slots: lower.slots.drain(..at).collect(),
            children: lower.tokens.first().map(|&t| (t, index)).into_iter().collect(),
            parent: lower.parent,
            pins: lower.pins,
            used: lower.used,
        };
        let (parent, first) = (upper.parent, upper.tokens.first().copied());
        let upper = self.add(upper);
        if let Some(lower) = self.node_mut(index) {
            lower.parent = Some(upper);
        }
        if let (Some(parent), Some(first)) = (parent.and_then(|p| self.node_mut(p)), first) {
            parent.children.insert(first, upper);
        }
        upper
    }

    fn evict(&mut self, count: usize) {
        let target = self.free.len() + count;
        let mut victims: BinaryHeap<Reverse<(u64, usize)>> = self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, n)| n.parent.is_some() && n.children.is_empty() && n.pins == 0)
            .map(|(i, n)| Reverse((n.used, i)))
            .collect();
        while self.free.len() < target
            && let Some(Reverse((_, index))) = victims.pop()
        {
            let Some(victim) = self.nodes.get_mut(index).map(std::mem::take) else { continue };
            self.spare.push(index);
            self.evictable -= victim.tokens.len();
            self.free.extend(victim.slots);
            let (parent, first) = (victim.parent, victim.tokens.first());
            if let (Some(at), Some(first)) = (parent, first)
                && let Some(parent) = self.node_mut(at)
            {
                parent.children.remove(first);
                if parent.children.is_empty() && parent.pins == 0 && parent.parent.is_some() {
                    victims.push(Reverse((parent.used, at)));
                }
            }
        }
        // Otherwise the namespaces of past policy versions would accumulate as empty roots.
        let Self { nodes, roots, spare, .. } = self;
        roots.retain(|_, root| {
            let keep = nodes.get(*root).is_some_and(|n| n.pins > 0 || !n.children.is_empty());
            if !keep {
                spare.push(*root);
            }
            keep
        });
    }
}

fn common_len(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space() -> Namespace {
        Namespace::default()
    }

    fn store(cache: &mut PrefixCache, tokens: &[u32]) -> Vec<u32> {
        let (mut slots, pin) = cache.lookup(&space(), tokens);
        let own = cache.allocate(tokens.len() - slots.len()).unwrap();
        slots.extend(own);
        let inserted = cache.insert(&space(), tokens, &slots);
        cache.unpin(pin);
        cache.unpin(inserted.pin);
        slots
    }

    #[test]
    fn lookup_finds_prefix_to_the_token() {
        let mut cache = PrefixCache::new(100);
        let slots = store(&mut cache, &[1, 2, 3, 4, 5]);
        store(&mut cache, &[1, 2, 9]);
        assert_eq!(cache.cached_len(&space(), &[1, 2, 3, 4, 8]), 4);
        let (found, pin) = cache.lookup(&space(), &[1, 2, 3, 4, 8]);
        assert_eq!(found, slots[..4]);
        cache.unpin(pin);
        assert_eq!(cache.used(), 6);
    }

    #[test]
    fn namespaces_share_nothing() {
        let mut cache = PrefixCache::new(100);
        store(&mut cache, &[1, 2, 3]);
        let other = Namespace { extra_key: "7".into(), ..space() };
        assert_eq!(cache.cached_len(&other, &[1, 2, 3]), 0);
    }

    #[test]
    fn least_recently_used_leaf_is_evicted_first_and_pinned_leaves_stay() {
        let mut cache = PrefixCache::new(9);
        store(&mut cache, &[1, 2, 3]);
        store(&mut cache, &[4, 5, 6]);
        let (_, pin) = cache.lookup(&space(), &[1, 2, 3]);
        store(&mut cache, &[7, 8, 9]);
        assert!(cache.allocate(7).is_none());
        cache.allocate(3).unwrap();
        assert_eq!(cache.cached_len(&space(), &[4, 5, 6]), 0);
        assert_eq!(cache.cached_len(&space(), &[1, 2, 3]), 3);
        cache.unpin(pin);
    }

    #[test]
    fn duplicate_insert_leaves_slots_with_the_caller() {
        let mut cache = PrefixCache::new(10);
        store(&mut cache, &[1, 2, 3]);
        let own = cache.allocate(4).unwrap();
        let inserted = cache.insert(&space(), &[1, 2, 3, 4], &own);
        assert_eq!(inserted.existing, 3);
        cache.release(own[..3].to_vec());
        cache.unpin(inserted.pin);
        assert_eq!(cache.used(), 4);
    }

    proptest! {
        #[test]
        fn prop_no_slot_is_lost_or_owned_twice(
            sequences in prop::collection::vec(prop::collection::vec(0u32..3, 1..12), 1..40),
        ) {
            let mut cache = PrefixCache::new(24);
            for tokens in &sequences {
                let slots = store(&mut cache, tokens);
                let (found, pin) = cache.lookup(&space(), tokens);
                prop_assert_eq!(&found, &slots);
                cache.unpin(pin);
                prop_assert_eq!(cache.available(), 24);
                let held = cache.nodes.iter().flat_map(|n| &n.slots).chain(&cache.free);
                let mut all: Vec<u32> = held.copied().collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..24).collect::<Vec<u32>>());
            }
            cache.flush();
            prop_assert_eq!(cache.used(), 0);
        }
    }
}
