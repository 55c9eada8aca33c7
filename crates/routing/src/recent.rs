//! Least-recently-used map from block keys to values.
//!
//! One large table would be rehashed whenever it is full: with sixty thousand entries that takes 9 to
//! 16 ms at once, under the cache's lock. Many small tables grow one after the other.

use crate::key::BlockKey;
use lru::LruCache;

const TABLES: usize = 64;

/// Behaves like one unbounded [`LruCache`].
#[derive(Debug)]
pub(crate) struct Recent<V> {
    /// Indexed by the key's first byte, which is uniform because keys are hashes.
    tables: Vec<LruCache<BlockKey, Used<V>>>,
    /// Number of uses so far.
    uses: u64,
}

#[derive(Debug)]
struct Used<V> {
    value: V,
    /// Value of [`Recent::uses`] at its last use.
    at: u64,
}

impl<V> Recent<V> {
    pub(crate) fn new() -> Self {
        Self { tables: (0..TABLES).map(|_| LruCache::unbounded()).collect(), uses: 0 }
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.peek(key).is_some()
    }

    /// Returns the value without counting as a use.
    pub(crate) fn peek(&self, key: &BlockKey) -> Option<&V> {
        self.tables.get(table(key))?.peek(key).map(|used| &used.value)
    }

    pub(crate) fn get(&mut self, key: &BlockKey) -> Option<&mut V> {
        self.uses += 1;
        let used = self.tables.get_mut(table(key))?.get_mut(key)?;
        used.at = self.uses;
        Some(&mut used.value)
    }

    /// Inserts a value and returns the previous one.
    pub(crate) fn put(&mut self, key: BlockKey, value: V) -> Option<V> {
        self.uses += 1;
        let used = Used { value, at: self.uses };
        Some(self.tables.get_mut(table(&key))?.put(key, used)?.value)
    }

    pub(crate) fn remove(&mut self, key: &BlockKey) -> Option<V> {
        Some(self.tables.get_mut(table(key))?.pop(key)?.value)
    }

    /// Removes the least recently used entry.
    pub(crate) fn pop_oldest(&mut self) -> Option<(BlockKey, V)> {
        let at =
            |table: &LruCache<_, Used<V>>| table.peek_lru().map_or(u64::MAX, |(_, used)| used.at);
        let (key, used) = self.tables.iter_mut().min_by_key(|table| at(table))?.pop_lru()?;
        Some((key, used.value))
    }
}

fn table(key: &BlockKey) -> usize {
    key.as_bytes().first().map_or(0, |byte| usize::from(*byte) % TABLES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Use {
        Put(u8),
        Get(u8),
        Peek(u8),
        Remove(u8),
        Pop,
    }

    fn uses() -> impl Strategy<Value = Vec<Use>> {
        let one = prop_oneof![
            4 => any::<u8>().prop_map(Use::Put),
            3 => any::<u8>().prop_map(Use::Get),
            1 => any::<u8>().prop_map(Use::Peek),
            1 => any::<u8>().prop_map(Use::Remove),
            2 => Just(Use::Pop),
        ];
        proptest::collection::vec(one, 0..200)
    }

    proptest! {
        #[test]
        fn behaves_like_a_single_lru_cache(uses in uses()) {
            let mut one = LruCache::unbounded();
            let mut many = Recent::new();
            let key = |byte| BlockKey::new([byte; 32]);
            for (index, step) in uses.into_iter().enumerate() {
                match step {
                    Use::Put(byte) => {
                        prop_assert_eq!(one.put(key(byte), index), many.put(key(byte), index));
                    }
                    Use::Get(byte) => prop_assert_eq!(one.get_mut(&key(byte)), many.get(&key(byte))),
                    Use::Peek(byte) => prop_assert_eq!(one.peek(&key(byte)), many.peek(&key(byte))),
                    Use::Remove(byte) => {
                        prop_assert_eq!(one.pop(&key(byte)), many.remove(&key(byte)));
                    }
                    Use::Pop => prop_assert_eq!(one.pop_lru(), many.pop_oldest()),
                }
            }
            while let Some(oldest) = one.pop_lru() {
                prop_assert_eq!(Some(oldest), many.pop_oldest());
            }
            prop_assert_eq!(many.pop_oldest(), None);
        }
    }
}
