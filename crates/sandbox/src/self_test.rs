//! The self-test: hostile commands and lost containers, case by case, on a real daemon.
//!
//! Each case has exactly one correct outcome and must end at most two seconds after its deadline.
//! Afterwards the next command must work, and no process of the case may be alive.

mod case;
mod cases;

use crate::api::{
    Command, ExecResult, Exit, FileEntry, Owner, Purpose, Sandbox, SandboxLimits,
    SandboxProvider as _, SandboxSpec,
};
use crate::config::SandboxSettings;
use crate::error::{SandboxError, SandboxErrorKind};
use crate::provider::DockerProvider;
use case::{Action, Case, ErrorClass, Expected};
use cases::{CASES, GRACE_MS};
use orchestrate_types::{AttemptId, ByteSize, EpisodeId, GroupId, HumanDuration, RunId};
use std::time::Duration;
use tokio::time::Instant;

/// How much later than its deadline a case may end.
const TOLERANCE: Duration = Duration::from_secs(2);
/// Time limit of the check that follows each case.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a command runs before it is interfered with.
const INTERFERE_AFTER: Duration = Duration::from_millis(200);
const TREE_CAP: ByteSize = ByteSize::mib(8);
/// Prints what is left in a reused sandbox: the folder's mode, the number of leftover files, and
/// the number of leftover entries in /dev.
const LIST_LEFTOVERS: &str = "stat -c %a .; find . /tmp /dev/shm -mindepth 1 | wc -l; \
                              ls /dev/hidden 2> /dev/null | wc -l";
/// Largest number of processes alive during the check: process 1, the shell and the two commands of
/// its pipeline.
const CHECK_PROCESSES: u32 = 4;

/// The result of one case.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct SelfTestResult {
    /// Name of the case.
    pub name: &'static str,
    /// Whether the outcome was correct and in time, and the next command worked.
    pub ok: bool,
    /// Description of the outcome.
    pub outcome: String,
    /// Milliseconds from the start of the action to its outcome.
    pub elapsed_ms: u64,
    /// Largest permitted `elapsed_ms`.
    pub limit_ms: u64,
    /// Whether the next command ran in another container.
    pub replaced: bool,
    /// Why the case failed; `None` if it passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The outcome of an action.
#[derive(Debug)]
enum Outcome {
    Ran(ExecResult),
    Tree(Vec<FileEntry>),
    Wrote,
    /// Another sandbox was opened after the first was closed.
    Reopened {
        same_container: bool,
    },
    Failed(SandboxError),
}

/// Names of all cases, in the order in which they run.
pub fn self_test_cases() -> Vec<&'static str> {
    CASES.iter().map(|case| case.name).collect()
}

/// Runs the cases whose names `is_wanted` selects, on containers of `image`.
///
/// `report` is called with each result as soon as it is known.
///
/// # Errors
/// Any error that keeps the cases from running, such as an unreachable daemon or a missing image.
pub async fn run_self_test(
    config: &SandboxSettings,
    image: &str,
    is_wanted: impl Fn(&str) -> bool,
    mut report: impl FnMut(&SelfTestResult),
) -> Result<Vec<SelfTestResult>, SandboxError> {
    let config = SandboxSettings {
        command_grace: HumanDuration(Duration::from_millis(GRACE_MS)),
        reuse: true,
        ..config.clone()
    };
    let group = GroupId::Eval { round: 0, index: 0 };
    let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
    let spec = SandboxSpec {
        image: image.to_owned(),
        purpose: Purpose::Agent,
        owner: Owner { run: RunId::generate(), epoch: 0, attempt },
        workdir: "/testbed".to_owned(),
        limits: SandboxLimits {
            memory: ByteSize::mib(256),
            cpu_millis: 1000,
            pids: 64,
            tmpfs: ByteSize::mib(48),
        },
        deadline: Duration::from_mins(5),
        reusable: true,
    };
    let self_test = SelfTest { provider: DockerProvider::connect(config).await?, spec };
    let mut results = Vec::new();
    for case in CASES.iter().filter(|case| is_wanted(case.name)) {
        let result = self_test.run(case).await?;
        report(&result);
        results.push(result);
    }
    self_test.provider.shutdown().await?;
    Ok(results)
}

struct SelfTest {
    provider: DockerProvider,
    spec: SandboxSpec,
}

impl SelfTest {
    async fn open(&self) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.provider.open(&self.spec).await
    }

    async fn run(&self, case: &Case) -> Result<SelfTestResult, SandboxError> {
        let deadline = Duration::from_millis(case.deadline_ms);
        let mut spec = self.spec.clone();
        if matches!(case.action, Action::Expire) {
            spec.deadline = Duration::from_secs(1);
        }
        let sandbox = self.provider.open(&spec).await?;
        let first = sandbox.name().to_owned();
        let start = Instant::now();
        let (outcome, sandbox) = self.perform(case.action, sandbox, deadline).await?;
        // Process 1 measures the time of a command, so that load on this side does not count.
        let elapsed = match &outcome {
            Outcome::Ran(result) => result.elapsed,
            Outcome::Tree(_) | Outcome::Wrote | Outcome::Reopened { .. } | Outcome::Failed(_) => {
                start.elapsed()
            }
        };
        let mut problem = mismatch(case.expected, &outcome, self.provider.config().max_output);
        if elapsed > deadline + TOLERANCE {
            problem.get_or_insert_with(|| format!("took {elapsed:.1?}, which is too long"));
        }
        let (next, problem_afterwards) = self.check_afterwards(sandbox, &outcome).await?;
        let replaced = next != first;
        if let Some(afterwards) = problem_afterwards {
            problem.get_or_insert(afterwards);
        }
        Ok(SelfTestResult {
            name: case.name,
            ok: problem.is_none(),
            outcome: outcome.to_string(),
            elapsed_ms: millis(elapsed),
            limit_ms: millis(deadline + TOLERANCE),
            replaced,
            problem,
        })
    }

    /// Performs the action. Also returns the sandbox to check afterwards.
    async fn perform(
        &self,
        action: Action,
        mut sandbox: Box<dyn Sandbox>,
        deadline: Duration,
    ) -> Result<(Outcome, Box<dyn Sandbox>), SandboxError> {
        let long = Command::shell("echo partial; sleep 100", deadline);
        let outcome = match action {
            Action::Shell(script) => ran(sandbox.exec(&Command::shell(script, deadline)).await),
            Action::Argv(argv) => {
                let argv = argv.iter().map(ToString::to_string).collect();
                ran(sandbox.exec(&Command { argv, ..Command::shell("", deadline) }).await)
            }
            Action::Argument(bytes) => {
                let mut command = Command::shell("echo ${#1}", deadline);
                command.argv.extend(["sh".to_owned(), "x".repeat(bytes)]);
                ran(sandbox.exec(&command).await)
            }
            Action::ReadTree(script) => {
                sandbox.exec(&Command::shell(script, deadline)).await?;
                sandbox.read_tree(TREE_CAP).await.map_or_else(Outcome::Failed, Outcome::Tree)
            }
            Action::Write(script, path) => {
                sandbox.exec(&Command::shell(script, deadline)).await?;
                let file = FileEntry { path: path.to_owned(), mode: 0o644, content: vec![b'x'] };
                sandbox.write_files(&[file]).await.map_or_else(Outcome::Failed, |()| Outcome::Wrote)
            }
            Action::CloseAfter(script) | Action::Spoil(script) => {
                let name = sandbox.name().to_owned();
                sandbox.exec(&Command::shell(script, deadline)).await?;
                sandbox.close().await?;
                sandbox = self.open().await?;
                let same_container = sandbox.name() == name;
                if matches!(action, Action::CloseAfter(_)) && same_container {
                    ran(sandbox.exec(&Command::shell(LIST_LEFTOVERS, deadline)).await)
                } else {
                    Outcome::Reopened { same_container }
                }
            }
            Action::Pause => {
                let short = deadline.saturating_sub(Duration::from_millis(GRACE_MS));
                let short = Command::shell("sleep 100", short);
                self.exec_and_interfere(&mut sandbox, &short, "pause").await?
            }
            Action::Kill => self.exec_and_interfere(&mut sandbox, &long, "kill").await?,
            Action::Remove => self.exec_and_interfere(&mut sandbox, &long, "remove").await?,
            Action::Expire => ran(sandbox.exec(&long).await),
            Action::DropCall => {
                let _ = tokio::time::timeout(INTERFERE_AFTER, sandbox.exec(&long)).await;
                ran(sandbox.exec(&long).await)
            }
            Action::RemoveIdle => {
                let name = sandbox.name().to_owned();
                sandbox.close().await?;
                self.interfere(&name, "remove").await?;
                sandbox = self.open().await?;
                Outcome::Reopened { same_container: sandbox.name() == name }
            }
        };
        Ok((outcome, sandbox))
    }

    async fn exec_and_interfere(
        &self,
        sandbox: &mut Box<dyn Sandbox>,
        command: &Command,
        call: &'static str,
    ) -> Result<Outcome, SandboxError> {
        let name = sandbox.name().to_owned();
        let interference = async {
            tokio::time::sleep(INTERFERE_AFTER).await;
            self.interfere(&name, call).await
        };
        let (result, interfered) = tokio::join!(sandbox.exec(command), interference);
        interfered.map(|()| ran(result))
    }

    /// Pauses, kills or removes a container, as a person or another program could.
    async fn interfere(&self, name: &str, call: &'static str) -> Result<(), SandboxError> {
        let daemon = &self.provider.state.daemon;
        let done = match call {
            "pause" => daemon.call(daemon.docker.pause_container(name)).await,
            "kill" => daemon.call(daemon.docker.kill_container(name, None)).await,
            _ => daemon.remove(name).await,
        };
        done.map_err(|error| error.at(name, call))
    }

    /// Checks that commands work afterwards, in this sandbox or in its replacement. Returns the
    /// name of the container and the problem, if any.
    async fn check_afterwards(
        &self,
        mut sandbox: Box<dyn Sandbox>,
        outcome: &Outcome,
    ) -> Result<(String, Option<String>), SandboxError> {
        let is_refusal = |kind: &SandboxErrorKind| {
            matches!(kind, SandboxErrorKind::Refused { .. } | SandboxErrorKind::TooLarge { .. })
        };
        let is_lost = matches!(outcome, Outcome::Failed(error) if !is_refusal(&error.kind));
        if is_lost {
            sandbox.close().await?;
            sandbox = self.open().await?;
        }
        let name = sandbox.name().to_owned();
        let check = Command::shell("echo alive; ls -d /proc/[0-9]* | wc -l", CHECK_TIMEOUT);
        let problem = match sandbox.exec(&check).await {
            Ok(result) => {
                let text = result.text();
                let count = text.strip_prefix("alive\n").and_then(|n| n.trim().parse().ok());
                let ok = count.is_some_and(|count: u32| count <= CHECK_PROCESSES);
                (!ok).then(|| format!("the next command ended with {}, {text:?}", result.exit))
            }
            Err(error) => Some(format!("the next command failed: {error}")),
        };
        sandbox.close().await?;
        Ok((name, problem))
    }
}

fn ran(result: Result<ExecResult, SandboxError>) -> Outcome {
    result.map_or_else(Outcome::Failed, Outcome::Ran)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn error_class(kind: &SandboxErrorKind) -> Option<ErrorClass> {
    match kind {
        SandboxErrorKind::Refused { .. } => Some(ErrorClass::Refused),
        SandboxErrorKind::TooLarge { .. } => Some(ErrorClass::TooLarge),
        SandboxErrorKind::Gone(_) => Some(ErrorClass::Gone),
        SandboxErrorKind::Damaged { .. } => Some(ErrorClass::Damaged),
        SandboxErrorKind::TimedOut { .. } => Some(ErrorClass::TimedOut),
        SandboxErrorKind::Protocol(_) => Some(ErrorClass::Protocol),
        SandboxErrorKind::NoDaemon(_)
        | SandboxErrorKind::Failed { .. }
        | SandboxErrorKind::DiskFull(_)
        | SandboxErrorKind::ImageMissing(_)
        | SandboxErrorKind::NotPulled { .. }
        | SandboxErrorKind::ImageChanged { .. }
        | SandboxErrorKind::NotRecorded { .. }
        | SandboxErrorKind::NotClean(_)
        | SandboxErrorKind::SelfTestFailed(_) => None,
    }
}

/// How the outcome differs from the expected one; `None` if it does not.
fn mismatch(expected: Expected, outcome: &Outcome, max_output: ByteSize) -> Option<String> {
    let matches = match (expected, outcome) {
        (Expected::Ends(exit), Outcome::Ran(result)) => result.exit == exit,
        (Expected::Text(exit, text), Outcome::Ran(result)) => {
            result.exit == exit && result.text() == text
        }
        (Expected::Bytes(exit, total), Outcome::Ran(result)) => {
            let ends = (result.head.len(), result.tail.len());
            result.exit == exit && result.total_bytes == total && ends == (64 << 10, 64 << 10)
        }
        (Expected::Contains(exit, part), Outcome::Ran(result)) => {
            result.exit == exit && result.text().contains(part)
        }
        (Expected::OutputKilled, Outcome::Ran(result)) => {
            let kept = result.head.len() + result.tail.len();
            result.exit == Exit::Signal(9) && result.total_bytes > max_output.0 && kept <= 128 << 10
        }
        (Expected::OutOfMemory(exit), Outcome::Ran(result)) => {
            result.exit == exit && result.oom_kills >= 1
        }
        (Expected::Tree(paths), Outcome::Tree(files)) => {
            files.iter().map(|file| file.path.as_str()).eq(paths.iter().copied())
        }
        (Expected::Fails(class), Outcome::Failed(error)) => error_class(&error.kind) == Some(class),
        (Expected::Replaced, Outcome::Reopened { same_container }) => !same_container,
        _ => false,
    };
    (!matches).then(|| format!("expected {expected}"))
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ran(result) => {
                let text: String = result.text().chars().take(80).collect();
                let (bytes, oom) = (result.total_bytes, result.oom_kills);
                write!(f, "{}, {bytes} bytes, {oom} out-of-memory kills, {text:?}", result.exit)
            }
            Self::Tree(files) => write!(f, "{} files", files.len()),
            Self::Wrote => write!(f, "written"),
            Self::Reopened { same_container: true } => write!(f, "the same container"),
            Self::Reopened { same_container: false } => write!(f, "another container"),
            Self::Failed(error) => write!(f, "{}", error.kind),
        }
    }
}
