//! Writing a batch folder: streamed, atomic, byte for byte the same for the same input.

use super::{
    BatchError, BatchErrorKind, BatchMeta, BatchSample, FORMAT_VERSION, MANIFEST_FILE, Manifest,
    ShardEntry, tensors,
};
use camino::Utf8Path;
use fs_err::File;
use orchestrate_routing::RoutingMask;
use orchestrate_types::ModelShape;
use serde_json::{Map, Value, json};
use std::io::{BufWriter, Write};

/// Write buffer; routing rows are longer and bypass it.
const BUFFER_BYTES: usize = 256 << 10;

/// Writes `samples` as a batch folder `dir` and returns its manifest. Blocking.
///
/// Shards are written under temporary names, synced and renamed; the manifest comes last. A
/// folder without a manifest is the rest of an interrupted write and is replaced. Where the same
/// batch is already published, nothing changes and its manifest is returned.
///
/// # Errors
/// [`BatchError`] for a sample that does not fit the model or has values that are not finite, for
/// another batch published in `dir`, and for failed writes.
pub fn write_batch(
    dir: &Utf8Path,
    meta: &BatchMeta,
    samples: &[BatchSample],
) -> Result<Manifest, BatchError> {
    check_samples(dir, meta, samples)?;
    let io = |error: std::io::Error| BatchErrorKind::Io(error).at(dir);
    fs_err::create_dir_all(dir).map_err(io)?;
    let published = dir.join(MANIFEST_FILE);
    let exists = published.try_exists().map_err(io)?;
    clear_leftovers(dir, exists).map_err(io)?;

    let mut shards = Vec::new();
    let mut names = Vec::new();
    let mut rest = samples;
    while !rest.is_empty() {
        let (shard, after) = rest.split_at(shard_length(meta, rest));
        rest = after;
        let file = format!("{:04}.safetensors", shards.len());
        let (temporary, path) = (dir.join(format!("{file}.tmp")), dir.join(&file));
        let (bytes, digest) = write_shard(&temporary, &meta.shape, shard)
            .map_err(|error| BatchErrorKind::Io(error).at(&path))?;
        shards.push(ShardEntry {
            file,
            sequences: shard.len(),
            tokens: shard.iter().map(|sample| sample.trajectory.len()).sum(),
            bytes,
            blake3: digest.to_hex().to_string(),
        });
        names.push((temporary, path));
    }
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        run: meta.run.clone(),
        step_id: meta.step_id.clone(),
        global_step: meta.global_step,
        base_version: meta.base_version,
        model: meta.shape.clone(),
        id_dtype: if meta.shape.id_bytes() == 1 { "u8" } else { "u16" }.to_owned(),
        sequences: samples.len(),
        tokens: shards.iter().map(|shard| shard.tokens).sum(),
        shards,
    };
    if exists {
        for (temporary, _) in names {
            fs_err::remove_file(temporary).map_err(io)?;
        }
        let text = fs_err::read(&published).map_err(io)?;
        let same = serde_json::from_slice::<Manifest>(&text).is_ok_and(|old| old == manifest);
        return if same { Ok(manifest) } else { Err(BatchErrorKind::Published.at(published)) };
    }
    for (temporary, path) in names {
        fs_err::rename(temporary, path).map_err(io)?;
    }
    sync_folder(dir).map_err(io)?;
    publish(&published, &manifest).map_err(|error| BatchErrorKind::Io(error).at(&published))?;
    sync_folder(dir).map_err(io)?;
    Ok(manifest)
}

fn check_samples(
    dir: &Utf8Path,
    meta: &BatchMeta,
    samples: &[BatchSample],
) -> Result<(), BatchError> {
    for sample in samples {
        if let Some(problem) = sample_problem(&meta.shape, sample) {
            let kind = BatchErrorKind::Sample { episode: sample.episode_id, problem };
            return Err(kind.at(dir.join(MANIFEST_FILE)));
        }
    }
    if samples.is_empty() {
        let kind = BatchErrorKind::Inconsistent("a batch needs at least one sequence");
        return Err(kind.at(dir.join(MANIFEST_FILE)));
    }
    Ok(())
}

fn sample_problem(shape: &ModelShape, sample: &BatchSample) -> Option<&'static str> {
    let trajectory = &sample.trajectory;
    let log_probs = trajectory.loss_mask().iter().zip(trajectory.rollout_logprobs());
    if trajectory.is_empty() {
        Some("it has no tokens")
    } else if trajectory.token_ids().iter().any(|&id| id as usize >= shape.vocab) {
        Some("a token id is not in the vocabulary")
    } else if trajectory.loss_mask().iter().any(|&mask| mask > 1) {
        Some("its loss mask has values other than 0 and 1")
    } else if log_probs.clone().any(|(&mask, lp)| mask == 1 && !(lp.is_finite() && *lp <= 0.0)) {
        Some("a log-probability of a sampled token is not finite and ≤ 0")
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

fn shard_length(meta: &BatchMeta, samples: &[BatchSample]) -> usize {
    // Ids, versions, log-probs, two masks and the routing row of each token.
    let token_bytes = 4 + 8 + 4 + 2 + meta.shape.row_bytes() as u64;
    let mut bytes = 0u64;
    let fitting = samples.iter().take_while(|sample| {
        bytes = bytes.saturating_add(token_bytes.saturating_mul(sample.trajectory.len() as u64));
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
    let mut file = File::create(&temporary)?;
    serde_json::to_writer_pretty(&mut file, manifest)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    fs_err::rename(temporary, path)
}

fn sync_folder(dir: &Utf8Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Counts and digests what goes into the file.
struct Sink {
    file: File,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(data)?;
        self.hasher.update(data.get(..written).unwrap_or_default());
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

fn write_shard(
    path: &Utf8Path,
    shape: &ModelShape,
    samples: &[BatchSample],
) -> std::io::Result<(u64, blake3::Hash)> {
    let sink = Sink { file: File::create(path)?, hasher: blake3::Hasher::new(), bytes: 0 };
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, sink);
    let header = header(shape, samples)?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    write_tensors(&mut out, shape, samples)?;
    let sink = out.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    sink.file.sync_all()?;
    Ok((sink.bytes, sink.hasher.finalize()))
}

fn header(shape: &ModelShape, samples: &[BatchSample]) -> std::io::Result<Vec<u8>> {
    let tokens = samples.iter().map(|sample| sample.trajectory.len()).sum();
    let episodes: Vec<String> =
        samples.iter().map(|sample| sample.episode_id.to_string()).collect();
    let mut header = Map::new();
    header.insert(
        "__metadata__".to_owned(),
        json!({
            "format_version": FORMAT_VERSION.to_string(),
            "episode_ids": serde_json::to_string(&episodes)?,
            "moe_layers": serde_json::to_string(&shape.moe_layers)?,
        }),
    );
    let mut offset = 0;
    for (name, dtype, dims) in tensors(shape, samples.len(), tokens) {
        let bytes = dims.iter().product::<usize>() * dtype.bitsize() / 8;
        let entry = json!({
            "dtype": dtype,
            "shape": dims,
            "data_offsets": [offset, offset + bytes],
        });
        header.insert(name.to_owned(), entry);
        offset += bytes;
    }
    let mut text = serde_json::to_vec(&Value::Object(header))?;
    // Data begins at a multiple of 8, so that mapped tensors are aligned.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok(text)
}

/// In the order of [`tensors`].
fn write_tensors(
    out: &mut impl Write,
    shape: &ModelShape,
    samples: &[BatchSample],
) -> std::io::Result<()> {
    let mut offset = 0i64;
    out.write_all(&offset.to_le_bytes())?;
    for sample in samples {
        offset += i64::try_from(sample.trajectory.len()).map_err(std::io::Error::other)?;
        out.write_all(&offset.to_le_bytes())?;
    }
    for sample in samples {
        out.write_all(&sample.group.to_le_bytes())?;
    }
    for version in samples.iter().flat_map(|sample| sample.trajectory.policy_versions()) {
        out.write_all(&version.to_le_bytes())?;
    }
    for sample in samples {
        out.write_all(&sample.advantage.to_le_bytes())?;
    }
    for sample in samples {
        out.write_all(&sample.reward.to_le_bytes())?;
    }
    for logprob in samples.iter().flat_map(|sample| sample.trajectory.rollout_logprobs()) {
        out.write_all(&logprob.to_le_bytes())?;
    }
    for id in samples.iter().flat_map(|sample| sample.trajectory.token_ids()) {
        out.write_all(&id.to_le_bytes())?;
    }
    let absent = absent_row(shape);
    for sample in samples {
        let held = sample.routing.as_ref().map_or(0, RoutingMask::rows);
        if let Some(mask) = &sample.routing {
            mask.chunks().try_for_each(|rows| out.write_all(rows))?;
        }
        for _ in held..sample.trajectory.len() {
            out.write_all(&absent)?;
        }
    }
    for sample in samples {
        out.write_all(sample.trajectory.loss_mask())?;
    }
    for sample in samples {
        let held = sample.routing.as_ref().map_or(0, RoutingMask::rows);
        for t in 0..sample.trajectory.len() {
            out.write_all(&[u8::from(t < held)])?;
        }
    }
    Ok(())
}

/// Ids `0..K` in every layer: distinct and in range, so that any consumer can process the row
/// that nobody chose.
fn absent_row(shape: &ModelShape) -> Vec<u8> {
    let mut row = Vec::with_capacity(shape.row_bytes());
    for _ in &shape.moe_layers {
        for slot in 0..shape.top_k {
            row.extend((slot as u64).to_le_bytes().iter().take(shape.id_bytes()));
        }
    }
    row
}
