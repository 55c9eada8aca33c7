//! The battery: what hostile commands and sick containers lead to, case by case, on a real daemon.
//!
//! Each case has one outcome that is right, must be over two seconds after its deadline, and is
//! followed by a look whether the next command works and nothing of the last one is alive.

mod cases;

use crate::api::{
    Command, ExecResult, Exit, FileEntry, Limits, Owner, Purpose, Sandbox, SandboxError,
    SandboxErrorKind, SandboxProvider as _, SandboxSpec,
};
use crate::config::SandboxSettings;
use crate::provider::DockerProvider;
use orchestrate_types::{AttemptId, ByteSize, EpisodeId, GroupId, HumanDuration, RunId};
use std::time::Duration;
use tokio::time::Instant;

/// A case may end this much after its deadline.
const LATE: Duration = Duration::from_secs(2);
/// How late a command's report may come before its sandbox is given up; a second of it is what a
/// command has between TERM and KILL.
const GRACE_MS: u64 = 4_000;
/// Time of the look afterwards.
const LOOK: Duration = Duration::from_secs(10);
/// When somebody interferes with a running command.
const MEANWHILE: Duration = Duration::from_millis(200);
const TREE_CAP: ByteSize = ByteSize::mib(8);
/// What is left in a sandbox that is used again: the folder's mode, and two counts.
const LEFT_OVER: &str = "stat -c %a .; find . /tmp /dev/shm -mindepth 1 | wc -l; \
                         ls /dev/hidden 2> /dev/null | wc -l";
/// The processes of the look itself: the shell and two of its own, beside process 1.
const LOOKERS: u32 = 4;

/// What is done.
#[derive(Debug, Clone, Copy)]
enum Act {
    Shell(&'static str),
    Argv(&'static [&'static str]),
    /// A command with an argument of so many bytes, which prints its length.
    Argument(usize),
    /// Reads the tree after a script.
    Tree(&'static str),
    /// Writes a file, after a script, at this path.
    Write(&'static str, &'static str),
    /// Gives the sandbox back after a script, and looks around in the next one.
    Dirty(&'static str),
    /// The same with something that a reset cannot undo.
    Spoil(&'static str),
    /// The container is paused under a command.
    Pause,
    Kill,
    Remove,
    /// The container reaches its own deadline.
    Expire,
    /// The future of a call is dropped, and the next call made.
    Forget,
    /// The container is removed while it waits to be used again.
    Vanish,
}

/// The right outcome.
#[derive(Debug, Clone, Copy)]
enum Expect {
    Ends(Exit),
    /// With exactly this output.
    Text(Exit, &'static str),
    /// With so many bytes of output, of which both ends are kept.
    Bytes(Exit, u64),
    /// With this somewhere in the output.
    Says(Exit, &'static str),
    /// Killed for its output, of which both ends are kept.
    Flooded,
    /// With a kill for memory.
    Oom(Exit),
    /// A tree of these paths.
    Names(&'static [&'static str]),
    Fails(Fault),
    /// Another container.
    Replaced,
}

/// Kinds of [`SandboxErrorKind`] that cases lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Refused,
    TooLarge,
    Gone,
    TimedOut,
    Protocol,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    act: Act,
    expect: Expect,
    deadline_ms: u64,
}

/// How one case went.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct BatteryResult {
    /// Name of the case.
    pub name: &'static str,
    /// Whether the outcome was right, in time, and the next command worked.
    pub ok: bool,
    /// What came out, in words.
    pub outcome: String,
    /// Milliseconds from the act to its outcome.
    pub elapsed_ms: u64,
    /// Milliseconds that it may take.
    pub limit_ms: u64,
    /// Whether the next command ran in another container, this one being lost.
    pub replaced: bool,
    /// What is wrong, where something is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What an act led to.
#[derive(Debug)]
enum Outcome {
    Ran(ExecResult),
    Tree(Vec<FileEntry>),
    Wrote,
    /// The sandbox that came after the one that was given back; whether it is the same container.
    Next {
        same: bool,
    },
    Failed(SandboxError),
}

/// Names of all cases, in order.
pub fn battery_cases() -> Vec<&'static str> {
    cases::CASES.iter().map(|case| case.name).collect()
}

/// Runs the cases whose names are wanted, on containers of `image`, telling each result as it comes.
///
/// # Errors
/// When the daemon cannot be reached, or no container of the image can be opened at all.
pub async fn run_battery(
    config: &SandboxSettings,
    image: &str,
    wanted: impl Fn(&str) -> bool,
    mut tell: impl FnMut(&BatteryResult),
) -> Result<Vec<BatteryResult>, SandboxError> {
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
        limits: Limits {
            memory: ByteSize::mib(256),
            cpu_millis: 1000,
            pids: 64,
            tmpfs: ByteSize::mib(48),
        },
        deadline: Duration::from_mins(5),
        reusable: true,
    };
    let battery = Battery { provider: DockerProvider::connect(config).await?, spec };
    let mut results = Vec::new();
    for case in cases::CASES.iter().filter(|case| wanted(case.name)) {
        let result = battery.judge(case).await?;
        tell(&result);
        results.push(result);
    }
    battery.provider.shutdown().await?;
    Ok(results)
}

struct Battery {
    provider: DockerProvider,
    spec: SandboxSpec,
}

impl Battery {
    async fn open(&self) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.provider.open(&self.spec).await
    }

    async fn judge(&self, case: &Case) -> Result<BatteryResult, SandboxError> {
        let deadline = Duration::from_millis(case.deadline_ms);
        let mut spec = self.spec.clone();
        if matches!(case.act, Act::Expire) {
            spec.deadline = Duration::from_secs(1);
        }
        let sandbox = self.provider.open(&spec).await?;
        let first = sandbox.name().to_owned();
        let began = Instant::now();
        let (outcome, sandbox) = self.act(case.act, sandbox, deadline).await?;
        // A command's time is told by process 1, whatever the load on this side.
        let elapsed = match &outcome {
            Outcome::Ran(result) => result.elapsed,
            Outcome::Tree(_) | Outcome::Wrote | Outcome::Next { .. } | Outcome::Failed(_) => {
                began.elapsed()
            }
        };
        let mut problem = problem(case.expect, &outcome, self.provider.config().max_output);
        if elapsed > deadline + LATE {
            problem.get_or_insert_with(|| format!("{elapsed:.1?} is too late"));
        }
        let (next, unfit) = self.look(sandbox, &outcome).await?;
        let replaced = next != first;
        if let Some(unfit) = unfit {
            problem.get_or_insert(unfit);
        }
        Ok(BatteryResult {
            name: case.name,
            ok: problem.is_none(),
            outcome: outcome.to_string(),
            elapsed_ms: millis(elapsed),
            limit_ms: millis(deadline + LATE),
            replaced,
            problem,
        })
    }

    /// Performs the act; also the sandbox that is to be looked at.
    async fn act(
        &self,
        act: Act,
        mut sandbox: Box<dyn Sandbox>,
        deadline: Duration,
    ) -> Result<(Outcome, Box<dyn Sandbox>), SandboxError> {
        let long = Command::shell("echo partial; sleep 100", deadline);
        let outcome = match act {
            Act::Shell(script) => ran(sandbox.exec(&Command::shell(script, deadline)).await),
            Act::Argv(argv) => {
                let argv = argv.iter().map(ToString::to_string).collect();
                ran(sandbox.exec(&Command { argv, ..Command::shell("", deadline) }).await)
            }
            Act::Argument(bytes) => {
                let mut command = Command::shell("echo ${#1}", deadline);
                command.argv.extend(["sh".to_owned(), "x".repeat(bytes)]);
                ran(sandbox.exec(&command).await)
            }
            Act::Tree(script) => {
                sandbox.exec(&Command::shell(script, deadline)).await?;
                sandbox.read_tree(TREE_CAP).await.map_or_else(Outcome::Failed, Outcome::Tree)
            }
            Act::Write(script, path) => {
                sandbox.exec(&Command::shell(script, deadline)).await?;
                let file = FileEntry { path: path.to_owned(), mode: 0o644, content: vec![b'x'] };
                sandbox.write_files(&[file]).await.map_or_else(Outcome::Failed, |()| Outcome::Wrote)
            }
            Act::Dirty(script) | Act::Spoil(script) => {
                let name = sandbox.name().to_owned();
                sandbox.exec(&Command::shell(script, deadline)).await?;
                sandbox.close().await?;
                sandbox = self.open().await?;
                let same = sandbox.name() == name;
                if matches!(act, Act::Dirty(_)) && same {
                    ran(sandbox.exec(&Command::shell(LEFT_OVER, deadline)).await)
                } else {
                    Outcome::Next { same }
                }
            }
            Act::Pause => {
                let short = deadline.saturating_sub(Duration::from_millis(GRACE_MS));
                let short = Command::shell("sleep 100", short);
                self.meanwhile(&mut sandbox, &short, "pause").await?
            }
            Act::Kill => self.meanwhile(&mut sandbox, &long, "kill").await?,
            Act::Remove => self.meanwhile(&mut sandbox, &long, "remove").await?,
            Act::Expire => ran(sandbox.exec(&long).await),
            Act::Forget => {
                let _ = tokio::time::timeout(MEANWHILE, sandbox.exec(&long)).await;
                ran(sandbox.exec(&long).await)
            }
            Act::Vanish => {
                let name = sandbox.name().to_owned();
                sandbox.close().await?;
                self.meddle(&name, "remove").await?;
                sandbox = self.open().await?;
                Outcome::Next { same: sandbox.name() == name }
            }
        };
        Ok((outcome, sandbox))
    }

    async fn meanwhile(
        &self,
        sandbox: &mut Box<dyn Sandbox>,
        command: &Command,
        how: &'static str,
    ) -> Result<Outcome, SandboxError> {
        let name = sandbox.name().to_owned();
        let meddling = async {
            tokio::time::sleep(MEANWHILE).await;
            self.meddle(&name, how).await
        };
        let (result, meddled) = tokio::join!(sandbox.exec(command), meddling);
        meddled.map(|()| ran(result))
    }

    /// Does to a container what a person or another program might.
    async fn meddle(&self, name: &str, how: &'static str) -> Result<(), SandboxError> {
        let daemon = &self.provider.shared.daemon;
        let done = match how {
            "pause" => daemon.call(daemon.docker.pause_container(name)).await,
            "kill" => daemon.call(daemon.docker.kill_container(name, None)).await,
            _ => daemon.remove(name).await,
        };
        done.map_err(|error| error.at(name, how))
    }

    /// Whether commands work afterwards, in this sandbox or in the one that takes its place; with
    /// the container's name.
    async fn look(
        &self,
        mut sandbox: Box<dyn Sandbox>,
        outcome: &Outcome,
    ) -> Result<(String, Option<String>), SandboxError> {
        let refusal = |kind: &SandboxErrorKind| {
            matches!(kind, SandboxErrorKind::Refused { .. } | SandboxErrorKind::TooLarge { .. })
        };
        let lost = matches!(outcome, Outcome::Failed(error) if !refusal(&error.kind));
        if lost {
            sandbox.close().await?;
            sandbox = self.open().await?;
        }
        let name = sandbox.name().to_owned();
        let look = Command::shell("echo alive; ls -d /proc/[0-9]* | wc -l", LOOK);
        let unfit = match sandbox.exec(&look).await {
            Ok(result) => {
                let text = result.text();
                let count = text.strip_prefix("alive\n").and_then(|n| n.trim().parse().ok());
                let fit = count.is_some_and(|count: u32| count <= LOOKERS);
                (!fit).then(|| format!("afterwards: {:?}, {text:?}", result.exit))
            }
            Err(error) => Some(format!("afterwards: {error}")),
        };
        sandbox.close().await?;
        Ok((name, unfit))
    }
}

fn ran(result: Result<ExecResult, SandboxError>) -> Outcome {
    result.map_or_else(Outcome::Failed, Outcome::Ran)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn fault(kind: &SandboxErrorKind) -> Option<Fault> {
    match kind {
        SandboxErrorKind::Refused { .. } => Some(Fault::Refused),
        SandboxErrorKind::TooLarge { .. } => Some(Fault::TooLarge),
        SandboxErrorKind::Gone(_) => Some(Fault::Gone),
        SandboxErrorKind::TimedOut { .. } => Some(Fault::TimedOut),
        SandboxErrorKind::Protocol(_) => Some(Fault::Protocol),
        SandboxErrorKind::NoDaemon(_)
        | SandboxErrorKind::DiskFull(_)
        | SandboxErrorKind::ImageMissing(_)
        | SandboxErrorKind::NotPulled { .. }
        | SandboxErrorKind::ImageChanged { .. }
        | SandboxErrorKind::NotRecorded { .. }
        | SandboxErrorKind::NotClean(_)
        | SandboxErrorKind::Unfit(_) => None,
    }
}

/// What is wrong with an outcome.
fn problem(expect: Expect, outcome: &Outcome, max_output: ByteSize) -> Option<String> {
    let right = match (expect, outcome) {
        (Expect::Ends(exit), Outcome::Ran(result)) => result.exit == exit,
        (Expect::Text(exit, text), Outcome::Ran(result)) => {
            result.exit == exit && result.text() == text
        }
        (Expect::Bytes(exit, total), Outcome::Ran(result)) => {
            let ends = (result.head.len(), result.tail.len());
            result.exit == exit && result.total_bytes == total && ends == (64 << 10, 64 << 10)
        }
        (Expect::Says(exit, part), Outcome::Ran(result)) => {
            result.exit == exit && result.text().contains(part)
        }
        (Expect::Flooded, Outcome::Ran(result)) => {
            let kept = result.head.len() + result.tail.len();
            result.exit == Exit::Signal(9) && result.total_bytes > max_output.0 && kept <= 128 << 10
        }
        (Expect::Oom(exit), Outcome::Ran(result)) => result.exit == exit && result.oom_kills >= 1,
        (Expect::Names(names), Outcome::Tree(files)) => {
            files.iter().map(|file| file.path.as_str()).eq(names.iter().copied())
        }
        (Expect::Fails(wanted), Outcome::Failed(error)) => fault(&error.kind) == Some(wanted),
        (Expect::Replaced, Outcome::Next { same }) => !same,
        _ => false,
    };
    (!right).then(|| format!("expected {expect:?}"))
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ran(result) => {
                let text: String = result.text().chars().take(80).collect();
                let (bytes, oom) = (result.total_bytes, result.oom_kills);
                write!(f, "{:?}, {bytes} bytes, {oom} killed for memory, {text:?}", result.exit)
            }
            Self::Tree(files) => write!(f, "{} files", files.len()),
            Self::Wrote => write!(f, "written"),
            Self::Next { same: true } => write!(f, "used again"),
            Self::Next { same: false } => write!(f, "another container"),
            Self::Failed(error) => write!(f, "{}", error.kind),
        }
    }
}
