//! The `[run]`, `[tasks]` and `[diagnostics]` sections.

use orchestrate_types::{ConfigProblem, HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Each step ahead holds its open groups, so that the limit is also one of memory.
const MAX_STALENESS: u32 = 64;

/// How long the run is, and when it is measured. Every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunSection {
    /// Seed of task order and of every episode. Default 0.
    pub seed: Option<u64>,
    /// Global steps. Default 100.
    pub steps: Option<u32>,
    /// Global steps that sampling may be ahead of training: by so many policy versions a token may
    /// be older than the weights it trains. Weights then change while episodes run. 0 = each step
    /// samples with the weights it trains (synchronous). Default 0.
    pub max_staleness: Option<u32>,
    /// Evaluate before training, after every so many steps, and after the last. 0 = never.
    /// Default 10.
    pub eval_every: Option<u32>,
    /// Held-out tasks per evaluation. Default 100.
    pub eval_tasks: Option<u32>,
    /// Held-out tasks of unseen families per evaluation. Default 0.
    pub eval_held_out_families: Option<u32>,
    /// Episodes per evaluation task; above 1, Pass@k is reported for k = this. Default 1.
    pub eval_samples: Option<u16>,
    /// Sampling temperature of evaluations; 0 = greedy. Default 0.
    pub eval_temperature: Option<f32>,
    /// Newest checkpoints the embedded trainer keeps in the run folder. Default 3.
    pub keep_checkpoints: Option<u32>,
    /// Newest batch folders kept after they were applied. Default 2.
    pub keep_batches: Option<u32>,
    /// Time for running episodes to reach a turn border after the first Ctrl-C. Default "60s".
    pub shutdown_grace: Option<HumanDuration>,
    /// Pause before an episode is tried again after its infrastructure failed. Default "2s".
    pub retry_pause: Option<HumanDuration>,
    /// The run stops once more than this share of a stage's episodes failed in every attempt.
    /// Default 0.25.
    pub max_broken_share: Option<f64>,
}

/// The checked `[run]` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSettings {
    /// Seed.
    pub seed: u64,
    /// Global steps, at least 1.
    pub steps: u32,
    /// Steps that sampling may be ahead of training; 0 = synchronous.
    pub max_staleness: u32,
    /// Evaluation interval in steps; 0 = never.
    pub eval_every: u32,
    /// Held-out tasks per evaluation.
    pub eval_tasks: u32,
    /// Held-out tasks of unseen families per evaluation.
    pub eval_held_out_families: u32,
    /// Episodes per evaluation task, at least 1.
    pub eval_samples: u16,
    /// Evaluation temperature, ≥ 0.
    pub eval_temperature: f32,
    /// Checkpoints kept, at least 1.
    pub keep_checkpoints: u32,
    /// Applied batch folders kept.
    pub keep_batches: u32,
    /// Grace after the first stop signal.
    pub shutdown_grace: HumanDuration,
    /// Pause before a retry.
    pub retry_pause: HumanDuration,
    /// Share of episodes that may be given up, 0 to 1.
    pub max_broken_share: f64,
}

impl RunSettings {
    /// Whether an evaluation follows global step `step` (0 = before training).
    pub fn evaluates_after(&self, step: u32) -> bool {
        let every = self.eval_every;
        every > 0 && (step.is_multiple_of(every) || step == self.steps)
    }
}

impl RunSection {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// All problems of the section at once.
    pub fn check(&self) -> Result<RunSettings, Vec<ConfigProblem>> {
        let settings = RunSettings {
            seed: self.seed.unwrap_or(0),
            steps: self.steps.unwrap_or(100),
            max_staleness: self.max_staleness.unwrap_or(0),
            eval_every: self.eval_every.unwrap_or(10),
            eval_tasks: self.eval_tasks.unwrap_or(100),
            eval_held_out_families: self.eval_held_out_families.unwrap_or(0),
            eval_samples: self.eval_samples.unwrap_or(1),
            eval_temperature: self.eval_temperature.unwrap_or(0.0),
            keep_checkpoints: self.keep_checkpoints.unwrap_or(3),
            keep_batches: self.keep_batches.unwrap_or(2),
            shutdown_grace: self.shutdown_grace.unwrap_or(HumanDuration::secs(60)),
            retry_pause: self.retry_pause.unwrap_or(HumanDuration::secs(2)),
            max_broken_share: self.max_broken_share.unwrap_or(0.25),
        };
        let s = &settings;
        let mut problems = Problems::default();
        problems.require(s.steps > 0, "run.steps", s.steps, "use at least 1");
        problems.require(
            s.max_staleness <= MAX_STALENESS,
            "run.max_staleness",
            s.max_staleness,
            format!("use at most {MAX_STALENESS}; samples that old teach little"),
        );
        problems.require(s.eval_samples > 0, "run.eval_samples", s.eval_samples, "use at least 1");
        problems.require(
            s.eval_every == 0 || s.eval_tasks + s.eval_held_out_families > 0,
            "run.eval_tasks",
            s.eval_tasks,
            "evaluate at least 1 task, or set run.eval_every = 0",
        );
        problems.require(
            s.eval_temperature.is_finite() && (0.0..=10.0).contains(&s.eval_temperature),
            "run.eval_temperature",
            s.eval_temperature,
            "use a number from 0 (greedy) to 10",
        );
        problems.require(
            s.eval_samples <= 1 || s.eval_temperature > 0.0,
            "run.eval_samples",
            s.eval_samples,
            "greedy samples are all alike: set run.eval_temperature above 0, or use 1",
        );
        problems.require(
            s.keep_checkpoints > 0,
            "run.keep_checkpoints",
            s.keep_checkpoints,
            "keep at least 1, the run continues from it",
        );
        problems.require(
            (0.0..=1.0).contains(&s.max_broken_share),
            "run.max_broken_share",
            s.max_broken_share,
            "use a share from 0 to 1",
        );
        problems.require(
            s.shutdown_grace.0 <= Duration::from_hours(1),
            "run.shutdown_grace",
            s.shutdown_grace,
            "use at most \"1h\"; a second Ctrl-C stops at once",
        );
        problems.into_result(settings)
    }
}

/// Where tasks come from. Every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TasksSection {
    /// Task family. Default "micro".
    pub environment: Option<String>,
    /// Rows of R2E-Gym or SWE-bench to train on (JSON lines, JSON or parquet, also .gz; or
    /// `hf://datasets/OWNER/NAME[@REVISION][/PATH]` on Hugging Face) instead of an environment's own
    /// tasks. Images are those of the rows.
    pub file: Option<String>,
    /// Rows to evaluate on, in the order of the file.
    pub held_out_file: Option<String>,
    /// Tasks of the environment to train on beside those of `file`. Default 0.
    pub mix: Option<u32>,
    /// Ids of rows that are left out, such as those that `orchestrate tasks verify` found unsound.
    pub skip: Option<Vec<String>>,
    /// Training tasks. Default 1000; of a file all.
    pub train: Option<u32>,
    /// Held-out tasks (of each held-out part). Default 200; of a file all.
    pub held_out: Option<u32>,
    /// Seed of generated tasks. Default 0.
    pub seed: Option<u64>,
    /// Container image, where the family does not name one per task. Default: the family's own.
    pub image: Option<String>,
}

/// The checked `[tasks]` section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TasksSettings {
    /// Task family.
    pub environment: String,
    /// File of rows to train on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// File of rows to evaluate on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out_file: Option<String>,
    /// Tasks of the environment among those of `file`.
    #[serde(default)]
    pub mix: u32,
    /// Ids of rows that are left out.
    #[serde(default)]
    pub skip: Vec<String>,
    /// Training tasks, at least 1; `None` where a file has as many as it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<u32>,
    /// Held-out tasks of each held-out part; `None` likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<u32>,
    /// Seed of generated tasks.
    pub seed: u64,
    /// Container image.
    pub image: Option<String>,
}

impl TasksSection {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// All problems of the section at once.
    pub fn check(&self) -> Result<TasksSettings, Vec<ConfigProblem>> {
        let generated = (self.file.is_none() && self.held_out_file.is_none()).then_some(());
        let settings = TasksSettings {
            environment: self.environment.clone().unwrap_or_else(|| "micro".to_owned()),
            file: self.file.clone(),
            held_out_file: self.held_out_file.clone(),
            mix: self.mix.unwrap_or(0),
            skip: self.skip.clone().unwrap_or_default(),
            train: self.train.or(generated.map(|()| 1000)),
            held_out: self.held_out.or(generated.map(|()| 200)),
            seed: self.seed.unwrap_or(0),
            image: self.image.clone(),
        };
        let mut problems = Problems::default();
        problems.require(settings.train != Some(0), "tasks.train", 0, "use at least 1");
        problems.require(
            settings.mix == 0 || settings.file.is_some(),
            "tasks.mix",
            settings.mix,
            "name rows to mix them with by tasks.file, or say by tasks.train how many tasks there are",
        );
        for (key, path) in
            [("tasks.file", &settings.file), ("tasks.held_out_file", &settings.held_out_file)]
        {
            let empty = path.as_ref().is_some_and(|path| path.trim().is_empty());
            problems.require(!empty, key, "\"\"", "name a file of rows, or leave it out");
        }
        problems.require(
            !settings.environment.trim().is_empty(),
            "tasks.environment",
            "\"\"",
            "name a task family, e.g. \"micro\"",
        );
        if let Some(image) = &settings.image {
            problems.require(
                !image.trim().is_empty(),
                "tasks.image",
                "\"\"",
                "name an image, or leave it out",
            );
        }
        problems.into_result(settings)
    }
}

/// What is measured beyond what training needs. Every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiagnosticsSection {
    /// Measure the train-inference mismatch without replay too, at the first step and then every
    /// so many. 0 = never. Default 10.
    pub no_replay_every: Option<u32>,
    /// What becomes of a run whose training collapses: "warn" or "stop". Default "warn".
    pub on_collapse: Option<OnCollapse>,
}

/// What becomes of a run whose training collapses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnCollapse {
    /// It goes on, and a person is told.
    #[default]
    Warn,
    /// It ends; the error names the last weights before.
    Stop,
}

/// The checked `[diagnostics]` section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiagnosticsSettings {
    /// Interval in steps; 0 = never.
    pub no_replay_every: u32,
    /// What becomes of a run that collapses.
    #[serde(default)]
    pub on_collapse: OnCollapse,
}

impl DiagnosticsSection {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// None at present; a list like the other sections'.
    pub fn check(&self) -> Result<DiagnosticsSettings, Vec<ConfigProblem>> {
        Ok(DiagnosticsSettings {
            no_replay_every: self.no_replay_every.unwrap_or(10),
            on_collapse: self.on_collapse.unwrap_or_default(),
        })
    }
}

#[derive(Default)]
struct Problems(Vec<ConfigProblem>);

impl Problems {
    fn require(
        &mut self,
        holds: bool,
        key: &str,
        value: impl std::fmt::Display,
        remedy: impl Into<String>,
    ) {
        if !holds {
            self.0.push(ConfigProblem::new(key, value, remedy));
        }
    }

    fn into_result<T>(self, value: T) -> Result<T, Vec<ConfigProblem>> {
        if self.0.is_empty() { Ok(value) } else { Err(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_sections_are_whole() {
        assert_eq!(RunSection::default().check().unwrap().steps, 100);
        assert_eq!(TasksSection::default().check().unwrap().environment, "micro");
        assert_eq!(DiagnosticsSection::default().check().unwrap().no_replay_every, 10);
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let text = "steps = 0\nmax_staleness = 65\neval_samples = 4\nkeep_checkpoints = 0\nmax_broken_share = 2.0\n\
                    eval_tasks = 0\nshutdown_grace = \"2h\"";
        let section: RunSection = toml::from_str(text).unwrap();
        let keys: Vec<String> = section.check().unwrap_err().into_iter().map(|p| p.key).collect();
        assert_eq!(
            keys,
            [
                "run.steps",
                "run.max_staleness",
                "run.eval_tasks",
                "run.eval_samples",
                "run.keep_checkpoints",
                "run.max_broken_share",
                "run.shutdown_grace"
            ]
        );
        let tasks: TasksSection = toml::from_str("train = 0\nimage = \"\"").unwrap();
        assert_eq!(tasks.check().unwrap_err().len(), 2);
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(toml::from_str::<RunSection>("stepz = 1").is_err());
    }
}
