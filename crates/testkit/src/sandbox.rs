//! Sandboxes that are trees in memory, with a scripted shell and planned faults.

use orchestrate_sandbox::{
    Command, ExecResult, Exit, FileEntry, Purpose, Sandbox, SandboxError, SandboxErrorKind,
    SandboxProvider, SandboxSpec, SweepReport,
};
use orchestrate_types::{ByteSize, RunId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Files by path: mode and content.
pub type FakeTree = BTreeMap<String, (u32, Vec<u8>)>;

/// What a scripted command does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeExec {
    /// How it ends.
    pub exit: Exit,
    /// What it prints.
    pub output: String,
    /// How long it takes (on tokio's clock), cut at the command's timeout.
    pub takes: Duration,
}

impl FakeExec {
    /// Ends with `code` at once.
    pub fn new(code: i32, output: impl Into<String>) -> Self {
        Self { exit: Exit::Code(code), output: output.into(), takes: Duration::ZERO }
    }
}

/// Runs one shell script on a tree.
pub type Shell = dyn Fn(&mut FakeTree, &str) -> FakeExec + Send + Sync;

/// Something a sandbox is asked to do, and that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// [`SandboxProvider::open`].
    Open,
    /// [`Sandbox::exec`].
    Exec,
    /// [`Sandbox::write_files`].
    Write,
    /// [`Sandbox::read_tree`].
    ReadTree,
    /// [`Sandbox::close`].
    Close,
}

#[derive(Debug)]
struct Fault {
    operation: Operation,
    purpose: Purpose,
    /// Calls that still succeed.
    skip: u32,
    /// Calls that then fail.
    times: u32,
}

#[derive(Debug, Default)]
struct Ledger {
    opened: Vec<SandboxSpec>,
    closed: usize,
    dropped: usize,
    faults: Vec<Fault>,
    graded: Vec<FakeTree>,
}

/// A provider of in-memory sandboxes.
#[derive(Clone)]
pub struct FakeSandboxes {
    shell: Arc<Shell>,
    ledger: Arc<Mutex<Ledger>>,
}

impl std::fmt::Debug for FakeSandboxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeSandboxes").finish_non_exhaustive()
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeSandboxes {
    /// Sandboxes whose shell scripts are run by `shell`.
    pub fn new(shell: impl Fn(&mut FakeTree, &str) -> FakeExec + Send + Sync + 'static) -> Self {
        Self { shell: Arc::new(shell), ledger: Arc::default() }
    }

    /// Lets `operation` of sandboxes for `purpose` fail `times` times, after `skip` successes.
    pub fn fail(&self, operation: Operation, purpose: Purpose, skip: u32, times: u32) {
        lock(&self.ledger).faults.push(Fault { operation, purpose, skip, times });
    }

    /// What was opened, in order.
    pub fn opened(&self) -> Vec<SandboxSpec> {
        lock(&self.ledger).opened.clone()
    }

    /// Sandboxes that were neither closed nor dropped yet.
    pub fn still_open(&self) -> usize {
        let ledger = lock(&self.ledger);
        ledger.opened.len() - ledger.closed - ledger.dropped
    }

    /// Sandboxes that were dropped instead of closed.
    pub fn dropped(&self) -> usize {
        lock(&self.ledger).dropped
    }

    /// Trees of grader sandboxes as they were when they closed.
    pub fn graded_trees(&self) -> Vec<FakeTree> {
        lock(&self.ledger).graded.clone()
    }

    fn check(
        ledger: &Mutex<Ledger>,
        operation: Operation,
        purpose: Purpose,
    ) -> Result<(), SandboxError> {
        for fault in &mut lock(ledger).faults {
            if fault.operation == operation && fault.purpose == purpose {
                if fault.skip > 0 {
                    fault.skip -= 1;
                } else if fault.times > 0 {
                    fault.times -= 1;
                    let message = format!("planned fault in {operation:?}");
                    return Err(error(SandboxErrorKind::Gone(message)));
                }
            }
        }
        Ok(())
    }
}

fn error(kind: SandboxErrorKind) -> SandboxError {
    SandboxError { sandbox: "fake".to_owned(), kind }
}

#[async_trait::async_trait]
impl SandboxProvider for FakeSandboxes {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Self::check(&self.ledger, Operation::Open, spec.purpose)?;
        lock(&self.ledger).opened.push(spec.clone());
        Ok(Box::new(ScriptedSandbox {
            name: format!("fake-{}-{:?}", spec.owner.attempt, spec.purpose),
            purpose: spec.purpose,
            tree: FakeTree::new(),
            shell: Arc::clone(&self.shell),
            ledger: Arc::clone(&self.ledger),
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

/// One in-memory sandbox. Two kinds of command are built in: the file reader of the `edit` tool
/// (five arguments, `sh` the fourth, the path the fifth) and `rm -f --`; shell scripts go to the
/// provider's shell, those that are run with their streams apart (`split` the fourth, the script the
/// fifth of more) included.
pub struct ScriptedSandbox {
    name: String,
    purpose: Purpose,
    tree: FakeTree,
    shell: Arc<Shell>,
    ledger: Arc<Mutex<Ledger>>,
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
        FakeSandboxes::check(&self.ledger, Operation::Exec, self.purpose)?;
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
        let bytes = result.output.into_bytes();
        let (head, rest) = bytes.split_at(bytes.len().min(command.keep_bytes));
        let (_, tail) = rest.split_at(rest.len().saturating_sub(command.keep_bytes));
        Ok(ExecResult {
            exit: result.exit,
            head: head.to_vec(),
            tail: tail.to_vec(),
            total_bytes: bytes.len() as u64,
            oom_kills: 0,
            elapsed: result.takes,
        })
    }

    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        FakeSandboxes::check(&self.ledger, Operation::Write, self.purpose)?;
        for file in files {
            self.tree.insert(file.path.clone(), (file.mode, file.content.clone()));
        }
        Ok(())
    }

    async fn read_tree(&mut self, _cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        FakeSandboxes::check(&self.ledger, Operation::ReadTree, self.purpose)?;
        let entry = |(path, (mode, content)): (&String, &(u32, Vec<u8>))| FileEntry {
            path: path.clone(),
            mode: *mode,
            content: content.clone(),
        };
        Ok(self.tree.iter().map(entry).collect())
    }

    async fn close(mut self: Box<Self>) -> Result<(), SandboxError> {
        self.is_closed = true;
        let mut ledger = lock(&self.ledger);
        ledger.closed += 1;
        if self.purpose == Purpose::Grader {
            ledger.graded.push(self.tree.clone());
        }
        drop(ledger);
        FakeSandboxes::check(&self.ledger, Operation::Close, self.purpose)
    }
}

impl Drop for ScriptedSandbox {
    fn drop(&mut self) {
        if !self.is_closed {
            lock(&self.ledger).dropped += 1;
        }
    }
}
