//! Sandboxes without processes, whose commands take no time.

use async_trait::async_trait;
use orchestrate_sandbox::{
    Command, ExecResult, Exit, FileEntry, Forward, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec, SweepReport, TreeChanges, TreeMark,
};
use orchestrate_types::{ByteSize, RunId};
use std::time::Duration;

/// A provider of sandboxes in which every command succeeds with the same output.
#[derive(Debug, Clone)]
pub struct SyntheticSandboxes {
    /// Output of every command.
    pub output: String,
}

#[async_trait]
impl SandboxProvider for SyntheticSandboxes {
    async fn open(&self, _spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(SyntheticSandbox { files: Vec::new(), output: self.output.clone() }))
    }

    async fn sweep(&self, _run: RunId, _epoch: i64) -> Result<SweepReport, SandboxError> {
        Ok(SweepReport::default())
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        Ok(())
    }
}

#[derive(Debug)]
struct SyntheticSandbox {
    files: Vec<FileEntry>,
    output: String,
}

#[async_trait]
impl Sandbox for SyntheticSandbox {
    fn name(&self) -> &'static str {
        "synthetic"
    }

    async fn exec(&mut self, command: &Command) -> Result<ExecResult, SandboxError> {
        let output = self.output.as_bytes();
        Ok(ExecResult {
            exit: Exit::Code(0),
            head: output.get(..output.len().min(command.keep_bytes)).unwrap_or_default().to_vec(),
            tail: Vec::new(),
            total_bytes: output.len() as u64,
            oom_kills: 0,
            elapsed: Duration::ZERO,
        })
    }

    /// Its commands open no connections.
    async fn exec_forwarding(
        &mut self,
        command: &Command,
        _forward: Forward<'_>,
    ) -> Result<ExecResult, SandboxError> {
        self.exec(command).await
    }

    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        self.files.extend_from_slice(files);
        Ok(())
    }

    async fn read_tree(&mut self, _cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        Ok(self.files.clone())
    }

    async fn mark_tree(&mut self, _mark: &TreeMark) -> Result<Vec<FileEntry>, SandboxError> {
        Ok(Vec::new())
    }

    async fn list_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        Ok(TreeChanges::default())
    }

    async fn mark_system(&mut self, _skip: &[String]) -> Result<(), SandboxError> {
        Ok(())
    }

    async fn list_system_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        Ok(TreeChanges::default())
    }

    async fn read_files(
        &mut self,
        paths: &[String],
        _cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError> {
        let asked = self.files.iter().filter(|file| paths.contains(&file.path));
        Ok(asked.cloned().collect())
    }

    async fn set_root(&mut self, _path: &str) -> Result<(), SandboxError> {
        Ok(())
    }

    async fn close(self: Box<Self>) -> Result<(), SandboxError> {
        Ok(())
    }
}
