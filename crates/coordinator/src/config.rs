//! The sections `[run]`, `[tasks]` and `[diagnostics]`.

use orchestrate_rollout::LOWEST_TEMPERATURE;
use orchestrate_settings::{
    Problems, at_least, at_most, between, not_blank, setting_types, settings,
};
use orchestrate_types::HumanDuration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Each step of staleness keeps its open groups in memory, so this also bounds memory.
const MAX_STALENESS: u32 = 64;

settings! {
    /// How long the run is, and when it is evaluated.
    [run] pub RunSection -> RunSettings, check: check_run;

    /// What the run is called where runs are listed.
    name: Option<String> = None => "the folder's name", not_blank("must be a name; leave it out for none");
    /// Words by which runs can be found where they are listed.
    tags: Vec<String> = Vec::new();
    /// Seed of the order of tasks and of every episode.
    seed: u64 = 0;
    /// Global steps.
    steps: u32 = 100, at_least(1);
    /// Global steps that sampling may be ahead of training: a token may be sampled by weights this
    /// many policy versions older than those that it trains. Weights then change while episodes
    /// run. With 0 each step samples with the weights that it trains (synchronous).
    max_staleness: u32 = 0, at_most(MAX_STALENESS).hint("older samples teach little");
    /// Evaluate before training, after every this many steps, and after the last one. 0 = never.
    eval_every: u32 = 10;
    /// Evaluate before training. Without it, the gain is counted from the first evaluation that ran.
    eval_first: bool = true;
    /// Held-out tasks per evaluation.
    eval_tasks: u32 = 100;
    /// Held-out tasks of unseen families per evaluation.
    eval_held_out_families: u32 = 0;
    /// Episodes per evaluation task; above 1, pass@k is reported for k = this number.
    eval_samples: u16 = 1, at_least(1);
    /// Sampling temperature of evaluations; 0 = greedy.
    eval_temperature: f32 = 0.0, between(0.0, 10.0).hint("0 is greedy");
    /// Newest checkpoints that the embedded trainer keeps in the run folder.
    keep_checkpoints: u32 = 3, at_least(1).hint("the run resumes from it");
    /// Newest batch folders that are kept after they were applied.
    keep_batches: u32 = 2;
    /// Time for running episodes to finish their turn after the first Ctrl-C.
    shutdown_grace: HumanDuration = HumanDuration::secs(60),
        at_most(HumanDuration::secs(3600)).hint("a second Ctrl-C stops at once");
    /// Pause before an episode is retried after its infrastructure failed.
    retry_pause: HumanDuration = HumanDuration::secs(2);
    /// The run stops once more than this share of a stage's episodes failed in every attempt.
    max_broken_share: f64 = 0.25, between(0.0, 1.0);
}

fn check_run(written: &RunSection, settings: &RunSettings, problems: &mut Problems) {
    problems.require(
        settings.eval_every == 0
            || settings.eval_tasks.saturating_add(settings.eval_held_out_families) > 0,
        "eval_tasks",
        settings.eval_tasks,
        "must be at least 1, unless run.eval_every is 0",
    );
    problems.require(
        settings.eval_samples <= 1 || settings.eval_temperature > 0.0,
        "eval_samples",
        settings.eval_samples,
        "must be 1 while run.eval_temperature is 0: greedy samples are all alike",
    );
    problems.require(
        settings.eval_temperature <= 0.0 || settings.eval_temperature >= LOWEST_TEMPERATURE,
        "eval_temperature",
        settings.eval_temperature,
        format!("must be at least {LOWEST_TEMPERATURE}, or 0, which is greedy: engines do not sample at lower ones"),
    );
    if settings.eval_every == 0 {
        problems.refuse_unread(written, &["eval_first"], "only applies with run.eval_every");
    }
}

impl RunSettings {
    /// Whether an evaluation follows global step `step` (0 = before training).
    pub fn evaluates_after(&self, step: u32) -> bool {
        let every = self.eval_every;
        let due = if step == 0 { self.eval_first } else { step.is_multiple_of(every) };
        every > 0 && (due || step == self.steps)
    }
}

/// Tasks are generated before a run starts, and kept in memory.
const MAX_GENERATED: u32 = 1_000_000;

settings! {
    /// Which tasks are trained on and evaluated.
    #[derive(Eq)]
    [tasks] pub TasksSection -> TasksSettings, check: check_tasks;

    /// Environment that generates tasks.
    environment: String = "micro".to_owned(), not_blank("must be an environment, like \"micro\"");
    /// Rows of R2E-Gym or SWE-bench to train on, instead of generated tasks: JSON lines, JSON or
    /// parquet, also `.gz`, or `hf://datasets/OWNER/NAME[@REVISION][/PATH]` on Hugging Face. Images
    /// are those that the rows name.
    file: Option<String> = None, not_blank(FILE);
    /// Rows to evaluate on, in the order of the file.
    held_out_file: Option<String> = None, not_blank(FILE);
    /// Generated tasks to train on in addition to those of `file`.
    mix: u32 = 0, at_most(MAX_GENERATED);
    /// Ids of tasks to leave out, such as those that `orchestrate tasks verify` found unsound.
    skip: Vec<String> = Vec::new();
    /// Training tasks.
    train: Option<u32> = (file.is_none() && held_out_file.is_none()).then_some(1000)
        => "`1000`; of a file all", between(1, MAX_GENERATED);
    /// Held-out tasks of each held-out part.
    held_out: Option<u32> = (file.is_none() && held_out_file.is_none()).then_some(200)
        => "`200`; of a file all", at_most(MAX_GENERATED);
    /// Seed of generated tasks.
    seed: u64 = 0;
    /// Container image of tasks that do not name one.
    image: Option<String> = None => "the environment's own",
        not_blank("must be the name of an image; leave it out for the environment's own");
}

const FILE: &str = "must be a task file; leave it out for generated tasks";

fn check_tasks(written: &TasksSection, settings: &TasksSettings, problems: &mut Problems) {
    problems.require(
        settings.mix == 0 || settings.file.is_some(),
        "mix",
        settings.mix,
        "must be 0 without tasks.file; tasks.train is the number of generated tasks",
    );
    let (file, held_out_file) = (settings.file.is_some(), settings.held_out_file.is_some());
    if (file || held_out_file) && settings.mix == 0 {
        let why = "only applies to generated tasks: rows of files name their images";
        problems.refuse_unread(written, &["image"], why);
    }
    if held_out_file && !file {
        let why = "only applies with tasks.file, whose rows it counts, and to generated tasks, which \
                   tasks.held_out_file replaces";
        problems.refuse_unread(written, &["train"], why);
    }
    if file && !held_out_file {
        let why = "only applies with tasks.held_out_file, whose rows it counts, and to generated tasks, \
                   which tasks.file replaces";
        problems.refuse_unread(written, &["held_out"], why);
    }
}

/// What happens to a run whose training collapses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnCollapse {
    /// The run continues, with a warning.
    #[default]
    Warn,
    /// The run ends with an error that names the last weights before the collapse.
    Stop,
}

setting_types!(OnCollapse);

settings! {
    /// Measurements that training itself does not need.
    #[derive(Eq)]
    [diagnostics] pub DiagnosticsSection -> DiagnosticsSettings;

    /// Measure the train-inference mismatch without replay as well, at the first step and then
    /// every this many steps. 0 = never.
    no_replay_every: u32 = 10;
    /// What happens to a run whose training collapses.
    on_collapse: OnCollapse = OnCollapse::default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_sections_have_every_default() {
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
                "run.keep_checkpoints",
                "run.shutdown_grace",
                "run.max_broken_share",
                "run.eval_tasks",
                "run.eval_samples"
            ]
        );
        let cold: RunSection = toml::from_str("eval_temperature = 1e-30").unwrap();
        assert_eq!(cold.check().unwrap_err()[0].key, "run.eval_temperature");
        let tasks: TasksSection = toml::from_str("train = 0\nimage = \"\"").unwrap();
        assert_eq!(tasks.check().unwrap_err().len(), 2);
    }

    #[test]
    fn keys_that_nothing_reads_are_refused_by_name() {
        let keys = |found: Result<_, Vec<orchestrate_types::ConfigProblem>>| -> Vec<String> {
            let problems = found.err().unwrap_or_default();
            assert!(problems.iter().all(|p| p.remedy.starts_with("only applies ")), "{problems:?}");
            problems.into_iter().map(|problem| problem.key).collect()
        };
        let run = |text| keys(toml::from_str::<RunSection>(text).unwrap().check().map(drop));
        assert_eq!(run("eval_every = 0\neval_first = false"), ["run.eval_first"]);
        assert_eq!(run("eval_every = 5\neval_first = false"), [""; 0]);
        let tasks = |text| keys(toml::from_str::<TasksSection>(text).unwrap().check().map(drop));
        assert_eq!(tasks("image = \"i\"\ntrain = 5\nheld_out = 6"), [""; 0]);
        assert_eq!(tasks("file = \"f\"\nimage = \"i\""), ["tasks.image"]);
        assert_eq!(tasks("file = \"f\"\nmix = 2\nimage = \"i\""), [""; 0]);
        assert_eq!(tasks("file = \"f\"\ntrain = 5\nheld_out = 6"), ["tasks.held_out"]);
        assert_eq!(tasks("held_out_file = \"f\"\ntrain = 5\nheld_out = 6"), ["tasks.train"]);
    }

    #[test]
    fn evaluations_are_before_at_multiples_and_at_the_end() {
        let evaluated = |text: &str| {
            let run = toml::from_str::<RunSection>(text).unwrap().check().unwrap();
            (0..=run.steps).filter(|step| run.evaluates_after(*step)).collect::<Vec<_>>()
        };
        assert_eq!(evaluated("steps = 7\neval_every = 3"), [0, 3, 6, 7]);
        assert_eq!(evaluated("steps = 7\neval_every = 3\neval_first = false"), [3, 6, 7]);
        assert_eq!(evaluated("steps = 7\neval_every = 0"), [0; 0]);
    }

    #[test]
    fn unknown_keys_are_errors() {
        assert!(toml::from_str::<RunSection>("stepz = 1").is_err());
    }
}
