//! Stand-ins for benchmarks: everything but the program under measurement is cheap and predictable.
//!
//! * [`serve`] is an engine with SGLang's routes that computes nothing. Its response times come from
//!   a [`Latency`] model, its tokens from a [`Script`], and its routing rows from [`expected_rows`].
//! * [`SyntheticSandboxes`] run no command, and [`task`] is solved by any episode that submits.
//!
//! The invariant: a row is a function of the policy version and the tokens up to its position, and
//! of nothing else. Every row of a finished mask can therefore be checked, whichever worker sent it
//! and whatever failed on the way.

mod cache;
mod engine;
mod latency;
mod rows;
mod sandbox;
mod script;
mod task;

pub use engine::{EnginePlan, EngineStats, serve};
pub use latency::Latency;
pub use rows::expected_rows;
pub use sandbox::{AgentJob, SyntheticSandboxes};
pub use script::Script;
pub use task::{grade, task};
