//! Several configurations side by side, each over its seeds: the tables of a paper, from journals. The
//! modules below draw, write and read them.

mod page;
mod record;
mod table;

pub use record::{read_runs, write_runs};

use crate::error::ReportError;
use crate::journal::metrics_lines;
use crate::summary::RunReport;
use camino::{Utf8Path, Utf8PathBuf};
use jiff::Timestamp;
use orchestrate_metrics::{MetricsLine, SCHEMA_VERSION, mean_and_se};
use orchestrate_store::Reader;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One run of a comparison.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ComparedRun {
    /// `run.seed` of its plan.
    pub seed: u64,
    /// Its folder; in a file of runs only `NAME/seed-N`.
    pub folder: Utf8PathBuf,
    /// Whether every step and evaluation is done.
    pub finished: bool,
    /// The error that ended it early, if one did.
    pub failure: Option<String>,
    /// Its results.
    pub report: RunReport,
    /// The lines of its `metrics.jsonl`.
    #[serde(skip)]
    pub lines: Vec<MetricsLine>,
}

impl ComparedRun {
    /// Reads the journal of the run in `folder`. The caller knows its plan: the seed, and whether it is
    /// `finished`.
    ///
    /// # Errors
    /// Store errors, and a stored metrics line that this version cannot read.
    pub async fn read(
        reader: &Reader,
        folder: &Utf8Path,
        seed: u64,
        finished: bool,
    ) -> Result<Self, ReportError> {
        Ok(Self {
            seed,
            folder: folder.to_owned(),
            finished,
            failure: None,
            report: RunReport::from_journal(reader).await?,
            lines: metrics_lines(reader).await?,
        })
    }
}

/// Runs that differ only in their seed.
#[derive(Debug, Clone)]
pub struct ConfigRuns {
    /// Name of the configuration.
    pub name: String,
    /// Their plan as JSON, without the seed.
    pub plan: Value,
    /// The runs, at least one.
    pub runs: Vec<ComparedRun>,
}

/// Mean over seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Its standard error; `None` with a single run.
    pub se: Option<f64>,
    /// Runs that have the value, the others are left out.
    pub runs: usize,
}

impl Estimate {
    fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let values: Vec<f64> = values.flatten().collect();
        let (mean, se) = mean_and_se(&values)?;
        Some(Self { mean, se: (values.len() > 1).then_some(se), runs: values.len() })
    }
}

/// The results of one configuration.
#[derive(Debug, Clone, Serialize)]
pub struct ConfigResult {
    /// Its name.
    pub name: String,
    /// The settings that differ between configurations, by key; null if this one does not set a key.
    pub settings: BTreeMap<String, Value>,
    /// Pass@1 at the newest evaluation.
    pub final_pass_at_1: Option<Estimate>,
    /// Highest Pass@1 of each run. The highest of many evaluations overstates the policy.
    pub best_pass_at_1: Option<Estimate>,
    /// The step of each run's highest Pass@1, by seed.
    pub best_steps: Vec<Option<u32>>,
    /// The step at which the collapse of each run started, by seed; null = it did not collapse, or has no steps.
    pub crash_steps: Vec<Option<u32>>,
    /// Final Pass@1 minus that of the first configuration, paired by seed.
    pub against_first: Option<Estimate>,
    /// Train-inference KL (k3), nats.
    pub kl_train_infer: Option<Estimate>,
    /// Train-inference KL in a forward pass without replay, nats.
    pub kl_train_infer_no_replay: Option<Estimate>,
    /// F(2): share of tokens with `max(ρ, 1/ρ) > 2`.
    pub extreme_tokens: Option<Estimate>,
    /// Share of (token, layer) pairs with other experts than the engine's.
    pub router_disagreement: Option<Estimate>,
    /// Entropy, nats per token.
    pub entropy: Option<Estimate>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<Estimate>,
    /// Wall time of a run, seconds.
    pub seconds: Option<Estimate>,
    /// The runs, by seed.
    pub runs: Vec<ComparedRun>,
}

/// Configurations compared with each other.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Version of this format, the same as that of metrics lines.
    pub schema_version: u32,
    /// When the newest metrics line of its runs was written, UTC; `None` if no line has a time.
    pub time: Option<Timestamp>,
    /// One result per configuration, in the order given.
    pub configs: Vec<ConfigResult>,
}

impl Comparison {
    /// Compares configurations. Settings that are the same in all plans are left out of
    /// [`ConfigResult::settings`].
    pub fn new(configs: Vec<ConfigRuns>) -> Self {
        let differing = differences(configs.iter().map(|config| &config.plan));
        let first: BTreeMap<u64, f64> = configs
            .first()
            .iter()
            .flat_map(|config| &config.runs)
            .filter_map(|run| Some((run.seed, final_pass(run)?)))
            .collect();
        let result = |(index, (config, settings)): (usize, (ConfigRuns, _))| {
            let runs = &config.runs;
            let of = |read: fn(&RunReport) -> Option<f64>| {
                Estimate::of(runs.iter().map(|run| read(&run.report)))
            };
            let gained = |run: &ComparedRun| Some(final_pass(run)? - first.get(&run.seed)?);
            ConfigResult {
                settings,
                final_pass_at_1: Estimate::of(runs.iter().map(final_pass)),
                best_pass_at_1: of(|r| Some(r.best?.pass_at_1)),
                best_steps: runs.iter().map(|r| Some(r.report.best?.global_step)).collect(),
                crash_steps: runs.iter().map(|r| Some(r.report.collapse.as_ref()?.step)).collect(),
                against_first: Estimate::of(runs.iter().map(gained)).filter(|_| index > 0),
                kl_train_infer: of(|r| r.kl_train_infer),
                kl_train_infer_no_replay: of(|r| r.means.kl_train_infer_no_replay),
                extreme_tokens: of(|r| r.means.extreme_tokens),
                router_disagreement: of(|r| r.means.router_disagreement),
                entropy: of(|r| r.means.entropy),
                grad_norm: of(|r| r.means.grad_norm),
                seconds: of(|r| Some(r.seconds)),
                name: config.name,
                runs: config.runs,
            }
        };
        let runs = configs.iter().flat_map(|config| &config.runs);
        let time = runs.filter_map(|run| run.report.time).max();
        let configs = configs.into_iter().zip(differing).enumerate().map(result).collect();
        Self { schema_version: SCHEMA_VERSION, time, configs }
    }

    /// Runs that an error ended before their last step: name with seed, and the error.
    pub fn failures(&self) -> impl Iterator<Item = (String, &str)> {
        self.configs.iter().flat_map(|config| {
            let named = |run: &ComparedRun| format!("{}, seed {}", config.name, run.seed);
            config.runs.iter().filter_map(move |run| Some((named(run), run.failure.as_deref()?)))
        })
    }
}

fn final_pass(run: &ComparedRun) -> Option<f64> {
    Some(run.report.newest()?.pass_at_1)
}

/// For each plan, the settings that are not the same in all of them, without the seed.
fn differences<'a>(plans: impl Iterator<Item = &'a Value>) -> Vec<BTreeMap<String, Value>> {
    let mut flat: Vec<BTreeMap<String, Value>> = plans
        .map(|plan| {
            let mut into = BTreeMap::new();
            flatten(plan, "", &mut into);
            into.remove("run.seed");
            into
        })
        .collect();
    let keys: Vec<String> = flat.iter().flat_map(|plan| plan.keys().cloned()).collect();
    for key in keys {
        let mut values = flat.iter().map(|plan| plan.get(&key));
        let first = values.next();
        let same = values.all(|value| Some(value) == first);
        for plan in &mut flat {
            if same {
                plan.remove(&key);
            } else {
                plan.entry(key.clone()).or_default();
            }
        }
    }
    flat
}

fn flatten(value: &Value, path: &str, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(value, &path, into);
            }
        }
        Value::Null => {}
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            into.insert(path.to_owned(), value.clone());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::summary::{EvalPoint, StepMeans};
    use orchestrate_metrics::{Collapse, EvalLine, StepLine, Symptom};
    use orchestrate_types::{PolicyVersion, RunId};
    use serde_json::json;

    fn point(global_step: u32, pass_at_1: f64) -> EvalPoint {
        EvalPoint {
            global_step,
            policy_version: PolicyVersion(u64::from(global_step)),
            pass_at_1,
            pass_at_1_se: 0.01,
            pass_at_k: None,
            k: 1,
            tasks: 100,
            held_out_families_pass_at_1: None,
            broken: 0,
        }
    }

    pub(crate) fn run(seed: u64, best: (u32, f64), last: f64, crash: Option<u32>) -> ComparedRun {
        let evaluation = |global_step, pass| EvalLine {
            global_step,
            eval_pass_at_1: Some(pass),
            ..EvalLine::default()
        };
        let step = |global_step, reward, kl| StepLine {
            global_step,
            reward_mean: Some(reward),
            kl_train_infer: Some(kl),
            entropy: Some(0.1),
            ..StepLine::default()
        };
        let lines = vec![
            evaluation(0, 0.3).into(),
            step(1, 0.3, 1e-4).into(),
            step(2, 0.4, 2e-4).into(),
            evaluation(2, last).into(),
        ];
        let symptom = Symptom::ExtremeTokens;
        let report = RunReport {
            schema_version: SCHEMA_VERSION,
            time: None,
            quarantined: Vec::new(),
            run: RunId::generate(),
            steps_applied: 2,
            steps_skipped: 0,
            baseline: Some(point(0, 0.3)),
            last: Some(point(2, last)),
            best: Some(point(best.0, best.1)),
            gain: None,
            held_out_families_gain: None,
            episodes: 8,
            train_tokens: 80,
            kl_train_infer: Some(1.5e-4),
            kl_ratio: None,
            seconds: 10.0,
            collapse: crash.map(|step| Collapse { step, symptom, last_good: None }),
            means: StepMeans { entropy: Some(0.1), ..StepMeans::default() },
        };
        let folder = format!("runs/seed-{seed}").into();
        ComparedRun { seed, folder, finished: true, failure: None, report, lines }
    }

    pub(crate) fn comparison() -> Comparison {
        let plan = |loss: &str, seed: u64, clip: Option<f64>| {
            json!({"run": {"seed": seed, "steps": 2},
                   "algorithm": {"policy_loss": loss, "clip_low": clip}})
        };
        let mut unfinished = run(2, (1, 0.5), 0.4, Some(60));
        unfinished.finished = false;
        unfinished.failure = Some("the loss of mini step 1 is not finite".into());
        Comparison::new(vec![
            ConfigRuns {
                name: "none".into(),
                plan: plan("grpo", 1, Some(0.2)),
                runs: vec![run(1, (2, 0.4), 0.4, None), run(2, (1, 0.6), 0.5, None)],
            },
            ConfigRuns {
                name: "a|b".into(),
                plan: plan("sapo", 1, None),
                runs: vec![run(1, (2, 0.6), 0.6, None), unfinished, run(3, (2, 0.9), 0.9, None)],
            },
        ])
    }

    #[test]
    fn numbers_are_means_over_seeds_with_their_standard_error() {
        let comparison = comparison();
        let [none, other] = &comparison.configs[..] else { panic!("two") };
        let close = |found: Option<Estimate>, mean: f64, se: f64, runs| {
            let found = found.unwrap();
            assert!((found.mean - mean).abs() < 1e-12, "{found:?}");
            assert!((found.se.unwrap() - se).abs() < 1e-12, "{found:?}");
            assert_eq!(found.runs, runs);
        };
        // Two values 0.1 apart: deviation 0.0707, error 0.05.
        close(none.final_pass_at_1, 0.45, 0.05, 2);
        close(none.best_pass_at_1, 0.5, 0.1, 2);
        assert_eq!(
            (none.against_first, other.best_steps.as_slice()),
            (None, &[Some(2), Some(1), Some(2)][..])
        );
        // Seed 3 has no partner: +0.2 and −0.1.
        close(other.against_first, 0.05, 0.15, 2);
        assert_eq!(other.crash_steps, [None, Some(60), None]);
        assert_eq!(none.seconds.unwrap().mean.to_string(), "10");
    }

    #[test]
    fn single_run_has_no_standard_error() {
        let one = Estimate::of([None, Some(0.5)].into_iter()).unwrap();
        assert_eq!((one.se, one.runs), (None, 1));
        assert_eq!(Estimate::of([None].into_iter()), None);
    }

    #[test]
    fn settings_table_has_only_what_differs() {
        let (header, rows) = comparison().settings_table();
        assert_eq!(header, ["config", "algorithm.clip_low", "algorithm.policy_loss"]);
        assert_eq!(rows, [["none", "0.2", "grpo"], ["a|b", "–", "sapo"]]);
    }
}
