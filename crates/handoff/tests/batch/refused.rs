//! Invalid batches and samples are rejected with the file and the reason.

use crate::support::{assert_same, batch, folder, mask, meta, sample, shape};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::{Batch, BatchErrorKind, BatchMeta, BatchSample, Manifest, write_batch};
use orchestrate_types::{ModelShape, Trajectory};

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

/// Applies `change` to the first shard's bytes (and the offset of its tensor data), and updates size and
/// digest in the manifest. Returns the error of opening the batch.
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
fn values_out_of_range_are_refused_even_with_a_valid_digest() {
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
fn headers_that_contradict_the_manifest_are_rejected() {
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
fn inconsistent_or_escaping_manifests_are_rejected() {
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

#[test]
fn missing_shared_row_is_rejected() {
    let shape = shape(8);
    let (_keep, dir) = folder();
    let meta = BatchMeta { share_prefix_rows: true, ..meta(shape.clone()) };
    write_batch(&dir, &meta, &[sample(&shape, 0, 2), sample(&shape, 1, 3)]).unwrap();
    // Offsets, groups, versions, advantages, rewards, log-probs and tokens precede the tensor.
    let at = 3 * 8 + 2 * 8 + 5 * 8 + 2 * 4 + 2 * 4 + 5 * 4 + 5 * 4;
    let kind =
        forge(&dir, |file, data| file[data + at..data + at + 4].copy_from_slice(&[5, 0, 0, 0]));
    assert!(matches!(kind, BatchErrorKind::Value { name: "routed_row", index: 0, .. }), "{kind}");
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

/// Set in the copy of this test process that runs with a disk of 256 KiB; the disk's path.
const SMALL_DISK: &str = "ORCHESTRATE_TEST_SMALL_DISK";

#[test]
fn a_full_disk_is_reported_and_nothing_is_published() {
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
        .arg("refused::a_full_disk_is_reported_and_nothing_is_published")
        .env(SMALL_DISK, folder.path())
        .output();
    match status {
        Ok(output) if output.status.success() => {
            let told = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(told.contains("1 passed"), "{told}");
        }
        Ok(output) if output.status.code() == Some(101) => {
            panic!("{}", String::from_utf8_lossy(&output.stdout))
        }
        Ok(_) | Err(_) => {
            orchestrate_e2e::skip::skip(
                "mount",
                "no small disk can be mounted in a user namespace",
            );
        }
    }
}

fn on_a_small_disk(dir: &Utf8Path) {
    let shape = shape(8);
    let samples: Vec<BatchSample> = (0..8).map(|i| sample(&shape, i, 3000)).collect();
    // Two shards fit, the others do not.
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
