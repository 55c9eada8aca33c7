//! Batch folders: manifest and shards as a trainer opens them. Every accepted batch could have been
//! written by the coordinator.
#![no_main]

use camino::{Utf8Path, Utf8PathBuf};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, Model, Sent};
use orchestrate_handoff::{Batch, BatchMeta, BatchSample, write_batch};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_types::{EpisodeId, GroupId, ModelShape, PolicyVersion, Trajectory};
use std::sync::{Arc, OnceLock};

#[derive(Debug, Arbitrary)]
struct Input {
    template: u8,
    manifest: Vec<Change>,
    shard: Vec<Change>,
    /// Whether size and digest in the manifest are recomputed for the changed shard.
    seal: bool,
}

struct Template {
    manifest: Vec<u8>,
    shard: Vec<u8>,
}

/// A folder in memory, one per process.
fn folder() -> &'static Utf8Path {
    static FOLDER: OnceLock<Utf8PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Utf8PathBuf::from(format!("/dev/shm/orchestrate-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("/dev/shm is writable");
        path
    })
}

fn templates() -> &'static [Template] {
    static TEMPLATES: OnceLock<Vec<Template>> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        let bytes: Vec<u8> = (0..255u8).cycle().take(4096).collect();
        let mut made = Vec::new();
        for seed in 0..4 {
            let mut random = arbitrary::Unstructured::new(&bytes[seed * 64..]);
            let model = Model::arbitrary(&mut random).expect("bytes enough");
            let sent = Sent::arbitrary(&mut random).expect("bytes enough");
            let mut shape = model.shape();
            shape.experts = [8, 256, 300, 16][seed];
            shape.top_k = shape.top_k.clamp(1, 4);
            if shape.moe_layers.is_empty() {
                shape.moe_layers = vec![0];
            }
            made.push(template(&shape, &sent, seed % 2 == 1));
        }
        made
    })
}

fn template(shape: &ModelShape, sent: &Sent, share: bool) -> Template {
    let samples: Vec<BatchSample> = (0..3u16)
        .map(|member| {
            let tokens = 5 + usize::from(member);
            let mut rows = Vec::new();
            for at in 0..(tokens - 1) * shape.moe_layers.len() {
                for slot in 0..shape.top_k {
                    let id = (at * 3 + slot) % shape.experts;
                    rows.extend(id.to_le_bytes().iter().take(shape.id_bytes()));
                }
            }
            let versions =
                vec![RowVersion { start: 0, end: tokens - 1, version: PolicyVersion(3) }];
            let mask =
                RoutingMask::new(Arc::new(shape.clone()), &rows, versions).expect("a valid mask");
            BatchSample {
                episode_id: EpisodeId { group: GroupId::Train { seq: 1 }, member },
                group: 1,
                trajectory: Trajectory::new(
                    (0..tokens as u32).collect(),
                    (0..tokens).map(|at| u8::from(at > 2)).collect(),
                    (0..tokens).map(|at| if at > 2 { -0.5 } else { 0.0 }).collect(),
                    vec![3; tokens],
                    Vec::new(),
                )
                .expect("lengths agree"),
                routing: (member != 2 || sent.tokens() % 2 == 0).then_some(mask),
                advantage: 0.5,
                reward: 1.0,
            }
        })
        .collect();
    let meta = BatchMeta {
        run: "r".to_owned(),
        step_id: "r-1".to_owned(),
        global_step: 1,
        base_version: PolicyVersion(3),
        shape: shape.clone(),
        max_shard_bytes: u64::MAX,
        share_prefix_rows: share,
    };
    let dir = folder().join("template");
    let _ = std::fs::remove_dir_all(&dir);
    write_batch(&dir, &meta, &samples).expect("a valid batch");
    let read = |name: &str| std::fs::read(dir.join(name)).expect("it was written");
    Template { manifest: read("manifest.json"), shard: read("0000.safetensors") }
}

fuzz_target!(|input: Input| {
    let all = templates();
    let template = &all[usize::from(input.template) % all.len()];
    let (mut manifest, mut shard) = (template.manifest.clone(), template.shard.clone());
    input::change(&mut shard, &input.shard);
    if input.seal {
        let text = String::from_utf8(manifest).expect("JSON");
        let sizes =
            (format!("\"bytes\": {}", template.shard.len()), format!("\"bytes\": {}", shard.len()));
        let digests = (digest(&template.shard), digest(&shard));
        manifest = text.replace(&sizes.0, &sizes.1).replace(&digests.0, &digests.1).into_bytes();
    }
    input::change(&mut manifest, &input.manifest);
    let path = folder().join("manifest.json");
    std::fs::write(&path, &manifest).expect("write");
    std::fs::write(folder().join("0000.safetensors"), &shard).expect("write");

    let unchanged = manifest == template.manifest && shard == template.shard;
    match bounded(manifest.len() + shard.len(), || Batch::open(&path)) {
        Ok(batch) => {
            assert!(input.seal || shard == template.shard, "changed bytes were accepted");
            check(&batch);
        }
        Err(error) => assert!(!unchanged, "a valid batch was rejected: {error}"),
    }
});

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

fn check(batch: &Batch) {
    let shape = &batch.manifest().model;
    let mut tokens = 0;
    for sequence in batch.sequences() {
        let sequence = sequence.expect("an open batch has all its sequences");
        let length = sequence.token_ids.len();
        tokens += length;
        assert!(length > 0 && sequence.token_ids.iter().all(|&id| (id as usize) < shape.vocab));
        let lengths = [
            sequence.loss_mask.len(),
            sequence.rollout_logprobs.len(),
            sequence.policy_versions.len(),
            sequence.routing_valid.len(),
        ];
        assert_eq!(lengths, [length; 4]);
        assert!(sequence.loss_mask.iter().chain(sequence.routing_valid).all(|&mask| mask <= 1));
        assert_eq!(sequence.routing_valid.last(), Some(&0), "the last token has no row");
        for (&mask, &logprob) in sequence.loss_mask.iter().zip(sequence.rollout_logprobs) {
            assert!(mask == 0 || (logprob.is_finite() && logprob <= 0.0));
        }
        assert!(sequence.advantage.is_finite() && sequence.reward.is_finite());
        assert_eq!(sequence.routed_experts.row(length), None);
        let rows = sequence.routed_experts.to_vec();
        assert_eq!(rows.len(), length * shape.row_bytes());
        for cell in rows.chunks_exact(shape.top_k * shape.id_bytes()) {
            let ids: Vec<usize> = cell
                .chunks_exact(shape.id_bytes())
                .map(|id| id.iter().rev().fold(0, |value, &byte| value << 8 | usize::from(byte)))
                .collect();
            assert!(ids.iter().all(|&id| id < shape.experts), "an id out of range: {ids:?}");
            assert!(
                (1..ids.len()).all(|at| !ids[..at].contains(&ids[at])),
                "a repeated id: {ids:?}"
            );
        }
    }
    assert_eq!(tokens, batch.manifest().tokens);
}
