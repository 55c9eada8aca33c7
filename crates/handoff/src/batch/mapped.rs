//! A memory-mapped shard and views into it.

use super::manifest::{Extent, Manifest, ROW_INDEX, ShardEntry, tensors};
use super::{BatchErrorKind, FORMAT_VERSION};
use camino::Utf8Path;
use memmap2::Mmap;
use orchestrate_types::{ModelShape, TokenId};
use rayon::iter::IndexedParallelIterator;
use rayon::slice::ParallelSlice;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use std::collections::HashMap;
use std::ops::Range;

/// Number of ids checked per parallel task.
const CHECKED_TOGETHER: usize = 1 << 16;

/// One shard that has passed all checks.
#[derive(Debug)]
pub(super) struct Shard {
    map: Mmap,
    routed_experts: Range<usize>,
    /// Row of each token, where rows are shared.
    routed_row: Option<Vec<u32>>,
    episode_ids: Vec<String>,
    starts: Vec<usize>,
    group_ids: Vec<i64>,
    policy_versions: Vec<i64>,
    advantages: Vec<f32>,
    rewards: Vec<f32>,
    rollout_logprobs: Vec<f32>,
    token_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    routing_valid: Vec<u8>,
}

/// One sequence of `T` tokens, borrowed from a [`Batch`](super::Batch).
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    /// Id of its episode, e.g. `t000012.03`.
    pub episode_id: &'a str,
    /// Number of its group, equal for members of one group.
    pub group: i64,
    /// Token ids `[T]`, each below the vocabulary size.
    pub token_ids: &'a [TokenId],
    /// Loss mask `[T]`, 0 or 1.
    pub loss_mask: &'a [u8],
    /// Log-probabilities of the rollout `[T]`, nats, finite and ≤ 0 where the mask is 1.
    pub rollout_logprobs: &'a [f32],
    /// Policy version per token `[T]`.
    pub policy_versions: &'a [i64],
    /// Expert ids `[T, moe layers, top_k]`, all in range.
    pub routed_experts: Rows<'a>,
    /// Which rows were chosen by the engine `[T]`, 0 or 1; the last is always 0.
    pub routing_valid: &'a [u8],
    /// Advantage of the whole sequence.
    pub advantage: f32,
    /// Reward of the episode.
    pub reward: f32,
}

/// Rows of a sequence in the mapped file: `[T, moe layers, top_k]`, 1 or 2 little-endian bytes
/// per id.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    /// Row of each token in `bytes`; `None` if token `t` has row `t`.
    index: Option<&'a [u32]>,
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    /// Row of token `t`, `[moe layers, top_k]`; `None` past the end.
    pub fn row(&self, t: usize) -> Option<&'a [u8]> {
        let row = match self.index {
            Some(index) => usize::try_from(*index.get(t)?).ok()?,
            None => t,
        };
        self.span(row, 1)
    }

    /// The rows in order, as contiguous pieces of the file: one, or at most two if prefix rows are
    /// shared.
    pub fn pieces(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let rows = *self;
        let whole = rows.index.is_none().then_some(rows.bytes);
        let runs = rows.index.unwrap_or_default();
        let runs = runs.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        let shared =
            runs.filter_map(move |run| rows.span(usize::try_from(*run.first()?).ok()?, run.len()));
        whole.into_iter().chain(shared)
    }

    /// A copy of all rows in one vector, `[T, moe layers, top_k]`.
    pub fn to_vec(&self) -> Vec<u8> {
        self.pieces().flatten().copied().collect()
    }

    fn span(&self, row: usize, rows: usize) -> Option<&'a [u8]> {
        let start = row.checked_mul(self.row_bytes)?;
        self.bytes.get(start..start.checked_add(rows.checked_mul(self.row_bytes)?)?)
    }
}

impl Shard {
    /// Maps a shard and checks size, digest, header and values.
    pub(super) fn open(
        path: &Utf8Path,
        entry: &ShardEntry,
        manifest: &Manifest,
    ) -> Result<Self, BatchErrorKind> {
        let shape = &manifest.model;
        let shared = manifest.shares_rows();
        let map = map_file(path)?;
        if map.len() as u64 != entry.bytes || digest(&map) != entry.blake3 {
            return Err(BatchErrorKind::Digest);
        }
        let (header_bytes, header) =
            SafeTensors::read_metadata(&map).map_err(BatchErrorKind::Header)?;
        let &ShardEntry { sequences, tokens, rows, .. } = entry;
        let episode_ids = check_metadata(header.metadata().as_ref(), sequences, shape)?;
        let expected = Extent { sequences, tokens, rows, shared };
        let places = places(&header, size_of::<u64>() + header_bytes, shape, expected)?;
        let bytes = |name: &str| {
            places.get(name).and_then(|place| map.get(place.clone())).unwrap_or_default()
        };
        let starts = check_offsets(&elements(bytes("cu_seqlens"), i64::from_le_bytes), tokens)?;
        let shard = Self {
            episode_ids,
            starts,
            group_ids: elements(bytes("group_ids"), i64::from_le_bytes),
            policy_versions: elements(bytes("policy_versions"), i64::from_le_bytes),
            advantages: elements(bytes("advantages"), f32::from_le_bytes),
            rewards: elements(bytes("rewards"), f32::from_le_bytes),
            rollout_logprobs: elements(bytes("rollout_logprobs"), f32::from_le_bytes),
            token_ids: elements(bytes("token_ids"), u32::from_le_bytes),
            routed_row: shared.then(|| elements(bytes(ROW_INDEX), u32::from_le_bytes)),
            loss_mask: bytes("loss_mask").to_vec(),
            routing_valid: bytes("routing_valid").to_vec(),
            routed_experts: places.get("routed_experts").cloned().unwrap_or_default(),
            map,
        };
        shard.check(shape, rows)?;
        Ok(shard)
    }

    fn check(&self, shape: &ModelShape, rows: usize) -> Result<(), BatchErrorKind> {
        let all = |name, bad: Option<usize>, problem| match bad {
            Some(index) => Err(BatchErrorKind::Value { name, index, problem }),
            None => Ok(()),
        };
        let finite = |values: &[f32]| values.iter().position(|value| !value.is_finite());
        all("advantages", finite(&self.advantages), "it must be finite")?;
        all("rewards", finite(&self.rewards), "it must be finite")?;
        let flag = |values: &[u8]| values.iter().position(|&value| value > 1);
        all("loss_mask", flag(&self.loss_mask), "it must be 0 or 1")?;
        all("routing_valid", flag(&self.routing_valid), "it must be 0 or 1")?;
        let token = self.token_ids.iter().position(|&id| id as usize >= shape.vocab);
        all("token_ids", token, "it must be below the vocabulary size")?;
        let sampled = self.loss_mask.iter().zip(&self.rollout_logprobs);
        let logprob =
            sampled.clone().position(|(&m, lp)| m == 1 && !(lp.is_finite() && *lp <= 0.0));
        all("rollout_logprobs", logprob, "it must be finite and ≤ 0 where the loss mask is 1")?;
        let index = self.routed_row.as_deref().unwrap_or_default();
        let lost = index.iter().position(|&row| usize::try_from(row).is_ok_and(|row| row >= rows));
        all(ROW_INDEX, lost, "it must be below the number of rows")?;
        let routed = self.map.get(self.routed_experts.clone()).unwrap_or_default();
        all(
            "routed_experts",
            unknown_expert(routed, shape),
            "it must be below the number of experts",
        )?;
        let ends = self.starts.iter().skip(1).map(|end| end - 1);
        let last = ends.clone().find(|&end| self.routing_valid.get(end) != Some(&0));
        all("routing_valid", last, "it must be 0 for the last token of a sequence")
    }

    /// Sequence `i` of this shard.
    pub(super) fn sequence(&self, i: usize, shape: &ModelShape) -> Option<Sequence<'_>> {
        let span = *self.starts.get(i)?..*self.starts.get(i + 1)?;
        let all = self.map.get(self.routed_experts.clone())?;
        let row_bytes = shape.row_bytes();
        let routed_experts = if let Some(index) = &self.routed_row {
            Rows { bytes: all, index: Some(index.get(span.clone())?), row_bytes }
        } else {
            let bytes = all.get(span.start * row_bytes..span.end * row_bytes)?;
            Rows { bytes, index: None, row_bytes }
        };
        Some(Sequence {
            episode_id: self.episode_ids.get(i)?,
            group: *self.group_ids.get(i)?,
            token_ids: self.token_ids.get(span.clone())?,
            loss_mask: self.loss_mask.get(span.clone())?,
            rollout_logprobs: self.rollout_logprobs.get(span.clone())?,
            policy_versions: self.policy_versions.get(span.clone())?,
            routed_experts,
            routing_valid: self.routing_valid.get(span)?,
            advantage: *self.advantages.get(i)?,
            reward: *self.rewards.get(i)?,
        })
    }
}

#[expect(unsafe_code, reason = "the format is designed to be memory-mapped")]
fn map_file(path: &Utf8Path) -> Result<Mmap, BatchErrorKind> {
    let file = fs_err::File::open(path)?;
    // SAFETY: published batches never change (they are renamed into place and not written to
    // again), so the mapped bytes stay what the digest was computed over.
    let map = unsafe { Mmap::map(file.file()) }?;
    Ok(map)
}

fn digest(bytes: &[u8]) -> String {
    blake3::Hasher::new().update_rayon(bytes).finalize().to_hex().to_string()
}

/// Checks the header metadata and returns the episode ids.
fn check_metadata(
    metadata: Option<&HashMap<String, String>>,
    sequences: usize,
    shape: &ModelShape,
) -> Result<Vec<String>, BatchErrorKind> {
    let field = |name: &str| metadata.and_then(|metadata| metadata.get(name));
    if field("format_version") != Some(&FORMAT_VERSION.to_string()) {
        return Err(BatchErrorKind::Inconsistent("its format_version does not match the manifest"));
    }
    let layers: Option<Vec<usize>> =
        field("moe_layers").and_then(|text| serde_json::from_str(text).ok());
    if layers.as_ref() != Some(&shape.moe_layers) {
        return Err(BatchErrorKind::Inconsistent("its moe_layers do not match the manifest"));
    }
    let ids: Option<Vec<String>> =
        field("episode_ids").and_then(|text| serde_json::from_str(text).ok());
    ids.filter(|ids| ids.len() == sequences)
        .ok_or(BatchErrorKind::Inconsistent("its episode_ids must be one per sequence"))
}

/// The byte range of each expected tensor in the file. The header's own consistency (ranges without gap
/// or overlap, as long as dtype and shape say, up to the end of the file) was checked when it was
/// read.
fn places(
    header: &Metadata,
    data_at: usize,
    shape: &ModelShape,
    extent: Extent,
) -> Result<HashMap<&'static str, Range<usize>>, BatchErrorKind> {
    let mut places = HashMap::new();
    for (name, dtype, dims) in tensors(shape, extent) {
        let expected = format!("{dtype:?} {dims:?}");
        let Some(info) = header.info(name) else {
            return Err(BatchErrorKind::Tensor { name, found: "absent".to_owned(), expected });
        };
        if info.dtype != dtype || info.shape != dims {
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(BatchErrorKind::Tensor { name, found, expected });
        }
        let (start, end) = info.data_offsets;
        places.insert(name, data_at + start..data_at + end);
    }
    Ok(places)
}

fn check_offsets(offsets: &[i64], tokens: usize) -> Result<Vec<usize>, BatchErrorKind> {
    let value = |index, problem| BatchErrorKind::Value { name: "cu_seqlens", index, problem };
    let mut starts = Vec::with_capacity(offsets.len());
    for (index, &offset) in offsets.iter().enumerate() {
        let start = usize::try_from(offset).map_err(|_| value(index, "it is negative"))?;
        let rises = starts.last().is_none_or(|&before| start > before);
        if !rises || (index == 0 && start != 0) {
            return Err(value(index, "offsets must start at 0 and increase"));
        }
        starts.push(start);
    }
    if starts.last() != Some(&tokens) {
        return Err(value(offsets.len().saturating_sub(1), "the last must be the token count"));
    }
    Ok(starts)
}

/// Index of the first id that is not below the number of experts.
fn unknown_expert(ids: &[u8], shape: &ModelShape) -> Option<usize> {
    let last = shape.experts.saturating_sub(1);
    if shape.id_bytes() == 1 {
        first_above(ids, |id| *id, u8::try_from(last).unwrap_or(u8::MAX))
    } else {
        let last = u16::try_from(last).unwrap_or(u16::MAX);
        first_above(ids.as_chunks::<2>().0, |id| u16::from_le_bytes(*id), last)
    }
}

/// Index of the first value above `last`. Takes the maximum of each part first, which needs no branch
/// per value and vectorises at the width of the values.
fn first_above<T: Sync, V: Ord + Default + Copy + Sync>(
    values: &[T],
    read: impl Fn(&T) -> V + Sync,
    last: V,
) -> Option<usize> {
    let greatest = |part: &[T]| part.iter().fold(V::default(), |most, v| most.max(read(v)));
    let part = values.par_chunks(CHECKED_TOGETHER).position_first(|part| greatest(part) > last)?;
    let start = part * CHECKED_TOGETHER;
    Some(start + values.get(start..)?.iter().position(|value| read(value) > last)?)
}

fn elements<T, const N: usize>(bytes: &[u8], read: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect()
}
