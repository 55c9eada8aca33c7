//! Batch folders: what is written is read back, anything else is refused with its file.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "helpers of tests; a skip must be visible"
)]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::{
    Batch, BatchErrorKind, BatchMeta, BatchSample, Manifest, Planned, RecordEntry, stream_batch,
    write_batch,
};
use orchestrate_routing::{RoutedRows, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion, Trajectory};
use proptest::prelude::*;
use std::sync::Arc;

fn shape(experts: usize) -> ModelShape {
    ModelShape {
        hidden_layers: 3,
        moe_layers: vec![0, 2],
        experts,
        top_k: 2,
        vocab: 100,
        context: 1000,
    }
}

fn mask(shape: &ModelShape, tokens: usize) -> RoutingMask {
    let experts = u16::try_from(shape.experts).unwrap();
    let ids: Vec<u16> = (0..u16::try_from(tokens - 1).unwrap())
        .flat_map(|t| [t % experts, (t + 1) % experts, (t + 2) % experts, (t + 5) % experts])
        .collect();
    let rows = RoutedRows::from_ids(shape, 0, &ids).unwrap();
    let versions = if tokens > 1 {
        vec![RowVersion { start: 0, end: tokens - 1, version: PolicyVersion(3) }]
    } else {
        vec![]
    };
    RoutingMask::new(Arc::new(shape.clone()), &rows.to_vec(), versions).unwrap()
}

fn sample(shape: &ModelShape, index: u16, tokens: usize) -> BatchSample {
    let ids = (0..tokens).map(|t| u32::try_from((t * 7 + usize::from(index)) % 100).unwrap());
    let loss_mask: Vec<u8> = (0..tokens).map(|t| u8::from(t % 3 == 2)).collect();
    let logprobs = loss_mask.iter().map(|&m| if m == 1 { -0.25 } else { 0.0 }).collect();
    let trajectory =
        Trajectory::new(ids.collect(), loss_mask, logprobs, vec![3; tokens], vec![]).unwrap();
    BatchSample {
        episode_id: format!("t000012.{index:02}").parse().unwrap(),
        group: 12,
        trajectory,
        routing: Some(mask(shape, tokens)),
        advantage: f32::from(index) - 1.5,
        reward: 1.0,
    }
}

fn meta(shape: ModelShape) -> BatchMeta {
    BatchMeta {
        run: "run-1".to_owned(),
        step_id: "run-1-s000004".to_owned(),
        global_step: 4,
        base_version: PolicyVersion(3),
        shape,
        max_shard_bytes: 400,
        share_prefix_rows: false,
    }
}

fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(folder.path().join("batch")).unwrap();
    (folder, path)
}

fn files(dir: &Utf8Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

fn batch(dir: &Utf8Path, experts: usize, lengths: &[usize]) -> (Vec<BatchSample>, Manifest) {
    let shape = shape(experts);
    let samples: Vec<BatchSample> =
        lengths.iter().zip(0u16..).map(|(&tokens, index)| sample(&shape, index, tokens)).collect();
    let manifest = write_batch(dir, &meta(shape), &samples).unwrap();
    (samples, manifest)
}

fn assert_same(dir: &Utf8Path, shape: &ModelShape, samples: &[BatchSample]) {
    let batch = Batch::open(&dir.join("manifest.json")).unwrap();
    assert_eq!(batch.len(), samples.len());
    for (got, sample) in batch.sequences().zip(samples) {
        let got = got.unwrap();
        let trajectory = &sample.trajectory;
        assert_eq!(got.episode_id, sample.episode_id.to_string());
        assert_eq!(got.group, sample.group);
        assert_eq!(got.token_ids, trajectory.token_ids());
        assert_eq!(got.loss_mask, trajectory.loss_mask());
        assert_eq!(got.rollout_logprobs, trajectory.rollout_logprobs());
        assert_eq!(got.policy_versions, trajectory.policy_versions());
        assert_eq!(got.advantage.to_bits(), sample.advantage.to_bits());
        assert_eq!(got.reward.to_bits(), sample.reward.to_bits());
        let held = sample.routing.as_ref().map_or(0, RoutingMask::rows);
        let (held_bytes, row_bytes) = (held * shape.row_bytes(), shape.row_bytes());
        let rows = got.routed_experts.to_vec();
        if let Some(mask) = &sample.routing {
            assert_eq!(rows[..held_bytes], mask.chunks().collect::<Vec<_>>().concat());
        }
        let absent: Vec<u8> =
            if shape.id_bytes() == 1 { vec![0, 1, 0, 1] } else { vec![0, 0, 1, 0, 0, 0, 1, 0] };
        for row in rows[held_bytes..].chunks(row_bytes) {
            assert_eq!(row, absent, "a row that nobody chose holds ids 0..K");
        }
        let valid: Vec<u8> = (0..trajectory.len()).map(|t| u8::from(t < held)).collect();
        assert_eq!(got.routing_valid, valid);
        assert_eq!(got.routing_valid.last(), Some(&0));
    }
    assert!(batch.sequence(samples.len()).is_err());
}

#[test]
fn what_is_written_is_read_back_over_several_shards() {
    for experts in [8, 300] {
        let (_keep, dir) = folder();
        let (mut samples, manifest) = batch(&dir, experts, &[5, 9, 1, 40, 3]);
        assert_same(&dir, &shape(experts), &samples);
        assert!(manifest.shards.len() > 1);
        assert_eq!((manifest.sequences, manifest.tokens), (5, 58));
        assert_eq!(manifest.records[0].dtype, if experts == 8 { "u8" } else { "u16" });
        // A sequence without routing is written, and says so row by row.
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
fn sequences_of_any_length_are_packed_without_a_padding_token_or_row() {
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
    // The only rows that nobody chose are those of last tokens, one per sequence.
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
fn the_rest_of_an_interrupted_write_is_replaced() {
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
fn every_changed_byte_of_a_shard_is_detected_and_the_file_named() {
    let (_keep, dir) = folder();
    let (_, manifest) = batch(&dir, 8, &[3, 2]);
    let path = dir.join(&manifest.shards[0].file);
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        let error = Batch::open(&dir.join("manifest.json")).unwrap_err();
        assert!(matches!(error.kind, BatchErrorKind::Digest), "{error}");
        assert_eq!(error.file, path);
    }
    for end in [0, 1, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..end]).unwrap();
        assert!(Batch::open(&dir.join("manifest.json")).is_err());
    }
}

/// Replaces the first shard's bytes by `change` and puts the right digest into the manifest.
fn forge(dir: &Utf8Path, change: impl FnOnce(&mut Vec<u8>, usize)) -> BatchErrorKind {
    let manifest_path = dir.join("manifest.json");
    let mut manifest: Manifest =
        serde_json::from_slice(&std::fs::read(&manifest_path).unwrap()).unwrap();
    let path = dir.join(&manifest.shards[0].file);
    let mut bytes = std::fs::read(&path).unwrap();
    let data = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    change(&mut bytes, data);
    manifest.shards[0].bytes = bytes.len() as u64;
    manifest.shards[0].blake3 = blake3::hash(&bytes).to_hex().to_string();
    std::fs::write(&path, bytes).unwrap();
    std::fs::write(&manifest_path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    Batch::open(&manifest_path).unwrap_err().kind
}

#[test]
fn values_out_of_range_are_refused_even_with_a_right_digest() {
    // One shard of 2 + 3 tokens; offsets of the tensors in file order.
    let cu = 0;
    let groups = cu + 3 * 8;
    let versions = groups + 2 * 8;
    let advantages = versions + 5 * 8;
    let rewards = advantages + 2 * 4;
    let logprobs = rewards + 2 * 4;
    let tokens = logprobs + 5 * 4;
    let loss = tokens + 5 * 4;
    let valid = loss + 5;
    let routed = valid + 5;
    let nan = f32::NAN.to_le_bytes().to_vec();
    let cases: Vec<(&str, usize, Vec<u8>)> = vec![
        ("cu_seqlens", cu, 1i64.to_le_bytes().to_vec()),
        ("cu_seqlens", cu + 8, (-1i64).to_le_bytes().to_vec()),
        ("cu_seqlens", cu + 8, 5i64.to_le_bytes().to_vec()),
        ("cu_seqlens", cu + 16, 6i64.to_le_bytes().to_vec()),
        ("advantages", advantages, nan.clone()),
        ("rewards", rewards + 4, nan.clone()),
        ("rollout_logprobs", logprobs + 4 * 4, nan),
        ("rollout_logprobs", logprobs + 4 * 4, 0.5f32.to_le_bytes().to_vec()),
        ("token_ids", tokens, 100u32.to_le_bytes().to_vec()),
        ("routed_experts", routed + 3, vec![8]),
        ("loss_mask", loss, vec![2]),
        ("routing_valid", valid + 1, vec![1]),
        ("routing_valid", valid, vec![9]),
    ];
    for (tensor, at, bytes) in cases {
        let (_keep, dir) = folder();
        batch(&dir, 8, &[2, 3]);
        let kind = forge(&dir, |file, data| {
            file[data + at..data + at + bytes.len()].copy_from_slice(&bytes);
        });
        assert!(
            matches!(&kind, BatchErrorKind::Value { name, .. } if *name == tensor),
            "{tensor}: {kind}"
        );
    }
}

#[test]
fn headers_that_say_something_else_are_refused() {
    let replace = |file: &mut Vec<u8>, from: &str, to: &str| {
        let at = file.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        file[at..at + from.len()].copy_from_slice(to.as_bytes());
    };
    for (from, to) in [
        ("\"U32\"", "\"F32\""),
        ("\"shape\":[5,2,2]", "\"shape\":[5,4,1]"),
        ("\"rewards\"", "\"rewardz\""),
        ("\"episode_ids\"", "\"episode_idz\""),
        ("t000012.00", "t000012\\\"0"),
        ("{\"__meta", "{]__meta"),
    ] {
        let (_keep, dir) = folder();
        batch(&dir, 8, &[2, 3]);
        let kind = forge(&dir, |file, _| replace(file, from, to));
        assert!(
            matches!(
                kind,
                BatchErrorKind::Tensor { .. }
                    | BatchErrorKind::Header(_)
                    | BatchErrorKind::Inconsistent(_)
            ),
            "{from}: {kind}"
        );
    }
}

#[test]
fn manifests_that_lie_or_lead_away_are_refused() {
    let (_keep, dir) = folder();
    batch(&dir, 8, &[2, 3]);
    let path = dir.join("manifest.json");
    let good = std::fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("\"format_version\": 1", "\"format_version\": 2"),
        ("\"tokens\": 5,\n  \"shards\"", "\"tokens\": 6,\n  \"shards\""),
        ("\"dtype\": \"u8\"", "\"dtype\": \"u16\""),
        ("\"0000.safetensors\"", "\"../x.safetensors\""),
        ("\"0000.safetensors\"", "\"0001.safetensors\""),
        ("\"top_k\": 2", "\"top_k\": 0"),
        ("\"top_k\": 2", "\"top_k\": 3"),
        ("{", "["),
    ] {
        assert!(good.contains(from), "{from}");
        std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
        let error = Batch::open(&path).unwrap_err();
        assert!(error.file.starts_with(&dir), "{error}");
    }
    std::fs::write(&path, good.replacen("\"format_version\": 1", "\"format_version\": 9", 1))
        .unwrap();
    let kind = Batch::open(&path).unwrap_err().kind;
    assert!(matches!(kind, BatchErrorKind::Version(9)));
}

#[test]
fn samples_that_must_not_be_trained_on_are_refused_before_anything_is_written() {
    let shape = shape(8);
    let good = sample(&shape, 0, 4);
    let trajectory = |ids: Vec<u32>, mask: Vec<u8>, logprobs: Vec<f32>| {
        let tokens = ids.len();
        Trajectory::new(ids, mask, logprobs, vec![0; tokens], vec![]).unwrap()
    };
    let with = |trajectory| BatchSample { trajectory, routing: None, ..good.clone() };
    let wrong = [
        with(trajectory(vec![], vec![], vec![])),
        with(trajectory(vec![100], vec![0], vec![0.0])),
        with(trajectory(vec![1], vec![2], vec![0.0])),
        with(trajectory(vec![1], vec![1], vec![f32::NAN])),
        with(trajectory(vec![1], vec![1], vec![0.5])),
        BatchSample { advantage: f32::INFINITY, ..good.clone() },
        BatchSample { reward: f32::NAN, ..good.clone() },
        BatchSample { routing: Some(mask(&shape, 5)), ..good.clone() },
        BatchSample { routing: Some(mask(&self::shape(9), 4)), ..good.clone() },
    ];
    for (index, sample) in wrong.into_iter().enumerate() {
        let (_keep, dir) = folder();
        let error = write_batch(&dir, &meta(shape.clone()), &[good.clone(), sample]).unwrap_err();
        assert!(matches!(error.kind, BatchErrorKind::Sample { .. }), "{index}: {error}");
        assert!(!dir.exists());
    }
    let (_keep, dir) = folder();
    assert!(write_batch(&dir, &meta(shape), &[]).is_err());
}

/// Members of one group: `prompt` tokens and rows in common, the rest of each its own.
fn group_of(shape: &ModelShape, prompt: usize, lengths: &[usize]) -> Vec<BatchSample> {
    let common = sample(shape, 0, prompt.max(1));
    lengths
        .iter()
        .zip(1u16..)
        .map(|(&tokens, index)| {
            let mut own = sample(shape, index, tokens);
            let ids: Vec<u32> = (common.trajectory.token_ids().iter().take(prompt.min(tokens)))
                .chain(own.trajectory.token_ids().iter().skip(prompt))
                .copied()
                .collect();
            let (mask, logprobs) =
                (own.trajectory.loss_mask().to_vec(), own.trajectory.rollout_logprobs().to_vec());
            own.trajectory = Trajectory::new(ids, mask, logprobs, vec![3; tokens], vec![]).unwrap();
            own
        })
        .collect()
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
    assert_eq!(rows(&unrouted), 32, "nothing is shared with rows that nobody chose");
    let three = group_of(&shape, 10, &[16, 16, 16]);
    let mut first_unrouted = three.clone();
    first_unrouted[0].routing = None;
    assert_eq!(rows(&first_unrouted), 48 - 10, "the first with rows leads");
}

#[test]
fn a_shared_row_that_does_not_exist_is_refused() {
    let shape = shape(8);
    let (_keep, dir) = folder();
    let meta = BatchMeta { share_prefix_rows: true, ..meta(shape.clone()) };
    write_batch(&dir, &meta, &[sample(&shape, 0, 2), sample(&shape, 1, 3)]).unwrap();
    // Offsets, groups, versions, advantages, rewards, log-probs and tokens come before.
    let at = 3 * 8 + 2 * 8 + 5 * 8 + 2 * 4 + 2 * 4 + 5 * 4 + 5 * 4;
    let kind =
        forge(&dir, |file, data| file[data + at..data + at + 4].copy_from_slice(&[5, 0, 0, 0]));
    assert!(matches!(kind, BatchErrorKind::Value { name: "routed_row", index: 0, .. }), "{kind}");
}

#[test]
fn samples_are_taken_one_at_a_time_and_must_be_the_planned_ones() {
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
fn a_lazily_opened_batch_checks_the_shards_that_are_read() {
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
fn a_batch_of_another_model_is_refused_by_name() {
    let (_keep, dir) = folder();
    batch(&dir, 8, &[5]);
    let batch = Batch::open(&dir.join("manifest.json")).unwrap();
    let own = shape(8);
    batch.require_model(&own).unwrap();
    batch.require_model(&ModelShape { context: 5, ..own.clone() }).unwrap();
    for (field, other) in [
        ("moe_layers", ModelShape { moe_layers: vec![1, 2], ..own.clone() }),
        ("experts", ModelShape { experts: 16, ..own.clone() }),
        ("top_k", ModelShape { top_k: 3, ..own.clone() }),
        ("hidden_layers", ModelShape { hidden_layers: 4, ..own.clone() }),
        ("vocab", ModelShape { vocab: 101, ..own.clone() }),
    ] {
        let error = batch.require_model(&other).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("another model: {field} is")), "{text}");
    }
}

#[test]
fn records_of_unknown_kinds_are_passed_over() {
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

/// Set in the copy of this test that runs on a disk of a quarter mebibyte.
const SMALL_DISK: &str = "ORCHESTRATE_TEST_SMALL_DISK";

#[test]
fn a_full_disk_publishes_nothing_and_says_so() {
    if let Some(disk) = std::env::var_os(SMALL_DISK) {
        let disk = Utf8PathBuf::from_path_buf(disk.into()).unwrap();
        return on_a_small_disk(&disk.join("batch"));
    }
    let folder = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=256k none "$1" || exit 75; exec "$2" --exact "$3""#;
    let status = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .arg("a_full_disk_publishes_nothing_and_says_so")
        .env(SMALL_DISK, folder.path())
        .output();
    match status {
        Ok(output) if output.status.success() => {}
        Ok(output) if output.status.code() == Some(101) => {
            panic!("{}", String::from_utf8_lossy(&output.stdout))
        }
        Ok(_) | Err(_) => eprintln!("skipped: no small disk can be mounted here"),
    }
}

fn on_a_small_disk(dir: &Utf8Path) {
    let shape = shape(8);
    let samples: Vec<BatchSample> = (0..8).map(|i| sample(&shape, i, 3000)).collect();
    // Two shards fit, the rest does not.
    let meta = BatchMeta { max_shard_bytes: 80_000, ..meta(shape.clone()) };
    let error = write_batch(dir, &meta, &samples).unwrap_err();
    assert!(matches!(error.kind, BatchErrorKind::Full(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("No space left on device") && text.contains("ENOSPC"), "{text}");
    assert!(text.contains("free some space"), "{text}");
    assert!(!dir.exists(), "nothing is left");
    write_batch(dir, &meta, &samples[..2]).unwrap();
    assert_same(dir, &shape, &samples[..2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn prop_any_lengths_and_shard_sizes_read_back(
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
