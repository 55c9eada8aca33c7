//! Rows of common prefixes: fetched once, held once.
//!
//! # When rows of one sequence are right for another
//!
//! Row `t` is a function of the weights and of tokens `0 ..= t`, up to rounding: a router's near
//! tie may fall either way when the same tokens run in another batch, another chunk or on another
//! worker. What replay must reproduce is the choice behind the KV that later tokens were sampled
//! over. So there are two cases when a second episode begins with the same tokens.
//!
//! * The engine answers them from its own prefix cache. Then this KV *is* that of the first
//!   episode, and the first episode's rows are exactly right. (An engine that returns rows by KV
//!   slot would send the same bytes again.)
//! * It computes them again. Then equal rows are expected, not promised. Prompt tokens carry no
//!   loss, so a differing row there shifts later log-probabilities by rounding, as any two
//!   computations do; but it is noticed: the next request asks for the last row held once more,
//!   and a difference is counted as drift ([`CacheMetrics::drift_rows`], the metric
//!   `routing_drift`).
//!
//! Where that is not good enough, the scope `worker` shares only among episodes on one worker,
//! whose KV cache the first case is about; the scope `fleet` shares among all.
//!
//! Whatever is *not* a function of the key must never get in: rows of other weights (the policy
//! version is part of the key, and a seed whose first reply comes under another version is thrown
//! away), mixed rows, and rows that follow a change of version, whose KV was of two versions.
//! Keys are a hash chain of whole blocks of tokens, so a block is found only under the very prefix
//! it was computed for.
//!
//! # Order of eviction
//!
//! A block without those before it is useless, so a chain is always touched from its end to its
//! beginning: ends are older and go first. Evicted blocks that a second sequence has used are
//! written to files (the tail of one conversation never is); a file that is missing or damaged is
//! a miss.

use crate::blocks::Block;
use crate::check::same_sets;
use crate::recent::Recent;
use crate::spill::{SpillFolder, SpillIndex};
use crate::{BLOCK_ROWS, MaskBuilder};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Names a block: model, policy version, scope, and all tokens up to the block's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey([u8; 32]);

impl BlockKey {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    #[cfg(test)]
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The keys of one growing sequence.
#[derive(Debug, Clone)]
pub struct PrefixChain {
    version: PolicyVersion,
    shape: ModelShape,
    last: BlockKey,
    keys: Vec<BlockKey>,
    /// Leading blocks that were compared with the cache's: each is counted once.
    compared: usize,
}

impl PrefixChain {
    /// An empty sequence. `model` tells weights of equal version apart (a run's id), `scope` is
    /// the worker's name or empty for the fleet.
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
        let last = BlockKey(*hasher.finalize().as_bytes());
        Self { version, shape: shape.clone(), last, keys: Vec::new(), compared: 0 }
    }

    /// The version its rows were computed under.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// Takes in the sequence as it is now: all of its tokens, the known ones unchanged.
    pub fn extend_to(&mut self, tokens: &[TokenId]) {
        let (blocks, _) = tokens.as_chunks::<BLOCK_ROWS>();
        let mut bytes = Vec::with_capacity(self.last.0.len() + size_of::<[TokenId; BLOCK_ROWS]>());
        for block in blocks.iter().skip(self.keys.len()) {
            // In one piece: token by token takes three times the instructions.
            bytes.clear();
            bytes.extend_from_slice(&self.last.0);
            for token in block {
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            self.last = BlockKey(*blake3::hash(&bytes).as_bytes());
            self.keys.push(self.last);
        }
    }
}

/// How large the cache may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes of blocks in memory. Blocks that masks hold as well count all the same, once.
    pub bytes: u64,
    /// Folder for evicted blocks and its size in bytes; `None` = they are forgotten. What an
    /// earlier process left there is removed.
    pub spill: Option<(PathBuf, u64)>,
}

/// What happened so far, and what is held now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheMetrics {
    /// Lookups that found at least one block.
    pub hits: u64,
    /// Lookups that found none.
    pub misses: u64,
    /// Rows handed out by lookups.
    pub rows_reused: u64,
    /// Blocks that came with a sequence but were held already, and are shared since.
    pub blocks_merged: u64,
    /// Rows that came with a sequence and differ from those held for the same tokens.
    pub drift_rows: u64,
    /// Bytes of blocks in memory now.
    pub bytes_held: u64,
    /// Bytes of files now.
    pub bytes_spilled: u64,
    /// Blocks written to files.
    pub spills: u64,
    /// Blocks read back.
    pub reloads: u64,
    /// Files that could not be written, or not be used.
    pub spill_failures: u64,
}

/// What [`PrefixCache::insert`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inserted {
    /// Rows that are shared with an earlier sequence from now on.
    pub merged_rows: usize,
    /// Rows that differ, as sets per layer, from those held for the same tokens.
    pub drift_rows: usize,
}

/// Blocks that had to give way to newer ones and are worth a file each.
#[derive(Debug, Default)]
#[must_use = "they are lost unless they are written"]
pub struct Evicted(Vec<(BlockKey, Block)>);

impl Evicted {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Blocks by token prefix. Calls may write and read files, all but
/// [`PrefixCache::insert_in_memory`]: make them where blocking is allowed.
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
    /// A second sequence has used it.
    reused: bool,
}

impl PrefixCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When the spill folder cannot be made or emptied.
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

    /// What happened so far.
    pub fn metrics(&self) -> CacheMetrics {
        let state = self.lock();
        CacheMetrics {
            bytes_held: state.bytes,
            bytes_spilled: state.spilled.bytes(),
            ..state.counts
        }
    }

    /// The longest run of blocks from the sequence's beginning, to [`MaskBuilder::seed`] a builder
    /// with.
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

    /// Takes in what a sequence has collected: its full blocks of one clean run under the chain's
    /// version. Blocks held already are compared, and shared from now on where they are equal.
    /// Writes to files what had to give way.
    pub fn insert(&self, chain: &mut PrefixChain, builder: &mut MaskBuilder) -> Inserted {
        let (inserted, evicted) = self.insert_in_memory(chain, builder);
        self.write(evicted);
        inserted
    }

    /// As [`PrefixCache::insert`], without touching a file: what had to give way is for
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
        // From the end, so that what is needed for all that follows gives way last.
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
        // Who was used last matters when something must give way soon. Until then nothing has gone: a
        // cache that ever was full stays so.
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
                    tracing::warn!(%key, %error, "a spilled routing block is lost");
                    folder.delete(key);
                    let mut state = self.lock();
                    state.spilled.remove(key);
                    state.counts.spill_failures += 1;
                }
            }
        }
        loaded
    }

    /// Writes blocks that had to give way, and deletes the oldest files for them.
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
                    tracing::warn!(%error, "an evicted routing block cannot be written");
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

    /// Takes out what is too much; gives the blocks worth a file.
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
