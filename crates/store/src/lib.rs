//! The journal of a run: what was decided, in SQLite; what was sampled, in files by digest.
//!
//! The invariant: one writer. [`Store`] holds an operating-system lock on the run folder and an
//! epoch; every write transaction begins by checking that epoch, so a coordinator that lost its
//! place writes nothing. A file is complete on disk before the row that names it.
//!
//! [`Reader`] looks at a run, live or finished, without a lock. Read `store.rs` for how a journal
//! is opened, `attempts.rs` and `steps.rs` for its transitions, `record.rs` for the file format.

mod attempts;
mod blob;
mod db;
mod error;
#[cfg(feature = "failpoints")]
mod failpoint;
mod images;
mod lock;
mod read;
mod record;
mod rows;
mod sql;
mod steps;
mod store;

pub use attempts::{AfterBreak, Claim, Sealing};
pub use error::StoreError;
#[cfg(feature = "failpoints")]
pub use failpoint::Failpoint;
pub use images::{ImageRecords, ImageRow};
pub use read::{Reader, RunRow, StoredEpisode};
pub use record::{EpisodeRecord, RecordError, RowSpan, StoredRouting};
pub use rows::{
    AttemptRow, AttemptState, BatchRow, BatchState, EpisodeRow, EpisodeState, EvalRow, GroupRow,
    GroupState, StepRow, StepState, VersionRow,
};
pub use steps::BatchMember;
pub use store::{NewRun, Store};

/// Name of the journal inside a run folder.
pub const JOURNAL_FILE: &str = "orchestrate.db";
