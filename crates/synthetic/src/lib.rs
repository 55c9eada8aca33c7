//! A world for benchmarks, in which everything but the program under measurement is cheap and
//! known beforehand.
//!
//! * [`serve`] is an engine with SGLang's routes. It computes nothing: time comes from a
//!   [`Latency`] model, text from a [`Script`], and routing rows from [`expected_rows`].
//! * [`SyntheticSandboxes`] run no command, and [`task`] is solved by any episode that submits.
//!
//! The invariant: a row is a function of the policy version and the tokens up to its position, and
//! of nothing else. So every row of every finished mask can be checked, whichever worker sent it,
//! and whatever died on the way.

mod cache;
mod engine;
mod latency;
mod rows;
mod sandbox;
mod script;
mod world;

pub use engine::{EnginePlan, EngineStats, serve};
pub use latency::Latency;
pub use rows::expected_rows;
pub use sandbox::SyntheticSandboxes;
pub use script::Script;
pub use world::{judge, task};
