//! The run, from its first step to its last. Read [`Coordinator::run`], then `drive`, then
//! `sample_all` and `train_all`: the rest of the crate is what they call.
//!
//! A step goes `sampling → training → trained → applied` (or `skipped`). Each arrow is one committed
//! write to the journal, and `close_step` only reads the state from the journal and does what that
//! state requires. So there is no recovery code: a run that was killed at any point is opened again and
//! continues with the same loop.
//!
//! Sampling and training are two streams over the same steps. Besides the step after the last closed
//! one, up to `max_staleness` later steps may be sampled; with 0, sampling and training alternate. So no
//! token of a batch is more than `max_staleness` policy versions stale.
//!
//! | Killed while | Found at the next start | What happens |
//! |---|---|---|
//! | episodes run | attempts `lost`, containers of an older epoch | containers are swept, attempts repeated |
//! | external agents run episodes | attempts `lost`, their turn journals | the attempts are continued |
//! | groups fill | some episodes sealed | sealed episodes count, open ones run |
//! | the batch is written | step `sampling`, batch `assembling` | the same members and bytes are written again |
//! | the trainer works | step `training` | the same step id is submitted again and applied once |
//! | weights are synced | step `trained` | the version is announced and synced again |
//! | metrics are written | step `applied` | `metrics.jsonl` is repaired from the journal |
//!
//! Spans let a subscriber of `tracing` follow one episode, step or weight sync. All have level
//! `info`.
//!
//! ```text
//! run {run_id, epoch}
//!   step {step}
//!     group {group_id, task_id}
//!       episode {episode_id}
//!         attempt {episode_id, attempt, policy_version}
//!           turn {turn}
//!             generate {policy_version, engine}
//!             exec
//!             grade                               (below the last turn)
//!     train {policy_version}
//!     weight_sync {policy_version, checkpoint}
//!       worker {engine}
//!   evaluation {step, policy_version}             (groups as in a step)
//!   weight_sync                                   (at the start)
//! ```

use crate::context::{Context, RunEnd, quarantined};
use crate::error::RunError;
use crate::evaluation::Evaluator;
use crate::events::{Event, Reporter, StageBefore};
use crate::files::RunFolder;
use crate::groups::{GroupCounts, SealedGroup};
use crate::lag::LoopLag;
use crate::metrics::StepTimes;
use crate::plan::{Plan, TaskSet};
use crate::pool::{Pool, StageSettings};
use crate::progress::is_finished;
use crate::record::result_of;
use crate::schedule::task_index;
use crate::stop::Stop;
use crate::trainer::TrainerSink;
use camino::Utf8PathBuf;
use futures::stream::{self, StreamExt};
use orchestrate_engine::Engine;
use orchestrate_metrics::Detector;
use orchestrate_report::metrics_lines;
use orchestrate_rollout::Episodes;
use orchestrate_sandbox::{HostUsage, SandboxProvider};
use orchestrate_store::{GroupState, StepRow, StepState, Store, StoreError};
use orchestrate_tasks::Task;
use orchestrate_types::{GroupId, PolicyVersion};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{Instrument, Span};

/// Number of upcoming groups whose images are announced to the sandboxes, which decide how many to pull.
const GROUPS_AHEAD: u32 = 16;

/// One run and everything it needs. Build it, then [`Coordinator::run`] it.
pub struct Coordinator {
    /// The run folder: metrics, batches and reports are written there.
    pub folder: Utf8PathBuf,
    /// Its journal, newly created or opened.
    pub store: Store,
    /// Runs attempts.
    pub episodes: Arc<dyn Episodes>,
    /// Serves the weights; gets new ones after each step.
    pub engine: Arc<dyn Engine>,
    /// Trains on batches and writes new weights.
    pub trainer: Arc<dyn TrainerSink>,
    /// The sandboxes of the episodes, swept at the start and shut down at the end; `None` if they need
    /// none.
    pub sandboxes: Option<Arc<dyn SandboxProvider>>,
    /// The tasks to train and evaluate on.
    pub tasks: TaskSet,
    /// The checked settings.
    pub plan: Plan,
    /// Receives events.
    pub reporter: Arc<dyn Reporter>,
}

impl std::fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Coordinator").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Coordinator {
    /// Runs to the end, or until stopped. Can be called again on a store that was opened after any end,
    /// even a kill: it continues where the journal ends.
    ///
    /// # Errors
    /// [`RunError`] says what must be fixed. Everything that finished before is kept.
    pub async fn run(self, stop: Stop) -> Result<RunEnd, RunError> {
        let plan = self.plan.evaluation();
        let context = Context::new(self.store, self.episodes, plan, self.reporter, stop).await?;
        let run_loop = RunLoop {
            folder: RunFolder::new(self.folder),
            engine: self.engine,
            trainer: self.trainer,
            sandboxes: self.sandboxes,
            tasks: self.tasks,
            plan: self.plan,
            detector: Mutex::new(Detector::default()),
            lag: LoopLag::start(),
            opening: tokio::sync::Mutex::new(()),
            context: Arc::new(context),
        };
        let work = Box::pin(run_loop.drive());
        let sandboxes = run_loop.sandboxes.as_deref();
        let finished = run_loop.context.drive(sandboxes, work).await?;
        let mut report = run_loop.folder.write_report(run_loop.store().reader()).await?;
        report.quarantined = quarantined(sandboxes);
        Ok(if finished { RunEnd::Finished(report) } else { RunEnd::Stopped(report) })
    }
}

/// A coordinator that runs.
pub(crate) struct RunLoop {
    pub(crate) context: Arc<Context>,
    pub(crate) folder: RunFolder,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) trainer: Arc<dyn TrainerSink>,
    pub(crate) sandboxes: Option<Arc<dyn SandboxProvider>>,
    pub(crate) tasks: TaskSet,
    pub(crate) plan: Plan,
    pub(crate) detector: Mutex<Detector>,
    pub(crate) lag: LoopLag,
    /// Held while a training group gets its number.
    opening: tokio::sync::Mutex<()>,
}

impl RunLoop {
    pub(crate) fn store(&self) -> &Store {
        &self.context.store
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Current use of the sandboxes' hosts.
    pub(crate) fn hosts(&self) -> Vec<HostUsage> {
        self.sandboxes.iter().flat_map(|sandboxes| sandboxes.hosts()).collect()
    }

    fn evaluator(&self) -> Evaluator<'_> {
        Evaluator {
            context: &self.context,
            folder: &self.folder,
            sandboxes: self.sandboxes.as_deref(),
            tasks: &self.tasks,
        }
    }

    /// Evaluates after global step `round` if the plan requires it and it is not done yet.
    async fn evaluate_after(&self, round: u32, version: PolicyVersion) -> Result<(), RunError> {
        let evaluator = self.evaluator();
        if evaluator.is_done(round).await? || !self.plan().evaluates_after(round) {
            return Ok(());
        }
        evaluator.evaluate(round, version).await
    }

    /// The collapse detector, which has observed the lines of all closed steps.
    pub(crate) fn detector(&self) -> MutexGuard<'_, Detector> {
        self.detector.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn drive(&self) -> Result<(), RunError> {
        self.announce_start().await?;
        self.bring_files_up_to_date().await?;
        if is_finished(self.store().reader(), &self.plan().run).await? {
            return Ok(());
        }
        if self.tasks.train.is_empty() && self.plan().run.steps > 0 {
            return Err(RunError::NoTasks { part: "training" });
        }
        self.context.sweep(self.sandboxes.as_deref()).await?;
        let mut version = self.agree_with_trainer().await?;
        if let Some(step) = self.step_in_training().await? {
            // Its weights must be served before anything is sampled.
            let closing = self.close_step(step, version, StepTimes::default());
            version = closing.instrument(tracing::info_span!("step", step)).await?;
        }
        self.evaluate_after(0, version).await?;
        let (closed, closed_steps) = watch::channel(0);
        // Has room for every step that may be sampled before the one in training is closed: a sender
        // that had to wait would block the steps behind it.
        let (sampled, sampled_steps) = mpsc::channel(self.plan().run.max_staleness as usize + 1);
        tokio::try_join!(
            self.sample_all(closed_steps, sampled),
            self.train_all(version, closed, sampled_steps),
        )?;
        Ok(())
    }

    /// Samples every step, in order, some of them concurrently; sends how long each took.
    async fn sample_all(
        &self,
        closed: watch::Receiver<u32>,
        sampled: mpsc::Sender<(Duration, Span)>,
    ) -> Result<(), RunError> {
        let run = &self.plan().run;
        let ahead = run.max_staleness;
        let steps = stream::iter(1..=run.steps).map(|step| {
            let mut closed = closed.clone();
            async move {
                // Fails only after training ended; the caller returns the error of training.
                let _ = closed.wait_for(|&last| step <= last + 1 + ahead).await;
                let span = tracing::info_span!("step", step);
                let took = self.sample(step).instrument(span.clone()).await;
                took.map(|took| (took, span))
            }
        });
        let mut steps = std::pin::pin!(steps.buffered(ahead as usize + 1));
        while let Some(took) = steps.next().await {
            // Fails only after training ended, as above.
            let _ = sampled.send(took?).await;
        }
        Ok(())
    }

    /// Trains every sampled step and evaluates after those for which the plan requires it.
    async fn train_all(
        &self,
        mut version: PolicyVersion,
        closed: watch::Sender<u32>,
        mut sampled: mpsc::Receiver<(Duration, Span)>,
    ) -> Result<(), RunError> {
        for step in 1..=self.plan().run.steps {
            // The channel closes if sampling failed; the caller returns the error of sampling.
            let Some((rollout, span)) = sampled.recv().await else { return Ok(()) };
            let times = StepTimes { rollout, ..StepTimes::default() };
            version = self.close_step(step, version, times).instrument(span).await?;
            self.evaluate_after(step, version).await?;
            closed.send_replace(step);
        }
        Ok(())
    }

    /// Continues a sampled step from its state in the journal until it is closed. Returns the policy
    /// version that engines serve after it.
    async fn close_step(
        &self,
        step: u32,
        version: PolicyVersion,
        mut times: StepTimes,
    ) -> Result<PolicyVersion, RunError> {
        loop {
            let row = self.step_row(step).await?;
            match row.state {
                StepState::Sampling => {
                    let row = StepRow { base_version: version, ..row };
                    self.publish_or_skip(&row, &times).await?;
                }
                StepState::Training => self.train(&row, &mut times).await?,
                StepState::Trained => self.sync_and_close(&row, &times).await?,
                StepState::Applied => return Ok(result_of(&row)?.policy_version),
                StepState::Skipped => return Ok(version),
            }
        }
    }

    /// Samples groups until enough of them have a gradient: a group whose rewards are all equal is
    /// replaced by another one, up to `max_groups_per_step`. Returns how long it took.
    async fn sample(&self, step: u32) -> Result<Duration, RunError> {
        let (id, live) = (self.step_id(step), self.context.live.get());
        if self.store().open_step(step, &id, live).await?.state != StepState::Sampling {
            return Ok(Duration::ZERO);
        }
        self.context.stop.check()?;
        let started = Instant::now();
        let sampling = &self.plan().sampling;
        let group_size = sampling.group_size;
        let groups = self.store().reader().groups_of_step(step).await?;
        let count = |state| {
            u32::try_from(groups.iter().filter(|g| g.state == state).count()).unwrap_or(u32::MAX)
        };
        let mut counts = GroupCounts {
            wanted: sampling.groups_per_step,
            at_most: sampling.max_groups_per_step,
            filling: count(GroupState::Filling),
            kept: count(GroupState::Kept),
            dropped: count(GroupState::Dropped),
        };
        let outcomes = self.store().reader().outcomes_of_step(step).await?;
        self.context.report(&Event::StepSampling {
            step,
            groups: counts.wanted,
            group_size,
            before: StageBefore::new(&groups, outcomes),
        });
        let mut pool = Pool::new(
            self.context.clone(),
            StageSettings {
                temperature: sampling.temperature,
                want_routing: self.plan().want_routing(),
                planned: counts.wanted as usize * usize::from(group_size),
            },
        );
        for group in groups.iter().filter(|g| g.state == GroupState::Filling) {
            pool.add(group.id, &self.train_task(group.id)?).await?;
        }
        loop {
            while counts.may_open() {
                let _one_at_a_time = self.opening.lock().await;
                let seq = self.store().reader().train_groups().await?;
                let id = GroupId::Train { seq };
                let task = self.train_task(id)?;
                self.expect_images_after(seq)?;
                self.store().open_group(id, step, &task.id, group_size).await?;
                let task_id = task.id.to_string();
                self.context.report(&Event::GroupOpened { step, group: id, task_id });
                pool.add(id, &task).await?;
                counts.opened();
            }
            let Some(id) = pool.next_group().await? else { break };
            let group = SealedGroup::load(self.store().reader(), id, group_size).await?;
            let decision = group.decide(self.plan());
            self.context.decide(id, &decision).await?;
            counts.decided(&decision);
        }
        Ok(started.elapsed())
    }

    /// Announces to the sandboxes which images the next groups need.
    fn expect_images_after(&self, seq: u32) -> Result<(), RunError> {
        let Some(sandboxes) = &self.sandboxes else { return Ok(()) };
        let groups = (seq..seq.saturating_add(GROUPS_AHEAD)).map(|seq| GroupId::Train { seq });
        let images: Result<Vec<String>, RunError> =
            groups.map(|id| Ok(self.train_task(id)?.image.clone())).collect();
        sandboxes.expect_images(&images?);
        Ok(())
    }

    fn train_task(&self, id: GroupId) -> Result<Arc<Task>, RunError> {
        let train = &self.tasks.train;
        let index = match id {
            GroupId::Train { seq } => task_index(self.plan().run.seed, seq, train.len()),
            GroupId::Eval { index, .. } => index as usize,
        };
        train.get(index).cloned().ok_or(RunError::NoTasks { part: "training" })
    }

    /// The trainer's idempotency key of a step.
    fn step_id(&self, step: u32) -> String {
        format!("{}-{step:06}", self.context.run)
    }

    /// The step that was submitted to the trainer and is not closed, if any.
    async fn step_in_training(&self) -> Result<Option<u32>, RunError> {
        let steps = self.store().reader().steps().await?;
        Ok(steps.iter().find(|row| row.state.is_in_training()).map(|row| row.step))
    }

    async fn step_row(&self, step: u32) -> Result<StepRow, RunError> {
        let row = self.store().reader().step(step).await?;
        Ok(row.ok_or_else(|| StoreError::Absent { what: format!("step {step}") })?)
    }

    async fn announce_start(&self) -> Result<(), RunError> {
        let rows = self.store().reader().steps().await?;
        let closed = |s: &&StepRow| match s.state {
            StepState::Applied | StepState::Skipped => true,
            StepState::Sampling | StepState::Training | StepState::Trained => false,
        };
        let done = rows.iter().filter(closed).map(|s| s.step).max().unwrap_or(0);
        self.context.report(&Event::Started {
            run: self.context.run,
            epoch: self.store().epoch(),
            next_step: done + 1,
            steps: self.plan().run.steps,
        });
        Ok(())
    }

    /// Repairs the files that are derived from the journal, and passes its metrics lines to the
    /// collapse detector.
    async fn bring_files_up_to_date(&self) -> Result<(), RunError> {
        let reader = self.store().reader();
        self.folder.write_metrics(&reader.metrics().await?)?;
        for line in &metrics_lines(reader).await? {
            self.detector().observe(line);
        }
        self.retire_folders().await
    }
}
