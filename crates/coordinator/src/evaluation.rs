//! Pass@1 on held-out tasks, the same tasks under the same seeds every time.

mod standalone;

pub use standalone::Evaluation;

use crate::config::RunSettings;
use crate::context::Context;
use crate::error::RunError;
use crate::events::{Event, StageBefore};
use crate::files::RunFolder;
use crate::groups::{Decision, SealedGroup};
use crate::plan::TaskSet;
use crate::pool::{Pool, StageSettings};
use crate::record::{EpisodeDetail, stored_line};
use orchestrate_metrics::{EvalLine, SCHEMA_VERSION};
use orchestrate_report::task_scores;
use orchestrate_sandbox::SandboxProvider;
use orchestrate_store::{GroupState, Reader};
use orchestrate_tasks::Task;
use orchestrate_tasks::predictions::Prediction;
use orchestrate_types::{GroupId, PolicyVersion, now};
use std::sync::Arc;
use tokio::time::Instant;

/// Evaluates policy versions, in a run or without training.
#[derive(Clone, Copy)]
pub(crate) struct Evaluator<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) folder: &'a RunFolder,
    pub(crate) sandboxes: Option<&'a dyn SandboxProvider>,
    pub(crate) tasks: &'a TaskSet,
}

impl Evaluator<'_> {
    fn reader(&self) -> &Reader {
        self.context.store.reader()
    }

    fn run_settings(&self) -> &RunSettings {
        &self.context.plan.run
    }

    /// Whether the journal has the numbers of this round.
    pub(crate) async fn is_done(&self, round: u32) -> Result<bool, RunError> {
        let evals = self.reader().evals().await?;
        Ok(evals.iter().any(|e| e.round == round && e.metrics.is_some()))
    }

    /// Evaluates `version` as `round` (the global step before it), or continues to.
    #[tracing::instrument(
        name = "evaluation",
        skip_all,
        fields(step = round, policy_version = version.0)
    )]
    pub(crate) async fn evaluate(
        &self,
        round: u32,
        version: PolicyVersion,
    ) -> Result<(), RunError> {
        let started = Instant::now();
        let tasks = self.eval_tasks()?;
        let held_out = tasks.len() - self.family_tasks();
        let size = self.run_settings().eval_samples;
        self.context.store.open_eval(round, version).await?;
        self.run_eval_groups(round, &tasks).await?;

        let scores = task_scores(self.reader(), round).await?;
        let line = EvalLine {
            schema_version: SCHEMA_VERSION,
            time: Some(now()),
            global_step: round,
            policy_version: version,
            time_eval_s: Some(started.elapsed().as_secs_f64()),
            ..EvalLine::of_scores(&scores, held_out, usize::from(size))
        };
        self.write_predictions(round, version, &tasks).await?;
        self.context.store.finish_eval(round, &stored_line(&line)?).await?;
        self.folder.write_metrics(&self.reader().metrics().await?)?;
        self.context.report(&Event::EvalFinished { line: Box::new(line) });
        self.folder.write_report(self.reader()).await?;
        Ok(())
    }

    async fn run_eval_groups(&self, round: u32, tasks: &[Arc<Task>]) -> Result<(), RunError> {
        let size = self.run_settings().eval_samples;
        let planned = tasks.len() * usize::from(size);
        let groups = self.reader().groups_of_eval(round).await?;
        let outcomes = self.reader().outcomes_of_eval(round).await?;
        let before = StageBefore::new(&groups, outcomes);
        self.context.report(&Event::EvalStarted { round, episodes: planned, before });
        let settings = StageSettings {
            temperature: self.run_settings().eval_temperature,
            want_routing: false,
            planned,
        };
        if let Some(sandboxes) = self.sandboxes {
            let images: Vec<String> = tasks.iter().map(|task| task.image.clone()).collect();
            sandboxes.expect_images(&images);
        }
        let mut pool = Pool::new(self.context.clone(), settings);
        for (index, task) in (0u32..).zip(tasks) {
            let id = GroupId::Eval { round, index };
            let known = self.reader().group(id).await?;
            match known.map(|group| group.state) {
                None => self.context.store.open_group(id, round, &task.id, size).await?,
                Some(GroupState::Filling) => {}
                Some(GroupState::Kept | GroupState::Dropped) => continue,
            }
            pool.add(id, task).await?;
        }
        let mut complete = Vec::new();
        while let Some(id) = pool.next_group().await? {
            complete.push(id);
        }
        // Decided only now: if broken machinery ends the round, the next start tries its episodes
        // again, and no task is counted as broken for ever.
        for id in complete {
            let group = SealedGroup::load(self.reader(), id, size).await?;
            let decision = if group.rewards().iter().flatten().next().is_some() {
                Decision::Keep
            } else {
                Decision::Drop("no episode has a trusted reward".to_owned())
            };
            self.context.decide(id, &decision).await?;
        }
        Ok(())
    }

    /// Held-out tasks first, then those of unseen families.
    fn eval_tasks(&self) -> Result<Vec<Arc<Task>>, RunError> {
        let run = self.run_settings();
        let held_out = self.tasks.held_out.iter().take(run.eval_tasks as usize);
        let families = self.tasks.held_out_families.iter().take(self.family_tasks());
        let tasks: Vec<_> = held_out.chain(families).cloned().collect();
        if tasks.is_empty() { Err(RunError::NoTasks { part: "held-out" }) } else { Ok(tasks) }
    }

    fn family_tasks(&self) -> usize {
        let wanted = self.run_settings().eval_held_out_families as usize;
        wanted.min(self.tasks.held_out_families.len())
    }

    /// Writes the patches. `predictions.jsonl` has one per task, the first sample with a trusted
    /// outcome; with several samples per task each sample also has a file, because the means of an
    /// evaluation are over all of them.
    async fn write_predictions(
        &self,
        round: u32,
        version: PolicyVersion,
        tasks: &[Arc<Task>],
    ) -> Result<(), RunError> {
        let reader = self.reader();
        let samples = usize::from(self.run_settings().eval_samples);
        let mut first = Vec::new();
        let mut by_sample = vec![Vec::new(); samples];
        for (index, task) in (0u32..).zip(tasks) {
            let attempts = reader.sealed_of_group(GroupId::Eval { round, index }).await?;
            for (place, attempt) in attempts.iter().enumerate() {
                let detail = reader.load_record(attempt).await?.detail;
                let detail: EpisodeDetail = serde_json::from_value(detail).map_err(|e| {
                    RunError::stored(format!("detail of attempt {}", attempt.id), e)
                })?;
                let prediction = Prediction {
                    instance_id: task.id.clone(),
                    model_name_or_path: self.context.plan.model_name.at_version(version),
                    model_patch: Some(detail.patch),
                };
                if place == 0 {
                    first.push(prediction.clone());
                }
                if let Some(sample) = by_sample.get_mut(usize::from(attempt.id.episode.member)) {
                    sample.push(prediction);
                }
            }
        }
        self.folder.write_predictions(&first, if samples > 1 { &by_sample } else { &[] })
    }
}
