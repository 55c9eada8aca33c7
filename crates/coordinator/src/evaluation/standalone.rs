//! An evaluation without training: `orchestrate eval`.

use super::Evaluator;
use crate::context::{Context, RunEnd, quarantined};
use crate::error::RunError;
use crate::events::{Event, Reporter};
use crate::files::RunFolder;
use crate::plan::{EvaluationPlan, TaskSet};
use crate::progress::run_kind;
use crate::stop::Stop;
use camino::Utf8PathBuf;
use orchestrate_engine::Engine;
use orchestrate_rollout::Episodes;
use orchestrate_sandbox::SandboxProvider;
use orchestrate_store::{RunKind, Store};
use orchestrate_types::PolicyVersion;
use std::sync::Arc;

/// The round of an evaluation without training: that of a run before its first step.
const ROUND: u32 = 0;
/// Policy version that the evaluated checkpoint is served as.
const VERSION: PolicyVersion = PolicyVersion(0);

/// One evaluation of one checkpoint, and everything it needs. Build it, then
/// [`Evaluation::run`] it.
pub struct Evaluation {
    /// The folder: metrics, predictions and the report go there.
    pub folder: Utf8PathBuf,
    /// Its journal, freshly created or opened.
    pub store: Store,
    /// Runs attempts.
    pub episodes: Arc<dyn Episodes>,
    /// Serves the checkpoint.
    pub engine: Arc<dyn Engine>,
    /// The weights to evaluate: a folder, or a model's name if the server has its own weights.
    pub checkpoint: Utf8PathBuf,
    /// The sandboxes of the episodes, swept at the start and shut down at the end; `None` if they need
    /// none.
    pub sandboxes: Option<Arc<dyn SandboxProvider>>,
    /// The held-out tasks; tasks for training are not used.
    pub tasks: TaskSet,
    /// The checked settings.
    pub plan: EvaluationPlan,
    /// Receives events.
    pub reporter: Arc<dyn Reporter>,
}

impl std::fmt::Debug for Evaluation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Evaluation").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Evaluation {
    /// Evaluates to the end, or until stopped. May be called again on a store opened after any
    /// end, even a kill: episodes with an outcome are not run again.
    ///
    /// # Errors
    /// [`RunError`] says what must be fixed. Everything that finished before is kept.
    pub async fn run(self, stop: Stop) -> Result<RunEnd, RunError> {
        let Self { store, episodes, plan, reporter, sandboxes, .. } = self;
        let context = Arc::new(Context::new(store, episodes, plan, reporter, stop).await?);
        let folder = RunFolder::new(self.folder);
        let sandboxes = sandboxes.as_deref();
        let work = async {
            let reader = context.store.reader();
            if run_kind(reader, &self.checkpoint).await? == Some(RunKind::Training) {
                return Err(RunError::HoldsTrainingRun);
            }
            let epoch = context.store.epoch();
            context.report(&Event::EvaluationStarted { run: context.run, epoch });
            folder.write_metrics(&reader.metrics().await?)?;
            let evaluator =
                Evaluator { context: &context, folder: &folder, sandboxes, tasks: &self.tasks };
            if evaluator.is_done(ROUND).await? {
                return Ok(());
            }
            context.sweep(sandboxes).await?;
            context.serve(self.engine.as_ref(), VERSION, 0, &self.checkpoint).await?;
            evaluator.evaluate(ROUND, VERSION).await
        };
        let finished = context.drive(sandboxes, Box::pin(work)).await?;
        let reader = context.store.reader();
        let mut report = folder.write_report(reader).await?;
        report.quarantined = quarantined(sandboxes);
        Ok(if finished { RunEnd::Finished(report) } else { RunEnd::Stopped(report) })
    }
}
