//! Cache of routing rows by token prefix: rows of a common prefix are fetched once and held once.
//!
//! # When rows of one sequence are valid for another
//!
//! Row `t` is a function of the weights and of tokens `0 ..= t`, up to rounding: a near tie in a
//! router may resolve either way when the same tokens run in another batch, another chunk or on
//! another worker. Replay must reproduce the choice behind the KV cache that later tokens were
//! sampled over. So there are two cases when a second episode starts with the same tokens.
//!
//! * The engine answers them from its own prefix cache. Then this KV *is* that of the first
//!   episode, and the first episode's rows are exact. (An engine that returns rows by KV slot would
//!   send the same bytes again.)
//! * It computes them again. Then equal rows are expected, but not guaranteed. Prompt tokens carry no
//!   loss, so a differing row there shifts later log-probabilities by rounding, as any two
//!   computations do. The difference is still detected: the next request includes the last row held,
//!   and a difference counts as drift ([`CacheMetrics::drift_rows`], the metric
//!   `routing_drift`).
//!
//! Where that is not acceptable, the scope `worker` shares rows only among episodes on one worker,
//! which share its KV cache (the first case). The scope `fleet` shares rows among all workers.
//!
//! Rows that are *not* a function of the key are never inserted: rows of other weights (the policy
//! version is part of the key, and a seed whose first reply comes under another version is
//! discarded), mixed rows, and rows after a change of version, whose KV cache is of two versions.
//! Keys are a hash chain over whole blocks of tokens, so a block is found only under the exact
//! prefix it was computed for.
//!
//! # Order of eviction
//!
//! A block is useless without the blocks before it, so a chain is always touched from its end to its
//! start: blocks at the end are older and evicted first. Evicted blocks that a second sequence has
//! used are written to files; the tail of a single conversation never is. A missing or damaged file
//! is a miss.

use crate::blocks::Block;
use crate::check::same_sets;
use crate::key::BlockKey;
use crate::recent::Recent;
use crate::spill::{SpillFolder, SpillIndex};
use crate::{BLOCK_ROWS, MaskBuilder};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The block keys of one growing sequence.
#[derive(Debug, Clone)]
pub struct PrefixChain {
    version: PolicyVersion,
    shape: ModelShape,
    last: BlockKey,
    keys: Vec<BlockKey>,
    /// Number of leading blocks already compared with the cache, so that each is counted once.
    compared: usize,
}

impl PrefixChain {
    /// An empty sequence. `model` distinguishes weights of equal version (a run id); `scope` is the
    /// worker's name, or empty for the fleet.
    pub fn new(shape: &ModelShape, model: &str, version: PolicyVersion, scope: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("orchestrate routing prefix 1");
        for text in [model, scope] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        hasher.update(&version.0.to_le_bytes());
        let numbers = [shape.hidden_layers, shape.experts, shape.top_k, shape.moe_layers.len()];
        for number in numbers.iter().chain(&shape.moe_layers) {
            hasher.update(&(*number as u64).to_le_bytes());
        }
        let last = BlockKey::new(*hasher.finalize().as_bytes());
        Self { version, shape: shape.clone(), last, keys: Vec::new(), compared: 0 }
    }

    /// Policy version under which its rows were computed.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// Extends the chain to all tokens of the sequence; tokens passed before must be unchanged.
    pub fn extend_to(&mut self, tokens: &[TokenId]) {
        let (blocks, _) = tokens.as_chunks::<BLOCK_ROWS>();
        let mut bytes =
            Vec::with_capacity(self.last.as_bytes().len() + size_of::<[TokenId; BLOCK_ROWS]>());
        for block in blocks.iter().skip(self.keys.len()) {
            // Hashed in one piece: token by token takes three times as many instructions.
            bytes.clear();
            bytes.extend_from_slice(self.last.as_bytes());
            for token in block {
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            self.last = BlockKey::new(*blake3::hash(&bytes).as_bytes());
            self.keys.push(self.last);
        }
    }
}

/// Size limits of a [`PrefixCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// Limit on the bytes of blocks in memory. Blocks that masks share count as well, once.
    pub bytes: u64,
    /// Folder for evicted blocks and its size limit in bytes; `None` discards them. Blocks of an
    /// earlier process in the folder are removed.
    pub spill: Option<(PathBuf, u64)>,
}

/// Counters since the cache was opened, and current sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheMetrics {
    /// Lookups that found at least one block.
    pub hits: u64,
    /// Lookups that found no block.
    pub misses: u64,
    /// Rows returned by lookups.
    pub rows_reused: u64,
    /// Inserted blocks that were already cached and are shared since.
    pub blocks_merged: u64,
    /// Inserted rows that differ from the cached rows of the same tokens.
    pub drift_rows: u64,
    /// Current bytes of blocks in memory.
    pub bytes_held: u64,
    /// Current bytes of files.
    pub bytes_spilled: u64,
    /// Blocks written to files.
    pub spills: u64,
    /// Blocks read back from files.
    pub reloads: u64,
    /// Files that could not be written, read or validated.
    pub spill_failures: u64,
}

/// Result of [`PrefixCache::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inserted {
    /// Rows that are now shared with an earlier sequence.
    pub merged_rows: usize,
    /// Rows that differ, as sets per layer, from the cached rows of the same tokens.
    pub drift_rows: usize,
}

/// Evicted blocks that are worth writing to files; see [`PrefixCache::write`].
#[derive(Debug, Default)]
#[must_use = "they are lost unless they are written"]
pub struct Evicted(Vec<(BlockKey, Block)>);

impl Evicted {
    /// Whether no blocks have to be written.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Blocks by token prefix. All calls except [`PrefixCache::insert_in_memory`] may read or write
/// files: make them where blocking is allowed.
#[derive(Debug)]
pub struct PrefixCache {
    state: Mutex<State>,
    folder: Option<SpillFolder>,
}

#[derive(Debug)]
struct State {
    memory: Recent<Entry>,
    bytes: u64,
    limit: u64,
    spilled: SpillIndex,
    newest: PolicyVersion,
    counts: CacheMetrics,
}

#[derive(Debug)]
struct Entry {
    block: Block,
    version: PolicyVersion,
    /// Whether a second sequence has used it.
    reused: bool,
}

impl PrefixCache {
    /// Opens an empty cache and its spill folder.
    ///
    /// # Errors
    /// Fails if the spill folder cannot be created or emptied.
    pub fn open(options: CacheOptions) -> std::io::Result<Self> {
        let (folder, limit) = match options.spill {
            Some((path, limit)) => (Some(SpillFolder::open(&path)?), limit),
            None => (None, 0),
        };
        let state = State {
            memory: Recent::new(),
            bytes: 0,
            limit: options.bytes,
            spilled: SpillIndex::new(limit),
            newest: PolicyVersion(0),
            counts: CacheMetrics::default(),
        };
        Ok(Self { state: Mutex::new(state), folder })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current counters and sizes.
    pub fn metrics(&self) -> CacheMetrics {
        let state = self.lock();
        CacheMetrics {
            bytes_held: state.bytes,
            bytes_spilled: state.spilled.bytes(),
            ..state.counts
        }
    }

    /// The longest run of cached blocks from the start of the sequence, for [`MaskBuilder::seed`].
    pub fn lookup(&self, chain: &PrefixChain) -> Vec<Block> {
        let in_files: Vec<BlockKey> = {
            let state = self.lock();
            let known = chain.keys.iter().take_while(|key| state.knows(key));
            known.filter(|key| !state.memory.contains(key)).copied().collect()
        };
        let loaded = self.load(&in_files, chain);

        let mut state = self.lock();
        let mut found: Vec<(BlockKey, Block)> = Vec::new();
        for key in &chain.keys {
            let held = state.memory.peek(key).map(|entry| &entry.block).or_else(|| loaded.get(key));
            let Some(block) = held else { break };
            found.push((*key, block.clone()));
        }
        for (key, block) in found.iter().rev() {
            state.put(*key, block, chain.version, true);
        }
        let counts = &mut state.counts;
        counts.rows_reused += (found.len() * BLOCK_ROWS) as u64;
        counts.reloads += loaded.len() as u64;
        *(if found.is_empty() { &mut counts.misses } else { &mut counts.hits }) += 1;
        let evicted = state.evict();
        drop(state);
        self.write(evicted);
        found.into_iter().map(|(_, block)| block).collect()
    }

    /// Inserts the leading full, unmixed blocks of a sequence under the chain's version. Blocks that
    /// are already cached are compared, and shared if they are equal. Evicted blocks are written to
    /// files.
    pub fn insert(&self, chain: &mut PrefixChain, builder: &mut MaskBuilder) -> Inserted {
        let (inserted, evicted) = self.insert_in_memory(chain, builder);
        self.write(evicted);
        inserted
    }

    /// Like [`PrefixCache::insert`], but without file access: pass the evicted blocks to
    /// [`PrefixCache::write`].
    pub fn insert_in_memory(
        &self,
        chain: &mut PrefixChain,
        builder: &mut MaskBuilder,
    ) -> (Inserted, Evicted) {
        let blocks = builder.clean_blocks(chain.version);
        let clean = blocks.len().min(chain.keys.len());
        let compared = chain.compared.min(clean);
        let new: Vec<Block> = blocks.get(compared..clean).unwrap_or_default().to_vec();
        let mut inserted = Inserted::default();
        let mut state = self.lock();
        // From the end, so that the blocks that all later ones depend on are evicted last.
        for (at, block) in new.iter().enumerate().rev() {
            let index = compared + at;
            let Some(key) = chain.keys.get(index) else { continue };
            let held = state.memory.get(key).map(|entry| entry.block.clone());
            match held {
                Some(held) if held.address() == block.address() => {}
                Some(held) if held == *block => {
                    builder.share(index, &held);
                    state.counts.blocks_merged += 1;
                    inserted.merged_rows += BLOCK_ROWS;
                    state.put(*key, &held, chain.version, true);
                }
                Some(held) => {
                    inserted.drift_rows += differing(&held, block, &chain.shape);
                    state.put(*key, &held, chain.version, true);
                }
                None => state.put(*key, block, chain.version, false),
            }
        }
        // The order of last use matters only when eviction is near. Below half of the limit nothing
        // has ever been evicted: a cache that was full once stays full.
        if state.bytes > state.limit / 2 {
            let known = chain.keys.iter().zip(builder.clean_blocks(chain.version)).take(compared);
            for (key, block) in known.collect::<Vec<_>>().into_iter().rev() {
                if state.memory.get(key).is_none() {
                    state.put(*key, block, chain.version, false);
                }
            }
        }
        chain.compared = chain.compared.max(clean);
        state.counts.drift_rows += inserted.drift_rows as u64;
        (inserted, state.evict())
    }

    fn load(&self, keys: &[BlockKey], chain: &PrefixChain) -> HashMap<BlockKey, Block> {
        let mut loaded = HashMap::new();
        let Some(folder) = &self.folder else { return loaded };
        for key in keys {
            match folder.read(key, chain.shape.row_bytes()) {
                Ok(bytes) => {
                    loaded.insert(*key, Block::new(bytes));
                }
                Err(error) => {
                    tracing::warn!(%key, %error, "cannot read a spilled routing block; its rows are fetched again");
                    folder.delete(key);
                    let mut state = self.lock();
                    state.spilled.remove(key);
                    state.counts.spill_failures += 1;
                }
            }
        }
        loaded
    }

    /// Writes evicted blocks to files and deletes the oldest files beyond the size limit.
    pub fn write(&self, evicted: Evicted) {
        let Some(folder) = &self.folder else { return };
        for (key, block) in evicted.0 {
            let written = folder.write(&key, block.bytes());
            let mut state = self.lock();
            let gone = match written {
                Ok(bytes) => {
                    state.counts.spills += 1;
                    state.spilled.add(key, bytes)
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot write an evicted routing block");
                    state.counts.spill_failures += 1;
                    Vec::new()
                }
            };
            drop(state);
            for key in &gone {
                folder.delete(key);
            }
        }
    }
}

impl State {
    fn knows(&self, key: &BlockKey) -> bool {
        self.memory.contains(key) || self.spilled.contains(key)
    }

    fn put(&mut self, key: BlockKey, block: &Block, version: PolicyVersion, reused: bool) {
        self.newest = self.newest.max(version);
        self.spilled.touch(&key);
        let known = self.memory.get(&key);
        if let Some(entry) = known {
            entry.reused |= reused;
            return;
        }
        self.bytes += block.bytes().len() as u64;
        self.memory.put(key, Entry { block: block.clone(), version, reused });
    }

    /// Removes the oldest blocks beyond the limit and returns those worth writing to files.
    fn evict(&mut self) -> Evicted {
        let mut victims = Vec::new();
        while self.bytes > self.limit {
            let Some((key, entry)) = self.memory.pop_oldest() else { break };
            self.bytes -= entry.block.bytes().len() as u64;
            let useful = entry.reused && entry.version >= self.newest;
            if useful && !self.spilled.contains(&key) {
                victims.push((key, entry.block));
            }
        }
        Evicted(victims)
    }
}

fn differing(a: &Block, b: &Block, shape: &ModelShape) -> usize {
    let rows = |block: &Block| block.bytes().len() / shape.row_bytes();
    debug_assert_eq!(rows(a), rows(b));
    let pairs = a.bytes().chunks(shape.row_bytes()).zip(b.bytes().chunks(shape.row_bytes()));
    pairs.filter(|(a, b)| !same_sets(a, b, shape)).count()
}
