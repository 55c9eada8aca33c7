//! Why a sink could not be brought up to date.

use camino::Utf8PathBuf;
use orchestrate_metrics::LineError;
use orchestrate_store::StoreError;

/// Why a sink could not be brought up to date. Lines that are missing stay in the journal, so the
/// next attempt writes them.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// A file cannot be read or written.
    #[error("cannot write {path}: {source}; free some space there, or make it writable")]
    File {
        /// The file.
        path: Utf8PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Lines cannot be encoded in a file's format.
    #[error("cannot encode the lines for {path}: {problem}; please report this as a bug")]
    Encoding {
        /// The file.
        path: Utf8PathBuf,
        /// The library's reason.
        problem: String,
    },
    /// The journal cannot be read.
    #[error("cannot read the journal")]
    Journal(#[from] StoreError),
    /// The journal has a line that this version cannot read.
    #[error("cannot read a metrics line of the journal")]
    Line(#[from] LineError),
}

impl SinkError {
    /// An error of a file, for `map_err`.
    pub(crate) fn file(path: &camino::Utf8Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::File { path: path.to_owned(), source }
    }
}
