//! Fakes for tests: [`FakeEngine`], [`FakeSandboxes`] and a [`toy_task`] to solve with them; and
//! the conformance tests that every engine must pass ([`engine_conformance!`]).
//!
//! Never part of the shipped program. The invariant: the output of a fake passes the same checks as
//! that of the real implementation (routing rows have distinct ids in range, sandboxes must be
//! closed).

pub mod conformance;
mod engine;
mod sandbox;
mod spans;
mod toy;

pub use engine::{EngineScript, FakeEngine, FakeReply, FakeRequest, toy_shape, well_behaved};
pub use sandbox::{FakeExec, FakeSandboxes, FakeShell, FakeTree, Operation, ScriptedSandbox};
pub use spans::{Fields, SpanCollector, SpanPath};
pub use toy::{TOY_FIX, grade_toy, toy_shell, toy_task};
