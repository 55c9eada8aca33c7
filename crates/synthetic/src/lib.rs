//! An environment for benchmarks and tests in which everything but the program under test is cheap and
//! predictable.
//!
//! * [`serve`] is an engine with SGLang's routes. It computes nothing: time comes from a
//!   [`Latency`] model, text from a [`Script`], and routing rows from [`expected_rows`].
//! * [`SyntheticSandboxes`] run no command, and [`task`] is solved by any episode that submits.
//!
//! The invariant: a row is a function of only the policy version and the tokens up to its position.
//! So every row of every finished mask can be checked, whichever worker sent it and whatever was
//! killed meanwhile.

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
