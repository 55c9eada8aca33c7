//! Runs the episodes of many groups at the same time, up to `max_in_flight`.

use crate::context::{Context, UnfinishedAttempt};
use crate::error::RunError;
use crate::events::Event;
use crate::record::{broken_report, to_record};
use crate::schedule::attempt_seed;
use futures::FutureExt;
use orchestrate_rollout::{EpisodeReport, EpisodeRequest};
use orchestrate_store::{AfterBreak, AttemptState, Claim, EpisodeState};
use orchestrate_tasks::Task;
use orchestrate_types::{AbortCause, AttemptId, EpisodeId, GroupId, Outcome, Stage};
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tracing::Instrument;

/// Time without a finished episode after which the run warns what it waits for.
const STALL_REPORT: Duration = Duration::from_mins(10);

/// How the episodes of one stage are run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageSettings {
    pub(crate) temperature: f32,
    pub(crate) want_routing: bool,
    /// Episodes of the stage, as far as known at its start.
    pub(crate) planned: usize,
}

enum EpisodeEnd {
    Sealed,
    GivenUp { stage: Stage, error: String },
    Stopped,
}

/// The running episodes of one stage: the rollout of a step, or an evaluation.
pub(crate) struct Pool {
    context: Arc<Context>,
    settings: StageSettings,
    tasks: JoinSet<(EpisodeId, Result<EpisodeEnd, RunError>)>,
    open: BTreeMap<GroupId, Vec<EpisodeId>>,
    complete: VecDeque<GroupId>,
    given_up: usize,
    stopped: bool,
}

impl Pool {
    pub(crate) fn new(context: Arc<Context>, settings: StageSettings) -> Self {
        Self {
            context,
            settings,
            tasks: JoinSet::new(),
            open: BTreeMap::new(),
            complete: VecDeque::new(),
            given_up: 0,
            stopped: false,
        }
    }

    /// Starts every episode of `group` that has no outcome yet.
    pub(crate) async fn add(&mut self, group: GroupId, task: &Arc<Task>) -> Result<(), RunError> {
        let members = self.context.store.reader().episodes_of_group(group).await?;
        let mut open = Vec::new();
        for member in members {
            match member.state {
                EpisodeState::Open => open.push(member.id),
                EpisodeState::Quarantined => self.given_up += 1,
                EpisodeState::Sealed => {}
            }
        }
        if open.is_empty() {
            self.complete.push_back(group);
            return Ok(());
        }
        let group_span =
            tracing::info_span!("group", group_id = %group, task_id = task.id.as_str());
        for &episode in &open {
            let (context, settings) = (self.context.clone(), self.settings);
            let task = task.clone();
            let span = tracing::info_span!(parent: &group_span, "episode", episode_id = %episode);
            let running =
                async move { (episode, run_episode(&context, settings, episode, task).await) };
            self.tasks.spawn(running.instrument(span));
        }
        self.open.insert(group, open);
        Ok(())
    }

    /// Waits for the next group whose episodes have all ended; `None` when no group is left. After a
    /// stop request it waits for all running episodes and then fails with [`RunError::Stopped`].
    /// Dropping the future loses nothing.
    pub(crate) async fn next_group(&mut self) -> Result<Option<GroupId>, RunError> {
        loop {
            if let Some(group) = self.complete.pop_front() {
                return Ok(Some(group));
            }
            let joined = match tokio::time::timeout(STALL_REPORT, self.tasks.join_next()).await {
                Ok(Some(joined)) => joined,
                Ok(None) if self.stopped => return Err(RunError::Stopped),
                Ok(None) => return Ok(None),
                Err(_) => {
                    self.report_stall();
                    continue;
                }
            };
            let (episode, end) = joined.map_err(|e| RunError::Panicked {
                task: "episode bookkeeping",
                detail: e.to_string(),
            })?;
            self.ended(episode, end?)?;
        }
    }

    fn ended(&mut self, episode: EpisodeId, end: EpisodeEnd) -> Result<(), RunError> {
        match end {
            EpisodeEnd::Stopped => {
                self.stopped = true;
                return Ok(());
            }
            EpisodeEnd::GivenUp { stage, error } => {
                self.given_up += 1;
                self.context.report(&Event::EpisodeGivenUp { episode, error: error.clone() });
                self.check_broken(stage, error)?;
            }
            EpisodeEnd::Sealed => {}
        }
        if let Some(open) = self.open.get_mut(&episode.group) {
            open.retain(|id| *id != episode);
            if open.is_empty() {
                self.open.remove(&episode.group);
                self.complete.push_back(episode.group);
            }
        }
        Ok(())
    }

    /// A single broken episode leaves its group. Many mean that something outside is broken, and more
    /// attempts would only be wasted.
    fn check_broken(&self, stage: Stage, error: String) -> Result<(), RunError> {
        let planned = self.settings.planned;
        let allowed = self.context.plan.run.max_broken_share * planned as f64;
        if self.given_up as f64 > allowed {
            let given_up = self.given_up;
            return Err(RunError::TooManyBroken { given_up, planned, stage, error });
        }
        Ok(())
    }

    fn report_stall(&self) {
        let open: Vec<String> = self.open.values().flatten().map(ToString::to_string).collect();
        let (count, first) = (open.len(), open.iter().take(8));
        let names = first.cloned().collect::<Vec<_>>().join(", ");
        self.context.warn(format!(
            "no episode has ended for {} minutes; waiting for {count}: {names}",
            STALL_REPORT.as_secs() / 60
        ));
    }
}

/// Runs attempts of an episode until one has a trusted outcome, none are left, or the run stops.
async fn run_episode(
    context: &Context,
    settings: StageSettings,
    episode: EpisodeId,
    task: Arc<Task>,
) -> Result<EpisodeEnd, RunError> {
    let mut last = (Stage::Setup, "all attempts had failed before".to_owned());
    let (mut unfinished, mut place) = match context.take_unfinished(episode) {
        Some(UnfinishedAttempt { attempt, place }) => (Some(attempt), place),
        None => (None, None),
    };
    loop {
        let in_flight = Arc::clone(&context.in_flight);
        let acquire = async {
            match place.take() {
                Some(place) => Ok(place),
                None => in_flight.acquire_owned().await,
            }
        };
        let permit = tokio::select! {
            biased;
            () = context.stop.drain.cancelled() => return Ok(EpisodeEnd::Stopped),
            permit = acquire.instrument(tracing::info_span!("queue")) => permit,
        };
        let attempt = match unfinished.take() {
            Some(attempt) => {
                context.store.resume_attempt(attempt).await?;
                attempt
            }
            None => match context.store.claim_attempt(episode).await? {
                Claim::Attempt(attempt) => attempt,
                Claim::Sealed => return Ok(EpisodeEnd::Sealed),
                Claim::Quarantined => {
                    let (stage, error) = last;
                    return Ok(EpisodeEnd::GivenUp { stage, error });
                }
            },
        };
        context.report(&Event::AttemptStarted { attempt });
        let seed = seed_of(context, attempt).await?;
        let report = run_attempt(context, settings, attempt, seed, task.clone()).await;
        drop(permit);
        context.report(&Event::AttemptEnded {
            attempt,
            outcome: report.outcome.clone(),
            turns: report.turns.len(),
        });
        let outcome = report.outcome.clone();
        let is_broken = matches!(outcome, Outcome::Broken { .. });
        if let Some(warning) = context.retries.count(&task.id, is_broken) {
            context.warn(warning);
        }
        let record = to_record(report, &task.id, settings.want_routing)?;
        match &outcome {
            Outcome::Scored { .. } | Outcome::Truncated { .. } => {
                context.store.seal_attempt(&record).await?;
                context.episodes.recorded(attempt, &outcome);
                return Ok(EpisodeEnd::Sealed);
            }
            Outcome::Aborted { by: AbortCause::Shutdown } => {
                context.store.abort_attempt(attempt).await?;
                context.episodes.recorded(attempt, &outcome);
                return Ok(EpisodeEnd::Stopped);
            }
            Outcome::Broken { stage, error } => {
                tracing::warn!(%attempt, %stage, error, "attempt broken");
                let limit = context.plan.sampling.max_attempts;
                let after = context.store.break_attempt(&record, limit).await?;
                context.episodes.recorded(attempt, &outcome);
                match after {
                    AfterBreak::Quarantined => {
                        return Ok(EpisodeEnd::GivenUp { stage: *stage, error: error.clone() });
                    }
                    AfterBreak::Retry => last = (*stage, error.clone()),
                }
                tokio::select! {
                    () = context.stop.drain.cancelled() => {}
                    () = tokio::time::sleep(context.plan.run.retry_pause.0) => {}
                }
            }
        }
    }
}

/// The seed of an attempt: of its own after each attempt that broke.
async fn seed_of(context: &Context, attempt: AttemptId) -> Result<u64, RunError> {
    let mut broken = 0;
    if attempt.attempt > 1 {
        let earlier = context.store.reader().attempts(attempt.episode).await?;
        broken = earlier.iter().filter(|row| row.state == AttemptState::Broken).count();
    }
    let broken = u32::try_from(broken).unwrap_or(u32::MAX);
    Ok(attempt_seed(context.plan.run.seed, attempt.episode, broken))
}

async fn run_attempt(
    context: &Context,
    settings: StageSettings,
    attempt: AttemptId,
    seed: u64,
    task: Arc<Task>,
) -> EpisodeReport {
    let request = EpisodeRequest {
        run: context.run,
        epoch: context.store.epoch(),
        attempt,
        task,
        policy_version: context.live.get(),
        seed,
        temperature: settings.temperature,
        want_routing: settings.want_routing,
    };
    let running = context.episodes.run(request, &context.stop.drain);
    match AssertUnwindSafe(running).catch_unwind().await {
        Ok(report) => report,
        Err(panic) => {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_else(|| "no message".to_owned());
            let error = format!("internal error, please report it: {message}");
            broken_report(attempt, Outcome::Broken { stage: Stage::Record, error })
        }
    }
}
