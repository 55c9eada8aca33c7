//! Batch folders round-trip; anything else is rejected with its file.

#[cfg(test)]
mod refused;
#[cfg(test)]
mod support;

use crate::support::{assert_same, batch, files, folder, group_of, mask, meta, sample, shape};
use orchestrate_handoff::{
    Batch, BatchErrorKind, BatchMeta, BatchSample, Planned, RecordEntry, stream_batch, write_batch,
};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_types::PolicyVersion;
use proptest::prelude::*;
use std::sync::Arc;

#[test]
fn batches_of_several_shards_round_trip() {
    for experts in [8, 300] {
        let (_keep, dir) = folder();
        let (mut samples, manifest) = batch(&dir, experts, &[5, 9, 1, 40, 3]);
        assert_same(&dir, &shape(experts), &samples);
        assert!(manifest.shards.len() > 1);
        assert_eq!((manifest.sequences, manifest.tokens), (5, 58));
        assert_eq!(manifest.records[0].dtype, if experts == 8 { "u8" } else { "u16" });
        // A sequence without routing is written with every row marked invalid.
        samples[1].routing = None;
        let (_keep, dir) = folder();
        write_batch(&dir, &meta(shape(experts)), &samples).unwrap();
        assert_same(&dir, &shape(experts), &samples);
    }
}

#[test]
fn a_shard_is_plain_safetensors_with_the_documented_tensors() {
    let (_keep, dir) = folder();
    let (_, manifest) = batch(&dir, 8, &[5, 9]);
    let bytes = std::fs::read(dir.join(&manifest.shards[0].file)).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0, "tensors are aligned");
    let shown = metadata.metadata().as_ref().unwrap();
    assert_eq!(shown["episode_ids"], r#"["t000012.00","t000012.01"]"#);
    assert_eq!(shown["moe_layers"], "[0,2]");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<String> = file
        .iter()
        .map(|(name, view)| format!("{name} {:?} {:?}", view.dtype(), view.shape()))
        .collect();
    tensors.sort();
    assert_eq!(
        tensors,
        [
            "advantages F32 [2]",
            "cu_seqlens I64 [3]",
            "group_ids I64 [2]",
            "loss_mask U8 [14]",
            "policy_versions I64 [14]",
            "rewards F32 [2]",
            "rollout_logprobs F32 [14]",
            "routed_experts U8 [14, 2, 2]",
            "routing_valid U8 [14]",
            "token_ids U32 [14]",
        ]
    );
}

#[test]
fn sequences_of_any_length_are_packed_without_padding() {
    let (_keep, dir) = folder();
    let lengths = [1, 700, 2, 3, 90];
    let shape = shape(8);
    let samples: Vec<BatchSample> =
        lengths.iter().zip(0u16..).map(|(&tokens, index)| sample(&shape, index, tokens)).collect();
    let meta = BatchMeta { max_shard_bytes: u64::MAX, ..meta(shape.clone()) };
    let manifest = write_batch(&dir, &meta, &samples).unwrap();
    let (tokens, sequences) = (lengths.iter().sum::<usize>(), lengths.len());
    let shard = &manifest.shards[0];
    assert_eq!((shard.tokens, shard.rows, shard.sequences), (tokens, tokens, sequences));
    // 8 bytes of header length, the header, and per token: id, version, log-prob, two masks, row.
    let bytes = std::fs::read(dir.join(&shard.file)).unwrap();
    let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let per_token = 4 + 8 + 4 + 2 + shape.row_bytes();
    assert_eq!(bytes.len(), 8 + header + tokens * per_token + 8 + sequences * (8 + 8 + 4 + 4));
    // The only placeholder rows are those of last tokens, one per sequence.
    let batch = Batch::open(&dir.join("manifest.json")).unwrap();
    let mut absent = 0;
    for sequence in batch.sequences() {
        let sequence = sequence.unwrap();
        absent +=
            sequence.routing_valid.iter().map(|&valid| usize::from(valid == 0)).sum::<usize>();
    }
    assert_eq!(absent, sequences);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let ((_a, first), (_b, second)) = (folder(), folder());
    batch(&first, 8, &[5, 9, 1, 40]);
    batch(&second, 8, &[5, 9, 1, 40]);
    assert_eq!(files(&first), files(&second));
}

#[test]
fn a_published_batch_never_changes() {
    let (_keep, dir) = folder();
    let (mut samples, manifest) = batch(&dir, 8, &[5, 9]);
    let before = files(&dir);
    assert_eq!(write_batch(&dir, &meta(shape(8)), &samples).unwrap(), manifest);
    samples[0].advantage = 0.25;
    let error = write_batch(&dir, &meta(shape(8)), &samples).unwrap_err();
    assert!(matches!(error.kind, BatchErrorKind::Published), "{error}");
    assert_eq!(files(&dir), before);
}

#[test]
fn leftovers_of_an_interrupted_write_are_replaced() {
    let (_keep, dir) = folder();
    let (_clean, other) = folder();
    std::fs::create_dir_all(&dir).unwrap();
    for name in
        ["0000.safetensors.tmp", "0000.safetensors", "0007.safetensors", "manifest.json.tmp"]
    {
        std::fs::write(dir.join(name), b"half").unwrap();
    }
    let error = Batch::open(&dir.join("manifest.json")).unwrap_err();
    assert!(matches!(error.kind, BatchErrorKind::Io(_)), "no manifest, no batch");
    batch(&dir, 8, &[5, 9]);
    batch(&other, 8, &[5, 9]);
    assert_eq!(files(&dir), files(&other));
}

#[test]
fn a_groups_common_prompt_is_written_once_when_rows_are_shared() {
    for experts in [8, 300] {
        let shape = shape(experts);
        // Rows are the same function of the position in all of them; tokens are not.
        let mut samples = group_of(&shape, 20, &[30, 41, 20, 25]);
        let mut other = sample(&shape, 9, 12);
        other.group = 13;
        samples.push(other);
        let whole = BatchMeta { max_shard_bytes: u64::MAX, ..meta(shape.clone()) };
        let shared = BatchMeta { share_prefix_rows: true, ..whole.clone() };
        let ((_a, plain_dir), (_b, shared_dir)) = (folder(), folder());
        let plain = write_batch(&plain_dir, &whole, &samples).unwrap();
        let manifest = write_batch(&shared_dir, &shared, &samples).unwrap();
        assert_same(&plain_dir, &shape, &samples);
        assert_same(&shared_dir, &shape, &samples);
        assert!(manifest.shares_rows() && !plain.shares_rows());
        // 20 rows of the second and fourth; 19 of the third, whose last token has no row.
        assert_eq!((plain.shards[0].rows, manifest.shards[0].rows), (128, 128 - 20 - 19 - 20));
        assert_eq!(write_batch(&shared_dir, &shared, &samples).unwrap(), manifest);
    }
}

#[test]
fn rows_are_shared_only_where_tokens_and_bytes_agree() {
    let shape = shape(8);
    let meta =
        BatchMeta { max_shard_bytes: u64::MAX, share_prefix_rows: true, ..meta(shape.clone()) };
    let rows = |samples: &[BatchSample]| {
        let (_keep, dir) = folder();
        let manifest = write_batch(&dir, &meta, samples).unwrap();
        assert_same(&dir, &shape, samples);
        manifest.shards[0].rows
    };
    let samples = group_of(&shape, 10, &[16, 16]);
    assert_eq!(rows(&samples), 32 - 10);
    // Another choice of experts at row 4: the rows from there on are this member's own.
    let mut drifted = samples.clone();
    let mut data = mask(&shape, 16).to_vec();
    data.swap(4 * 4, 4 * 4 + 1);
    let versions = vec![RowVersion { start: 0, end: 15, version: PolicyVersion(3) }];
    drifted[1].routing = Some(RoutingMask::new(Arc::new(shape.clone()), &data, versions).unwrap());
    assert_eq!(rows(&drifted), 32 - 4);
    let mut foreign = samples.clone();
    foreign[1].group = 13;
    assert_eq!(rows(&foreign), 32);
    let mut unrouted = samples.clone();
    unrouted[0].routing = None;
    assert_eq!(rows(&unrouted), 32, "placeholder rows are not shared");
    let three = group_of(&shape, 10, &[16, 16, 16]);
    let mut first_unrouted = three.clone();
    first_unrouted[0].routing = None;
    assert_eq!(rows(&first_unrouted), 48 - 10, "the first with rows leads");
}

#[test]
fn samples_are_streamed_one_at_a_time_and_must_match_the_plan() {
    let shape = shape(8);
    let samples: Vec<BatchSample> = (0..3).map(|i| sample(&shape, i, 6)).collect();
    let planned: Vec<Planned> = samples
        .iter()
        .map(|s| Planned { episode_id: s.episode_id, tokens: s.trajectory.len() })
        .collect();
    let (_keep, dir) = folder();
    let meta = meta(shape.clone());
    let manifest = stream_batch(&dir, &meta, &planned, samples.clone()).unwrap();
    assert_eq!(write_batch(&dir, &meta, &samples).unwrap(), manifest);

    let mut swapped = samples.clone();
    swapped.swap(1, 2);
    let mut longer = samples.clone();
    longer[2] = sample(&shape, 2, 7);
    for wrong in [samples[..2].to_vec(), swapped, longer] {
        let (_keep, dir) = folder();
        let error = stream_batch(&dir, &meta, &planned, wrong).unwrap_err();
        assert!(matches!(error.kind, BatchErrorKind::Sample { .. }), "{error}");
        assert!(!dir.exists(), "nothing is left");
    }
}

#[test]
fn a_lazily_opened_batch_checks_only_the_shards_that_are_read() {
    let (_keep, dir) = folder();
    let (samples, manifest) = batch(&dir, 8, &[5, 9, 1, 40, 3]);
    let damaged = dir.join(&manifest.shards.last().unwrap().file);
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let path = dir.join("manifest.json");
    assert_eq!(Batch::open(&path).unwrap_err().file, damaged);
    let batch = Batch::open_lazily(&path).unwrap();
    let first = batch.sequence(0).unwrap();
    assert_eq!(first.token_ids, samples[0].trajectory.token_ids());
    let error = batch.sequence(4).unwrap_err();
    assert!(matches!(error.kind, BatchErrorKind::Digest), "{error}");
    assert_eq!(error.file, damaged);
}

#[test]
fn records_of_unknown_kinds_are_ignored() {
    let (_keep, dir) = folder();
    let (samples, mut manifest) = batch(&dir, 8, &[5]);
    let other = RecordEntry {
        kind: "indexer".to_owned(),
        tensor: "indexer_ids".to_owned(),
        ..manifest.records[0].clone()
    };
    manifest.records.insert(0, other);
    std::fs::write(dir.join("manifest.json"), serde_json::to_vec(&manifest).unwrap()).unwrap();
    assert_same(&dir, &shape(8), &samples);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn prop_batches_of_any_lengths_and_shard_sizes_round_trip(
        lengths in proptest::collection::vec(1usize..30, 1..8),
        max_shard_bytes in 1u64..2000,
        wide in any::<bool>(),
        (share_prefix_rows, prompt) in (any::<bool>(), 0usize..20),
    ) {
        let (_keep, dir) = folder();
        let shape = shape(if wide { 300 } else { 8 });
        let samples = group_of(&shape, prompt, &lengths);
        let meta = BatchMeta { max_shard_bytes, share_prefix_rows, ..meta(shape.clone()) };
        write_batch(&dir, &meta, &samples).unwrap();
        assert_same(&dir, &shape, &samples);
    }
}
