//! Config files: layers are parsed one by one, merged, then checked as a whole.
//!
//! Later layers win, tables merge, lists are replaced. Each section belongs to the crate that
//! uses it; this module only loads.

use crate::args::ConfigSource;
use camino::Utf8PathBuf;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use toml::{Table, Value};

use orchestrate_types::ConfigProblem;

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
            Self::Unreadable { file, error } => write!(f, "cannot read config file {file}: {error}"),
            Self::Layer { name, error } => write!(f, "{name}: {}", error.trim_end()),
            Self::Problems(problems) => {
                write!(f, "the config has {} problem(s):", problems.len())?;
                for problem in problems {
                    write!(f, "\n  {} = {}: {}", problem.key, problem.value, problem.remedy)?;
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

/// `[policy]`: where training starts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawPolicy {
    /// Starting checkpoint: folder in the Hugging Face layout, tokenizer and chat template
    /// included. Default: the policy shipped for the `micro` environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub(crate) checkpoint: Option<Utf8PathBuf>,
}

/// `[embedded]`: the engine and trainer inside this program (used where `engine.url` or
/// `trainer.url` is absent).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawEmbedded {
    /// Weights of the embedded engine: `q8_0` (quantised, the default) or `f32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight_format: Option<String>,
    /// Requests the embedded engine decodes together. Default 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_running: Option<usize>,
    /// Tokens its prefix cache holds. Default 65536.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cache_tokens: Option<usize>,
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
        let inner =
            Inner { x: Some(2), y: Some("word with spaces".into()), z: Some(vec![3]) };
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
