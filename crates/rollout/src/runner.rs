//! Runs one attempt: performs the commands of [`EpisodeMachine`] and feeds it the resulting events.
//!
//! [`EpisodeRunner`] connects the pure parts with the outside. It opens and closes sandboxes,
//! grades, and leaves sampling and acting to [`crate::attempt::Attempt`], which owns the token
//! buffer and the routing rows.
//!
//! The invariant: every sandbox and session that was opened is closed before the report is returned,
//! whatever happened, and no engine call is running while a tool runs.

use crate::agent::{AgentSettings, ExternalWorkers};
use crate::api::{EpisodeReport, EpisodeRequest, Episodes};
use crate::attempt::Attempt;
use crate::chat::ChatModel;
use crate::collection::{self, CollectedChange, CollectionBaseline};
use crate::config::RolloutSettings;
use crate::dialogue::Dialogue;
use crate::failure::{failed, grading_failed, sandbox_failed};
use crate::grading::{
    self, GradeError, GradeLogs, GradedChange, GradedInput, GradingRules, write_log_folder,
};
use crate::harbor;
use crate::machine::{EpisodeCommand, EpisodeEvent, EpisodeMachine};
use crate::prefill::PrefillLeaders;
use crate::repository;
use crate::rows::RowSharing;
use crate::sandboxes::{close, file_entry};
use crate::scaffold::Scaffold;
use crate::sequence::EpisodeContext;
use crate::tool_server::ToolServers;
use crate::tree;
use orchestrate_engine::Engine;
use orchestrate_sandbox::{
    FileEntry, Owner, Purpose, Sandbox, SandboxError, SandboxLimits, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::harbor::{HarborRow, seconds};
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{AttemptId, GradingRun, GroupId, Outcome, Retry, Stage};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Sandboxes to try for one purpose before the attempt fails.
const SANDBOX_TRIES: u32 = 2;

/// Time that a container may live beyond its work: for the start, uploads and reading back.
const SANDBOX_SLACK: Duration = Duration::from_mins(5);

/// Runs attempts with one engine, one sandbox provider and one set of settings.
#[derive(Debug, Clone)]
pub struct EpisodeRunner {
    /// The engine that samples turns.
    pub engine: Arc<dyn Engine>,
    /// Provider of the sandboxes in which commands run and changes are graded.
    pub sandboxes: Arc<dyn SandboxProvider>,
    /// Tokenizer and chat template of the served model.
    pub chat: Arc<ChatModel>,
    /// The checked `[rollout]` section.
    pub settings: Arc<RolloutSettings>,
    /// The agent of the scaffold `command`; `None` for the others.
    pub agent: Option<Arc<AgentSettings>>,
    /// Where episodes of the scaffold `external` are offered; `None` for the others.
    pub external: Option<ExternalWorkers>,
    /// Servers of tools that the policy can call in addition to the built-in ones.
    pub tool_servers: Arc<ToolServers>,
    /// Resource limits of every container.
    pub container_limits: SandboxLimits,
    /// The rules that turn a test log into a verdict.
    pub rules: GradingRules,
    /// Where the graded changes of evaluation episodes are kept; `None` = nowhere. Tasks that bring
    /// their own files have no such logs.
    pub logs: Option<GradeLogs>,
    /// How routing rows are shared, and what happens to mixed ones.
    pub rows: RowSharing,
    /// The prefill leader of each group.
    pub prefill_leaders: PrefillLeaders,
}

#[async_trait::async_trait]
impl Episodes for EpisodeRunner {
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let span = tracing::info_span!(
            "attempt",
            episode_id = %request.attempt.episode,
            attempt = request.attempt.attempt,
            policy_version = request.policy_version.0,
        );
        // Boxed, because the future holds a whole episode and callers keep hundreds of them.
        Box::pin(self.run_inner(request, stop)).instrument(span).await
    }

    fn recorded(&self, attempt: AttemptId, outcome: &Outcome) {
        if let Some(external) = &self.external {
            // Before the result is acknowledged, so that no file is left when the run ends.
            external.journals.remove(attempt);
            external.offers.recorded(attempt, outcome.name());
        }
    }

    fn unfinished(&self) -> Vec<AttemptId> {
        let external = self.external.iter();
        let unfinished = external.flat_map(|external| external.journals.unfinished());
        unfinished.map(|(attempt, _)| attempt).collect()
    }
}

impl EpisodeRunner {
    /// What the sequences of an attempt share.
    pub(crate) fn context(
        &self,
        request: EpisodeRequest,
        stop: &CancellationToken,
    ) -> EpisodeContext {
        EpisodeContext {
            request,
            engine: Arc::clone(&self.engine),
            chat: Arc::clone(&self.chat),
            settings: Arc::clone(&self.settings),
            sharing: self.rows.clone(),
            leaders: self.prefill_leaders.clone(),
            stop: stop.clone(),
            deadline: None,
            restarts: 0,
        }
    }

    async fn run_inner(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let context = self.engine.shape().context;
        let limits = self.settings.limits(context);
        let (mut machine, mut command) = match self.settings.scaffold {
            Scaffold::Command => EpisodeMachine::with_agent(limits),
            Scaffold::External => EpisodeMachine::external(limits),
            Scaffold::Tools | Scaffold::R2eXml | Scaffold::Mini => EpisodeMachine::new(limits),
        };
        let mut attempt = Attempt::new(self, request, stop);
        let mut agent = AgentSandbox::default();
        let outcome = loop {
            let event = match command {
                EpisodeCommand::Finish(outcome) => break outcome,
                EpisodeCommand::OpenSandbox if stop.is_cancelled() => EpisodeEvent::StopRequested,
                EpisodeCommand::OpenSandbox => self.open_agent(&mut attempt, &mut agent).await,
                EpisodeCommand::RenderPrompt => self.render_prompt(&mut attempt).await,
                EpisodeCommand::Generate { turn, resumed, max_new_tokens } => {
                    attempt.generate(turn, resumed, max_new_tokens).await
                }
                EpisodeCommand::Act => match agent.sandbox.as_deref_mut() {
                    Some(sandbox) => attempt.act(sandbox).await,
                    None => failed(Stage::Exec, "no sandbox is open"),
                },
                EpisodeCommand::RunAgent => match (agent.sandbox.as_deref_mut(), &self.agent) {
                    (Some(sandbox), Some(settings)) => {
                        attempt.run_agent(settings, limits, sandbox).await
                    }
                    (None, _) => failed(Stage::Exec, "no sandbox is open"),
                    (_, None) => failed(Stage::Setup, "there is no section [agent]"),
                },
                EpisodeCommand::Offer => match &self.external {
                    Some(external) => attempt.run_external(external, limits).await,
                    None => failed(Stage::Setup, "the run has no gateway for workers"),
                },
                EpisodeCommand::Grade => self.grade(&mut attempt, &mut agent).await,
            };
            match machine.step(event) {
                Ok(next) => command = next,
                Err(error) => {
                    tracing::error!(%error, "the episode machine rejected an event");
                    break Outcome::Broken { stage: Stage::Record, error: error.to_string() };
                }
            }
        };
        std::mem::take(&mut attempt.servers).close().await;
        if let Some(sandbox) = agent.sandbox.take() {
            close(sandbox).await;
        }
        tracing::debug!(outcome = outcome.name(), "episode ended");
        attempt.report(outcome)
    }

    #[tracing::instrument(name = "open_sandbox", skip_all)]
    async fn open_agent(&self, attempt: &mut Attempt, agent: &mut AgentSandbox) -> EpisodeEvent {
        let started = Instant::now();
        let task = Arc::clone(&attempt.context.request.task);
        let mut time = self.settings.episode_timeout.0;
        let mut grading_time = Duration::ZERO;
        if let Origin::Harbor(row) = &task.origin {
            if row.has_steps() {
                let reason = "an agent cannot take a Harbor task with several steps";
                return failed(Stage::Setup, reason);
            }
            let own = row.steps.iter().filter_map(|step| step.agent_timeout_s).map(seconds);
            time = own.fold(time, Duration::min);
            // The tests may run in the same container.
            grading_time = task.test_timeout;
        }
        let lifetime = time.saturating_add(grading_time);
        let spec = self.spec(&attempt.context.request, Purpose::Agent, lifetime);
        let files: Vec<FileEntry> = task.agent_files.iter().map(file_entry).collect();
        let mut tries = 0;
        let opened = loop {
            tries += 1;
            match self.open_filled(&spec, &task, &files).await {
                Ok(opened) => break Ok(opened),
                Err(error) if tries < SANDBOX_TRIES && pause(error.retry()).await => {
                    tracing::debug!(%error, "sandbox setup failed, trying another sandbox");
                }
                Err(error) => break Err(error),
            }
        };
        attempt.timings.setup_s += started.elapsed().as_secs_f64();
        match opened {
            Ok(opened) => {
                *agent = opened;
                attempt.context.start_clock(time);
                EpisodeEvent::SandboxOpened
            }
            Err(error) => failed(Stage::Setup, error),
        }
    }

    async fn open_filled(
        &self,
        spec: &SandboxSpec,
        task: &Task,
        files: &[FileEntry],
    ) -> Result<AgentSandbox, SandboxError> {
        let mut sandbox = self.sandboxes.open(spec).await?;
        let mut prepared = harbor::Prepared::default();
        let filled = async {
            if let Origin::Harbor(row) = &task.origin {
                prepared = harbor::prepare(sandbox.as_mut(), row).await?;
                return Ok(CollectionBaseline::default());
            }
            if !files.is_empty() {
                sandbox.write_files(files).await?;
            }
            let mut tracked = None;
            if task.origin != Origin::Files {
                let hide_history = self.settings.hide_history;
                tracked = Some(repository::reset(sandbox.as_mut(), task, hide_history).await?);
            }
            collection::mark(sandbox.as_mut(), task, tracked).await
        };
        match filled.await {
            Ok(baseline) => Ok(AgentSandbox { sandbox: Some(sandbox), baseline, prepared }),
            Err(error) => {
                close(sandbox).await;
                Err(error)
            }
        }
    }

    /// Opens the sessions with tool servers, whose tools are part of the prompt, and renders it.
    async fn render_prompt(&self, attempt: &mut Attempt) -> EpisodeEvent {
        match self.tool_servers.open().await {
            Ok(sessions) => attempt.servers = sessions,
            Err(error) => return failed(Stage::Setup, error.with_causes()),
        }
        let messages = self.settings.opening(&attempt.context.request.task);
        if self.engine.takes_messages() {
            let messages = self.chat.without_control_tokens(&messages);
            attempt.sequence.dialogue = Some(Dialogue::open(&messages, &self.chat.options.tools));
        }
        match self.chat.prompt(&messages) {
            Ok(ids) => {
                attempt.sequence.buffer.add_pending(&ids);
                EpisodeEvent::PromptRendered { tokens: ids.len() }
            }
            Err(error) => failed(Stage::Setup, error),
        }
    }

    /// Collects the agent's change, closes its sandbox and grades the change in a fresh one.
    #[tracing::instrument(name = "grade", parent = &attempt.turn_span, skip_all)]
    async fn grade(&self, attempt: &mut Attempt, agent: &mut AgentSandbox) -> EpisodeEvent {
        let Some(mut sandbox) = agent.sandbox.take() else {
            return failed(Stage::Collect, "no sandbox is open");
        };
        let started = Instant::now();
        let task = Arc::clone(&attempt.context.request.task);
        if let Origin::Harbor(row) = &task.origin {
            let event = self.grade_harbor(attempt, sandbox, row, agent.prepared).await;
            attempt.timings.grade_s += started.elapsed().as_secs_f64();
            return event;
        }
        let collected = collection::collect(sandbox.as_mut(), &agent.baseline).await;
        close(sandbox).await;
        let event = match collected {
            Ok(Some(collected)) => self.grade_collected(attempt, collected).await,
            Ok(None) => EpisodeEvent::ChangeTooLarge,
            Err(error) => sandbox_failed(Stage::Collect, error),
        };
        attempt.timings.grade_s += started.elapsed().as_secs_f64();
        event
    }

    /// Grades a Harbor task by the state of the container that the agent left.
    async fn grade_harbor(
        &self,
        attempt: &mut Attempt,
        sandbox: Box<dyn Sandbox>,
        row: &HarborRow,
        prepared: harbor::Prepared,
    ) -> EpisodeEvent {
        let Some(step) = row.steps.first() else {
            return failed(Stage::Grade, "the task has no step");
        };
        let provider = self.sandboxes.as_ref();
        let mut open = Some(sandbox);
        let graded = match open.as_deref_mut() {
            Some(sandbox) if step.verifier.separate.is_none() => {
                harbor::grade_in_agents(sandbox, row, step, prepared).await
            }
            _ => {
                let time = seconds(step.verifier.timeout_s);
                let spec = self.spec(&attempt.context.request, Purpose::Grader, time);
                harbor::grade_separately(provider, &spec, &mut open, row, step, false).await
            }
        };
        if let Some(sandbox) = open.take() {
            close(sandbox).await;
        }
        let graded = graded.map_err(GradeError::from).and_then(harbor::GradedStep::graded);
        match graded {
            Ok(graded) => {
                if let Some(problem) = &graded.problem {
                    tracing::info!(task = row.name, problem, "the tests wrote no valid reward");
                }
                self.write_log(&attempt.context.request, &graded).await;
                let reward = graded.verdict.reward;
                attempt.verdict = Some(graded.verdict);
                EpisodeEvent::Graded { reward }
            }
            Err(GradeError::NoReward(problem)) => {
                let problem = format!("Harbor task {}: {problem}", row.name);
                grading_failed(Stage::Grade, GradeError::NoReward(problem))
            }
            // Without a separate verifier the tests run in the agent's sandbox.
            Err(error) if step.verifier.separate.is_none() => grading_failed(Stage::Collect, error),
            Err(error) => grading_failed(Stage::Grade, error),
        }
    }

    async fn grade_collected(
        &self,
        attempt: &mut Attempt,
        collected: CollectedChange,
    ) -> EpisodeEvent {
        let task = Arc::clone(&attempt.context.request.task);
        // If the task brings all its files, the comparison needs no sandbox.
        if !task.brings_all_files() {
            return self.grade_change(attempt, GradedInput::Files(&collected)).await;
        }
        match tree::change_of_files(&task, collected).await {
            Ok(Some(change)) => {
                let event = self.grade_change(attempt, GradedInput::Change(&change)).await;
                attempt.patch = change.patch;
                event
            }
            Ok(None) => EpisodeEvent::ChangeTooLarge,
            Err(error) => failed(Stage::Collect, error),
        }
    }

    async fn grade_change(&self, attempt: &mut Attempt, input: GradedInput<'_>) -> EpisodeEvent {
        let task = Arc::clone(&attempt.context.request.task);
        let spec = self.spec(&attempt.context.request, Purpose::Grader, task.test_timeout);
        let is_evaluation =
            matches!(attempt.context.request.attempt.episode.group, GroupId::Eval { .. });
        let rules = if is_evaluation { self.rules.for_evaluation() } else { self.rules };
        let mut tries = 0;
        let graded = loop {
            tries += 1;
            let provider = self.sandboxes.as_ref();
            match grading::grade(provider, &spec, &task, input, rules).await {
                Ok(graded) => break Ok(graded),
                Err(GradeError::Sandbox(error))
                    if !error.is_agents_doing()
                        && tries < SANDBOX_TRIES
                        && pause(error.retry()).await =>
                {
                    tracing::debug!(%error, "grading failed, trying another sandbox");
                }
                Err(error) => break Err(error),
            }
        };
        match graded {
            Ok(graded) => {
                self.write_log(&attempt.context.request, &graded).await;
                let reward = graded.verdict.reward;
                attempt.patch = graded.patch;
                attempt.verdict = Some(graded.verdict);
                EpisodeEvent::Graded { reward }
            }
            Err(error) => grading_failed(Stage::Grade, error),
        }
    }

    /// Writes the log folder of an evaluation's verdict. In the harness's terms there is one run
    /// per evaluation round and sample, and one model per policy version.
    async fn write_log(&self, request: &EpisodeRequest, graded: &GradedChange) {
        let (Some(logs), GroupId::Eval { round, .. }) = (&self.logs, request.attempt.episode.group)
        else {
            return;
        };
        let task = Arc::clone(&request.task);
        if task.origin == Origin::Files {
            return;
        }
        let model = logs.model.at_version(request.policy_version);
        let logs = GradeLogs { root: logs.root.clone(), model };
        let sample = request.attempt.episode.member;
        let run = GradingRun::made_of(&format!("v{round:05}.{sample:02}"));
        let graded = graded.clone();
        let written = tokio::task::spawn_blocking(move || {
            write_log_folder(&logs, &run, &task, &graded).map(drop)
        });
        // The verdict is valid without its log.
        match written.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "a test log could not be written"),
            Err(error) => tracing::warn!(%error, "a test log could not be written"),
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
            deadline: time.saturating_add(SANDBOX_SLACK),
            reusable: task.brings_all_files(),
        }
    }
}

/// The agent's sandbox and what tells which of its changes count.
#[derive(Debug, Default)]
struct AgentSandbox {
    sandbox: Option<Box<dyn Sandbox>>,
    baseline: CollectionBaseline,
    prepared: harbor::Prepared,
}

/// Waits for as long as an error advises; `false` if retrying is useless.
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
