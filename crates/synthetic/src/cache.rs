//! The prefix cache of a synthetic engine: which pages it holds, without any content.

use crate::rows::{extend, mix};
use lru::LruCache;
use orchestrate_types::TokenId;

/// The cached pages, each identified by the hash of all tokens up to its end. The least recently
/// used pages are evicted first.
#[derive(Debug)]
pub(crate) struct PageCache {
    pages: LruCache<u64, ()>,
    page_tokens: usize,
    max_pages: usize,
}

impl PageCache {
    /// An empty cache for `tokens` tokens in pages of `page_tokens`; 0 tokens = unbounded.
    pub(crate) fn new(page_tokens: usize, tokens: usize) -> Self {
        let page_tokens = page_tokens.max(1);
        let max_pages = if tokens == 0 { usize::MAX } else { tokens / page_tokens };
        Self { pages: LruCache::unbounded(), page_tokens, max_pages }
    }

    fn keys(&self, namespace: &str, tokens: &[TokenId]) -> Vec<u64> {
        let seed = namespace.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        let whole = tokens.chunks_exact(self.page_tokens);
        whole
            .scan(seed, |hash, page| {
                *hash = page.iter().fold(*hash, |hash, token| extend(hash, *token));
                Some(*hash)
            })
            .collect()
    }

    /// Number of leading tokens in the cache, in whole pages. The last token is always computed.
    pub(crate) fn cached_tokens(&self, namespace: &str, tokens: &[TokenId]) -> usize {
        let usable = tokens.get(..tokens.len().saturating_sub(1)).unwrap_or_default();
        let keys = self.keys(namespace, usable);
        keys.iter().take_while(|key| self.pages.contains(key)).count() * self.page_tokens
    }

    /// Adds all whole pages of `tokens`.
    pub(crate) fn insert(&mut self, namespace: &str, tokens: &[TokenId]) {
        // In reverse, so that the ends of sequences are older and are evicted first.
        for key in self.keys(namespace, tokens).into_iter().rev() {
            self.pages.put(key, ());
        }
        while self.pages.len() > self.max_pages {
            self.pages.pop_lru();
        }
    }

    pub(crate) fn clear(&mut self) {
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_of_the_same_prefix_and_namespace_are_cached() {
        let mut cache = PageCache::new(4, 0);
        let tokens: Vec<TokenId> = (0..11).collect();
        cache.insert("w1", &tokens);
        assert_eq!(cache.cached_tokens("w1", &tokens), 8);
        assert_eq!(cache.cached_tokens("w2", &tokens), 0);
        assert_eq!(cache.cached_tokens("w1", &tokens[..8]), 4, "the last token is computed");
        let mut other = tokens.clone();
        other[5] = 99;
        assert_eq!(cache.cached_tokens("w1", &other), 4);
        cache.clear();
        assert_eq!(cache.cached_tokens("w1", &tokens), 0);
    }

    #[test]
    fn full_cache_evicts_the_ends_of_unused_sequences() {
        let mut cache = PageCache::new(2, 8);
        cache.insert("", &[1, 2, 3, 4, 5, 6]);
        cache.insert("", &[9, 8, 7, 6]);
        assert_eq!(cache.cached_tokens("", &[9, 8, 7, 6, 5]), 4);
        assert_eq!(cache.cached_tokens("", &[1, 2, 3, 4, 5, 6, 7]), 4, "its end was evicted");
    }
}
