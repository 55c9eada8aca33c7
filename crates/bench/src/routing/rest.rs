//! Stored masks: blocks that the prefix cache writes to files and reads back, and whole masks.

use super::conversation::check;
use super::floors;
use super::measure::{Case, Limits, Meter};
use super::workload::{Conversation, Size, VOCAB};
use anyhow::{Context as _, ensure};
use camino::Utf8Path;
use orchestrate_routing::{
    CacheOptions, MaskBuilder, PrefixCache, PrefixChain, RoutedRows, RoutingMask, RowVersion,
};
use orchestrate_types::{PolicyVersion, TokenId};
use std::sync::Arc;

/// A conversation whose rows can be inserted into a cache.
struct Cached {
    chain: PrefixChain,
    builder: MaskBuilder,
}

fn cached(conversation: &Conversation, tokens: usize, stream: usize) -> anyhow::Result<Cached> {
    let shape = &conversation.shape;
    let version = PolicyVersion(0);
    let mut chain = PrefixChain::new(shape, "bench", version, "");
    let token = |at| TokenId::try_from((at * 7919 + stream) % VOCAB as usize).unwrap_or(0);
    chain.extend_to(&(0..tokens - 1).map(token).collect::<Vec<_>>());
    let mut builder = MaskBuilder::new(shape.clone())?;
    builder.push(RoutedRows::new(shape, 0, &conversation.rows)?, tokens, version)?;
    Ok(Cached { chain, builder })
}

/// Measures eviction of a conversation's blocks to files (`spill`), and reloading them (`reload`).
pub(super) fn spill(
    size: &Size,
    dir: &Utf8Path,
    rounds: u32,
    seed: u64,
) -> anyhow::Result<(Case, Case)> {
    let conversation = Conversation::draw(size, seed);
    let other = Conversation::draw(size, seed + 1);
    let (mut spill, mut reload) = (Meter::new(), Meter::new());
    let mut kept = 0;
    for _ in 0..rounds {
        let folder = tempfile::tempdir_in(dir).context("failed to create a folder for files")?;
        let mut first = cached(&conversation, size.tokens, 0)?;
        let mut second = cached(&other, size.tokens, 1)?;
        let bytes = conversation.mask_bytes();
        let cache = PrefixCache::open(CacheOptions {
            bytes,
            spill: Some((folder.path().join("blocks"), u64::MAX)),
        })?;
        cache.insert(&mut first.chain, &mut first.builder);
        kept = cache.metrics().bytes_held;
        // Only blocks that a second sequence has used are written to files.
        ensure!(
            !cache.lookup(&first.chain).is_empty(),
            "blocks that were inserted into the cache are not found"
        );
        drop(first.builder);

        let raw = folder.path().join("raw");
        spill.floor(|| floors::write_file(&raw, kept))?;
        spill.case(0, || cache.insert(&mut second.chain, &mut second.builder));
        let spilled = cache.metrics().spills;
        ensure!(spilled > 0, "nothing was written to files");
        drop(second.builder);

        reload.floor(|| floors::read_file(&raw))?;
        let blocks = reload.case(0, || cache.lookup(&first.chain));
        let mut builder = MaskBuilder::new(conversation.shape.clone())?;
        builder.seed(blocks, PolicyVersion(0));
        let back = builder.rows();
        ensure!(
            back * size.shape().row_bytes() == usize::try_from(kept)?,
            "bug: {back} rows were reloaded from {kept} bytes"
        );
        let mask = builder.finish(back + 1)?;
        let drawn = conversation.rows.get(..usize::try_from(kept)?).unwrap_or_default();
        ensure!(
            mask.to_vec() == drawn,
            "bug: the reloaded rows differ from those that were written"
        );
        spill.end_round();
        reload.end_round();
    }
    let limits = Limits::default();
    let mut out = spill.finish("spill", floors::WRITE_FILE, kept, limits);
    let mut back = reload.finish("reload", floors::READ_FILE, kept, limits);
    let note = "one compressed, checked file per block";
    (out.bytes_in, back.bytes_in) = (kept, kept);
    (out.note, back.note) = (note.to_owned(), note.to_owned());
    Ok((out, back))
}

/// Measures conversion of a whole mask to its stored form (`store`), and back (`load`).
pub(super) fn store(size: &Size, rounds: u32, seed: u64) -> anyhow::Result<(Case, Case)> {
    let conversation = Conversation::draw(size, seed);
    let end = size.tokens - 1;
    let versions = vec![RowVersion { start: 0, end, version: PolicyVersion(0) }];
    let mask = RoutingMask::new(Arc::clone(&conversation.shape), &conversation.rows, versions)?;
    let (mut store, mut load) = (Meter::new(), Meter::new());
    let mut stored_bytes = 0;
    for _ in 0..rounds {
        store.floor(|| std::hint::black_box(conversation.rows.clone()));
        let bytes = store.case(0, || mask.to_bytes());
        load.floor(|| std::hint::black_box(bytes.clone()));
        let back = load.case(bytes.len(), || RoutingMask::from_bytes(&bytes))?;
        check(&back, &conversation)?;
        stored_bytes = bytes.len() as u64;
        drop((bytes, back));
        store.end_round();
        load.end_round();
    }
    let kept = conversation.mask_bytes();
    let limits = Limits { ratio: None, seconds: None, memory: true };
    let mut out = store.finish("store", floors::COPY, stored_bytes, Limits::default());
    let mut back = load.finish("load", floors::COPY, kept, limits);
    out.bytes_in = kept;
    out.note = format!("{kept} bytes of rows become {stored_bytes}");
    "unpacks, verifies the checksum and checks every row".clone_into(&mut back.note);
    Ok((out, back))
}
