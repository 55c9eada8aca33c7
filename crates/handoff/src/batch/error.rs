//! What can be wrong with a batch.

use super::FORMAT_VERSION;
use camino::Utf8PathBuf;
use orchestrate_types::EpisodeId;
use std::io;

/// A batch that cannot be written or read, and the file that says so.
#[derive(Debug, thiserror::Error)]
#[error("batch file {file}: {kind}")]
pub struct BatchError {
    /// Path of the file.
    pub file: Utf8PathBuf,
    /// What is wrong.
    #[source]
    pub kind: BatchErrorKind,
}

/// What is wrong with a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchErrorKind {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(io::Error),
    /// The disk, or the quota on it, is full.
    #[error("{0} (ENOSPC or EDQUOT); nothing was published: free some space and write it again")]
    Full(io::Error),
    /// The manifest is not a manifest.
    #[error("it is not a readable manifest")]
    Manifest(#[source] serde_json::Error),
    /// A newer program wrote it.
    #[error(
        "its format version is {0}, this program reads {FORMAT_VERSION}; use the version of \
         Orchestrate that wrote it"
    )]
    Version(u32),
    /// The batch was made for another model.
    #[error("it was made for another model: {field} is {found}, expected {expected}")]
    Model {
        /// The part of the shape that differs.
        field: &'static str,
        /// What the batch says.
        found: String,
        /// What the reader's model has.
        expected: String,
    },
    /// The file is not the one the manifest means.
    #[error("its size or digest is not the manifest's; the batch must be written again")]
    Digest,
    /// The safetensors header is broken.
    #[error("it is not a readable safetensors file")]
    Header(#[source] safetensors::SafeTensorError),
    /// A tensor is missing, or has another dtype or shape.
    #[error("tensor `{name}` is {found}, expected {expected}")]
    Tensor {
        /// Its name.
        name: &'static str,
        /// What is there.
        found: String,
        /// What must be there.
        expected: String,
    },
    /// A value that must not be.
    #[error("tensor `{name}`, index {index}: {problem}")]
    Value {
        /// Tensor.
        name: &'static str,
        /// Flat index.
        index: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A field of the manifest or of the header metadata disagrees with the data.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// A sequence that the batch does not have.
    #[error("it has {sequences} sequences, there is no number {index}")]
    NoSequence {
        /// Asked for, from 0.
        index: usize,
        /// Held.
        sequences: usize,
    },
    /// A sample that must not be trained on.
    #[error("episode {episode}: {problem}")]
    Sample {
        /// Which.
        episode: EpisodeId,
        /// Why.
        problem: &'static str,
    },
    /// Another batch is already published under this name.
    #[error("another batch is already published here; published batches never change")]
    Published,
}

impl From<io::Error> for BatchErrorKind {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full(error),
            _ => Self::Io(error),
        }
    }
}

impl BatchErrorKind {
    pub(super) fn at(self, file: impl Into<Utf8PathBuf>) -> BatchError {
        BatchError { file: file.into(), kind: self }
    }
}
