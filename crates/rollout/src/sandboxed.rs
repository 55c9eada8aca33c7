//! Episodes in sandboxes: opens the agent's sandbox, lets the actor act in it, and grades the change that
//! is left.
//!
//! The invariant: every sandbox that was opened is closed before the attempt ends, whatever happened.

use crate::agent::AgentSettings;
use crate::api::EpisodeRequest;
use crate::attempt::{Attempt, Rewarded};
use crate::collection::{self, CollectedChange, CollectionBaseline};
use crate::failure::{change_too_large, failed, grading_failed, sandbox_failed, stopped};
use crate::grading::{
    self, GradeError, GradeLogs, GradedChange, GradedInput, GradingRules, write_log_folder,
};
use crate::harbor;
use crate::machine::EpisodeLimits;
use crate::repository;
use crate::sandboxes::{close, file_entry};
use crate::tool_server::ToolServers;
use crate::tree;
use orchestrate_sandbox::{
    FileEntry, Owner, Purpose, Sandbox, SandboxError, SandboxLimits, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::harbor::{HarborRow, seconds};
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{GradingRun, GroupId, Outcome, Retry, Stage};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Sandboxes to try for one purpose before the attempt fails.
const SANDBOX_TRIES: u32 = 2;

/// Time that a container may live beyond its work: for the start, uploads and reading back.
const SANDBOX_SLACK: Duration = Duration::from_mins(5);

/// Runs episodes in sandboxes.
#[derive(Debug, Clone)]
pub struct Sandboxed {
    /// Who acts in the agent's sandbox.
    pub actor: Actor,
    /// Opens the sandboxes in which the actor acts and changes are graded.
    pub provider: Arc<dyn SandboxProvider>,
    /// Resource limits of every container.
    pub limits: SandboxLimits,
    /// The rules that turn a test log into a verdict.
    pub rules: GradingRules,
    /// Where the graded changes of evaluation episodes are kept; `None` = nowhere. Tasks that bring
    /// their own files have no such logs.
    pub logs: Option<GradeLogs>,
}

/// Who acts in the agent's sandbox.
#[derive(Debug, Clone)]
pub enum Actor {
    /// The built-in scaffold of the settings. The policy can also call the tools of these servers.
    Scaffold(Arc<ToolServers>),
    /// An agent program, which has its own loop.
    Program(Arc<AgentSettings>),
}

/// The agent's open sandbox and what tells which of its changes count.
#[derive(Debug)]
struct AgentSandbox {
    sandbox: Box<dyn Sandbox>,
    baseline: CollectionBaseline,
    prepared: harbor::Prepared,
}

impl Sandboxed {
    /// Runs and grades an episode.
    ///
    /// A stop request does not interrupt grading: the verdict is near, and without it the whole episode
    /// would be wasted.
    ///
    /// # Errors
    /// The outcome of an episode without a grade.
    pub(crate) async fn run(
        &self,
        attempt: &mut Attempt,
        limits: EpisodeLimits,
    ) -> Result<Rewarded, Outcome> {
        if attempt.context.stop.is_cancelled() {
            return Err(stopped());
        }
        let mut agent = self.open_agent(attempt).await?;
        let sandbox = agent.sandbox.as_mut();
        let acted = match &self.actor {
            Actor::Scaffold(servers) => attempt.run_scaffold(servers, limits, sandbox).await,
            Actor::Program(settings) => attempt.run_agent(settings, limits, sandbox).await,
        };
        match acted {
            Ok(truncated_by) => {
                let reward = self.grade(attempt, agent).await?;
                Ok(Rewarded { reward, truncated_by })
            }
            Err(outcome) => {
                close(agent.sandbox).await;
                Err(outcome)
            }
        }
    }

    #[tracing::instrument(name = "open_sandbox", skip_all)]
    async fn open_agent(&self, attempt: &mut Attempt) -> Result<AgentSandbox, Outcome> {
        let started = Instant::now();
        let task = Arc::clone(&attempt.context.request.task);
        let mut time = attempt.context.settings.episode_timeout.0;
        let mut grading_time = Duration::ZERO;
        if let Origin::Harbor(row) = &task.origin {
            if row.has_steps() {
                let reason = "an agent cannot take a Harbor task with several steps";
                return Err(failed(Stage::Setup, reason));
            }
            let own = row.steps.iter().filter_map(|step| step.agent_timeout_s).map(seconds);
            time = own.fold(time, Duration::min);
            // The tests may run in the same container.
            grading_time = task.test_timeout;
        }
        let lifetime = time.saturating_add(grading_time);
        let spec = self.spec(&attempt.context.request, Purpose::Agent, lifetime);
        let files: Vec<FileEntry> = task.agent_files.iter().map(file_entry).collect();
        let hide_history = attempt.context.settings.hide_history;
        let mut tries = 0;
        let opened = loop {
            tries += 1;
            match self.open_filled(&spec, &task, &files, hide_history).await {
                Ok(opened) => break Ok(opened),
                Err(error) if tries < SANDBOX_TRIES && pause(error.retry()).await => {
                    tracing::debug!(%error, "sandbox setup failed, trying another sandbox");
                }
                Err(error) => break Err(error),
            }
        };
        attempt.timings.setup_s += started.elapsed().as_secs_f64();
        let opened = opened.map_err(|error| failed(Stage::Setup, error))?;
        attempt.context.start_clock(time);
        Ok(opened)
    }

    async fn open_filled(
        &self,
        spec: &SandboxSpec,
        task: &Task,
        files: &[FileEntry],
        hide_history: bool,
    ) -> Result<AgentSandbox, SandboxError> {
        let mut sandbox = self.provider.open(spec).await?;
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
                tracked = Some(repository::reset(sandbox.as_mut(), task, hide_history).await?);
            }
            collection::mark(sandbox.as_mut(), task, tracked).await
        };
        match filled.await {
            Ok(baseline) => Ok(AgentSandbox { sandbox, baseline, prepared }),
            Err(error) => {
                close(sandbox).await;
                Err(error)
            }
        }
    }

    /// Collects the agent's change, closes its sandbox and grades the change in a fresh one.
    #[tracing::instrument(name = "grade", parent = &attempt.turn_span, skip_all)]
    async fn grade(&self, attempt: &mut Attempt, agent: AgentSandbox) -> Result<f64, Outcome> {
        let AgentSandbox { mut sandbox, baseline, prepared } = agent;
        let started = Instant::now();
        let task = Arc::clone(&attempt.context.request.task);
        let graded = if let Origin::Harbor(row) = &task.origin {
            self.grade_harbor(attempt, sandbox, row, prepared).await
        } else {
            let collected = collection::collect(sandbox.as_mut(), &baseline).await;
            close(sandbox).await;
            match collected {
                Ok(Some(collected)) => self.grade_collected(attempt, collected).await,
                Ok(None) => Err(change_too_large()),
                Err(error) => Err(sandbox_failed(Stage::Collect, error)),
            }
        };
        attempt.timings.grade_s += started.elapsed().as_secs_f64();
        graded
    }

    /// Grades a Harbor task by the state of the container that the agent left.
    async fn grade_harbor(
        &self,
        attempt: &mut Attempt,
        sandbox: Box<dyn Sandbox>,
        row: &HarborRow,
        prepared: harbor::Prepared,
    ) -> Result<f64, Outcome> {
        let Some(step) = row.steps.first() else {
            return Err(failed(Stage::Grade, "the task has no step"));
        };
        let provider = self.provider.as_ref();
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
                Ok(reward)
            }
            Err(GradeError::NoReward(problem)) => {
                let problem = format!("Harbor task {}: {problem}", row.name);
                Err(grading_failed(Stage::Grade, GradeError::NoReward(problem)))
            }
            // Without a separate verifier the tests run in the agent's sandbox.
            Err(error) if step.verifier.separate.is_none() => {
                Err(grading_failed(Stage::Collect, error))
            }
            Err(error) => Err(grading_failed(Stage::Grade, error)),
        }
    }

    async fn grade_collected(
        &self,
        attempt: &mut Attempt,
        collected: CollectedChange,
    ) -> Result<f64, Outcome> {
        let task = Arc::clone(&attempt.context.request.task);
        // If the task brings all its files, the comparison needs no sandbox.
        if !task.brings_all_files() {
            return self.grade_change(attempt, GradedInput::Files(&collected)).await;
        }
        match tree::change_of_files(&task, collected).await {
            Ok(Some(change)) => {
                let graded = self.grade_change(attempt, GradedInput::Change(&change)).await;
                attempt.patch = change.patch;
                graded
            }
            Ok(None) => Err(change_too_large()),
            Err(error) => Err(failed(Stage::Collect, error)),
        }
    }

    async fn grade_change(
        &self,
        attempt: &mut Attempt,
        input: GradedInput<'_>,
    ) -> Result<f64, Outcome> {
        let task = Arc::clone(&attempt.context.request.task);
        let spec = self.spec(&attempt.context.request, Purpose::Grader, task.test_timeout);
        let is_evaluation =
            matches!(attempt.context.request.attempt.episode.group, GroupId::Eval { .. });
        let rules = if is_evaluation { self.rules.for_evaluation() } else { self.rules };
        let mut tries = 0;
        let graded = loop {
            tries += 1;
            let provider = self.provider.as_ref();
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
                Ok(reward)
            }
            Err(error) => Err(grading_failed(Stage::Grade, error)),
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
            limits: self.limits,
            deadline: time.saturating_add(SANDBOX_SLACK),
            reusable: task.brings_all_files(),
        }
    }
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
