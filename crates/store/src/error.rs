//! Errors of the journal, each with its remedy in the message.

use crate::file_system;
use crate::record::RecordError;
use camino::{Utf8Path, Utf8PathBuf};

/// A failed store operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process is using this run folder.
    #[error(
        "run folder {folder} is in use by {holder} (stop that process, or choose another --run-dir)"
    )]
    Locked {
        /// Path of the run folder.
        folder: Utf8PathBuf,
        /// Process id and host of the holder, from the lock file.
        holder: String,
    },
    /// The run folder already has a journal.
    #[error(
        "{journal} already exists (add --resume to continue that run, or choose another --run-dir)"
    )]
    Exists {
        /// Path of the journal.
        journal: Utf8PathBuf,
    },
    /// The run folder has no journal.
    #[error("{folder} is not a run folder: it has no {}", crate::JOURNAL_FILE)]
    Missing {
        /// The folder.
        folder: Utf8PathBuf,
    },
    /// The folder holds a run whose journal is gone.
    #[error(
        "{folder} holds files of a run, but no {}: restore it from a copy, or choose another folder; \
         nothing was changed",
        crate::JOURNAL_FILE
    )]
    JournalLost {
        /// The folder.
        folder: Utf8PathBuf,
    },
    /// The journal was not closed cleanly and cannot be recovered in a read-only folder.
    #[error(
        "{journal} was not closed cleanly and is in a read-only folder without its -shm file \
         (copy the folder to a writable place and open the copy)"
    )]
    NeedsRecovery {
        /// Path of the journal.
        journal: Utf8PathBuf,
    },
    /// A newer coordinator has taken over this run; nothing was written.
    #[error("this coordinator (epoch {epoch}) was replaced by a newer one and wrote nothing")]
    Fenced {
        /// The epoch that is no longer valid.
        epoch: i64,
    },
    /// The disk or its quota is full. Everything committed before is intact.
    #[error("no space left in {folder}: free some space, then run again with --resume")]
    Full {
        /// Path of the run folder.
        folder: Utf8PathBuf,
    },
    /// The journal's bytes are not a valid database.
    #[error(
        "{journal} is damaged ({detail}): restore it from a backup together with its -wal file, or start a new run"
    )]
    Corrupt {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// First problem that SQLite reported.
        detail: String,
    },
    /// The journal is older than the lock file next to it.
    #[error(
        "{journal} is an old copy: it is at epoch {journal_epoch}, but the run reached epoch \
         {lock_epoch} (put the newer journal and its -wal file back, or delete run.lock to \
         continue from the old copy on purpose)"
    )]
    OldCopy {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// Epoch recorded in the journal.
        journal_epoch: i64,
        /// Epoch recorded in the lock file.
        lock_epoch: i64,
    },
    /// A newer version of this program wrote the journal.
    #[error(
        "{journal} was written by a newer version of this program ({detail}): upgrade to open it"
    )]
    Newer {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// Which schema migration is unknown to this program.
        detail: String,
    },
    /// Another process has held a lock on the database for more than a minute.
    #[error(
        "{journal} is locked by another process: close tools that have it open, then run again with --resume"
    )]
    Busy {
        /// Path of the journal.
        journal: Utf8PathBuf,
    },
    /// A transition that the journal's constraints forbid.
    #[error("the journal rejected {what}: {detail}")]
    Refused {
        /// Name of the operation.
        what: &'static str,
        /// The violated constraint.
        detail: String,
    },
    /// The requested item is not in the journal.
    #[error("{what} is not in the journal")]
    Absent {
        /// The requested item, e.g. `episode t000012.03`.
        what: String,
    },
    /// A stored trajectory is missing, damaged or malformed.
    #[error("stored trajectory {path} cannot be used: {source} (restore it from a backup)")]
    Record {
        /// Path of the stored file.
        path: Utf8PathBuf,
        /// Why it cannot be used.
        source: RecordError,
    },
    /// A row holds a value that no version of this program writes.
    #[error("{journal} holds an unreadable value: {detail}")]
    Unreadable {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// The value and where it was found.
        detail: String,
    },
    /// A file operation failed.
    #[error("failed to access {path}")]
    Io {
        /// Path of the file or folder.
        path: Utf8PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The folder's file system lacks what SQLite needs.
    #[error(
        "journal operation {what} failed on {journal}{}: SQLite needs a writable file system with \
         locks and shared memory, as local ones are; choose another --run-dir",
        on_file_system(journal)
    )]
    FileSystem {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// Name of the operation.
        what: &'static str,
        /// Error of the database driver.
        source: sqlx::Error,
    },
    /// Any other database error.
    #[error("journal operation {what} failed on {journal}")]
    Db {
        /// Path of the journal.
        journal: Utf8PathBuf,
        /// Name of the operation.
        what: &'static str,
        /// Error of the database driver.
        source: sqlx::Error,
    },
}

/// Result codes of SQLite, low byte (<https://sqlite.org/rescode.html>).
mod code {
    pub(super) const BUSY: u32 = 5;
    pub(super) const LOCKED: u32 = 6;
    pub(super) const READ_ONLY: u32 = 8;
    pub(super) const IO: u32 = 10;
    pub(super) const CORRUPT: u32 = 11;
    pub(super) const FULL: u32 = 13;
    pub(super) const CANNOT_OPEN: u32 = 14;
    pub(super) const PROTOCOL: u32 = 15;
    pub(super) const NO_LARGE_FILES: u32 = 22;
    pub(super) const CONSTRAINT: u32 = 19;
    pub(super) const NOT_A_DB: u32 = 26;
}

impl StoreError {
    /// Translates a driver error. Only this function knows SQLite's codes.
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
            Some((
                code::READ_ONLY
                | code::IO
                | code::CANNOT_OPEN
                | code::PROTOCOL
                | code::NO_LARGE_FILES,
                _,
            )) => Self::FileSystem { journal, what, source },
            _ => Self::Db { journal, what, source },
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

/// Where `journal` is, as part of a message.
fn on_file_system(journal: &Utf8Path) -> String {
    let found = file_system::of(&folder_of(journal));
    found.map_or_else(String::new, |found| {
        format!(", on the file system `{}` at {}", found.kind, found.mounted_at)
    })
}

fn folder_of(path: &Utf8Path) -> Utf8PathBuf {
    path.parent().unwrap_or(path).to_owned()
}
