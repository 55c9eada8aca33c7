//! Writing one shard. Rows go directly from the masks to the file; the rest follows once the last
//! sequence is known.

use super::digest::FileDigest;
use super::manifest::{EXPERTS, Extent, ShardEntry, tensor_bytes, tensors};
use super::write::Planned;
use super::{BatchSample, FORMAT_VERSION};
use camino::Utf8PathBuf;
use fs_err::File;
use orchestrate_routing::RoutingMask;
use orchestrate_types::ModelShape;
use serde_json::{Map, Value, json};
use std::borrow::Borrow;
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::FileExt;

/// Slices per vectored write; Linux accepts at most 1024.
const SLICES: usize = 512;
/// Placeholder rows written at a time.
const ABSENT_ROWS: usize = 256;

/// A shard that is being written. `S` is the sample, owned or borrowed.
pub(super) struct ShardWriter<'a, S> {
    file: File,
    digest: FileDigest,
    temporary: Utf8PathBuf,
    shape: &'a ModelShape,
    planned: &'a [Planned],
    share: bool,
    /// File offset of the first row.
    rows_at: u64,
    /// Number of rows written.
    rows: usize,
    tokens: usize,
    columns: Columns,
    /// Sequences whose rows later ones may share: the group's first one with rows, and the branches so
    /// far of the latest episode.
    written: Vec<Written<S>>,
    absent: Vec<u8>,
}

/// A sequence whose rows are in the file.
struct Written<S> {
    sample: S,
    /// The row of each token.
    rows: Vec<usize>,
}

/// All tensors except the rows, in file form: a few bytes per token.
#[derive(Default)]
struct Columns {
    cu_seqlens: Vec<u8>,
    group_ids: Vec<u8>,
    policy_versions: Vec<u8>,
    advantages: Vec<u8>,
    rewards: Vec<u8>,
    rollout_logprobs: Vec<u8>,
    token_ids: Vec<u8>,
    routed_row: Vec<u8>,
    loss_mask: Vec<u8>,
    routing_valid: Vec<u8>,
}

/// A written shard that is not synced yet.
#[derive(Debug)]
pub(super) struct Unsealed {
    file: File,
    temporary: Utf8PathBuf,
    entry: ShardEntry,
}

impl<'a, S: Borrow<BatchSample>> ShardWriter<'a, S> {
    /// Creates `temporary` for the sequences `planned`.
    pub(super) fn create(
        temporary: Utf8PathBuf,
        shape: &'a ModelShape,
        planned: &'a [Planned],
        share: bool,
    ) -> io::Result<Self> {
        let tokens = planned.iter().map(|sequence| sequence.tokens).sum();
        let extent = Extent { sequences: planned.len(), tokens, rows: tokens, shared: share };
        // With fewer rows the header's text can only become shorter; spaces fill the difference.
        let mut front = size_of::<u64>() + header(shape, planned, extent)?.len();
        front = front.next_multiple_of(size_of::<u64>());
        let plan = tensors(shape, extent);
        front += plan.iter().rev().skip(1).map(tensor_bytes).sum::<usize>();
        let rows_at = front as u64;
        let file = File::create(&temporary)?;
        let mut columns = Columns::default();
        columns.cu_seqlens.extend(0i64.to_le_bytes());
        let absent = absent_row(shape).repeat(ABSENT_ROWS);
        Ok(Self {
            file,
            digest: FileDigest::new(rows_at),
            temporary,
            shape,
            planned,
            share,
            rows_at,
            rows: 0,
            tokens: 0,
            columns,
            written: Vec::new(),
            absent,
        })
    }

    /// Writes the rows of the next sequence; its other columns are kept until the end.
    pub(super) fn push(&mut self, sample: S) -> io::Result<()> {
        let sequence: &BatchSample = sample.borrow();
        let tokens = sequence.trajectory.len();
        let held = sequence.routing.as_ref().map_or(0, RoutingMask::rows);
        let mut rows: Vec<usize> = Vec::new();
        if self.share {
            // The last of the longest: a branch has more in common with another one than with the group.
            let common = self.written.iter().map(|w| (equal_rows(w.sample.borrow(), sequence), w));
            if let Some((shared, from)) = common.max_by_key(|(shared, _)| *shared) {
                rows = from.rows.get(..shared).unwrap_or_default().to_vec();
            }
        }
        let shared = rows.len();
        let absent = (tokens - held) * self.shape.row_bytes();
        self.write_rows(sequence.routing.as_ref(), shared, absent)?;

        let first = self.rows;
        self.rows += tokens - shared;
        self.tokens += tokens;
        let end = i64::try_from(self.tokens).map_err(io::Error::other)?;
        self.columns.push(sequence, held, end);
        if self.share {
            rows.extend(first..self.rows);
            for row in &rows {
                let row = u32::try_from(*row).map_err(io::Error::other)?;
                self.columns.routed_row.extend(row.to_le_bytes());
            }
            self.keep(sample, rows);
        }
        Ok(())
    }

    /// Keeps a sequence that later ones may share rows with.
    fn keep(&mut self, sample: S, rows: Vec<usize>) {
        let sequence: &BatchSample = sample.borrow();
        let mut is_first = true;
        self.written.retain(|written| {
            let leads = is_first;
            is_first = false;
            let other: &BatchSample = written.sample.borrow();
            other.group == sequence.group && (leads || other.episode_id == sequence.episode_id)
        });
        if sequence.routing.is_some() {
            self.written.push(Written { sample, rows });
        }
    }

    /// Writes and digests a mask's rows from row `skip` on, then `absent` bytes of placeholder
    /// rows.
    fn write_rows(
        &mut self,
        mask: Option<&RoutingMask>,
        skip: usize,
        absent: usize,
    ) -> io::Result<()> {
        let whole = self.absent.len().max(1);
        let absent = std::iter::repeat_n(self.absent.as_slice(), absent / whole)
            .chain(self.absent.get(..absent % whole));
        let held =
            mask.into_iter().flat_map(|mask| skip_bytes(mask.chunks(), skip * mask.row_bytes()));
        let file = self.file.file();
        self.digest.write(held.chain(absent), |at, bytes| file.write_all_at(bytes, at))
    }

    /// Writes header and columns in front of the rows.
    pub(super) fn finish(mut self, file_name: String) -> io::Result<Unsealed> {
        let (shape, sequences, share) = (self.shape, self.planned.len(), self.share);
        let extent = Extent { sequences, tokens: self.tokens, rows: self.rows, shared: share };
        let columns = self.columns.in_file_order(share);
        let column_bytes: usize = columns.iter().map(|column| column.len()).sum();
        let mut header = header(shape, self.planned, extent)?;
        let front = usize::try_from(self.rows_at).map_err(io::Error::other)?;
        let header_bytes = front - column_bytes - size_of::<u64>();
        header.resize(header_bytes, b' ');
        let length = (header_bytes as u64).to_le_bytes();
        let parts = [length.as_slice(), header.as_slice()].into_iter().chain(columns);
        write_chunks(&mut self.file, parts.clone())?;
        let entry = ShardEntry {
            file: file_name,
            sequences,
            tokens: self.tokens,
            rows: self.rows,
            bytes: self.rows_at + (self.rows * shape.row_bytes()) as u64,
            blake3: self.digest.finish(parts).to_hex().to_string(),
        };
        Ok(Unsealed { file: self.file, temporary: self.temporary, entry })
    }
}

impl Unsealed {
    /// Syncs the shard to disk and checks its size.
    pub(super) fn seal(self) -> io::Result<ShardEntry> {
        self.file.sync_all()?;
        let bytes = self.file.metadata()?.len();
        if bytes != self.entry.bytes {
            let Self { temporary, entry, .. } = self;
            return Err(io::Error::new(
                io::ErrorKind::WriteZero,
                format!("only {bytes} of {} bytes were written to {temporary}", entry.bytes),
            ));
        }
        Ok(self.entry)
    }
}

impl Columns {
    fn push(&mut self, sample: &BatchSample, held: usize, end: i64) {
        let trajectory = &sample.trajectory;
        self.cu_seqlens.extend(end.to_le_bytes());
        self.group_ids.extend(sample.group.to_le_bytes());
        let versions = trajectory.policy_versions().iter();
        append(&mut self.policy_versions, versions.map(|version| version.to_le_bytes()));
        self.advantages.extend(sample.advantage.to_le_bytes());
        self.rewards.extend(sample.reward.to_le_bytes());
        let logprobs = trajectory.rollout_logprobs().iter();
        append(&mut self.rollout_logprobs, logprobs.map(|logprob| logprob.to_le_bytes()));
        append(&mut self.token_ids, trajectory.token_ids().iter().map(|id| id.to_le_bytes()));
        self.loss_mask.extend_from_slice(trajectory.loss_mask());
        self.routing_valid.extend(std::iter::repeat_n(1, held));
        self.routing_valid.extend(std::iter::repeat_n(0, trajectory.len() - held));
    }

    /// In the order of [`tensors`].
    fn in_file_order(&self, shared: bool) -> Vec<&[u8]> {
        let mut columns: Vec<&[u8]> = vec![
            &self.cu_seqlens,
            &self.group_ids,
            &self.policy_versions,
            &self.advantages,
            &self.rewards,
            &self.rollout_logprobs,
            &self.token_ids,
        ];
        if shared {
            columns.push(&self.routed_row);
        }
        columns.extend([self.loss_mask.as_slice(), self.routing_valid.as_slice()]);
        columns
    }
}

/// Appends values of `N` bytes, at the speed of a copy.
fn append<const N: usize>(column: &mut Vec<u8>, values: impl ExactSizeIterator<Item = [u8; N]>) {
    let before = column.len();
    column.resize(before + N * values.len(), 0);
    let added = column.get_mut(before..).unwrap_or_default();
    for (place, value) in added.as_chunks_mut().0.iter_mut().zip(values) {
        *place = value;
    }
}

/// JSON text of the safetensors header, without padding.
fn header(shape: &ModelShape, planned: &[Planned], extent: Extent) -> io::Result<Vec<u8>> {
    let episodes: Vec<String> =
        planned.iter().map(|sequence| sequence.episode_id.to_string()).collect();
    let mut header = Map::new();
    header.insert(
        "__metadata__".to_owned(),
        json!({
            "format_version": FORMAT_VERSION.to_string(),
            "kind": EXPERTS,
            "episode_ids": serde_json::to_string(&episodes)?,
            "moe_layers": serde_json::to_string(&shape.moe_layers)?,
        }),
    );
    let mut offset = 0;
    for tensor in tensors(shape, extent) {
        let end = offset + tensor_bytes(&tensor);
        let (name, dtype, dims) = tensor;
        let entry = json!({ "dtype": dtype, "shape": dims, "data_offsets": [offset, end] });
        header.insert(name.to_owned(), entry);
        offset = end;
    }
    Ok(serde_json::to_vec(&Value::Object(header))?)
}

/// Leading rows that two sequences of a group have in common: same tokens, same bytes.
fn equal_rows(written: &BatchSample, next: &BatchSample) -> usize {
    let (Some(first), Some(second)) = (&written.routing, &next.routing) else { return 0 };
    if written.group != next.group {
        return 0;
    }
    let tokens = written.trajectory.token_ids().iter().zip(next.trajectory.token_ids());
    let common = tokens.take_while(|(a, b)| a == b).count();
    (0..common).take_while(|&t| second.row(t).is_some() && first.row(t) == second.row(t)).count()
}

/// The chunks without their first `skip` bytes.
fn skip_bytes<'c>(
    chunks: impl Iterator<Item = &'c [u8]> + Clone,
    mut skip: usize,
) -> impl Iterator<Item = &'c [u8]> + Clone {
    chunks.filter_map(move |chunk| {
        let passed = skip.min(chunk.len());
        skip -= passed;
        chunk.get(passed..).filter(|rest| !rest.is_empty())
    })
}

/// Writes borrowed pieces in order, many per system call, and handles short writes.
fn write_chunks<'c>(
    out: &mut impl Write,
    chunks: impl IntoIterator<Item = &'c [u8]>,
) -> io::Result<()> {
    let mut chunks = chunks.into_iter().filter(|chunk| !chunk.is_empty());
    let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES);
    loop {
        slices.clear();
        slices.extend(chunks.by_ref().take(SLICES).map(IoSlice::new));
        if slices.is_empty() {
            return Ok(());
        }
        let mut rest = slices.as_mut_slice();
        while !rest.is_empty() {
            match out.write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut rest, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Ids `0..K` in every layer: distinct and in range, so that any consumer can process the
/// placeholder row.
fn absent_row(shape: &ModelShape) -> Vec<u8> {
    let mut row = Vec::with_capacity(shape.row_bytes());
    for _ in &shape.moe_layers {
        for slot in 0..shape.top_k {
            row.extend((slot as u64).to_le_bytes().iter().take(shape.id_bytes()));
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `step` bytes per call, interrupts now and then, and is full after `room` bytes.
    struct Trickle {
        taken: Vec<u8>,
        step: usize,
        room: usize,
        calls: usize,
    }

    impl Write for Trickle {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.calls += 1;
            if self.calls.is_multiple_of(3) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let room = self.room - self.taken.len();
            if room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = data.len().min(self.step).min(room);
            self.taken.extend_from_slice(&data[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn short_and_interrupted_writes_lose_nothing_and_a_full_disk_is_reported() {
        let data: Vec<u8> = (0..=255).cycle().take(3000).collect();
        for (chunk, step) in [(1, 7), (100, 1), (64, 64), (3000, 999)] {
            let mut out = Trickle { taken: vec![], step, room: 3000, calls: 0 };
            write_chunks(&mut out, data.chunks(chunk)).unwrap();
            assert_eq!(out.taken, data);
            let mut out = Trickle { taken: vec![], step, room: 2999, calls: 0 };
            let error = write_chunks(&mut out, data.chunks(chunk)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn skipping_bytes_crosses_chunk_boundaries() {
        let data: Vec<u8> = (0..100).collect();
        for chunk in [1, 3, 64, 100] {
            for skip in 0..=100 {
                let rest: Vec<u8> =
                    skip_bytes(data.chunks(chunk), skip).flatten().copied().collect();
                assert_eq!(rest, data[skip..]);
            }
        }
    }
}
