//! Reading a batch folder. Shards are memory-mapped, and fully checked before any data is returned.

use super::mapped::{Sequence, Shard};
use super::{BatchError, BatchErrorKind, Manifest};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::ModelShape;
use std::sync::OnceLock;

/// Limit on the size of a manifest; a real one has a few hundred bytes per shard.
const MANIFEST_LIMIT: u64 = 64 << 20;

/// An opened batch. Routing rows stay in the mapped files; the rest is small and kept in memory.
/// [`write_batch`](super::write_batch) has an example.
#[derive(Debug)]
pub struct Batch {
    path: Utf8PathBuf,
    manifest: Manifest,
    shards: Vec<OnceLock<Shard>>,
    /// Number of the first sequence of each shard.
    firsts: Vec<usize>,
}

impl Batch {
    /// Opens and checks a batch by the path of its `manifest.json`: sizes and digests of the
    /// shards, dtypes and shapes, every value's range. Blocking; reads every byte once.
    ///
    /// # Errors
    /// [`BatchError`] names the file and the error in it.
    pub fn open(manifest_path: &Utf8Path) -> Result<Self, BatchError> {
        let batch = Self::open_lazily(manifest_path)?;
        for number in 0..batch.shards.len() {
            batch.shard(number)?;
        }
        Ok(batch)
    }

    /// Opens a batch as [`open`](Self::open) does, but each shard is mapped and checked only when
    /// one of its sequences is first requested, so that a reader of some shards reads no others.
    ///
    /// # Errors
    /// [`BatchError`] if the manifest cannot be read or is invalid.
    pub fn open_lazily(manifest_path: &Utf8Path) -> Result<Self, BatchError> {
        let at = |kind: BatchErrorKind| kind.at(manifest_path);
        let size = fs_err::metadata(manifest_path).map_err(|e| at(e.into()))?.len();
        if size > MANIFEST_LIMIT {
            return Err(at(BatchErrorKind::Inconsistent("it is too large for a manifest")));
        }
        let text = fs_err::read(manifest_path).map_err(|e| at(e.into()))?;
        let manifest = Manifest::parse(&text).map_err(at)?;
        let shards = manifest.shards.iter().map(|_| OnceLock::new()).collect();
        let firsts = manifest.shards.iter().scan(0, |next, shard| {
            let first = *next;
            *next += shard.sequences;
            Some(first)
        });
        let firsts = firsts.collect();
        Ok(Self { path: manifest_path.to_owned(), manifest, shards, firsts })
    }

    /// The content of `manifest.json`.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Checks that the batch was made for the model `expected`; only the context length may differ.
    ///
    /// # Errors
    /// [`BatchErrorKind::Model`] names the first part of the shape that differs.
    pub fn require_model(&self, expected: &ModelShape) -> Result<(), BatchError> {
        self.manifest.require_model(expected).map_err(|kind| kind.at(&self.path))
    }

    /// Number of sequences in all shards.
    pub fn len(&self) -> usize {
        self.manifest.sequences
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.manifest.sequences == 0
    }

    /// Sequence `index`, counted over all shards in order.
    ///
    /// # Errors
    /// [`BatchError`] if `index` is out of range; in a lazily opened batch also if its shard is damaged.
    pub fn sequence(&self, index: usize) -> Result<Sequence<'_>, BatchError> {
        let sequences = self.len();
        let number = self.firsts.partition_point(|&first| first <= index).saturating_sub(1);
        let first = self.firsts.get(number).copied().unwrap_or_default();
        let absent = || BatchErrorKind::NoSequence { index, sequences }.at(&self.path);
        if index >= sequences {
            return Err(absent());
        }
        self.shard(number)?.sequence(index - first, &self.manifest.model).ok_or_else(absent)
    }

    /// All sequences in order.
    pub fn sequences(&self) -> impl Iterator<Item = Result<Sequence<'_>, BatchError>> {
        (0..self.len()).map(|index| self.sequence(index))
    }

    fn shard(&self, number: usize) -> Result<&Shard, BatchError> {
        let absent = || {
            let kind = BatchErrorKind::Inconsistent("it has fewer shards than the manifest lists");
            kind.at(&self.path)
        };
        let slot = self.shards.get(number).ok_or_else(absent)?;
        if let Some(shard) = slot.get() {
            return Ok(shard);
        }
        let entry = self.manifest.shards.get(number).ok_or_else(absent)?;
        let path = self.path.parent().unwrap_or(Utf8Path::new("")).join(&entry.file);
        let shard = Shard::open(&path, entry, &self.manifest).map_err(|kind| kind.at(path))?;
        Ok(slot.get_or_init(|| shard))
    }
}
