//! Artifacts: the files that a separate verifier receives from the agent's container.

use super::container::{HELPER_TIMEOUT, shell};
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use orchestrate_sandbox::{FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::harbor::{Artifact, HarborRow, HarborStep, seconds};
use orchestrate_types::ByteSize;

/// Maximum total size of all artifacts.
const MAX_ARTIFACTS: ByteSize = ByteSize::mib(64);

/// An artifact that exists in the agent's container.
#[derive(Debug)]
pub(super) struct Collected {
    /// Its absolute path, in both containers.
    pub(super) source: String,
    /// Its files, relative to the root; for a folder, all its contents.
    pub(super) files: Vec<FileEntry>,
    /// Whether it is a folder, which replaces the one in the verifier's container.
    pub(super) is_folder: bool,
}

/// Runs the collect hooks and reads the artifacts. Missing artifacts are skipped, as in Harbor, and
/// so are symbolic links.
pub(super) async fn collect(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    step: &HarborStep,
) -> Result<Vec<Collected>, SandboxError> {
    for hook in &step.verifier.collect {
        let result = sandbox.exec(&shell(row, &hook.command, seconds(hook.timeout_s))).await?;
        if !result.success() {
            tracing::info!(output = result.text(), command = hook.command, "a collect hook failed");
        }
    }
    let (mut collected, mut left) = (Vec::new(), MAX_ARTIFACTS);
    for artifact in &step.verifier.artifacts {
        let Some(found) = read(sandbox, row, artifact, left).await? else { continue };
        let size: usize = found.files.iter().map(|file| file.content.len()).sum();
        left = ByteSize(left.0.saturating_sub(size as u64));
        collected.push(found);
    }
    Ok(collected)
}

async fn read(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    artifact: &Artifact,
    cap: ByteSize,
) -> Result<Option<Collected>, SandboxError> {
    let relative = artifact.source.trim_matches('/').to_owned();
    let source = format!("/{relative}");
    sandbox.set_root("/").await?;
    let mut files = sandbox.read_files(std::slice::from_ref(&relative), cap).await?;
    files.retain(|file| !file.is_link() && !file.is_special());
    if !files.is_empty() {
        for file in &mut files {
            file.mode &= 0o777;
        }
        return Ok(Some(Collected { source, files, is_folder: false }));
    }
    let mut is_folder = shell(row, "[ -d \"$0\" ] && [ ! -L \"$0\" ]", HELPER_TIMEOUT);
    is_folder.argv.push(source.clone());
    if !sandbox.exec(&is_folder).await?.success() {
        return Ok(None);
    }
    sandbox.set_root(&source).await?;
    let mut files = sandbox.read_tree(cap).await?;
    let excluded = patterns(&artifact.exclude);
    files.retain(|file| !excluded.matched_path_or_any_parents(&file.path, false).is_ignore());
    for file in &mut files {
        file.mode &= 0o777;
        file.path = format!("{relative}/{}", file.path);
    }
    Ok(Some(Collected { source, files, is_folder: true }))
}

/// Name patterns in the syntax of `tar --exclude`.
fn patterns(exclude: &[String]) -> Gitignore {
    let mut builder = GitignoreBuilder::new("");
    for pattern in exclude {
        // Invalid patterns have no effect.
        let _ = builder.add_line(None, pattern);
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}
