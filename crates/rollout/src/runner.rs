//! Runs one attempt: performs the commands of the episode machine and feeds it what happened.
//!
//! The invariants: the buffer is the only source of what the engine is sent; a routing row is
//! pushed only with the reply it belongs to; every sandbox that was opened is closed before the
//! report is given; no engine call is under way while a tool runs.

use crate::api::{EpisodeReport, EpisodeRequest, Episodes};
use crate::attempt::Attempt;
use crate::chat::ChatModel;
use crate::config::RolloutSettings;
use crate::dialogue::Dialogue;
use crate::grading::{self, GradeError, GradeLogs, Graded, Rules, close, entry, write_log_folder};
use crate::leads::Leads;
use crate::machine::{Command, EpisodeMachine, Event};
use crate::repository::{self, Given};
use crate::rows::RowSharing;
use crate::tree::{TreeChange, compare_trees};
use orchestrate_engine::Engine;
use orchestrate_sandbox::{
    FileEntry, Limits, Owner, Purpose, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider,
    SandboxSpec,
};
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{ByteSize, GroupId, Outcome, Retry, Stage};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Largest tree read back, in bytes.
const TREE_CAP: ByteSize = ByteSize::mib(512);

/// Sandboxes tried for one purpose before the attempt is given up.
const SANDBOX_TRIES: u32 = 2;

/// Time a container may live beyond the work it is opened for: start, upload and reading back.
const SANDBOX_SLACK: Duration = Duration::from_mins(5);

/// What an episode runner is made of.
#[derive(Debug, Clone)]
pub struct EpisodeRunner {
    /// Where turns are sampled.
    pub engine: Arc<dyn Engine>,
    /// Where commands run.
    pub sandboxes: Arc<dyn SandboxProvider>,
    /// Tokenizer and template of the served model.
    pub chat: Arc<ChatModel>,
    /// The checked `[rollout]` section.
    pub plan: RolloutSettings,
    /// Limits of every container.
    pub container_limits: Limits,
    /// Whose rules turn a test log into a verdict.
    pub rules: Rules,
    /// Where graded changes of evaluation episodes are kept; `None`: nowhere. Tasks that bring
    /// their own files have no such logs.
    pub logs: Option<GradeLogs>,
    /// How routing rows are shared, and what is done with mixed ones.
    pub rows: RowSharing,
    /// Who of each group goes first.
    pub leads: Leads,
}

#[async_trait::async_trait]
impl Episodes for EpisodeRunner {
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let span = tracing::info_span!(
            "episode",
            episode_id = %request.attempt.episode,
            attempt = request.attempt.attempt,
        );
        // Boxed: the future holds a whole episode, and callers keep hundreds of them.
        Box::pin(self.run_inner(request, stop)).instrument(span).await
    }
}

impl EpisodeRunner {
    async fn run_inner(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let shape = Arc::new(self.engine.shape().clone());
        let (mut machine, mut command) = EpisodeMachine::new(self.plan.limits(shape.context));
        let mut attempt = Attempt::new(self, request, stop, shape);
        let mut agent = Agent::default();
        let outcome = loop {
            let event = match command {
                Command::Finish(outcome) => break outcome,
                Command::OpenSandbox if stop.is_cancelled() => Event::StopRequested,
                Command::OpenSandbox => self.open_agent(&mut attempt, &mut agent).await,
                Command::RenderPrompt => self.render_prompt(&mut attempt),
                Command::Generate { turn, resumed, max_new_tokens } => {
                    attempt.generate(turn, resumed, max_new_tokens).await
                }
                Command::Act => match agent.sandbox.as_deref_mut() {
                    Some(sandbox) => attempt.act(sandbox).await,
                    None => failed(Stage::Exec, "no sandbox is open"),
                },
                Command::Grade => self.grade(&mut attempt, &mut agent).await,
            };
            match machine.step(event) {
                Ok(next) => command = next,
                Err(error) => {
                    tracing::error!(%error, "episode machine refused an event");
                    break Outcome::Broken { stage: Stage::Record, error: error.to_string() };
                }
            }
        };
        if let Some(sandbox) = agent.sandbox.take() {
            close(sandbox).await;
        }
        tracing::debug!(outcome = outcome.name(), "episode ended");
        attempt.report(outcome)
    }

    async fn open_agent(&self, attempt: &mut Attempt<'_>, agent: &mut Agent) -> Event {
        let started = Instant::now();
        let task = Arc::clone(&attempt.request.task);
        let time = self.plan.episode_timeout.0;
        let spec = self.spec(&attempt.request, Purpose::Agent, time);
        let files: Vec<FileEntry> = task.agent_files.iter().map(entry).collect();
        let mut tries = 0;
        let opened = loop {
            tries += 1;
            match self.open_and_fill(&spec, &task, &files).await {
                Ok(opened) => break Ok(opened),
                Err(error) if tries < SANDBOX_TRIES && pause(error.retry()).await => {
                    tracing::debug!(%error, "sandbox setup failed, trying another");
                }
                Err(error) => break Err(error),
            }
        };
        attempt.timings.setup_s += started.elapsed().as_secs_f64();
        match opened {
            Ok((sandbox, baseline)) => {
                *agent = Agent { sandbox: Some(sandbox), baseline };
                attempt.start_clock(time);
                Event::SandboxOpened
            }
            Err(error) => failed(Stage::Setup, error),
        }
    }

    async fn open_and_fill(
        &self,
        spec: &SandboxSpec,
        task: &Task,
        files: &[FileEntry],
    ) -> Result<(Box<dyn Sandbox>, Baseline), SandboxError> {
        let mut sandbox = self.sandboxes.open(spec).await?;
        let filled = async {
            if task.origin != Origin::Files {
                let hide_history = self.plan.hide_history;
                let given = repository::reset(sandbox.as_mut(), task, hide_history).await?;
                return Ok(Baseline::Repository(given));
            }
            if !files.is_empty() {
                sandbox.write_files(files).await?;
            }
            sandbox.read_tree(TREE_CAP).await.map(Baseline::Files)
        };
        match filled.await {
            Ok(baseline) => Ok((sandbox, baseline)),
            Err(error) => {
                close(sandbox).await;
                Err(error)
            }
        }
    }

    fn render_prompt(&self, attempt: &mut Attempt<'_>) -> Event {
        let messages = self.plan.opening(&attempt.request.task);
        if self.engine.takes_messages() {
            attempt.dialogue = Some(Dialogue::open(&messages, &self.chat.purpose.tools));
        }
        match self.chat.prompt(&messages) {
            Ok(ids) => {
                attempt.buffer.add_pending(&ids);
                Event::PromptRendered { tokens: ids.len() }
            }
            Err(error) => failed(Stage::Setup, error),
        }
    }

    /// Reads the tree, closes the agent's sandbox, and judges the change in fresh ones.
    async fn grade(&self, attempt: &mut Attempt<'_>, agent: &mut Agent) -> Event {
        let Some(mut sandbox) = agent.sandbox.take() else {
            return failed(Stage::Collect, "no sandbox is open");
        };
        let started = Instant::now();
        let change = match &agent.baseline {
            Baseline::Files(before) => {
                match sandbox.read_tree(TREE_CAP).await {
                    Ok(after) => Ok(Some(compare_trees(before, &after))),
                    // The tree that it was given was read within the same bounds.
                    Err(SandboxError {
                        kind: SandboxErrorKind::TooLarge { what, cap }, ..
                    }) => {
                        tracing::warn!(what, %cap, "the agent's tree is too large to grade");
                        Ok(None)
                    }
                    Err(error) => Err(error),
                }
            }
            Baseline::Repository(given) => {
                let patch = repository::collect(sandbox.as_mut(), given).await;
                let change = |patch| TreeChange { patch, ..TreeChange::default() };
                patch.map(|patch| patch.map(change))
            }
        };
        close(sandbox).await;
        let event = match change {
            Ok(Some(change)) => self.judge(attempt, change).await,
            Ok(None) => Event::ChangeTooLarge,
            Err(error) => failed(Stage::Collect, error),
        };
        attempt.timings.grade_s += started.elapsed().as_secs_f64();
        event
    }

    async fn judge(&self, attempt: &mut Attempt<'_>, change: TreeChange) -> Event {
        let task = Arc::clone(&attempt.request.task);
        let spec = self.spec(&attempt.request, Purpose::Grader, task.test_timeout);
        let mut tries = 0;
        let graded = loop {
            tries += 1;
            let provider = self.sandboxes.as_ref();
            match grading::grade(provider, &spec, &task, &change, self.rules).await {
                Ok(graded) => break Ok(graded),
                Err(GradeError::Sandbox(error))
                    if tries < SANDBOX_TRIES && pause(error.retry()).await =>
                {
                    tracing::debug!(%error, "grading failed, trying another sandbox");
                }
                Err(error) => break Err(error),
            }
        };
        attempt.patch = change.patch;
        match graded {
            Ok(graded) => {
                self.keep_log(&attempt.request, &graded).await;
                let reward = graded.verdict.reward;
                attempt.verdict = Some(graded.verdict);
                Event::Graded { reward }
            }
            Err(error @ GradeError::TooLarge { .. }) => {
                tracing::warn!(%error, "the agent's change is too large to grade");
                Event::ChangeTooLarge
            }
            Err(error) => failed(Stage::Grade, error),
        }
    }

    /// Keeps what proves an evaluation's verdict: one run of the harness per round and sample, one
    /// model per version.
    async fn keep_log(&self, request: &EpisodeRequest, graded: &Graded) {
        let (Some(logs), GroupId::Eval { round, .. }) = (&self.logs, request.attempt.episode.group)
        else {
            return;
        };
        let task = Arc::clone(&request.task);
        if task.origin == Origin::Files {
            return;
        }
        let model = format!("{}@{}", logs.model, request.policy_version);
        let logs = GradeLogs { root: logs.root.clone(), model };
        let run = format!("v{round:05}.{:02}", request.attempt.episode.member);
        let graded = graded.clone();
        let written = tokio::task::spawn_blocking(move || {
            write_log_folder(&logs, &run, &task, &graded).map(drop)
        });
        // The verdict stands without its log.
        match written.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "a test log was not kept"),
            Err(error) => tracing::warn!(%error, "a test log was not kept"),
        }
    }

    fn spec(&self, request: &EpisodeRequest, purpose: Purpose, time: Duration) -> SandboxSpec {
        let EpisodeRequest { run, epoch, attempt, task, .. } = request;
        SandboxSpec {
            image: task.image.clone(),
            purpose,
            owner: Owner { run: *run, epoch: *epoch, attempt: *attempt },
            workdir: task.workdir.clone(),
            limits: self.container_limits,
            deadline: time + SANDBOX_SLACK,
            // A task that brings all of its files starts from an empty folder, which can be
            // emptied again; one whose repository is in the image needs a fresh container.
            reusable: task.origin == Origin::Files && !task.agent_files.is_empty(),
        }
    }
}

/// The agent's sandbox and the tree it was given.
#[derive(Debug, Default)]
struct Agent {
    sandbox: Option<Box<dyn Sandbox>>,
    baseline: Baseline,
}

#[derive(Debug)]
enum Baseline {
    Files(Vec<FileEntry>),
    Repository(Given),
}

impl Default for Baseline {
    fn default() -> Self {
        Self::Files(Vec::new())
    }
}

/// Waits as an error's advice says; `false` if trying again is useless.
async fn pause(retry: Retry) -> bool {
    match retry {
        Retry::Never => false,
        Retry::Now => true,
        Retry::After(time) => {
            tokio::time::sleep(time).await;
            true
        }
    }
}

/// The event for a failure of ours.
pub(crate) fn failed(stage: Stage, error: impl std::fmt::Display) -> Event {
    Event::Failed { stage, error: error.to_string() }
}
