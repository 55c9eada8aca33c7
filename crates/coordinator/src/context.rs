//! The common part of a training run and an evaluation: the journal, the episodes under way, the
//! weights that engines serve, and the way both end.

use crate::error::RunError;
use crate::events::{Event, Reporter};
use crate::groups::Decision;
use crate::plan::EvaluationPlan;
use crate::retries::RetryWatch;
use crate::stop::Stop;
use camino::Utf8Path;
use orchestrate_engine::Engine;
use orchestrate_report::RunReport;
use orchestrate_rollout::Episodes;
use orchestrate_sandbox::SandboxProvider;
use orchestrate_store::Store;
use orchestrate_types::{AttemptId, EpisodeId, GroupId, PolicyVersion, RunId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Instrument;

/// Time for removing the containers that are still open at the end; the next start removes the
/// rest.
const SANDBOX_SHUTDOWN: Duration = Duration::from_secs(30);

/// How a run or an evaluation ended.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEnd {
    /// Every step and evaluation is done.
    Finished(RunReport),
    /// Stopped on request; `--resume` continues it.
    Stopped(RunReport),
}

/// Names of the containers that could not be removed.
pub(crate) fn quarantined(sandboxes: Option<&dyn SandboxProvider>) -> Vec<String> {
    let quarantined = sandboxes.into_iter().flat_map(SandboxProvider::quarantined);
    quarantined.map(|container| container.to_string()).collect()
}

/// Shared by every task of a run or an evaluation.
pub(crate) struct Context {
    pub(crate) run: RunId,
    pub(crate) store: Store,
    pub(crate) episodes: Arc<dyn Episodes>,
    pub(crate) plan: EvaluationPlan,
    pub(crate) reporter: Arc<dyn Reporter>,
    pub(crate) stop: Stop,
    pub(crate) in_flight: Arc<Semaphore>,
    /// Attempts that are continued after a kill, each with its place among those in flight, which it had
    /// before. A worker waits for them, so they must not wait for others.
    unfinished: Mutex<HashMap<EpisodeId, UnfinishedAttempt>>,
    pub(crate) live: LiveVersion,
    pub(crate) retries: RetryWatch,
}

/// An attempt that an earlier coordinator began.
#[derive(Debug)]
pub(crate) struct UnfinishedAttempt {
    pub(crate) attempt: AttemptId,
    /// `None` if `rollout.max_in_flight` was lowered since.
    pub(crate) place: Option<OwnedSemaphorePermit>,
}

/// The weights that engines serve: an episode that starts now is sampled with them.
#[derive(Debug, Default)]
pub(crate) struct LiveVersion(AtomicU64);

impl LiveVersion {
    pub(crate) fn get(&self) -> PolicyVersion {
        PolicyVersion(self.0.load(Ordering::Acquire))
    }

    pub(crate) fn set(&self, version: PolicyVersion) {
        self.0.store(version.0, Ordering::Release);
    }
}

impl Context {
    /// Reads the run's id from the journal; nothing is sampled yet.
    pub(crate) async fn new(
        store: Store,
        episodes: Arc<dyn Episodes>,
        plan: EvaluationPlan,
        reporter: Arc<dyn Reporter>,
        stop: Stop,
    ) -> Result<Self, RunError> {
        let in_flight = Arc::new(Semaphore::new(plan.sampling.max_in_flight as usize));
        let unfinished = episodes.unfinished().into_iter().map(|attempt| {
            let place = Arc::clone(&in_flight).try_acquire_owned().ok();
            (attempt.episode, UnfinishedAttempt { attempt, place })
        });
        Ok(Self {
            run: store.reader().run().await?.run,
            unfinished: Mutex::new(unfinished.collect()),
            in_flight,
            live: LiveVersion::default(),
            retries: RetryWatch::default(),
            store,
            episodes,
            plan,
            reporter,
            stop,
        })
    }

    /// The attempt of an episode that is continued; the next call returns `None`.
    pub(crate) fn take_unfinished(&self, episode: EpisodeId) -> Option<UnfinishedAttempt> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner).remove(&episode)
    }

    pub(crate) fn report(&self, event: &Event) {
        self.reporter.report(event);
    }

    pub(crate) fn warn(&self, message: String) {
        tracing::warn!("{message}");
        self.report(&Event::Warning { message });
    }

    /// Runs `work` until it ends or a stop request ends it, then removes the sandboxes, if there are
    /// any. Returns whether `work` ran to its end.
    pub(crate) async fn drive(
        &self,
        sandboxes: Option<&dyn SandboxProvider>,
        work: impl Future<Output = Result<(), RunError>>,
    ) -> Result<bool, RunError> {
        let draining = || self.report(&Event::Draining);
        let span = tracing::info_span!("run", run_id = %self.run, epoch = self.store.epoch());
        let work = work.instrument(span);
        // Dropping `work` at any point is as good as a kill, and that is what the journal is for.
        let driven = tokio::select! {
            biased;
            () = self.stop.immediately(self.plan.run.shutdown_grace.0, draining) => {
                Err(RunError::Stopped)
            }
            driven = work => driven,
        };
        if let Some(sandboxes) = sandboxes {
            self.shut_down(sandboxes).await;
        }
        match driven {
            Ok(()) => Ok(true),
            Err(RunError::Stopped) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn shut_down(&self, sandboxes: &dyn SandboxProvider) {
        let why = match tokio::time::timeout(SANDBOX_SHUTDOWN, sandboxes.shutdown()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {SANDBOX_SHUTDOWN:?}"),
        };
        self.warn(format!("some containers may be left for the next start: {why}"));
    }

    /// Removes the containers of earlier starts, if there are sandboxes.
    pub(crate) async fn sweep(
        &self,
        sandboxes: Option<&dyn SandboxProvider>,
    ) -> Result<(), RunError> {
        let Some(sandboxes) = sandboxes else { return Ok(()) };
        let swept = sandboxes.sweep(self.run, self.store.epoch()).await?;
        for (name, why) in &swept.kept {
            tracing::debug!(name, why, "container left alone");
        }
        self.report(&Event::Swept { removed: swept.removed.len() });
        Ok(())
    }

    /// Has every engine serve `checkpoint` as `version`, recorded before and after.
    #[tracing::instrument(
        name = "weight_sync",
        skip_all,
        fields(policy_version = version.0, %checkpoint)
    )]
    pub(crate) async fn serve(
        &self,
        engine: &dyn Engine,
        version: PolicyVersion,
        lineage: u64,
        checkpoint: &Utf8Path,
    ) -> Result<(), RunError> {
        self.store.announce_version(version, lineage, checkpoint).await?;
        engine.sync_weights(checkpoint, version).await?;
        self.live.set(version);
        self.store.version_live(version).await?;
        self.report(&Event::WeightsLive { version });
        Ok(())
    }

    /// Records the decision about a complete group.
    pub(crate) async fn decide(&self, id: GroupId, decision: &Decision) -> Result<(), RunError> {
        let dropped = match decision {
            Decision::Keep => {
                self.store.keep_group(id).await?;
                None
            }
            Decision::Drop(reason) => {
                self.store.drop_group(id, reason).await?;
                Some(reason.clone())
            }
        };
        self.report(&Event::GroupDecided { group: id, dropped });
        Ok(())
    }
}
