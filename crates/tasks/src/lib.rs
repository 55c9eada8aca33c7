//! Tasks: what the agent is asked, in which tree, and how its patch is judged.
//!
//! The invariant: hidden tests and the gold patch live in fields that nothing puts into the
//! agent's sandbox ([`Task::agent_files`] are the only files it gets).
//!
//! [`micro`] writes the bundled tasks, [`r2e`] reads and writes R2E-Gym's rows, [`expert`] solves
//! micro tasks by script, [`patch`] makes and applies unified diffs, [`verify`] builds the trees a
//! grader needs, and [`grade`] turns a test log into a [`Verdict`].

pub mod expert;
mod log;
pub mod micro;
pub mod patch;
pub mod r2e;
mod task;
pub mod verify;

pub use log::grade;
pub use task::{Split, Task, TaskFile, TestStatus, Verdict};
