//! Reading a batch folder: mapped, checked in full before anything is handed out.

use super::{BatchError, BatchErrorKind, FORMAT_VERSION, Manifest, ShardEntry, tensors};
use camino::Utf8Path;
use memmap2::Mmap;
use orchestrate_types::{ModelShape, TokenId};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::ops::Range;

/// Largest manifest read; a real one has a few hundred bytes per shard.
const MANIFEST_LIMIT: u64 = 64 << 20;

/// An opened batch. Routing rows stay in the mapped files; the rest is small and held.
#[derive(Debug)]
pub struct Batch {
    manifest: Manifest,
    shards: Vec<Shard>,
    /// Shard and index in it, per sequence.
    index: Vec<(usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    map: Mmap,
    routed_experts: Range<usize>,
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

/// One sequence of `T` tokens.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    /// Where it comes from, e.g. `t000012.03`.
    pub episode_id: &'a str,
    /// Number of its group.
    pub group: i64,
    /// Token ids `[T]`, each below the vocabulary size.
    pub token_ids: &'a [TokenId],
    /// Loss mask `[T]`, 0 or 1.
    pub loss_mask: &'a [u8],
    /// Log-probabilities of the rollout `[T]`, nats, finite and ≤ 0 where the mask is 1.
    pub rollout_logprobs: &'a [f32],
    /// Policy version per token `[T]`.
    pub policy_versions: &'a [i64],
    /// Expert ids `[T, moe layers, top_k]`, 1 or 2 little-endian bytes each, all in range.
    pub routed_experts: &'a [u8],
    /// Which rows were chosen by the engine `[T]`, 0 or 1; the last is always 0.
    pub routing_valid: &'a [u8],
    /// Advantage of the whole sequence.
    pub advantage: f32,
    /// Verifier's reward.
    pub reward: f32,
}

impl Batch {
    /// Opens and checks a batch by the path of its `manifest.json`: sizes and digests of the
    /// shards, dtypes and shapes, every value's range. Blocking; reads every byte once.
    ///
    /// # Errors
    /// [`BatchError`] names the file and what is wrong with it.
    pub fn open(manifest_path: &Utf8Path) -> Result<Self, BatchError> {
        let at = |kind: BatchErrorKind| kind.at(manifest_path);
        let size = fs_err::metadata(manifest_path).map_err(|e| at(e.into()))?.len();
        if size > MANIFEST_LIMIT {
            return Err(at(BatchErrorKind::Inconsistent("it is too large for a manifest")));
        }
        let text = fs_err::read(manifest_path).map_err(|e| at(e.into()))?;
        let manifest = parse_manifest(&text).map_err(at)?;
        let folder = manifest_path.parent().unwrap_or(Utf8Path::new(""));
        let mut shards = Vec::with_capacity(manifest.shards.len());
        let mut index = Vec::new();
        for (number, entry) in manifest.shards.iter().enumerate() {
            let path = folder.join(&entry.file);
            let shard = Shard::open(&path, entry, &manifest.model).map_err(|kind| kind.at(path))?;
            index.extend((0..entry.sequences).map(|sequence| (number, sequence)));
            shards.push(shard);
        }
        Ok(Self { manifest, shards, index })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Sequence `i`, counted over all shards in order.
    pub fn sequence(&self, i: usize) -> Option<Sequence<'_>> {
        let &(shard, sequence) = self.index.get(i)?;
        self.shards.get(shard)?.sequence(sequence, self.manifest.model.row_bytes())
    }

    /// All sequences in order.
    pub fn sequences(&self) -> impl Iterator<Item = Sequence<'_>> {
        (0..self.len()).filter_map(|i| self.sequence(i))
    }
}

fn parse_manifest(text: &[u8]) -> Result<Manifest, BatchErrorKind> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        format_version: u32,
    }
    // The version first: a newer manifest need not parse as ours.
    let versioned: Versioned = serde_json::from_slice(text).map_err(BatchErrorKind::Manifest)?;
    if versioned.format_version != FORMAT_VERSION {
        return Err(BatchErrorKind::Version(versioned.format_version));
    }
    let manifest: Manifest = serde_json::from_slice(text).map_err(BatchErrorKind::Manifest)?;
    let shape = &manifest.model;
    let ids = shape.moe_layers.len().checked_mul(shape.top_k);
    if ids.is_none_or(|ids| ids == 0 || ids > 1 << 24) || shape.experts > 1 << 16 {
        return Err(BatchErrorKind::Inconsistent("its model shape is not that of a MoE model"));
    }
    let dtype = if shape.id_bytes() == 1 { "u8" } else { "u16" };
    if manifest.id_dtype != dtype {
        return Err(BatchErrorKind::Inconsistent("its id_dtype does not follow from the model"));
    }
    let sum = |count: fn(&ShardEntry) -> usize| {
        manifest.shards.iter().map(count).try_fold(0usize, usize::checked_add)
    };
    if sum(|shard| shard.sequences) != Some(manifest.sequences)
        || sum(|shard| shard.tokens) != Some(manifest.tokens)
    {
        return Err(BatchErrorKind::Inconsistent("its totals are not those of its shards"));
    }
    let plain = |file: &str| !file.is_empty() && !file.contains(['/', '\\']) && file != "..";
    if !manifest.shards.iter().all(|shard| plain(&shard.file)) {
        return Err(BatchErrorKind::Inconsistent("a shard's name leads out of the folder"));
    }
    Ok(manifest)
}

impl Shard {
    fn open(
        path: &Utf8Path,
        entry: &ShardEntry,
        shape: &ModelShape,
    ) -> Result<Self, BatchErrorKind> {
        let map = map_file(path)?;
        if map.len() as u64 != entry.bytes
            || blake3::hash(&map).to_hex().as_str() != entry.blake3.as_str()
        {
            return Err(BatchErrorKind::Digest);
        }
        let (header_bytes, header) =
            SafeTensors::read_metadata(&map).map_err(BatchErrorKind::Header)?;
        let episode_ids = episode_ids(header.metadata().as_ref(), entry.sequences)?;
        let file = SafeTensors::deserialize(&map).map_err(BatchErrorKind::Header)?;
        let expected = tensors(shape, entry.sequences, entry.tokens);
        let mut views = Vec::with_capacity(expected.len());
        for (name, dtype, dims) in &expected {
            let wanted = format!("{dtype:?} {dims:?}");
            let found = file.tensor(name).map_err(|_| BatchErrorKind::Tensor {
                name,
                found: "absent".to_owned(),
                expected: wanted.clone(),
            })?;
            if found.dtype() != *dtype || found.shape() != dims.as_slice() {
                let found = format!("{:?} {:?}", found.dtype(), found.shape());
                return Err(BatchErrorKind::Tensor { name, found, expected: wanted });
            }
            views.push(found);
        }
        let Ok(
            [
                cu_seqlens,
                group_ids,
                policy_versions,
                advantages,
                rewards,
                rollout_logprobs,
                token_ids,
                routed_experts,
                loss_mask,
                routing_valid,
            ],
        ) = <[TensorView<'_>; 10]>::try_from(views)
        else {
            return Err(BatchErrorKind::Inconsistent("it does not have all tensors"));
        };
        let starts = check_offsets(&elements(&cu_seqlens, i64::from_le_bytes), entry.tokens)?;
        let offset = header
            .info("routed_experts")
            .map(|info| info.data_offsets.0 + header_bytes + size_of::<u64>())
            .ok_or(BatchErrorKind::Inconsistent("routed_experts has no place"))?;
        let routed = offset..offset + routed_experts.data().len();
        let shard = Self {
            episode_ids,
            starts,
            group_ids: elements(&group_ids, i64::from_le_bytes),
            policy_versions: elements(&policy_versions, i64::from_le_bytes),
            advantages: elements(&advantages, f32::from_le_bytes),
            rewards: elements(&rewards, f32::from_le_bytes),
            rollout_logprobs: elements(&rollout_logprobs, f32::from_le_bytes),
            token_ids: elements(&token_ids, u32::from_le_bytes),
            loss_mask: loss_mask.data().to_vec(),
            routing_valid: routing_valid.data().to_vec(),
            routed_experts: routed,
            map,
        };
        shard.check(shape)?;
        Ok(shard)
    }

    fn check(&self, shape: &ModelShape) -> Result<(), BatchErrorKind> {
        let all = |name, bad: Option<usize>, problem| match bad {
            Some(index) => Err(BatchErrorKind::Value { name, index, problem }),
            None => Ok(()),
        };
        let finite = |values: &[f32]| values.iter().position(|value| !value.is_finite());
        all("advantages", finite(&self.advantages), "it is not finite")?;
        all("rewards", finite(&self.rewards), "it is not finite")?;
        let flag = |values: &[u8]| values.iter().position(|&value| value > 1);
        all("loss_mask", flag(&self.loss_mask), "it is neither 0 nor 1")?;
        all("routing_valid", flag(&self.routing_valid), "it is neither 0 nor 1")?;
        let token = self.token_ids.iter().position(|&id| id as usize >= shape.vocab);
        all("token_ids", token, "it is not in the vocabulary")?;
        let sampled = self.loss_mask.iter().zip(&self.rollout_logprobs);
        let logprob =
            sampled.clone().position(|(&m, lp)| m == 1 && !(lp.is_finite() && *lp <= 0.0));
        all("rollout_logprobs", logprob, "it is not finite and ≤ 0 under the loss mask")?;
        let routed = self.map.get(self.routed_experts.clone()).unwrap_or_default();
        let expert = if shape.id_bytes() == 1 {
            routed.iter().position(|&id| usize::from(id) >= shape.experts)
        } else {
            let ids = routed.as_chunks::<2>().0.iter();
            ids.map(|id| u16::from_le_bytes(*id)).position(|id| usize::from(id) >= shape.experts)
        };
        all("routed_experts", expert, "no expert has this id")?;
        let ends = self.starts.iter().skip(1).map(|end| end - 1);
        let last = ends.clone().find(|&end| self.routing_valid.get(end) != Some(&0));
        all("routing_valid", last, "the last token of a sequence has no row")
    }

    fn sequence(&self, i: usize, row_bytes: usize) -> Option<Sequence<'_>> {
        let span = *self.starts.get(i)?..*self.starts.get(i + 1)?;
        let routed = self.map.get(self.routed_experts.clone())?;
        Some(Sequence {
            episode_id: self.episode_ids.get(i)?,
            group: *self.group_ids.get(i)?,
            token_ids: self.token_ids.get(span.clone())?,
            loss_mask: self.loss_mask.get(span.clone())?,
            rollout_logprobs: self.rollout_logprobs.get(span.clone())?,
            policy_versions: self.policy_versions.get(span.clone())?,
            routed_experts: routed.get(span.start * row_bytes..span.end * row_bytes)?,
            routing_valid: self.routing_valid.get(span)?,
            advantage: *self.advantages.get(i)?,
            reward: *self.rewards.get(i)?,
        })
    }
}

#[expect(unsafe_code, reason = "memory maps are the point of the format")]
fn map_file(path: &Utf8Path) -> Result<Mmap, BatchErrorKind> {
    let file = fs_err::File::open(path)?;
    // SAFETY: published batches never change (they are renamed into place and not written to
    // again), so the mapped bytes stay what the digest was computed over.
    let map = unsafe { Mmap::map(file.file()) }?;
    Ok(map)
}

fn episode_ids(
    metadata: Option<&std::collections::HashMap<String, String>>,
    sequences: usize,
) -> Result<Vec<String>, BatchErrorKind> {
    let text = metadata.and_then(|metadata| metadata.get("episode_ids"));
    let ids: Option<Vec<String>> = text.and_then(|text| serde_json::from_str(text).ok());
    ids.filter(|ids| ids.len() == sequences)
        .ok_or(BatchErrorKind::Inconsistent("its episode_ids are not one per sequence"))
}

fn check_offsets(offsets: &[i64], tokens: usize) -> Result<Vec<usize>, BatchErrorKind> {
    let value = |index, problem| BatchErrorKind::Value { name: "cu_seqlens", index, problem };
    let mut starts = Vec::with_capacity(offsets.len());
    for (index, &offset) in offsets.iter().enumerate() {
        let start = usize::try_from(offset).map_err(|_| value(index, "it is negative"))?;
        let rises = starts.last().is_none_or(|&before| start > before);
        if !rises || (index == 0 && start != 0) {
            return Err(value(index, "offsets must rise from 0"));
        }
        starts.push(start);
    }
    if starts.last() != Some(&tokens) {
        return Err(value(offsets.len().saturating_sub(1), "the last must be the token count"));
    }
    Ok(starts)
}

fn elements<T, const N: usize>(view: &TensorView<'_>, read: fn([u8; N]) -> T) -> Vec<T> {
    view.data().as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect()
}
