//! Writing a batch folder: streamed, atomic, and byte-for-byte reproducible.

use super::shard::{ShardWriter, Unsealed};
use super::{
    BatchError, BatchErrorKind, BatchMeta, BatchSample, MANIFEST_FILE, Manifest, ShardEntry,
};
use camino::{Utf8Path, Utf8PathBuf};
use fs_err::File;
use orchestrate_types::{EpisodeId, ModelShape};
use std::borrow::Borrow;
use std::io::Write;
use std::thread::ScopedJoinHandle;

/// Description of a sequence before it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Id of its episode.
    pub episode_id: EpisodeId,
    /// Number of tokens, `T`, at least 1.
    pub tokens: usize,
}

/// Like [`stream_batch`], for samples that are all in memory.
///
/// ```
/// use camino::Utf8Path;
/// use orchestrate_handoff::{Batch, BatchMeta, BatchSample, write_batch};
/// use orchestrate_types::{ModelShape, PolicyVersion, Trajectory};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let folder = Utf8Path::from_path(folder.path()).ok_or("a path in UTF-8")?;
/// let meta = BatchMeta {
///     run: "example".to_owned(),
///     step_id: "example-00001".to_owned(),
///     global_step: 1,
///     base_version: PolicyVersion(0),
///     shape: ModelShape {
///         hidden_layers: 1,
///         moe_layers: vec![0],
///         experts: 4,
///         top_k: 2,
///         vocab: 100,
///         context: 64,
///     },
///     max_shard_bytes: 1 << 20,
///     share_prefix_rows: false,
/// };
/// // Two prompt tokens, then one token that the policy wrote.
/// let trajectory =
///     Trajectory::new(vec![5, 6, 7], vec![0, 0, 1], vec![0.0, 0.0, -0.7], vec![0; 3], vec![])?;
/// let sample = BatchSample {
///     episode_id: "t000012.03".parse()?,
///     group: 12,
///     trajectory,
///     routing: None,
///     advantage: 0.5,
///     reward: 1.0,
/// };
/// write_batch(folder, &meta, &[sample])?;
///
/// let batch = Batch::open(&folder.join("manifest.json"))?;
/// let sequence = batch.sequence(0)?;
/// assert_eq!(sequence.token_ids, [5, 6, 7]);
/// assert_eq!(sequence.routing_valid, [0, 0, 0], "trained without replay");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`stream_batch`].
pub fn write_batch(
    dir: &Utf8Path,
    meta: &BatchMeta,
    samples: &[BatchSample],
) -> Result<Manifest, BatchError> {
    let planned: Vec<Planned> = samples
        .iter()
        .map(|s| Planned { episode_id: s.episode_id, tokens: s.trajectory.len() })
        .collect();
    stream_batch(dir, meta, &planned, samples)
}

/// Writes a batch folder `dir` and returns its manifest. Blocking.
///
/// `samples` yields the sequences of `planned` in that order. Each is requested only when it is needed
/// and dropped once its rows are in the file; if prefix rows are shared, the group's first sequence
/// is kept as well. Of earlier sequences only the tokens, masks and log-probs of the current shard
/// are kept, about 20 bytes per token. While a shard is written, the previous one is synced.
///
/// Shards have temporary names until all are synced; the manifest is written last. A folder
/// without a manifest is left over from an interrupted write and is replaced. If the same batch is
/// already published, nothing changes and its manifest is returned. After an error, all files of
/// this call are removed.
///
/// # Errors
/// [`BatchError`] for a sample that is not the planned one, does not fit the model or has values
/// that are not finite, for another batch published in `dir`, and for failed writes.
pub fn stream_batch<S: Borrow<BatchSample>>(
    dir: &Utf8Path,
    meta: &BatchMeta,
    planned: &[Planned],
    samples: impl IntoIterator<Item = S>,
) -> Result<Manifest, BatchError> {
    let published = dir.join(MANIFEST_FILE);
    if planned.is_empty() {
        let kind = BatchErrorKind::Inconsistent("a batch needs at least one sequence");
        return Err(kind.at(published));
    }
    let io = |error: std::io::Error| BatchErrorKind::from(error).at(dir);
    fs_err::create_dir_all(dir).map_err(io)?;
    let exists = published.try_exists().map_err(io)?;
    clear_leftovers(dir, exists).map_err(io)?;

    let unfinished = Unfinished { dir };
    let shards = write_shards(dir, meta, planned, samples)?;
    let manifest = Manifest::of(meta, shards);
    if exists {
        drop(unfinished);
        let text = fs_err::read(&published).map_err(io)?;
        let same = serde_json::from_slice::<Manifest>(&text).is_ok_and(|old| old == manifest);
        return if same { Ok(manifest) } else { Err(BatchErrorKind::Published.at(published)) };
    }
    for shard in &manifest.shards {
        let path = dir.join(&shard.file);
        fs_err::rename(temporary(dir, &shard.file), path).map_err(io)?;
    }
    sync_folder(dir).map_err(io)?;
    publish(&published, &manifest).map_err(|e| BatchErrorKind::from(e).at(&published))?;
    sync_folder(dir).map_err(io)?;
    drop(unfinished);
    Ok(manifest)
}

/// Removes temporary files, and the folder if it is empty, when a write ends.
struct Unfinished<'a> {
    dir: &'a Utf8Path,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        // Files that cannot be removed now are removed by the next write.
        let published = self.dir.join(MANIFEST_FILE).exists();
        let _ = clear_leftovers(self.dir, published);
        let _ = std::fs::remove_dir(self.dir);
    }
}

fn write_shards<S: Borrow<BatchSample>>(
    dir: &Utf8Path,
    meta: &BatchMeta,
    planned: &[Planned],
    samples: impl IntoIterator<Item = S>,
) -> Result<Vec<ShardEntry>, BatchError> {
    let mut samples = samples.into_iter();
    let mut sealed = Vec::new();
    std::thread::scope(|scope| -> Result<(), BatchError> {
        let mut sealing: Option<Sealing<'_>> = None;
        let mut rest = planned;
        while !rest.is_empty() {
            let (planned, after) = rest.split_at(shard_length(meta, rest));
            rest = after;
            let number = sealed.len() + usize::from(sealing.is_some());
            let path = dir.join(format!("{number:04}.safetensors"));
            let shard = write_shard(&path, meta, planned, &mut samples)?;
            let thread = scope
                .spawn(move || shard.seal().map_err(|error| BatchErrorKind::from(error).at(path)));
            if let Some(before) = sealing.replace(thread) {
                sealed.push(join(before)?);
            }
        }
        if let Some(last) = sealing {
            sealed.push(join(last)?);
        }
        Ok(())
    })?;
    Ok(sealed)
}

type Sealing<'scope> = ScopedJoinHandle<'scope, Result<ShardEntry, BatchError>>;

fn join(sealing: Sealing<'_>) -> Result<ShardEntry, BatchError> {
    sealing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn write_shard<S: Borrow<BatchSample>>(
    path: &Utf8Path,
    meta: &BatchMeta,
    planned: &[Planned],
    samples: &mut impl Iterator<Item = S>,
) -> Result<Unsealed, BatchError> {
    let io = |error: std::io::Error| BatchErrorKind::from(error).at(path);
    let (dir, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
    let share = meta.share_prefix_rows;
    let mut writer =
        ShardWriter::create(temporary(dir, name), &meta.shape, planned, share).map_err(io)?;
    for expected in planned {
        let Some(sample) = samples.next() else {
            let problem = "it is planned, but was not provided";
            let kind = BatchErrorKind::Sample { episode: expected.episode_id, problem };
            return Err(kind.at(path));
        };
        if let Some(problem) = sample_problem(&meta.shape, expected, sample.borrow()) {
            let episode = sample.borrow().episode_id;
            return Err(BatchErrorKind::Sample { episode, problem }.at(path));
        }
        writer.push(sample).map_err(io)?;
    }
    writer.finish(name.to_owned()).map_err(io)
}

fn temporary(dir: &Utf8Path, file: &str) -> Utf8PathBuf {
    dir.join(format!("{file}.tmp"))
}

fn sample_problem(
    shape: &ModelShape,
    planned: &Planned,
    sample: &BatchSample,
) -> Option<&'static str> {
    let trajectory = &sample.trajectory;
    let log_probs = trajectory.loss_mask().iter().zip(trajectory.rollout_logprobs());
    if trajectory.is_empty() {
        Some("it has no tokens")
    } else if planned.episode_id != sample.episode_id || planned.tokens != trajectory.len() {
        Some("its id or length differs from the plan")
    } else if trajectory.token_ids().iter().any(|&id| id as usize >= shape.vocab) {
        Some("a token id is not below the vocabulary size")
    } else if trajectory.loss_mask().iter().any(|&mask| mask > 1) {
        Some("its loss mask has values other than 0 and 1")
    } else if log_probs.clone().any(|(&mask, lp)| mask == 1 && !(lp.is_finite() && *lp <= 0.0)) {
        Some("the log-probability of a sampled token must be finite and ≤ 0")
    } else if !sample.advantage.is_finite() || !sample.reward.is_finite() {
        Some("its advantage or reward is not finite")
    } else {
        let mask = sample.routing.as_ref()?;
        let (own, other) = (shape, mask.shape());
        if own.moe_layers != other.moe_layers
            || own.experts != other.experts
            || own.top_k != other.top_k
        {
            Some("its routing mask belongs to another model")
        } else if mask.rows() + 1 != trajectory.len() {
            Some("its routing mask does not have tokens − 1 rows (INV-3)")
        } else {
            None
        }
    }
}

fn shard_length(meta: &BatchMeta, planned: &[Planned]) -> usize {
    // Ids, versions, log-probs, two masks and the routing row of each token.
    let token_bytes = 4 + 8 + 4 + 2 + meta.shape.row_bytes() as u64;
    let mut bytes = 0u64;
    let fitting = planned.iter().take_while(|sequence| {
        bytes = bytes.saturating_add(token_bytes.saturating_mul(sequence.tokens as u64));
        bytes <= meta.max_shard_bytes
    });
    fitting.count().max(1)
}

fn clear_leftovers(dir: &Utf8Path, published: bool) -> std::io::Result<()> {
    for entry in fs_err::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let unfinished = name.ends_with(".tmp");
        if unfinished || (!published && name.ends_with(".safetensors")) {
            fs_err::remove_file(dir.join(&*name))?;
        }
    }
    Ok(())
}

fn publish(path: &Utf8Path, manifest: &Manifest) -> std::io::Result<()> {
    let temporary = path.with_extension("json.tmp");
    let mut text = serde_json::to_vec_pretty(manifest)?;
    text.push(b'\n');
    let mut file = File::create(&temporary)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs_err::rename(temporary, path)
}

fn sync_folder(dir: &Utf8Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}
