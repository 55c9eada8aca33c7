//! Sandboxes without processes, whose commands take no time.

use async_trait::async_trait;
use orchestrate_sandbox::{
    Command, ExecResult, Exit, FileEntry, Forward, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec, SweepReport, TreeChanges, TreeMark,
};
use orchestrate_types::{ByteSize, RunId};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::sync::{mpsc, oneshot};

/// A provider of sandboxes in which every command succeeds with the same output.
#[derive(Debug, Clone)]
pub struct SyntheticSandboxes {
    /// Output of every command.
    pub output: String,
    /// Receives commands with a forwarded port, to run them as agents; `None` = such commands do
    /// nothing.
    pub agents: Option<mpsc::Sender<AgentJob>>,
}

/// A command with a forwarded port, to be run as an agent.
#[derive(Debug)]
pub struct AgentJob {
    /// Value of the variable `TASK_PROMPT`.
    pub prompt: String,
    /// The single connection to the port.
    pub stream: DuplexStream,
    /// Receives the result; a failure ends the command with status 1 and this output.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// Bytes in flight on the connection, in each direction.
const WINDOW: usize = 256 * 1024;

#[async_trait]
impl SandboxProvider for SyntheticSandboxes {
    async fn open(&self, _spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let Self { output, agents } = self.clone();
        Ok(Box::new(SyntheticSandbox { files: Vec::new(), output, agents }))
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
    agents: Option<mpsc::Sender<AgentJob>>,
}

impl SyntheticSandbox {
    /// Runs a command as an agent, if agents are attached; `None` for all other commands.
    async fn work(&self, command: &Command, forward: Forward<'_>) -> Option<Result<(), String>> {
        let agents = self.agents.as_ref()?;
        let prompt = command.env.iter().find(|(name, _)| name == "TASK_PROMPT");
        let prompt = prompt.map(|(_, prompt)| prompt.clone()).unwrap_or_default();
        let (stream, served) = tokio::io::duplex(WINDOW);
        let (done, ended) = oneshot::channel();
        if forward.accepted.send(served).await.is_err() {
            return Some(Err("the port is not served".to_owned()));
        }
        if agents.send(AgentJob { prompt, stream, done }).await.is_err() {
            return Some(Err("no agent took the command".to_owned()));
        }
        Some(ended.await.unwrap_or_else(|error| Err(error.to_string())))
    }
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

    async fn exec_forwarding(
        &mut self,
        command: &Command,
        forward: Forward<'_>,
    ) -> Result<ExecResult, SandboxError> {
        let worked = self.work(command, forward).await;
        let result = self.exec(command).await?;
        match worked {
            Some(Err(error)) => {
                Ok(ExecResult { exit: Exit::Code(1), head: error.into_bytes(), ..result })
            }
            Some(Ok(())) | None => Ok(result),
        }
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
