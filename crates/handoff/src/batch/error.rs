//! Errors of reading and writing batches.

use super::FORMAT_VERSION;
use camino::Utf8PathBuf;
use orchestrate_types::EpisodeId;
use std::io;

/// Why a batch cannot be written or read, and in which file.
#[derive(Debug, thiserror::Error)]
#[error("batch file {file}: {kind}")]
pub struct BatchError {
    /// Path of the file.
    pub file: Utf8PathBuf,
    /// Why the file is invalid, or why it cannot be accessed.
    #[source]
    pub kind: BatchErrorKind,
}

/// Kinds of batch errors.
#[derive(Debug, thiserror::Error)]
pub enum BatchErrorKind {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(io::Error),
    /// The disk or its quota is full.
    #[error("{0} (ENOSPC or EDQUOT); nothing was published: free some space and write it again")]
    Full(io::Error),
    /// The manifest is not valid JSON or lacks a field.
    #[error("it is not a valid manifest")]
    Manifest(#[source] serde_json::Error),
    /// A newer version of this program wrote the batch.
    #[error(
        "its format version is {0}, but this program reads only {FORMAT_VERSION}; use the version of \
         Orchestrate that wrote it"
    )]
    Version(u32),
    /// The batch was made for another model.
    #[error("it was made for another model: {field} is {found}, expected {expected}")]
    Model {
        /// The part of the shape that differs.
        field: &'static str,
        /// Value in the batch.
        found: String,
        /// Value of the reader's model.
        expected: String,
    },
    /// The file's size or digest does not match the manifest.
    #[error("its size or digest does not match the manifest; write the batch again")]
    Digest,
    /// The safetensors header is invalid.
    #[error("it is not a valid safetensors file")]
    Header(#[source] safetensors::SafeTensorError),
    /// A tensor is missing, or has another dtype or shape.
    #[error("tensor `{name}` is {found}, expected {expected}")]
    Tensor {
        /// Name of the tensor.
        name: &'static str,
        /// Dtype and shape found, or `absent`.
        found: String,
        /// Dtype and shape expected.
        expected: String,
    },
    /// A tensor has an invalid value.
    #[error("tensor `{name}`, index {index}: {problem}")]
    Value {
        /// Name of the tensor.
        name: &'static str,
        /// Flat index of the value.
        index: usize,
        /// Why the value is invalid.
        problem: &'static str,
    },
    /// A field of the manifest or of the header metadata disagrees with the data.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// The requested sequence does not exist.
    #[error("it has {sequences} sequences, so sequence {index} does not exist")]
    NoSequence {
        /// Requested index, from 0.
        index: usize,
        /// Number of sequences in the batch.
        sequences: usize,
    },
    /// A sample is not valid for training.
    #[error("episode {episode}: {problem}")]
    Sample {
        /// Episode of the sample.
        episode: EpisodeId,
        /// Why the sample is invalid.
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
