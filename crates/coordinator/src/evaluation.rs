//! Pass@1 on held-out tasks, the same tasks under the same seeds every time.

mod standalone;

pub use standalone::Evaluation;

use crate::config::RunSettings;
use crate::context::Context;
use crate::error::RunError;
use crate::events::Event;
use crate::files::RunFolder;
use crate::groups::{Decision, SealedGroup};
use crate::plan::TaskSet;
use crate::pool::{Pool, StageSettings};
use crate::record::EpisodeDetail;
use orchestrate_metrics::{TaskScore, mean_and_se};
use orchestrate_report::{RunReport, task_scores};
use orchestrate_sandbox::SandboxProvider;
use orchestrate_store::{GroupState, Reader};
use orchestrate_tasks::Task;
use orchestrate_tasks::predictions::Prediction;
use orchestrate_types::{GroupId, PolicyVersion};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::time::Instant;

/// Evaluates policy versions, in a run or without training.
#[derive(Clone, Copy)]
pub(crate) struct Evaluator<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) folder: &'a RunFolder,
    pub(crate) sandboxes: &'a dyn SandboxProvider,
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
        let begun = Instant::now();
        let tasks = self.eval_tasks()?;
        let held_out = tasks.len() - self.family_tasks();
        let size = self.run_settings().eval_samples;
        self.context.store.open_eval(round, version).await?;
        self.run_eval_groups(round, &tasks).await?;

        let scores = task_scores(self.reader(), round).await?;
        let mut line = eval_line(&scores, held_out, usize::from(size));
        if let Value::Object(map) = &mut line {
            map.insert("time_eval_s".to_owned(), json!(begun.elapsed().as_secs_f64()));
            let mut named = serde_json::Map::new();
            named.insert("global_step".to_owned(), json!(round));
            named.insert("policy_version".to_owned(), json!(version));
            named.append(map);
            *map = named;
        }
        self.write_predictions(round, version, &tasks).await?;
        self.context.store.finish_eval(round, &line).await?;
        self.folder.write_metrics(&self.reader().metrics().await?)?;
        self.context.report(&Event::EvalFinished { line });
        let report = RunReport::from_journal(self.reader()).await?;
        self.folder.write_report(&report, &self.reader().metrics().await?)
    }

    async fn run_eval_groups(&self, round: u32, tasks: &[Arc<Task>]) -> Result<(), RunError> {
        let size = self.run_settings().eval_samples;
        let planned = tasks.len() * usize::from(size);
        self.context.report(&Event::EvalStarted { round, episodes: planned });
        let settings = StageSettings {
            temperature: self.run_settings().eval_temperature,
            want_routing: false,
            planned,
        };
        let images: Vec<String> = tasks.iter().map(|task| task.image.clone()).collect();
        self.sandboxes.expect_images(&images);
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

    async fn write_predictions(
        &self,
        round: u32,
        version: PolicyVersion,
        tasks: &[Arc<Task>],
    ) -> Result<(), RunError> {
        let reader = self.reader();
        let mut lines = Vec::new();
        for (index, task) in (0u32..).zip(tasks) {
            let sealed = reader.sealed_of_group(GroupId::Eval { round, index }).await?;
            let Some(attempt) = sealed.first() else { continue };
            let detail = reader.load_record(attempt).await?.detail;
            let detail: EpisodeDetail = serde_json::from_value(detail)
                .map_err(|e| RunError::stored(format!("detail of attempt {}", attempt.id), e))?;
            lines.push(Prediction {
                instance_id: task.id.clone(),
                model_name_or_path: format!("{}@{version}", self.context.plan.model_name),
                model_patch: Some(detail.patch),
            });
        }
        self.folder.write_predictions(&lines)
    }
}

/// The numbers of a round whose first `held_out` tasks are of known families.
fn eval_line(scores: &[TaskScore], held_out: usize, samples: usize) -> Value {
    let (known, families) = scores.split_at_checked(held_out).unwrap_or((scores, &[]));
    let rates =
        |part: &[TaskScore]| -> Vec<f64> { part.iter().filter_map(TaskScore::rate).collect() };
    let (pass, se) = unzip(mean_and_se(&rates(known)));
    let (family_pass, family_se) = unzip(mean_and_se(&rates(families)));
    let at_k: Vec<f64> = known.iter().filter_map(|s| s.pass_at(samples)).collect();
    let pass_at_k = if samples > 1 { unzip(mean_and_se(&at_k)).0 } else { None };
    json!({
        "eval_pass_at_1": pass,
        "eval_pass_at_1_se": se,
        "eval_pass_at_k": pass_at_k,
        "eval_k": samples,
        "eval_tasks": known.len(),
        "eval_held_out_families_pass_at_1": family_pass,
        "eval_held_out_families_pass_at_1_se": family_se,
        "eval_held_out_families_tasks": families.len(),
        "eval_broken": scores.iter().map(|s| s.broken).sum::<usize>(),
    })
}

fn unzip(pair: Option<(f64, f64)>) -> (Option<f64>, Option<f64>) {
    (pair.map(|p| p.0), pair.map(|p| p.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(solved: usize, trusted: usize, broken: usize) -> TaskScore {
        TaskScore { solved, trusted, broken }
    }

    #[test]
    fn broken_episodes_neither_pass_nor_fail() {
        let line = eval_line(&[score(1, 1, 0), score(0, 1, 0), score(0, 0, 1)], 3, 1);
        assert_eq!(line["eval_pass_at_1"], json!(0.5));
        assert_eq!(line["eval_broken"], json!(1));
        assert_eq!(line["eval_tasks"], json!(3));
        assert_eq!(line["eval_pass_at_k"], Value::Null);
        assert_eq!(line["eval_held_out_families_pass_at_1"], Value::Null);
    }

    #[test]
    fn families_are_reported_beside() {
        let line = eval_line(&[score(2, 2, 0), score(1, 2, 0)], 1, 2);
        assert_eq!(line["eval_pass_at_1"], json!(1.0));
        assert_eq!(line["eval_held_out_families_pass_at_1"], json!(0.5));
        assert_eq!(line["eval_pass_at_k"], json!(1.0));
    }
}
