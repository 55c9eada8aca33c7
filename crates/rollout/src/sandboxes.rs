//! Small operations on sandboxes that episodes and grading share.

use orchestrate_sandbox::{FileEntry, Sandbox, SandboxError, SandboxErrorKind};
use orchestrate_tasks::TaskFile;

/// Closes a sandbox. A failure is only logged: the provider cleans up, and the result stands.
pub(crate) async fn close(sandbox: Box<dyn Sandbox>) {
    if let Err(error) = sandbox.close().await {
        tracing::warn!(%error, "sandbox was not closed cleanly");
    }
}

/// The error for a step in `sandbox` that ended in an unexpected way.
pub(crate) fn refused(sandbox: &dyn Sandbox, call: &'static str, message: String) -> SandboxError {
    SandboxError {
        sandbox: sandbox.name().to_owned(),
        kind: SandboxErrorKind::Refused { call, message },
    }
}

/// A task's text file as sandboxes take it, with mode 0644.
pub(crate) fn file_entry(file: &TaskFile) -> FileEntry {
    FileEntry { path: file.path.clone(), mode: 0o644, content: file.content.clone().into_bytes() }
}
