//! Golden batches in `trainer/tests/golden`: this version writes exactly these files, and reads from
//! them exactly the values in the JSON files there. The Python package reads the same files.
//!
//! After a deliberate change of the format:
//! `cargo test -p orchestrate-handoff --test golden -- --ignored write_golden_batches`
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::{Batch, BatchMeta, BatchSample, write_batch};
use orchestrate_routing::{RoutedRows, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion, Trajectory};
use serde_json::{Value, json};
use std::sync::Arc;

/// Name, experts, global numbers of the MoE layers, hidden layers.
const MODELS: [(&str, usize, &[usize], usize); 2] =
    [("u8", 8, &[1, 2, 3], 4), ("u16", 300, &[0, 2, 3, 5], 6)];
/// Group, prompt tokens and tokens of each sequence.
const SEQUENCES: [(u32, usize, usize); 8] =
    [(3, 6, 12), (3, 6, 9), (3, 6, 17), (3, 6, 7), (9, 4, 5), (9, 4, 11), (9, 4, 8), (9, 4, 1)];
/// The sequence without routing rows.
const UNROUTED: usize = 6;
/// The sequence whose engine chose other experts inside the prompt, and the first row that differs.
const DRIFTED: (usize, usize) = (2, 3);

fn golden() -> Utf8PathBuf {
    Utf8PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../trainer/tests/golden"))
}

fn shape(experts: usize, layers: &[usize], hidden_layers: usize) -> ModelShape {
    let moe_layers = layers.to_vec();
    ModelShape { hidden_layers, moe_layers, experts, top_k: 2, vocab: 1000, context: 64 }
}

fn meta(shape: ModelShape, share_prefix_rows: bool) -> BatchMeta {
    BatchMeta {
        run: "golden".to_owned(),
        step_id: "golden-s000004".to_owned(),
        global_step: 4,
        base_version: PolicyVersion(3),
        // Two shards, with the boundary inside a group.
        max_shard_bytes: 40 * (18 + shape.row_bytes() as u64),
        shape,
        share_prefix_rows,
    }
}

fn sample(shape: &ModelShape, index: usize) -> BatchSample {
    let (group, prompt, tokens) = SEQUENCES[index];
    let number = u32::try_from(index).unwrap();
    let own = |t: usize| if t < prompt { 100 * group } else { 7 * number + 50 };
    let ids = (0..tokens).map(|t| (own(t) + 3 * u32::try_from(t).unwrap()) % 1000).collect();
    let loss_mask: Vec<u8> =
        (0..tokens).map(|t| u8::from(t >= prompt && !t.is_multiple_of(4))).collect();
    let logprobs = loss_mask.iter().zip(0u8..).map(|(&m, t)| f32::from(m * t) * -0.125).collect();
    let versions = (0..tokens).map(|t| if t < prompt { 2 } else { 3 }).collect();
    let trajectory = Trajectory::new(ids, loss_mask, logprobs, versions, vec![]).unwrap();

    let (experts, layers) = (shape.experts, shape.moe_layers.len());
    let mut chosen = Vec::new();
    for t in 0..tokens - 1 {
        let member = if t < prompt && (index, t) < DRIFTED { 0 } else { index };
        let member = if index > DRIFTED.0 && t < prompt { 0 } else { member };
        for layer in 0..layers {
            let first = (5 * t + 11 * member + 37 * layer + group as usize) % experts;
            let second = (first + 1 + (t + layer) % (experts - 1)) % experts;
            chosen.extend([first, second].map(|id| u16::try_from(id).unwrap()));
        }
    }
    let rows = RoutedRows::from_ids(shape, 0, &chosen).unwrap();
    let version = PolicyVersion(3);
    let versions = match tokens {
        1 => vec![],
        _ => vec![RowVersion { start: 0, end: tokens - 1, version }],
    };
    let mask = RoutingMask::new(Arc::new(shape.clone()), &rows.to_vec(), versions).unwrap();
    BatchSample {
        episode_id: format!("t{group:06}.{:02}", index % 4).parse().unwrap(),
        group: i64::from(group),
        trajectory,
        routing: (index != UNROUTED).then_some(mask),
        advantage: f32::from(u8::try_from(index).unwrap()) * 0.5 - 1.75,
        reward: f32::from(u8::from(index.is_multiple_of(2))),
    }
}

fn expected(shape: &ModelShape) -> Value {
    let sequences: Vec<Value> = (0..SEQUENCES.len())
        .map(|index| {
            let sample = sample(shape, index);
            let trajectory = &sample.trajectory;
            let held = sample.routing.as_ref().map_or(0, RoutingMask::rows);
            let absent: Vec<usize> = (0..shape.top_k).collect();
            let row = |t: usize| -> Vec<Vec<usize>> {
                let cell = |&layer: &usize| {
                    let mask = sample.routing.as_ref();
                    mask.and_then(|m| m.experts(t, layer)).unwrap_or(absent.clone())
                };
                shape.moe_layers.iter().map(cell).collect()
            };
            json!({
                "episode_id": sample.episode_id.to_string(),
                "group": sample.group,
                "advantage": sample.advantage,
                "reward": sample.reward,
                "token_ids": trajectory.token_ids(),
                "loss_mask": trajectory.loss_mask(),
                "rollout_logprobs": trajectory.rollout_logprobs(),
                "policy_versions": trajectory.policy_versions(),
                "routing_valid":
                    (0..trajectory.len()).map(|t| u8::from(t < held)).collect::<Vec<_>>(),
                "routed_experts": (0..trajectory.len()).map(row).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({ "model": shape, "sequences": sequences })
}

/// Writes all golden files below `root`.
fn write_all(root: &Utf8Path) {
    for (name, experts, layers, hidden) in MODELS {
        let shape = shape(experts, layers, hidden);
        let samples: Vec<BatchSample> =
            (0..SEQUENCES.len()).map(|index| sample(&shape, index)).collect();
        for (folder, share) in [(name.to_owned(), false), (format!("{name}_shared"), true)] {
            write_batch(&root.join(folder), &meta(shape.clone(), share), &samples).unwrap();
        }
        let sequences = expected(&shape);
        let mut text = format!("{{\"model\": {},\n\"sequences\": [\n", sequences["model"]);
        for sequence in sequences["sequences"].as_array().unwrap() {
            let comma = if text.ends_with("[\n") { "" } else { ",\n" };
            text = format!("{text}{comma}{sequence}");
        }
        text.push_str("\n]}\n");
        std::fs::write(root.join(format!("{name}.json")), text).unwrap();
    }
}

fn files(root: &Utf8Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in root.read_dir_utf8().unwrap().map(Result::unwrap) {
        let name = entry.file_name().to_owned();
        if entry.file_type().unwrap().is_dir() {
            let inner = self::files(entry.path());
            files.extend(inner.into_iter().map(|(file, bytes)| (format!("{name}/{file}"), bytes)));
        } else {
            files.push((name, std::fs::read(entry.path()).unwrap()));
        }
    }
    files.sort();
    files
}

#[test]
#[ignore = "replaces the golden files"]
fn write_golden_batches() {
    let root = golden();
    if root.exists() {
        std::fs::remove_dir_all(&root).unwrap();
    }
    std::fs::create_dir_all(&root).unwrap();
    write_all(&root);
}

#[test]
fn this_version_writes_the_golden_batches_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let root = Utf8Path::from_path(folder.path()).unwrap();
    write_all(root);
    let (written, stored) = (files(root), files(&golden()));
    let names = |files: &[(String, Vec<u8>)]| -> Vec<String> {
        files.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&written), names(&stored));
    for ((name, written), (_, stored)) in written.iter().zip(&stored) {
        assert!(written == stored, "{name} differs");
    }
}

#[test]
fn golden_batches_match_their_listed_contents() {
    for (name, experts, layers, hidden) in MODELS {
        let text = std::fs::read(golden().join(format!("{name}.json"))).unwrap();
        let listed: Value = serde_json::from_slice(&text).unwrap();
        let shape = shape(experts, layers, hidden);
        assert_eq!(listed, expected(&shape));
        for folder in [name.to_owned(), format!("{name}_shared")] {
            let path = golden().join(&folder).join("manifest.json");
            for batch in [Batch::open(&path).unwrap(), Batch::open_lazily(&path).unwrap()] {
                batch.require_model(&shape).unwrap();
                assert_eq!(batch.manifest().shards.len(), 2, "{folder}");
                assert_eq!(batch.manifest().shares_rows(), folder.ends_with("_shared"));
                assert_eq!(batch.len(), SEQUENCES.len());
                for (index, sequence) in batch.sequences().enumerate() {
                    check(&sequence.unwrap(), &listed["sequences"][index], &shape);
                }
            }
        }
    }
}

fn check(got: &orchestrate_handoff::Sequence<'_>, listed: &Value, shape: &ModelShape) {
    let ids: Vec<u16> = if shape.id_bytes() == 1 {
        got.routed_experts.to_vec().into_iter().map(u16::from).collect()
    } else {
        let bytes = got.routed_experts.to_vec();
        bytes.as_chunks::<2>().0.iter().map(|id| u16::from_le_bytes(*id)).collect()
    };
    let rows: Vec<Vec<&[u16]>> =
        ids.chunks(shape.ids_per_row()).map(|row| row.chunks(shape.top_k).collect()).collect();
    let read = json!({
        "episode_id": got.episode_id,
        "group": got.group,
        "advantage": got.advantage,
        "reward": got.reward,
        "token_ids": got.token_ids,
        "loss_mask": got.loss_mask,
        "rollout_logprobs": got.rollout_logprobs,
        "policy_versions": got.policy_versions,
        "routing_valid": got.routing_valid,
        "routed_experts": rows,
    });
    assert_eq!(&read, listed);
    for t in 0..got.token_ids.len() {
        let at = t * shape.row_bytes();
        let whole = got.routed_experts.to_vec();
        assert_eq!(got.routed_experts.row(t), Some(&whole[at..at + shape.row_bytes()]));
    }
    assert_eq!(got.routed_experts.row(got.token_ids.len()), None);
}

#[test]
fn shared_rows_are_written_once_up_to_the_first_difference() {
    for (name, ..) in MODELS {
        let batch = Batch::open(&golden().join(format!("{name}_shared/manifest.json"))).unwrap();
        let rows: Vec<usize> = batch.manifest().shards.iter().map(|shard| shard.rows).collect();
        let tokens: Vec<usize> = batch.manifest().shards.iter().map(|shard| shard.tokens).collect();
        // Shards of sequences 0-2 and 3-7. Of the prompt of 6, sequence 1 has all rows from
        // sequence 0, and sequence 2 the 3 before it drifts. Sequence 3 is the only one of its
        // group in its shard; sequence 5 has the prompt of 4 from sequence 4.
        assert_eq!(tokens, [38, 32], "{name}");
        assert_eq!(rows, [29, 28], "{name}");
        let pieces = |i: usize| batch.sequence(i).unwrap().routed_experts.pieces().count();
        assert_eq!((0..8).map(pieces).collect::<Vec<_>>(), [1, 2, 2, 1, 1, 2, 1, 1]);
    }
}
