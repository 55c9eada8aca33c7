//! The agent's change, read from its sandbox by the supervisor alone.
//!
//! The tree is marked before the agent gets control. At the end the supervisor lists what differs,
//! and this program decides which of it counts and reads only that. No program of the agent's
//! container takes part, so what the agent replaces there has no effect.
//!
//! The invariant: the memory that a change takes here is bounded, whatever is in the container.

mod ignored;

use ignored::IgnoreRules;
use orchestrate_sandbox::{
    FileEntry, LINK_MODE, Sandbox, SandboxError, SandboxErrorKind, TreeMark,
};
use orchestrate_tasks::patch::rules::is_source_path;
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::ByteSize;
use std::collections::BTreeSet;

/// Largest content of all changed files together that is graded.
pub(crate) const MAX_CHANGE: ByteSize = ByteSize::mib(4);

/// Number of changed files above which nothing is graded.
const MAX_CHANGED_FILES: usize = 5_000;

/// Limit of a repository's ignore files together.
const MAX_IGNORE_FILES: ByteSize = ByteSize::mib(1);

/// Name of the files that say what git ignores.
const IGNORE_FILE: &str = ".gitignore";

/// The repository's own list of what git ignores.
const EXCLUDE_FILE: &str = ".git/info/exclude";

/// What is needed, besides the mark in the sandbox, to tell which changes count.
#[derive(Debug, Clone, Default)]
pub(crate) struct CollectionBaseline {
    /// `None` if every file counts.
    ignored: Option<IgnoreRules>,
}

/// The files and symbolic links that the agent changed and that may count. Binary files and links out of
/// the tree are left out when they are compared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CollectedChange {
    /// New and changed files, sorted by path.
    pub(crate) written: Vec<FileEntry>,
    /// Paths of removed files, sorted.
    pub(crate) removed: Vec<String>,
    /// Whether binary files were left out.
    pub(crate) has_binary: bool,
}

/// Marks the tree that the agent is given. `tracked` are the files that count although the
/// repository's ignore files name them; `None` if there is no repository.
pub(crate) async fn mark(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    tracked: Option<BTreeSet<String>>,
) -> Result<CollectionBaseline, SandboxError> {
    let hidden: &[&str] = match task.origin {
        Origin::R2e => &[".git", "__pycache__", "/.venv", "/r2e_tests", "/run_tests.sh"],
        Origin::SweBench(_) => &[".git", "__pycache__", "/.venv"],
        Origin::Files | Origin::External(_) | Origin::Harbor(_) => &[".git", "__pycache__"],
    };
    let skip = hidden.iter().map(|&name| name.to_owned()).collect();
    let mark = TreeMark { skip, send: IGNORE_FILE.to_owned(), cap: MAX_IGNORE_FILES };
    let mut ignore_files = sandbox.mark_tree(&mark).await?;
    let Some(tracked) = tracked else { return Ok(CollectionBaseline::default()) };
    let exclude = sandbox.read_files(&[EXCLUDE_FILE.to_owned()], MAX_IGNORE_FILES).await?;
    ignore_files.extend(exclude.into_iter().filter(|file| !file.is_link() && !file.is_special()));
    Ok(CollectionBaseline { ignored: Some(IgnoreRules::new(ignore_files, tracked)) })
}

/// The agent's change; `None` if it is too large to be graded.
pub(crate) async fn collect(
    sandbox: &mut dyn Sandbox,
    baseline: &CollectionBaseline,
) -> Result<Option<CollectedChange>, SandboxError> {
    let changes = match sandbox.list_changes().await {
        Ok(changes) => changes,
        Err(error) => return too_large(error),
    };
    let ignored = baseline.ignored.clone();
    let picked = crate::offload::run(move || {
        let counts = |path: &str| {
            is_source_path(path) && ignored.as_ref().is_none_or(|rules| !rules.ignores(path))
        };
        let (binary, written): (Vec<_>, Vec<_>) = changes
            .written
            .into_iter()
            .filter(|file| counts(&file.path))
            .partition(|file| file.is_binary);
        let removed: Vec<String> =
            changes.removed.into_iter().filter(|path| counts(path)).collect();
        if let Some(first) = binary.first() {
            tracing::info!(files = binary.len(), first = first.path, "binary files are left out");
        }
        (written, removed, !binary.is_empty())
    });
    let (written, removed, has_binary) =
        picked.await.map_err(|error| failed_here(sandbox, error))?;
    let size: u64 = written.iter().map(|file| file.size).fold(0, u64::saturating_add);
    let files = written.len() + removed.len();
    if size > MAX_CHANGE.0 || files > MAX_CHANGED_FILES {
        tracing::warn!(files, size, "the agent's change is too large to grade");
        return Ok(None);
    }
    let asked: Vec<String> = written.into_iter().map(|file| file.path).collect();
    let mut written = match sandbox.read_files(&asked, MAX_CHANGE).await {
        Ok(written) => written,
        Err(error) => return too_large(error),
    };
    for file in &mut written {
        file.mode &= LINK_MODE | 0o777;
    }
    Ok(Some(CollectedChange { written, removed, has_binary }))
}

/// Whether a file is binary, as git tells it: text in any encoding has no NUL.
pub(crate) fn is_binary(file: &FileEntry) -> bool {
    file.content.contains(&0)
}

fn too_large<T>(error: SandboxError) -> Result<Option<T>, SandboxError> {
    match &error.kind {
        SandboxErrorKind::TooLarge { what, cap } => {
            tracing::warn!(what, %cap, "the agent's tree is too large to grade");
            Ok(None)
        }
        _ => Err(error),
    }
}

/// The error for a computation that failed on this machine.
pub(crate) fn failed_here(
    sandbox: &dyn Sandbox,
    error: crate::offload::OffloadError,
) -> SandboxError {
    let kind = SandboxErrorKind::Failed { call: "compare", source: std::sync::Arc::new(error) };
    SandboxError { sandbox: sandbox.name().to_owned(), kind }
}
