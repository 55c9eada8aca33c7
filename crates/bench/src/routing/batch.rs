//! The batch folder, as the coordinator writes it and a trainer opens it.

use super::floors;
use super::measure::{Case, Limits, Meter};
use super::workload::{Conversation, Size, VOCAB};
use anyhow::{Context as _, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::{Batch, BatchMeta, BatchSample, write_batch};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_types::{EpisodeId, GroupId, PolicyVersion, TokenId, Trajectory};
use std::sync::Arc;

/// Number of sequences in the batch.
const SEQUENCES: usize = 8;
/// Maximum size of a shard, as in a run.
const SHARD_BYTES: u64 = 256 << 20;

/// Measures writing a batch of conversations (`batch_write`), and opening it with all checks and
/// visiting all its rows (`batch_read`).
pub(super) fn measure(
    size: &Size,
    dir: &Utf8Path,
    rounds: u32,
    seed: u64,
) -> anyhow::Result<(Case, Case)> {
    let conversation = Conversation::draw(size, seed);
    let meta = BatchMeta {
        run: "bench".to_owned(),
        step_id: "bench-1".to_owned(),
        global_step: 1,
        base_version: PolicyVersion(0),
        shape: size.shape(),
        max_shard_bytes: SHARD_BYTES,
        share_prefix_rows: false,
    };
    let samples: Vec<BatchSample> = (0..SEQUENCES)
        .map(|member| sample(&conversation, size, member))
        .collect::<Result<_, _>>()?;
    let (mut write, mut read) = (Meter::new(), Meter::new());
    let (mut file_bytes, rows) = (0, conversation.mask_bytes() * SEQUENCES as u64);
    for round in 0..rounds {
        let folder = tempfile::tempdir_in(dir).context("failed to create a folder for files")?;
        let folder_path = Utf8PathBuf::try_from(folder.path().to_owned())?;
        let (batch, raw) = (folder_path.join("batch"), folder_path.join("raw"));
        let measure_floor =
            |meter: &mut Meter, bytes| meter.floor(|| floors::write_file(raw.as_std_path(), bytes));
        // The number of bytes is known after the first round.
        if round % 2 == 0 && file_bytes > 0 {
            measure_floor(&mut write, file_bytes)?;
        }
        let manifest = write.case(0, || write_batch(&batch, &meta, &samples))?;
        if round % 2 == 1 || file_bytes == 0 {
            file_bytes = manifest.shards.iter().map(|shard| shard.bytes).sum();
            measure_floor(&mut write, file_bytes)?;
        }
        write.end_round();

        read.floor(|| floors::read_file(raw.as_std_path()))?;
        let path = batch.join("manifest.json");
        let opened = read.case(0, || {
            let batch = Batch::open(&path)?;
            let visited: u64 = visit_rows(&batch)?;
            anyhow::Ok((batch, visited))
        })?;
        let padding = (SEQUENCES * size.shape().row_bytes()) as u64;
        ensure!(opened.1 == rows + padding, "bug: the batch has {} bytes of rows", opened.1);
        drop(opened);
        read.end_round();
    }
    // The target is 0.7 of the floor's throughput.
    let limits = Limits { ratio: Some(1.0 / 0.7), seconds: None, memory: false };
    let mut out = write.finish("batch_write", floors::WRITE_FILE, 0, limits);
    let mut back = read.finish("batch_read", floors::READ_FILE, 0, Limits::default());
    (out.bytes_in, back.bytes_in) = (file_bytes, file_bytes);
    (out.kept_bytes, back.kept_bytes) = (file_bytes, rows);
    out.note = format!("{SEQUENCES} sequences, digested and synced, {file_bytes} bytes of files");
    "verifies digests and checks every value; rows stay in the mapped files"
        .clone_into(&mut back.note);
    Ok((out, back))
}

/// Visits the rows of all sequences in place. Returns their size in bytes.
fn visit_rows(batch: &Batch) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for sequence in batch.sequences() {
        for piece in sequence?.routed_experts.pieces() {
            bytes += std::hint::black_box(piece).len() as u64;
        }
    }
    Ok(bytes)
}

fn sample(conversation: &Conversation, size: &Size, member: usize) -> anyhow::Result<BatchSample> {
    let tokens = size.tokens;
    let token = |at| TokenId::try_from((at * 7919 + member) % VOCAB as usize).unwrap_or(0);
    let sampled =
        |at: usize| conversation.turns.iter().any(|turn| (turn.prompt..turn.total).contains(&at));
    let loss_mask: Vec<u8> = (0..tokens).map(|at| u8::from(sampled(at))).collect();
    let log_probs = loss_mask.iter().map(|&mask| -0.5 * f32::from(mask)).collect();
    let versions = vec![RowVersion { start: 0, end: tokens - 1, version: PolicyVersion(0) }];
    let rows = conversation.rows.clone();
    Ok(BatchSample {
        episode_id: EpisodeId { group: GroupId::Train { seq: 0 }, member: u16::try_from(member)? },
        group: 0,
        trajectory: Trajectory::new(
            (0..tokens).map(token).collect(),
            loss_mask,
            log_probs,
            vec![0; tokens],
            Vec::new(),
        )?,
        routing: Some(RoutingMask::new(Arc::clone(&conversation.shape), &rows, versions)?),
        advantage: 1.0,
        reward: 1.0,
    })
}
