//! Samples and folders.

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::{Batch, BatchMeta, BatchSample, Manifest, write_batch};
use orchestrate_routing::{RoutedRows, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion, Trajectory};
use std::sync::Arc;

pub(crate) fn shape(experts: usize) -> ModelShape {
    ModelShape {
        hidden_layers: 3,
        moe_layers: vec![0, 2],
        experts,
        top_k: 2,
        vocab: 100,
        context: 1000,
    }
}

pub(crate) fn mask(shape: &ModelShape, tokens: usize) -> RoutingMask {
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

pub(crate) fn sample(shape: &ModelShape, index: u16, tokens: usize) -> BatchSample {
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

pub(crate) fn meta(shape: ModelShape) -> BatchMeta {
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

pub(crate) fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(folder.path().join("batch")).unwrap();
    (folder, path)
}

pub(crate) fn files(dir: &Utf8Path) -> Vec<(String, Vec<u8>)> {
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

pub(crate) fn batch(
    dir: &Utf8Path,
    experts: usize,
    lengths: &[usize],
) -> (Vec<BatchSample>, Manifest) {
    let shape = shape(experts);
    let samples: Vec<BatchSample> =
        lengths.iter().zip(0u16..).map(|(&tokens, index)| sample(&shape, index, tokens)).collect();
    let manifest = write_batch(dir, &meta(shape), &samples).unwrap();
    (samples, manifest)
}

pub(crate) fn assert_same(dir: &Utf8Path, shape: &ModelShape, samples: &[BatchSample]) {
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
            assert_eq!(row, absent, "a row that no engine chose holds ids 0..K");
        }
        let valid: Vec<u8> = (0..trajectory.len()).map(|t| u8::from(t < held)).collect();
        assert_eq!(got.routing_valid, valid);
        assert_eq!(got.routing_valid.last(), Some(&0));
    }
    assert!(batch.sequence(samples.len()).is_err());
}

/// Members of one group: `prompt` tokens and rows in common, the rest of each its own.
pub(crate) fn group_of(shape: &ModelShape, prompt: usize, lengths: &[usize]) -> Vec<BatchSample> {
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
