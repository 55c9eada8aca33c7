//! Sandboxes: where model-written commands run. Never a bare host process.
//!
//! The invariant: a result counts only when the supervisor inside the container reported the
//! command's end; an end of stream is never taken for success.

mod api;

pub use api::{
    Command, ExecResult, Exit, FileEntry, Limits, Owner, Purpose, Sandbox, SandboxError,
    SandboxErrorKind, SandboxProvider, SandboxSpec, SweepReport,
};
