//! Tasks: the issue that an agent is given, the tree it works in, and how its patch is graded.
//!
//! The invariant: hidden tests and the gold patch are in fields that are never copied into the
//! agent's sandbox ([`Task::agent_files`] are the only files it gets).
//!
//! [`micro`] generates the bundled tasks, [`expert`] solves them with scripted episodes, and
//! [`repair`] makes tasks from any Python repository with tests. [`load`] reads rows of [`r2e`]
//! (R2E-Gym), [`PlainRow`]s and [`swe`] (SWE-bench and its family, with scripts, log parsers and
//! verdicts) from files, and [`harbor`] reads Harbor's task folders; [`predictions`] reads patches
//! made by agents. [`patch`] makes and applies unified diffs, [`verify`] builds the trees that are
//! graded, and [`grade`] turns a test log into a [`Verdict`]. [`reporter`] runs tests so that what
//! they print cannot decide; [`Finding`] is what a verdict noticed besides.

mod column;
pub mod expert;
mod finding;
pub mod harbor;
mod json_column;
mod keys;
pub mod load;
mod log;
pub mod micro;
pub mod patch;
mod plain;
pub mod predictions;
pub mod r2e;
pub mod repair;
pub mod reporter;
pub mod swe;
mod task;
mod task_file;
mod text;
pub mod verify;

pub use finding::Finding;
pub use log::{SummaryRule, grade, grade_by, grade_log, grade_log_by, grade_reported};
pub use plain::PlainRow;
pub use task::{Origin, Split, Task, TaskStart, TestStatus, Verdict};
pub use task_file::TaskFile;
pub use text::{LINE_BYTES, printable, printable_lines};
