//! The journal of a run: decisions in SQLite, sampled trajectories in files named by digest.
//!
//! The invariant: there is one writer. [`Store`] holds an operating-system lock on the run folder
//! and an epoch. Every write transaction starts by checking that epoch, so a coordinator that has
//! been replaced writes nothing. A file is complete on disk before a row names it.
//!
//! [`Reader`] reads a live or finished run without a lock. See `store.rs` for how a journal
//! is opened, `attempts.rs` and `steps.rs` for its transitions, `record.rs` for the file format.

mod amendments;
mod attempts;
mod blob;
mod db;
mod error;
#[cfg(feature = "failpoints")]
mod failpoint;
mod file_system;
mod images;
mod lock;
mod read;
mod record;
mod rows;
mod sql;
mod steps;
mod store;

pub use amendments::AmendmentRow;
pub use attempts::{AfterBreak, Claim, Sealing};
pub use db::JOURNAL_FILE;
pub use error::StoreError;
#[cfg(feature = "failpoints")]
pub use failpoint::Failpoint;
pub use images::{ImageRecords, ImageRow};
pub use lock::{LOCK_FILE, holder};
pub use read::{NewestRow, Reader, RunRow, StoredEpisode};
pub use record::{EpisodeRecord, RecordError, RowSpan, StoredBranch, StoredRouting};
pub use rows::{
    AttemptRow, AttemptState, BatchRow, BatchState, EpisodeRow, EpisodeState, EvalRow, GroupRow,
    GroupState, RunKind, StepRow, StepState, VersionRow,
};
pub use steps::BatchMember;
pub use store::{Closer, NewRun, RunHold, Store, check_new};
