//! Writing and reading a batch, compared with a plain write of as many bytes to the same folder.
//!
//! The folder is `ORCHESTRATE_BENCH_DIR`, or a temporary one. On a memory file system (`/dev/shm`)
//! syncing is free, which isolates the page-cache ratio.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a benchmark: setup may fail, and the ratio is printed for people"
)]

use camino::{Utf8Path, Utf8PathBuf};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use orchestrate_handoff::{Batch, BatchMeta, BatchSample, write_batch};
use orchestrate_routing::{RoutedRows, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion, Trajectory};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of sequences, tokens per sequence, and tokens of their common prompt.
const SEQUENCES: u16 = 16;
const TOKENS: usize = 32_768;
const PROMPT: usize = 8_192;
/// Bytes per call of the plain write.
const PIECE: usize = 8 << 20;
/// The printed ratios are medians over this many rounds.
const ROUNDS: usize = 7;
const RANKS: usize = 8;

fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 48,
        moe_layers: (0..48).collect(),
        experts: 128,
        top_k: 8,
        vocab: 151_936,
        context: 40_960,
    }
}

fn sample(shape: &Arc<ModelShape>, member: u16) -> BatchSample {
    let own = |t: usize| if t < PROMPT { 0 } else { usize::from(member) };
    let mut ids = Vec::with_capacity(TOKENS * shape.ids_per_row());
    for t in 0..TOKENS - 1 {
        for cell in 0..48 {
            let first = t * 7 + cell * 11 + own(t) * 13;
            ids.extend((0..8).map(|slot| u16::try_from((first + slot * 9) % 128).unwrap()));
        }
    }
    let rows = RoutedRows::from_ids(shape, 0, &ids).unwrap();
    let versions = vec![RowVersion { start: 0, end: TOKENS - 1, version: PolicyVersion(1) }];
    let tokens = (0..TOKENS).map(|t| u32::try_from(t * 31 + own(t) * 17).unwrap() % 151_936);
    let loss = (0..TOKENS).map(|t| u8::from(t >= PROMPT)).collect();
    let trajectory =
        Trajectory::new(tokens.collect(), loss, vec![-0.5; TOKENS], vec![1; TOKENS], vec![]);
    BatchSample {
        episode_id: format!("t000001.{member:02}").parse().unwrap(),
        group: 1,
        trajectory: trajectory.unwrap(),
        routing: Some(RoutingMask::new(shape.clone(), &rows.to_vec(), versions).unwrap()),
        advantage: 0.5,
        reward: 1.0,
    }
}

fn meta(shape: &ModelShape, share_prefix_rows: bool) -> BatchMeta {
    BatchMeta {
        run: "bench".to_owned(),
        step_id: "bench-s000001".to_owned(),
        global_step: 1,
        base_version: PolicyVersion(1),
        shape: shape.clone(),
        max_shard_bytes: 64 << 20,
        share_prefix_rows,
    }
}

/// Writes `bytes` bytes from warm memory to a new file. Returns the times until they are in the page
/// cache and until they are on disk.
fn plain_write(folder: &Utf8Path, piece: &[u8], bytes: u64) -> (Duration, Duration) {
    let path = folder.join("plain");
    let started = Instant::now();
    let mut file = std::fs::File::create(&path).unwrap();
    let mut rest = usize::try_from(bytes).unwrap();
    while rest > 0 {
        let part = piece.get(..rest.min(PIECE)).unwrap_or(piece);
        file.write_all(part).unwrap();
        rest -= part.len();
    }
    let cached = started.elapsed();
    file.sync_all().unwrap();
    let synced = started.elapsed();
    std::fs::remove_file(path).unwrap();
    (cached, synced)
}

fn write(folder: &Utf8Path, meta: &BatchMeta, samples: &[BatchSample]) -> (Duration, u64) {
    let dir = folder.join("batch");
    let started = Instant::now();
    let manifest = write_batch(&dir, meta, samples).unwrap();
    let took = started.elapsed();
    std::fs::remove_dir_all(dir).unwrap();
    (took, manifest.shards.iter().map(|shard| shard.bytes).sum())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Alternates the plain write and the batch, so that noise of the machine affects both.
fn ratios(folder: &Utf8Path, meta: &BatchMeta, samples: &[BatchSample], piece: &[u8]) {
    let (mut cached, mut synced, mut seconds) = (vec![], vec![], vec![]);
    let mut size = write(folder, meta, samples).1;
    for _ in 0..ROUNDS {
        let plain = plain_write(folder, piece, size);
        let (took, bytes) = write(folder, meta, samples);
        size = bytes;
        cached.push(plain.0.as_secs_f64() / took.as_secs_f64());
        synced.push(plain.1.as_secs_f64() / took.as_secs_f64());
        seconds.push(took.as_secs_f64());
    }
    let (best, gb) = (cached.iter().copied().fold(0.0, f64::max), size as f64 / 1e9);
    eprintln!(
        "write of {gb:.3} GB, shared rows {}: {:.2} GB/s; plain write / batch {:.2} (best \
         {best:.2}), with fsync {:.2}",
        meta.share_prefix_rows,
        gb / median(seconds),
        median(cached),
        median(synced),
    );
}

fn batch(criterion: &mut Criterion) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = std::env::var("ORCHESTRATE_BENCH_DIR")
        .map_or_else(|_| Utf8PathBuf::from_path_buf(temporary.path().into()).unwrap(), Into::into);
    let shape = Arc::new(shape());
    let samples: Vec<BatchSample> = (0..SEQUENCES).map(|member| sample(&shape, member)).collect();
    let (plain, shared) = (meta(&shape, false), meta(&shape, true));
    let piece: Vec<u8> = (0..=255).cycle().take(PIECE).collect();
    ratios(&folder, &plain, &samples, &piece);
    ratios(&folder, &shared, &samples, &piece);

    let mut group = criterion.benchmark_group("batch");
    group.sample_size(10);
    let bytes = write(&folder, &plain, &samples).1;
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("write", |bencher| {
        bencher.iter_custom(|rounds| (0..rounds).map(|_| write(&folder, &plain, &samples).0).sum());
    });
    let dir = folder.join("batch");
    write_batch(&dir, &plain, &samples).unwrap();
    let manifest = dir.join("manifest.json");
    group.bench_function("open_and_check", |b| b.iter(|| Batch::open(&manifest).unwrap()));
    group.throughput(Throughput::Bytes(bytes / RANKS as u64));
    group.bench_function("read_one_of_8_ranks", |bencher| {
        bencher.iter(|| {
            let batch = Batch::open_lazily(&manifest).unwrap();
            let own = (0..batch.len()).step_by(RANKS).map(|i| batch.sequence(i).unwrap());
            let sum = |rows: &[u8]| rows.iter().map(|&id| u64::from(id)).sum::<u64>();
            own.flat_map(|sequence| sequence.routed_experts.pieces()).map(sum).sum::<u64>()
        });
    });
    group.finish();
    std::fs::remove_dir_all(dir).unwrap();
}

criterion_group!(benches, batch);
criterion_main!(benches);
