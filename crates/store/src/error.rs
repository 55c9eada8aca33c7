//! Every way a journal can fail, with the remedy in the message.

use crate::record::RecordError;
use camino::{Utf8Path, Utf8PathBuf};

/// A failed store operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process works on this run.
    #[error(
        "run folder {folder} is in use by {holder} (stop that process, or choose another --run-dir)"
    )]
    Locked {
        /// The run folder.
        folder: Utf8PathBuf,
        /// What the lock file says: pid and host.
        holder: String,
    },
    /// There is a journal already.
    #[error(
        "{journal} exists already (add --resume to continue that run, or choose another --run-dir)"
    )]
    Exists {
        /// The journal.
        journal: Utf8PathBuf,
    },
    /// There is no journal.
    #[error("{journal} does not exist (check --run-dir, or start a new run without --resume)")]
    Missing {
        /// The journal.
        journal: Utf8PathBuf,
    },
    /// The journal was not closed, and cannot be recovered where it lies.
    #[error(
        "{journal} was not closed cleanly and lies in a read-only folder without its -shm file \
         (copy the folder to a writable place and open the copy)"
    )]
    NeedsRecovery {
        /// The journal.
        journal: Utf8PathBuf,
    },
    /// A newer coordinator took this run over; nothing was written.
    #[error("this coordinator (epoch {epoch}) was replaced by a newer one and wrote nothing")]
    Fenced {
        /// The epoch that is no longer valid.
        epoch: i64,
    },
    /// The disk, or the quota, is full. What was committed before is intact.
    #[error("no space left in {folder}: free some space there, then continue with --resume")]
    Full {
        /// The run folder.
        folder: Utf8PathBuf,
    },
    /// The journal's bytes are not a sound database.
    #[error(
        "{journal} is damaged ({detail}): restore it from a backup together with its -wal file, or start a new run"
    )]
    Corrupt {
        /// The journal.
        journal: Utf8PathBuf,
        /// What the check found.
        detail: String,
    },
    /// The journal is older than the lock file beside it.
    #[error(
        "{journal} is an old copy: it is at epoch {journal_epoch}, the run reached epoch \
         {lock_epoch} (put the newer journal and its -wal file back, or delete run.lock to \
         continue from the old copy on purpose)"
    )]
    OldCopy {
        /// The journal.
        journal: Utf8PathBuf,
        /// Epoch in the journal.
        journal_epoch: i64,
        /// Epoch in the lock file.
        lock_epoch: i64,
    },
    /// A newer program wrote the journal.
    #[error(
        "{journal} was written by a newer version of this program ({detail}): upgrade to open it"
    )]
    Newer {
        /// The journal.
        journal: Utf8PathBuf,
        /// What is not known here.
        detail: String,
    },
    /// Another process holds the database locked for longer than we wait.
    #[error("{journal} is locked by another process: close tools that have it open, then --resume")]
    Busy {
        /// The journal.
        journal: Utf8PathBuf,
    },
    /// A transition the journal's constraints forbid.
    #[error("the journal refuses {what}: {detail}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// The constraint.
        detail: String,
    },
    /// No such episode, or none with a sealed attempt.
    #[error("{what} is not in the journal")]
    Absent {
        /// What was asked for.
        what: String,
    },
    /// A stored trajectory is missing or differs from its digest.
    #[error("stored trajectory {path} cannot be used: {source} (restore it from a backup)")]
    Record {
        /// The file.
        path: Utf8PathBuf,
        /// Why.
        source: RecordError,
    },
    /// A value in a row that no version of this program writes.
    #[error("{journal} holds an unreadable value: {detail}")]
    Unreadable {
        /// The journal.
        journal: Utf8PathBuf,
        /// What and where.
        detail: String,
    },
    /// A file operation failed.
    #[error("failed to access {path}")]
    Io {
        /// The file or folder.
        path: Utf8PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// Any other database error.
    #[error("journal operation {what} failed")]
    Db {
        /// The operation.
        what: &'static str,
        /// The driver's word.
        source: sqlx::Error,
    },
}

/// Result codes of SQLite, low byte (<https://sqlite.org/rescode.html>).
mod code {
    pub(super) const BUSY: u32 = 5;
    pub(super) const LOCKED: u32 = 6;
    pub(super) const CORRUPT: u32 = 11;
    pub(super) const FULL: u32 = 13;
    pub(super) const CONSTRAINT: u32 = 19;
    pub(super) const NOT_A_DB: u32 = 26;
}

impl StoreError {
    /// Translates a driver error: the one place that knows SQLite's codes.
    pub(crate) fn from_db(journal: &Utf8Path, what: &'static str, source: sqlx::Error) -> Self {
        let journal = journal.to_owned();
        let known = match &source {
            sqlx::Error::Database(e) => e
                .code()
                .and_then(|c| c.parse::<u32>().ok())
                .map(|c| (c & 0xff, e.message().to_owned())),
            _ => None,
        };
        match known {
            Some((code::FULL, _)) => Self::Full { folder: folder_of(&journal) },
            Some((code::CORRUPT | code::NOT_A_DB, detail)) => Self::Corrupt { journal, detail },
            Some((code::BUSY | code::LOCKED, _)) => Self::Busy { journal },
            Some((code::CONSTRAINT, detail)) => Self::Refused { what, detail },
            _ => Self::Db { what, source },
        }
    }

    /// Translates a file error.
    pub(crate) fn from_io(path: &Utf8Path, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                Self::Full { folder: folder_of(path) }
            }
            _ => Self::Io { path: path.to_owned(), source },
        }
    }
}

fn folder_of(path: &Utf8Path) -> Utf8PathBuf {
    path.parent().unwrap_or(path).to_owned()
}
