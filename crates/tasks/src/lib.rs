//! Tasks: what the agent is asked, in which tree, and how its patch is judged.
//!
//! The invariant: hidden tests and the gold patch live in fields that nothing puts into the
//! agent's sandbox ([`Task::agent_files`] are the only files it gets).

mod task;

pub use task::{Split, Task, TaskFile, TestStatus, Verdict};
