//! Tasks: what the agent is asked, in which tree, and how its patch is judged.
//!
//! The invariant: hidden tests and the gold patch live in fields that nothing puts into the
//! agent's sandbox ([`Task::agent_files`] are the only files it gets).
//!
//! [`micro`] writes the bundled tasks, [`expert`] solves them by script, and [`repair`] makes tasks
//! from any Python repository with tests. [`load`] reads rows of
//! [`r2e`] (R2E-Gym) and of [`swe`] (SWE-bench, with its scripts, log parsers and verdicts) from
//! files, [`predictions`] the patches that agents made. [`patch`] makes and applies unified diffs,
//! [`verify`] builds the trees a grader needs, and [`grade`] turns a test log into a [`Verdict`].

pub mod expert;
mod json_column;
pub mod load;
mod log;
pub mod micro;
pub mod patch;
pub mod predictions;
pub mod r2e;
pub mod repair;
pub mod swe;
mod task;
mod text;
pub mod verify;

pub use log::{grade, grade_log};
pub use task::{Origin, Split, Task, TaskFile, TestStatus, Verdict};
pub use text::LINE_BYTES;
