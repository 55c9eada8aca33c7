//! In-memory sandboxes with a scripted shell and planned faults.

use orchestrate_sandbox::{
    ChangedFile, Command, ExecResult, Exit, FileEntry, Forward, Purpose, Sandbox, SandboxError,
    SandboxErrorKind, SandboxProvider, SandboxSpec, SweepReport, TreeChanges, TreeMark,
};
use orchestrate_types::{ByteSize, RunId};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

/// Mode and content of files, by path.
pub type FakeTree = BTreeMap<String, (u32, Vec<u8>)>;

/// The result of a scripted command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeExec {
    /// How the command ends.
    pub exit: Exit,
    /// Output of the command.
    pub output: String,
    /// How long the command takes on tokio's clock, at most until its timeout.
    pub takes: Duration,
}

impl FakeExec {
    /// A command that ends at once with exit code `code`.
    pub fn new(code: i32, output: impl Into<String>) -> Self {
        Self { exit: Exit::Code(code), output: output.into(), takes: Duration::ZERO }
    }
}

impl FakeExec {
    /// The result of which `keep_bytes` of the output are kept from each end.
    fn kept(self, keep_bytes: usize) -> ExecResult {
        let bytes = self.output.into_bytes();
        let (head, rest) = bytes.split_at(bytes.len().min(keep_bytes));
        let (_, tail) = rest.split_at(rest.len().saturating_sub(keep_bytes));
        ExecResult {
            exit: self.exit,
            head: head.to_vec(),
            tail: tail.to_vec(),
            total_bytes: bytes.len() as u64,
            oom_kills: 0,
            elapsed: self.takes,
        }
    }
}

/// Runs a shell script on a tree.
pub type FakeShell = dyn Fn(&mut FakeTree, &str) -> FakeExec + Send + Sync;

/// The processes of a command whose connections are carried to the program under test.
#[derive(Debug, Clone)]
pub struct FakeAgent {
    /// The command as it was asked for.
    pub command: Command,
    /// The forwarded port.
    pub port: u16,
    accepted: mpsc::Sender<DuplexStream>,
}

impl FakeAgent {
    /// Opens a connection to the forwarded port; `None` if its receiver was dropped.
    pub async fn connect(&self) -> Option<DuplexStream> {
        let (stream, served) = tokio::io::duplex(64 * 1024);
        self.accepted.send(served).await.ok().map(|()| stream)
    }
}

/// Runs a command that may open connections.
type AgentRun = dyn Fn(FakeAgent) -> Pin<Box<dyn Future<Output = FakeExec> + Send>> + Send + Sync;

/// A sandbox operation that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// [`SandboxProvider::open`].
    Open,
    /// [`Sandbox::exec`] and [`Sandbox::exec_forwarding`].
    Exec,
    /// [`Sandbox::write_files`].
    Write,
    /// [`Sandbox::read_tree`].
    ReadTree,
    /// [`Sandbox::mark_tree`].
    MarkTree,
    /// [`Sandbox::list_changes`] and [`Sandbox::read_files`].
    Collect,
    /// [`Sandbox::close`].
    Close,
}

#[derive(Debug)]
struct Fault {
    operation: Operation,
    purpose: Purpose,
    /// Number of calls that still succeed.
    skip: u32,
    /// Number of calls that fail after that.
    times: u32,
    /// The error of these calls; `None` = the sandbox is gone.
    kind: Option<SandboxErrorKind>,
}

#[derive(Debug, Default)]
struct Records {
    opened: Vec<SandboxSpec>,
    closed: usize,
    dropped: usize,
    faults: Vec<Fault>,
    graded: Vec<FakeTree>,
}

/// A provider of in-memory sandboxes.
#[derive(Clone)]
pub struct FakeSandboxes {
    shell: Arc<FakeShell>,
    agent: Option<Arc<AgentRun>>,
    records: Arc<Mutex<Records>>,
}

impl std::fmt::Debug for FakeSandboxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeSandboxes").finish_non_exhaustive()
    }
}

fn lock(records: &Mutex<Records>) -> MutexGuard<'_, Records> {
    records.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeSandboxes {
    /// A provider whose sandboxes run shell scripts with `shell`.
    pub fn new(shell: impl Fn(&mut FakeTree, &str) -> FakeExec + Send + Sync + 'static) -> Self {
        Self { shell: Arc::new(shell), agent: None, records: Arc::default() }
    }

    /// Runs commands whose connections are forwarded with `agent` instead of the shell.
    #[must_use]
    pub fn with_agent<F>(mut self, agent: impl Fn(FakeAgent) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = FakeExec> + Send + 'static,
    {
        self.agent = Some(Arc::new(move |side| Box::pin(agent(side))));
        self
    }

    /// Makes `operation` fail `times` times for sandboxes of `purpose`, after `skip` successes.
    pub fn fail(&self, operation: Operation, purpose: Purpose, skip: u32, times: u32) {
        self.add_fault(Fault { operation, purpose, skip, times, kind: None });
    }

    /// Makes `operation` fail with `kind` in every sandbox of `purpose`, after `skip` successes.
    pub fn fail_with(
        &self,
        operation: Operation,
        purpose: Purpose,
        skip: u32,
        kind: SandboxErrorKind,
    ) {
        let kind = Some(kind);
        self.add_fault(Fault { operation, purpose, skip, times: u32::MAX, kind });
    }

    fn add_fault(&self, fault: Fault) {
        lock(&self.records).faults.push(fault);
    }

    /// The specifications of all opened sandboxes, in order.
    pub fn opened(&self) -> Vec<SandboxSpec> {
        lock(&self.records).opened.clone()
    }

    /// Number of sandboxes that were neither closed nor dropped so far.
    pub fn still_open(&self) -> usize {
        let records = lock(&self.records);
        records.opened.len() - records.closed - records.dropped
    }

    /// Number of sandboxes that were dropped without being closed.
    pub fn dropped(&self) -> usize {
        lock(&self.records).dropped
    }

    /// Trees of the grader sandboxes at the time when they were closed.
    pub fn graded_trees(&self) -> Vec<FakeTree> {
        lock(&self.records).graded.clone()
    }

    fn check(
        records: &Mutex<Records>,
        operation: Operation,
        purpose: Purpose,
    ) -> Result<(), SandboxError> {
        for fault in &mut lock(records).faults {
            if fault.operation == operation && fault.purpose == purpose {
                if fault.skip > 0 {
                    fault.skip -= 1;
                } else if fault.times > 0 {
                    fault.times -= 1;
                    let gone = || SandboxErrorKind::Gone(format!("planned fault in {operation:?}"));
                    return Err(error(fault.kind.clone().unwrap_or_else(gone)));
                }
            }
        }
        Ok(())
    }
}

fn entry((path, (mode, content)): (&String, &(u32, Vec<u8>))) -> FileEntry {
    FileEntry { path: path.clone(), mode: *mode, content: content.clone() }
}

fn error(kind: SandboxErrorKind) -> SandboxError {
    SandboxError { sandbox: "fake".to_owned(), kind }
}

#[async_trait::async_trait]
impl SandboxProvider for FakeSandboxes {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Self::check(&self.records, Operation::Open, spec.purpose)?;
        lock(&self.records).opened.push(spec.clone());
        Ok(Box::new(ScriptedSandbox {
            name: format!("fake-{}-{:?}", spec.owner.attempt, spec.purpose),
            purpose: spec.purpose,
            tree: FakeTree::new(),
            marked: FakeTree::new(),
            shell: Arc::clone(&self.shell),
            agent: self.agent.clone(),
            records: Arc::clone(&self.records),
            is_closed: false,
        }))
    }

    async fn sweep(&self, _run: RunId, _epoch: i64) -> Result<SweepReport, SandboxError> {
        Ok(SweepReport::default())
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        Ok(())
    }
}

/// An in-memory sandbox. Two commands are built in: the file reader of the `edit` tool (five
/// arguments, the fourth is `sh`, the fifth the path) and `rm -f --`. Shell scripts go to the
/// provider's shell, and so do those whose streams are kept apart (the fourth argument is `split`,
/// the fifth the script).
pub struct ScriptedSandbox {
    name: String,
    purpose: Purpose,
    tree: FakeTree,
    marked: FakeTree,
    shell: Arc<FakeShell>,
    agent: Option<Arc<AgentRun>>,
    records: Arc<Mutex<Records>>,
    is_closed: bool,
}

impl std::fmt::Debug for ScriptedSandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedSandbox").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ScriptedSandbox {
    fn built_in(&mut self, argv: &[&str]) -> Option<FakeExec> {
        match argv {
            [_, "-c", _, "sh", path] => Some(match self.tree.get(*path) {
                Some((mode, content)) => {
                    FakeExec::new(0, format!("{mode:o}\n{}", String::from_utf8_lossy(content)))
                }
                None => FakeExec::new(1, "no such file"),
            }),
            ["rm", "-f", "--", paths @ ..] => {
                for path in paths {
                    self.tree.remove(*path);
                }
                Some(FakeExec::new(0, ""))
            }
            [_, "-c", script] | [_, "-c", _, "split", script, ..] => {
                let shell = Arc::clone(&self.shell);
                Some(shell(&mut self.tree, script))
            }
            _ => None,
        }
    }
}

#[async_trait::async_trait]
impl Sandbox for ScriptedSandbox {
    fn name(&self) -> &str {
        &self.name
    }

    async fn exec(&mut self, command: &Command) -> Result<ExecResult, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Exec, self.purpose)?;
        let argv: Vec<&str> = command.argv.iter().map(String::as_str).collect();
        let result = self.built_in(&argv);
        let mut result = result.unwrap_or(FakeExec {
            exit: Exit::NotStarted,
            output: String::new(),
            takes: Duration::ZERO,
        });
        if result.takes > command.timeout {
            result.exit = Exit::TimedOut;
            result.takes = command.timeout;
        }
        tokio::time::sleep(result.takes).await;
        Ok(result.kept(command.keep_bytes))
    }

    /// Runs the provider's agent, or the shell if it has none, until it ends or is stopped.
    async fn exec_forwarding(
        &mut self,
        command: &Command,
        forward: Forward<'_>,
    ) -> Result<ExecResult, SandboxError> {
        let Forward { port, accepted, stop } = forward;
        let ended = |exit| {
            let exec = FakeExec { exit, output: String::new(), takes: Duration::ZERO };
            Ok(exec.kept(command.keep_bytes))
        };
        let Some(agent) = self.agent.clone() else {
            return tokio::select! {
                result = self.exec(command) => result,
                () = stop.cancelled() => ended(Exit::Stopped),
            };
        };
        FakeSandboxes::check(&self.records, Operation::Exec, self.purpose)?;
        tokio::select! {
            result = agent(FakeAgent { command: command.clone(), port, accepted }) => {
                tokio::time::sleep(result.takes).await;
                Ok(result.kept(command.keep_bytes))
            }
            () = stop.cancelled() => ended(Exit::Stopped),
            () = tokio::time::sleep(command.timeout) => ended(Exit::TimedOut),
        }
    }

    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Write, self.purpose)?;
        for file in files {
            self.tree.insert(file.path.clone(), (file.mode, file.content.clone()));
        }
        Ok(())
    }

    async fn read_tree(&mut self, _cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::ReadTree, self.purpose)?;
        Ok(self.tree.iter().map(entry).collect())
    }

    async fn mark_tree(&mut self, mark: &TreeMark) -> Result<Vec<FileEntry>, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::MarkTree, self.purpose)?;
        self.marked = self.tree.clone();
        let has_name = |path: &str| path.rsplit('/').next() == Some(mark.send.as_str());
        Ok(self.tree.iter().filter(|(path, _)| has_name(path)).map(entry).collect())
    }

    async fn list_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Collect, self.purpose)?;
        let changed = |(path, file): &(&String, &(u32, Vec<u8>))| {
            self.marked.get(path.as_str()) != Some(*file)
        };
        let item = |(path, (mode, content)): (&String, &(u32, Vec<u8>))| ChangedFile {
            path: path.clone(),
            mode: *mode,
            size: content.len() as u64,
            is_new: !self.marked.contains_key(path),
            is_binary: content.contains(&0),
        };
        let gone = self.marked.keys().filter(|path| !self.tree.contains_key(*path));
        Ok(TreeChanges {
            written: self.tree.iter().filter(changed).map(item).collect(),
            removed: gone.cloned().collect(),
        })
    }

    async fn mark_system(&mut self, _skip: &[String]) -> Result<(), SandboxError> {
        FakeSandboxes::check(&self.records, Operation::MarkTree, self.purpose)?;
        Ok(())
    }

    async fn list_system_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Collect, self.purpose)?;
        Ok(TreeChanges::default())
    }

    async fn read_files(
        &mut self,
        paths: &[String],
        cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Collect, self.purpose)?;
        let files: Vec<FileEntry> =
            paths.iter().filter_map(|path| self.tree.get_key_value(path)).map(entry).collect();
        let size: usize = files.iter().map(|file| file.content.len()).sum();
        if size as u64 > cap.0 {
            return Err(error(SandboxErrorKind::TooLarge { what: "files".to_owned(), cap }));
        }
        Ok(files)
    }

    /// Changes nothing: scripted files have only one root.
    async fn set_root(&mut self, _path: &str) -> Result<(), SandboxError> {
        FakeSandboxes::check(&self.records, Operation::Write, self.purpose)
    }

    async fn close(mut self: Box<Self>) -> Result<(), SandboxError> {
        self.is_closed = true;
        let mut records = lock(&self.records);
        records.closed += 1;
        if self.purpose == Purpose::Grader {
            records.graded.push(self.tree.clone());
        }
        drop(records);
        FakeSandboxes::check(&self.records, Operation::Close, self.purpose)
    }
}

impl Drop for ScriptedSandbox {
    fn drop(&mut self) {
        if !self.is_closed {
            lock(&self.records).dropped += 1;
        }
    }
}
