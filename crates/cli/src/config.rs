//! Config files: layers are parsed one by one, merged, then checked as a whole.
//!
//! Later layers win, tables merge, lists are replaced. Each section belongs to the crate that
//! uses it; this module only loads.

use crate::args::ConfigSource;
use camino::Utf8PathBuf;
use orchestrate_coordinator::{
    DiagnosticsSection, DiagnosticsSettings, RunSection, RunSettings, TasksSection, TasksSettings,
};
use orchestrate_engine::{EngineKind, EnginePlan, EngineSection};
use orchestrate_handoff::protocol::RoutingReplay;
use orchestrate_handoff::{
    Algorithm, AlgorithmSection, HandoffPlan, HandoffSection, TrainerPlan, TrainerSection,
};
use orchestrate_moe::infer::WeightFormat;
use orchestrate_rollout::{RewardSection, RolloutConfig, RolloutPlan};
use orchestrate_routing::{RoutingPlan, RoutingSection};
use orchestrate_sandbox::{RawSandboxConfig, SandboxConfig};
use orchestrate_types::ConfigProblem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use toml::{Table, Value};

/// What is wrong with the settings. Exit code 3.
#[derive(Debug)]
pub(crate) enum ConfigError {
    /// A file cannot be read.
    Unreadable { file: Utf8PathBuf, error: std::io::Error },
    /// A layer does not parse, or has a key nobody knows.
    Layer { name: String, error: String },
    /// The merged settings have these problems.
    Problems(Vec<ConfigProblem>),
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { file, error } => {
                write!(f, "cannot read config file {file}: {error}")
            }
            Self::Layer { name, error } => write!(f, "{name}: {}", error.trim_end()),
            Self::Problems(problems) => {
                write!(f, "the config has {} problem(s):", problems.len())?;
                for problem in problems {
                    write!(f, "\n  {problem}")?;
                }
                Ok(())
            }
        }
    }
}

/// Reads, merges and parses all layers of `source`.
pub(crate) fn load<T: for<'de> Deserialize<'de>>(source: &ConfigSource) -> Result<T, ConfigError> {
    let mut merged = Table::new();
    for file in &source.files {
        let text = fs_err::read_to_string(file)
            .map_err(|error| ConfigError::Unreadable { file: file.clone(), error })?;
        // Parsed alone first, so that a mistake points at its line.
        parse_layer::<T>(file.as_str(), &text)?;
        merge(&mut merged, parse_layer::<Table>(file.as_str(), &text)?);
    }
    for set in &source.sets {
        let name = format!("--set {set}");
        let text = set_as_toml(set)
            .ok_or_else(|| layer_error(&name, "expected KEY=VALUE, like rollout.group_size=8"))?;
        parse_layer::<T>(&name, &text)?;
        merge(&mut merged, parse_layer::<Table>(&name, &text)?);
    }
    merged.try_into().map_err(|error: toml::de::Error| layer_error("config", error))
}

/// Parses one document that is complete in itself (a stored plan).
pub(crate) fn parse_layer<T: for<'de> Deserialize<'de>>(
    name: &str,
    text: &str,
) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| layer_error(name, error))
}

fn layer_error(name: &str, error: impl fmt::Display) -> ConfigError {
    ConfigError::Layer { name: name.to_owned(), error: error.to_string() }
}

/// `a.b=c` as a TOML line; a value that is not TOML is taken as a string.
fn set_as_toml(set: &str) -> Option<String> {
    let (key, value) = set.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if key.is_empty() || !key.chars().all(valid) {
        return None;
    }
    let literal = format!("{key} = {value}");
    if toml::from_str::<Table>(&literal).is_ok() {
        return Some(literal);
    }
    Some(format!("{key} = {}", Value::String(value.to_owned())))
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

/// `[embedded]`: the engine and trainer inside this program (used where `engine.url` or
/// `trainer.url` is absent).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawEmbedded {
    /// Weights of the embedded engine: `q8_0` (quantised, the default), `f32`, or `q4_0` (coarse on
    /// purpose, to study the distance between sampler and trainer).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight_format: Option<String>,
    /// Requests the embedded engine decodes together. Default 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_running: Option<usize>,
    /// Tokens its prefix cache holds. Default 65536.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cache_tokens: Option<usize>,
}

/// A run file. Every section and every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawConfig {
    /// Length of the run, and when it is measured.
    pub(crate) run: RunSection,
    /// What is trained and evaluated on.
    pub(crate) tasks: TasksSection,
    /// How episodes are made.
    pub(crate) rollout: RolloutConfig,
    /// How test logs are judged.
    pub(crate) reward: RewardSection,
    /// How routing rows are kept and shared.
    pub(crate) routing: RoutingSection,
    /// The inference server and the starting policy.
    pub(crate) engine: EngineSection,
    /// The trainer.
    pub(crate) trainer: TrainerSection,
    /// How rewards become an update.
    pub(crate) algorithm: AlgorithmSection,
    /// How batches are written.
    pub(crate) handoff: HandoffSection,
    /// Containers.
    pub(crate) sandbox: RawSandboxConfig,
    /// The engine and trainer inside this program.
    pub(crate) embedded: RawEmbedded,
    /// What is measured beside.
    pub(crate) diagnostics: DiagnosticsSection,
}

/// All sections, checked.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) run: RunSettings,
    pub(crate) tasks: TasksSettings,
    pub(crate) rollout: RolloutPlan,
    pub(crate) reward: RewardSection,
    pub(crate) routing: RoutingPlan,
    pub(crate) engine: EnginePlan,
    pub(crate) trainer: TrainerPlan,
    pub(crate) algorithm: Algorithm,
    pub(crate) handoff: HandoffPlan,
    pub(crate) sandbox: SandboxConfig,
    pub(crate) embedded: Embedded,
    pub(crate) diagnostics: DiagnosticsSettings,
}

/// The checked `[embedded]` section.
#[derive(Debug, Clone)]
pub(crate) struct Embedded {
    pub(crate) weight_format: WeightFormat,
    pub(crate) max_running: usize,
    pub(crate) cache_tokens: usize,
}

/// Policy shipped for the `micro` environment, relative to the project's root.
const MICRO_POLICY: &str = "environments/micro/policy";

impl RawConfig {
    /// Fills in defaults and checks everything.
    pub(crate) fn check(&self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        let mut engine = self.engine.clone();
        engine.model.get_or_insert_with(|| MICRO_POLICY.into());
        let run = keep(&mut problems, self.run.check());
        let tasks = keep(&mut problems, self.tasks.check());
        let rollout = keep(&mut problems, self.rollout.check());
        let routing = keep(&mut problems, self.routing.check());
        let engine = keep(&mut problems, engine.check());
        let trainer = keep(&mut problems, self.trainer.check());
        let algorithm = keep(&mut problems, self.algorithm.check());
        let sandbox = keep(&mut problems, self.sandbox.check());
        let embedded = keep(&mut problems, self.embedded.check());
        let diagnostics = keep(&mut problems, self.diagnostics.check());
        if let Some(tasks) = &tasks
            && tasks.environment != "micro"
        {
            problems.push(ConfigProblem::new(
                "tasks.environment",
                &tasks.environment,
                "use \"micro\", or name files of rows by tasks.file and tasks.held_out_file",
            ));
        }
        if let (Some(tasks), Some(run)) = (&tasks, &run)
            && tasks.file.is_some()
            && tasks.held_out_file.is_none()
            && run.eval_every > 0
        {
            problems.push(ConfigProblem::new(
                "run.eval_every",
                run.eval_every,
                "name rows to evaluate on by tasks.held_out_file, or use 0",
            ));
        }
        if let Some(plan) = &engine
            && plan.kind == EngineKind::Openai
            && self.engine.tokenizer.is_none()
            && self.engine.model.is_none()
        {
            let remedy = "name a folder with a tokenizer and a chat template, best the served \
                          model's: it counts the tokens of what a chat server writes";
            problems.push(ConfigProblem::missing("engine.tokenizer", remedy));
        }
        if let (Some(engine), Some(algorithm)) = (&engine, &algorithm)
            && algorithm.routing_replay() == RoutingReplay::Predictive
            && !(engine.urls.is_empty() && engine.discover.is_none())
        {
            problems.push(ConfigProblem::new(
                "algorithm.routing_replay",
                "predictive",
                "only the embedded engine routes by the trainer's prediction: use \"rollout\" with \
                 an inference server",
            ));
        }
        let parts = (run, tasks, rollout, routing, engine, trainer, algorithm, sandbox);
        match (parts, embedded, diagnostics) {
            (
                (
                    Some(run),
                    Some(tasks),
                    Some(rollout),
                    Some(routing),
                    Some(engine),
                    Some(trainer),
                    Some(algorithm),
                    Some(sandbox),
                ),
                Some(embedded),
                Some(diagnostics),
            ) if problems.is_empty() => Ok(Settings {
                run,
                tasks,
                rollout,
                reward: self.reward,
                routing,
                engine,
                trainer,
                algorithm,
                handoff: self.handoff.plan(),
                sandbox,
                embedded,
                diagnostics,
            }),
            _ => Err(ConfigError::Problems(problems)),
        }
    }

    /// The same settings with every default written out, as the run folder keeps them: a later
    /// version with other defaults still continues this run as it began.
    pub(crate) fn with_defaults(&self) -> Result<Self, ConfigError> {
        let settings = self.check()?;
        Ok(Self {
            run: restate(&settings.run)?,
            tasks: restate(&settings.tasks)?,
            rollout: restate(&settings.rollout)?,
            reward: settings.reward,
            routing: restate(&settings.routing)?,
            engine: EngineSection {
                model: Some(settings.engine.model.to_string()),
                kind: Some(settings.engine.kind.to_string()),
                ..self.engine.clone()
            },
            trainer: self.trainer.clone(),
            algorithm: settings.algorithm.section(),
            handoff: restate(&settings.handoff)?,
            sandbox: restate(&settings.sandbox)?,
            embedded: RawEmbedded {
                weight_format: Some(self.embedded.weight_format.clone().unwrap_or("q8_0".into())),
                max_running: Some(settings.embedded.max_running),
                cache_tokens: Some(settings.embedded.cache_tokens),
            },
            diagnostics: restate(&settings.diagnostics)?,
        })
    }
}

impl Settings {
    /// Whether a run with these settings can train.
    pub(crate) fn check_training(&self) -> Result<(), ConfigError> {
        self.engine.check_training().map_err(|problem| ConfigError::Problems(vec![problem]))
    }
}

fn keep<T>(problems: &mut Vec<ConfigProblem>, checked: Result<T, Vec<ConfigProblem>>) -> Option<T> {
    checked.map_err(|found| problems.extend(found)).ok()
}

/// A checked section in its written form; both have the same keys.
fn restate<T: Serialize, R: for<'de> Deserialize<'de>>(checked: &T) -> Result<R, ConfigError> {
    let table = Table::try_from(checked).map_err(|e| layer_error("plan", e))?;
    table.try_into().map_err(|e: toml::de::Error| layer_error("plan", e))
}

impl RawEmbedded {
    fn check(&self) -> Result<Embedded, Vec<ConfigProblem>> {
        let mut problems = Vec::new();
        let format = self.weight_format.as_deref().unwrap_or("q8_0");
        let weight_format = weight_format(format).unwrap_or_else(|| {
            let remedy = "use \"q8_0\", \"q4_0\" or \"f32\"";
            problems.push(ConfigProblem::new("embedded.weight_format", format, remedy));
            WeightFormat::default()
        });
        let embedded = Embedded {
            weight_format,
            max_running: self.max_running.unwrap_or(32),
            cache_tokens: self.cache_tokens.unwrap_or(65_536),
        };
        for (key, value) in [
            ("embedded.max_running", embedded.max_running),
            ("embedded.cache_tokens", embedded.cache_tokens),
        ] {
            if value == 0 {
                problems.push(ConfigProblem::new(key, value, "use at least 1"));
            }
        }
        if problems.is_empty() { Ok(embedded) } else { Err(problems) }
    }
}

/// A weight format by its name in configs and on the command line.
pub(crate) fn weight_format(name: &str) -> Option<WeightFormat> {
    match name {
        "q8_0" => Some(WeightFormat::Q8_0),
        "q4_0" => Some(WeightFormat::Q4_0),
        "f32" => Some(WeightFormat::F32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[serde(default)]
        a: Option<Inner>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        x: Option<i64>,
        y: Option<String>,
        z: Option<Vec<i64>>,
    }

    fn sets(sets: &[&str]) -> Result<Sample, ConfigError> {
        let sets = sets.iter().map(|s| (*s).to_owned()).collect();
        load(&ConfigSource { files: vec![], sets })
    }

    #[test]
    fn later_layers_win_and_lists_are_replaced() {
        let merged = sets(&["a.x=1", "a.y=word with spaces", "a.z=[1,2]", "a.z=[3]", "a.x=2"]);
        let inner = Inner { x: Some(2), y: Some("word with spaces".into()), z: Some(vec![3]) };
        assert_eq!(merged.unwrap().a, Some(inner));
    }

    #[test]
    fn unknown_keys_and_malformed_sets_name_their_layer() {
        for bad in ["a.q=1", "no equals", "a.x=\"text\"", "=1"] {
            let error = sets(&[bad]).unwrap_err().to_string();
            assert!(error.contains(bad), "{error}");
        }
    }
}
