//! Why a report cannot be made.

use orchestrate_metrics::LineError;
use orchestrate_store::StoreError;

/// A journal that no report can be made from.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The journal cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A stored metrics line has a format that neither this version nor an older one writes.
    #[error("line {number} of the stored metrics cannot be read")]
    Line {
        /// Its number in `metrics.jsonl`, from 1.
        number: usize,
        /// Why it cannot be read.
        source: LineError,
    },
}
