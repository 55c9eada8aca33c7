//! Blocks shared by forks, by a group and through the prefix cache, and blocks spilled to files.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "test helpers")]

use orchestrate_routing::{
    BLOCK_ROWS, Block, CacheOptions, HeldBytes, Inserted, MaskBuilder, PrefixCache, PrefixChain,
    RoutedRows, RoutingMask,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::path::Path;
use std::sync::Arc;

const V: PolicyVersion = PolicyVersion(3);

fn shape(layers: usize, experts: usize, top_k: usize) -> Arc<ModelShape> {
    let moe_layers = (0..layers).collect();
    let context = 100_000;
    Arc::new(ModelShape { hidden_layers: layers, moe_layers, experts, top_k, vocab: 1000, context })
}

fn small() -> Arc<ModelShape> {
    shape(3, 16, 2)
}

/// Rows as an engine would choose them: by the token and its position.
fn rows(shape: &ModelShape, tokens: &[u32], start: usize) -> RoutedRows {
    let end = tokens.len().saturating_sub(1);
    let mut ids = Vec::new();
    for (position, &token) in tokens.iter().enumerate().take(end).skip(start) {
        for layer in 0..shape.moe_layers.len() {
            let first = position * 7 + token as usize * 3 + layer * (1 + position % 5);
            let ring = (0..shape.top_k).map(|slot| (first + slot) % shape.experts);
            ids.extend(ring.map(|id| u16::try_from(id).unwrap()));
        }
    }
    RoutedRows::from_ids(shape, start, &ids).unwrap()
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 31 + i / 7 + seed) % 1000).collect()
}

fn chain(shape: &ModelShape, tokens: &[u32], version: PolicyVersion, scope: &str) -> PrefixChain {
    let mut chain = PrefixChain::new(shape, "run", version, scope);
    chain.extend_to(tokens);
    chain
}

fn cache(bytes: usize, spill: Option<(&Path, u64)>) -> PrefixCache {
    let spill = spill.map(|(path, limit)| (path.to_owned(), limit));
    PrefixCache::open(CacheOptions { bytes: bytes as u64, spill }).unwrap()
}

/// One episode of one reply: seeded from the cache, filled by the engine, inserted.
fn episode(
    cache: &PrefixCache,
    shape: &Arc<ModelShape>,
    prompt: &[u32],
    output: &[u32],
) -> (RoutingMask, usize) {
    let mut chain = chain(shape, prompt, V, "w");
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.seed(cache.lookup(&chain), V);
    let seeded = builder.rows();
    let all = [prompt, output].concat();
    let asked = builder.next_start();
    let report = builder.push(rows(shape, &all, asked), all.len(), V).unwrap();
    assert_eq!(report.overlap_rows, usize::from(seeded > 0), "one row of overlap");
    assert_eq!(report.drift_rows, 0);
    chain.extend_to(&all);
    cache.insert(&mut chain, &mut builder);
    (builder.finish(all.len()).unwrap(), seeded)
}

#[test]
fn eight_group_members_with_an_8k_prompt_hold_its_rows_once() {
    let shape = shape(48, 128, 8);
    let cache = cache(64 << 20, None);
    let prompt = tokens(8192, 0);
    let masks: Vec<RoutingMask> = (0..8)
        .map(|member| {
            let (mask, seeded) = episode(&cache, &shape, &prompt, &tokens(100, member * 17 + 1));
            assert_eq!(seeded, if member == 0 { 0 } else { 8192 });
            mask
        })
        .collect();
    let row_bytes = shape.row_bytes();
    let prompt_bytes = 8192 * row_bytes;
    let tails = 8 * 99 * row_bytes;
    assert_eq!(RoutingMask::held_together(&masks), prompt_bytes + tails);
    // The cache holds what the masks hold: full blocks of tails as well, but no prompt twice.
    let metrics = cache.metrics();
    assert_eq!(metrics.bytes_held as usize, prompt_bytes + 8 * BLOCK_ROWS * row_bytes);
    assert_eq!((metrics.hits, metrics.misses, metrics.rows_reused), (7, 1, 7 * 8192));
    for mask in &masks {
        assert_eq!(mask.rows(), 8192 + 99);
        assert_eq!(mask.held().shared, prompt_bytes + BLOCK_ROWS * row_bytes);
    }
    for (member, mask) in (0u32..).zip(&masks) {
        let all = [prompt.as_slice(), &tokens(100, member * 17 + 1)].concat();
        assert_eq!(mask.to_vec(), rows(&shape, &all, 0).to_vec(), "member {member}");
    }
}

#[test]
fn members_that_started_together_share_the_prompt_after_their_first_turn() {
    let shape = small();
    let cache = cache(1 << 20, None);
    let prompt = tokens(200, 0);
    let mut masks = Vec::new();
    let mut merged = Vec::new();
    let builders: Vec<_> = (0..3)
        .map(|member| {
            let all = [prompt.as_slice(), &tokens(30, member)].concat();
            let mut builder = MaskBuilder::new(shape.clone()).unwrap();
            builder.push(rows(&shape, &all, 0), all.len(), V).unwrap();
            (all, builder)
        })
        .collect();
    for (all, mut builder) in builders {
        let mut chain = chain(&shape, &all, V, "w");
        merged.push(cache.insert(&mut chain, &mut builder).merged_rows);
        assert_eq!(cache.insert(&mut chain, &mut builder), Inserted::default(), "counted once");
        masks.push(builder.finish(all.len()).unwrap());
    }
    assert_eq!(merged, [0, 192, 192]);
    let own = (199 - 192 + 30) * shape.row_bytes();
    assert_eq!(RoutingMask::held_together(&masks), 192 * shape.row_bytes() + 3 * own);
}

#[test]
fn blocks_of_another_version_model_scope_or_prefix_are_never_found() {
    let shape = small();
    let cache = cache(1 << 20, None);
    let prompt = tokens(300, 0);
    episode(&cache, &shape, &prompt, &[1, 2]);
    let found = |chain: &PrefixChain| cache.lookup(chain).len();
    assert_eq!(found(&chain(&shape, &prompt, V, "w")), 4);
    assert_eq!(found(&chain(&shape, &prompt, PolicyVersion(4), "w")), 0);
    assert_eq!(found(&chain(&shape, &prompt, V, "v")), 0);
    let mut other_run = PrefixChain::new(&shape, "other", V, "w");
    other_run.extend_to(&prompt);
    assert_eq!(found(&other_run), 0);
    let wider = ModelShape { experts: 17, ..(*shape).clone() };
    assert_eq!(found(&chain(&wider, &prompt, V, "w")), 0);
    let mut changed = prompt.clone();
    changed[70] += 1;
    assert_eq!(found(&chain(&shape, &changed, V, "w")), 1, "the run ends before the change");
    changed[0] += 1;
    assert_eq!(found(&chain(&shape, &changed, V, "w")), 0);
    assert_eq!(found(&chain(&shape, &prompt[..127], V, "w")), 1, "whole blocks only");
}

#[test]
fn rows_that_are_mixed_or_follow_a_change_of_version_are_not_shared() {
    use orchestrate_routing::{Passes, RowVersion};
    let shape = small();
    let all = tokens(400, 0);
    let insert = |passes: &[(usize, usize, u64)], retracted: bool| {
        let cache = cache(1 << 20, None);
        let mut builder = MaskBuilder::new(shape.clone()).unwrap();
        let versions: Vec<RowVersion> = passes
            .iter()
            .map(|&(start, end, v)| RowVersion { start, end, version: PolicyVersion(v) })
            .collect();
        let passes = Passes { versions: &versions, retracted };
        builder.push_passes(rows(&shape, &all, 0), 400, passes).unwrap();
        let mut chain = chain(&shape, &all, V, "w");
        cache.insert(&mut chain, &mut builder);
        cache.lookup(&chain).len()
    };
    assert_eq!(insert(&[(0, 399, 3)], false), 6);
    assert_eq!(insert(&[(0, 399, 4)], false), 0, "of another version than the chain");
    assert_eq!(insert(&[(0, 200, 3), (200, 399, 4)], false), 3, "up to the change");
    assert_eq!(insert(&[(0, 399, 3)], true), 0, "computed twice");
}

#[test]
fn a_difference_between_members_is_drift_and_each_keeps_its_own_rows() {
    let shape = small();
    let cache = cache(1 << 20, None);
    let all = tokens(130, 0);
    let mut first = MaskBuilder::new(shape.clone()).unwrap();
    first.push(rows(&shape, &all, 0), 130, V).unwrap();
    cache.insert(&mut chain(&shape, &all, V, "w"), &mut first);
    let mut bytes = rows(&shape, &all, 0).to_vec();
    bytes.swap(0, 1); // another slot order is not drift
    bytes[shape.row_bytes() * 65] = (bytes[shape.row_bytes() * 65 + 1] + 1) % 16;
    let changed = RoutedRows::new(&shape, 0, &bytes).unwrap();
    let mut second = MaskBuilder::new(shape.clone()).unwrap();
    second.push(changed, 130, V).unwrap();
    let inserted = cache.insert(&mut chain(&shape, &all, V, "w"), &mut second);
    assert_eq!(inserted, Inserted { merged_rows: 0, drift_rows: 1 });
    assert_eq!(cache.metrics().drift_rows, 1);
    assert_eq!(second.finish(130).unwrap().to_vec(), bytes);
}

#[test]
fn memory_is_bounded_and_ends_are_evicted_before_starts() {
    let shape = small();
    let block = BLOCK_ROWS * shape.row_bytes();
    let cache = cache(5 * block, None);
    let prompt = tokens(64 * 8, 0);
    episode(&cache, &shape, &prompt, &[1, 2]);
    assert_eq!(cache.metrics().bytes_held as usize, 5 * block);
    assert_eq!(cache.lookup(&chain(&shape, &prompt, V, "w")).len(), 5, "the first five");
    let zero = self::cache(0, None);
    episode(&zero, &shape, &prompt, &[1, 2]);
    assert_eq!((zero.metrics().bytes_held, zero.metrics().misses), (0, 1));
}

/// A cache of two blocks in memory, and a prompt of four blocks that was used twice.
fn spilled(folder: &Path, limit: u64) -> (PrefixCache, Vec<u32>, RoutingMask) {
    let shape = small();
    let block = BLOCK_ROWS * shape.row_bytes();
    let prompt = tokens(256, 0);
    let cache = cache(4 * block, Some((folder, limit)));
    let (mask, _) = episode(&cache, &shape, &prompt, &[1, 2]);
    episode(&cache, &shape, &prompt, &[3, 4]);
    episode(&cache, &shape, &tokens(256, 5), &[1, 2]);
    (cache, prompt, mask)
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn evicted_blocks_that_were_shared_come_back_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, prompt, mask) = spilled(folder.path(), 1 << 20);
    let metrics = cache.metrics();
    assert_eq!((metrics.spills, files(folder.path()).len()), (4, 4));
    let on_disk: u64 = files(folder.path()).iter().map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(metrics.bytes_spilled, on_disk);
    let blocks = cache.lookup(&chain(&small(), &prompt, V, "w"));
    let bytes: Vec<u8> = blocks.iter().flat_map(Block::bytes).copied().collect();
    assert_eq!(bytes, mask.to_vec()[..bytes.len()]);
    assert_eq!(blocks.len(), 4);
    assert_eq!((cache.metrics().reloads, cache.metrics().spill_failures), (4, 0));
    // The second prompt was used only once: it is not worth a file.
    assert_eq!(files(folder.path()).len(), 4);
}

#[test]
fn missing_damaged_or_misnamed_file_is_a_miss() {
    let damage: [fn(&Path); 5] = [
        |file| std::fs::remove_file(file).unwrap(),
        |file| std::fs::write(file, []).unwrap(),
        |file| std::fs::write(file, vec![0; 1 << 20]).unwrap(),
        |file| {
            let mut bytes = std::fs::read(file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(file, bytes).unwrap();
        },
        |file| {
            // Another block under the same file name.
            let folder = file.parent().unwrap();
            let other = files(folder).into_iter().find(|other| other != file).unwrap();
            std::fs::copy(other, file).unwrap();
        },
    ];
    for hurt in damage {
        let folder = tempfile::tempdir().unwrap();
        let (cache, prompt, _) = spilled(folder.path(), 1 << 20);
        let all = files(folder.path());
        for file in &all {
            hurt(file);
        }
        if all.iter().all(|file| !file.exists()) {
            assert_eq!(cache.lookup(&chain(&small(), &prompt, V, "w")).len(), 0);
        }
        let found = cache.lookup(&chain(&small(), &prompt, V, "w")).len();
        assert!(found <= 1, "a copy may stand under its own name");
        assert!(cache.metrics().spill_failures >= 3);
        // After it is fetched again, it is cached again.
        episode(&cache, &small(), &prompt, &[1, 2]);
        assert_eq!(cache.lookup(&chain(&small(), &prompt, V, "w")).len(), 4);
    }
}

#[test]
fn every_flipped_byte_of_a_spilled_block_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, prompt, _) = spilled(folder.path(), 1 << 20);
    let chain = chain(&small(), &prompt[..64], V, "w");
    let whole: Vec<(std::path::PathBuf, Vec<u8>)> = files(folder.path())
        .into_iter()
        .map(|file| (file.clone(), std::fs::read(&file).unwrap()))
        .collect();
    drop(cache);
    for at in 0..whole.iter().map(|(_, bytes)| bytes.len()).max().unwrap() {
        let (cache, ..) = spilled(folder.path(), 1 << 20);
        for (file, bytes) in &whole {
            let mut bad = bytes.clone();
            let at = at.min(bad.len() - 1);
            bad[at] ^= 1 + u8::try_from(at % 7).unwrap();
            std::fs::write(file, bad).unwrap();
        }
        assert!(cache.lookup(&chain).is_empty(), "byte {at}");
    }
}

#[test]
fn spill_folder_is_bounded_and_emptied_at_startup() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes.txt"), "kept").unwrap();
    drop(spilled(folder.path(), 1 << 20));
    assert_eq!(files(folder.path()).len(), 5);
    let (cache, ..) = spilled(folder.path(), 400);
    let metrics = cache.metrics();
    assert!(metrics.bytes_spilled <= 400 && metrics.spills == 4, "{metrics:?}");
    assert!(files(folder.path()).len() < 5);
    drop(cache);
    drop(self::cache(1, Some((folder.path(), 1))));
    assert_eq!(files(folder.path()), [folder.path().join("notes.txt")]);
}

#[test]
fn unwritable_spill_folder_only_prevents_reuse() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("blocks");
    let block = BLOCK_ROWS * small().row_bytes();
    let cache = cache(4 * block, Some((&inner, 1 << 20)));
    let prompt = tokens(256, 0);
    episode(&cache, &small(), &prompt, &[1, 2]);
    episode(&cache, &small(), &prompt, &[3, 4]);
    std::fs::remove_dir_all(&inner).unwrap();
    episode(&cache, &small(), &tokens(256, 5), &[1, 2]);
    assert_eq!(cache.lookup(&chain(&small(), &prompt, V, "w")).len(), 0);
    let metrics = cache.metrics();
    assert_eq!((metrics.bytes_spilled, metrics.spills, metrics.spill_failures), (0, 0, 4));
}

#[test]
fn a_fork_shares_the_blocks_of_the_common_prefix() {
    let shape = small();
    let row = shape.row_bytes();
    let all = tokens(300, 0);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, &all, 0), 300, V).unwrap();
    for at in [0, 1, 2, 64, 65, 66, 129, 200, 299, 300, 1000] {
        let mut fork = builder.fork(at);
        let kept = at.saturating_sub(1).min(299);
        assert_eq!(fork.rows(), kept);
        let shared = kept / BLOCK_ROWS * BLOCK_ROWS * row;
        assert_eq!(fork.held(), HeldBytes { own: kept * row - shared, shared });
        // Another branch grows from it without affecting the first one.
        let branch = [&all[..at.min(300)], &tokens(90, 9)].concat();
        let start = fork.next_start();
        fork.push(rows(&shape, &branch, start), branch.len(), V).unwrap();
        let mask = fork.finish(branch.len()).unwrap();
        assert_eq!(mask.to_vec(), rows(&shape, &branch, 0).to_vec(), "fork at {at}");
    }
    assert_eq!(builder.finish(300).unwrap().to_vec(), rows(&shape, &all, 0).to_vec());
}

#[test]
fn whole_blocks_are_taken_without_a_copy() {
    let shape = small();
    let all = tokens(400, 0);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, &all[..100], 0), 100, V).unwrap();
    let payload = rows(&shape, &all, 98);
    let offered: Vec<*const u8> = payload.chunks().map(<[u8]>::as_ptr).collect();
    builder.push(payload, 400, V).unwrap();
    let mask = builder.finish(400).unwrap();
    let held: Vec<*const u8> = mask.chunks().map(<[u8]>::as_ptr).collect();
    assert_eq!(held[2..6], offered[1..5], "the blocks of the reply are those of the mask");
}

#[test]
fn id_width_follows_the_model_at_128_256_257_and_512_experts() {
    for (experts, width) in [(128, 1), (256, 1), (257, 2), (512, 2)] {
        let shape = shape(3, experts, 4);
        let all = tokens(150, 0);
        let mut builder = MaskBuilder::new(shape.clone()).unwrap();
        builder.push(rows(&shape, &all[..70], 0), 70, V).unwrap();
        builder.push(rows(&shape, &all, 69), 150, V).unwrap();
        let mask = builder.finish(150).unwrap();
        assert_eq!(mask.row_bytes(), 3 * 4 * width);
        assert_eq!(RoutingMask::from_bytes(&mask.to_bytes()).unwrap(), mask);
        let first = 149 * 7 - 7 + all[148] as usize * 3;
        assert_eq!(mask.experts(148, 0).unwrap()[0], first % experts);
    }
}
