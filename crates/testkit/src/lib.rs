//! Fakes for tests: [`FakeEngine`], [`FakeSandboxes`], and a [`toy_task`] to solve with them; and
//! what every engine promises ([`engine_conformance!`]).
//!
//! Never part of the shipped program. The invariant: what a fake gives passes the same checks as
//! the real thing (routing rows have distinct ids in range, sandboxes must be closed).

pub mod conformance;
mod engine;
mod sandbox;
mod spans;
mod world;

pub use engine::{EngineScript, FakeEngine, FakeReply, toy_shape, well_behaved};
pub use sandbox::{FakeExec, FakeSandboxes, FakeTree, Operation, ScriptedSandbox, Shell};
pub use spans::{Fields, SpanCollector, SpanPath};
pub use world::{TOY_FIX, judge_toy, toy_shell, toy_task};
