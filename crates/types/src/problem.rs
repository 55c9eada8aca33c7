//! A problem with one value of the configuration.

use crate::without_credentials;
use std::fmt;

/// One problem with the configuration, phrased so that a person can fix it.
///
/// A check returns every problem that it finds, so that a configuration can be fixed in one go.
/// Printed as `rollout.group_size = 0: must be at least 1`, after the place where the value was
/// written when that is known. User names and passwords of URLs are never printed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConfigProblem {
    /// Dotted key as written in the configuration, e.g. `algorithm.clip_low`.
    pub key: String,
    /// What was found at the key. Never a secret.
    pub found: Found,
    /// What the value must be, or what to do instead.
    pub remedy: String,
    /// Where the value was written, e.g. `run.toml:12:8` or `--set run.steps=0`.
    pub origin: Option<String>,
}

/// What a check found at a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Found {
    /// This value.
    Value(String),
    /// This value, which nothing reads with the other settings.
    Unread(String),
    /// Nothing, although a value is required.
    Missing,
    /// A key that does not exist.
    UnknownKey,
    /// A file or assignment that cannot be read; holds an excerpt, or nothing.
    Unreadable(String),
}

impl ConfigProblem {
    /// A problem with `value` at `key`; an empty value counts as missing.
    pub fn new(
        key: impl Into<String>,
        value: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        let value = value.to_string();
        let found = if value.is_empty() { Found::Missing } else { Found::Value(value) };
        Self { key: key.into(), found, remedy: remedy.into(), origin: None }
    }

    /// A problem with a required `key` that is absent.
    pub fn missing(key: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { key: key.into(), found: Found::Missing, remedy: remedy.into(), origin: None }
    }

    /// A `key` that does not exist; `remedy` names a similar one, or is empty.
    pub fn unknown(key: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { key: key.into(), found: Found::UnknownKey, remedy: remedy.into(), origin: None }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_credentials(&self.text()))
    }
}

impl ConfigProblem {
    fn text(&self) -> String {
        let Self { key, found, remedy, origin } = self;
        let place = match (origin, found) {
            // The origin of an assignment already shows its key and value.
            (Some(set), Found::Value(_) | Found::Unread(_))
                if set.strip_prefix("--set ").is_some_and(|set| {
                    set.split_once('=').is_some_and(|(name, _)| name.trim() == key)
                }) =>
            {
                return format!("{set}: {remedy}");
            }
            (Some(origin), _) => format!("{origin}: "),
            (None, _) => String::new(),
        };
        match found {
            Found::Value(value) | Found::Unread(value) => {
                format!("{place}{key} = {value}: {remedy}")
            }
            Found::Missing => format!("{place}{key} is missing: {remedy}"),
            Found::UnknownKey if remedy.is_empty() => format!("{place}unknown key {key}"),
            Found::UnknownKey => format!("{place}unknown key {key}; {remedy}"),
            Found::Unreadable(excerpt) if excerpt.is_empty() => format!("{place}{remedy}"),
            Found::Unreadable(excerpt) => format!("{place}{remedy}\n{excerpt}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_names_place_key_value_and_remedy() {
        let mut wrong = ConfigProblem::new("algorithm.clip_low", 1.5, "must be below 1");
        assert_eq!(wrong.to_string(), "algorithm.clip_low = 1.5: must be below 1");
        wrong.origin = Some("run.toml:3:12".to_owned());
        assert_eq!(wrong.to_string(), "run.toml:3:12: algorithm.clip_low = 1.5: must be below 1");
        wrong.origin = Some("--set algorithm.clip_low=1.5".to_owned());
        assert_eq!(wrong.to_string(), "--set algorithm.clip_low=1.5: must be below 1");
        let absent = ConfigProblem::missing("engine.model", "must be a model folder");
        assert_eq!(absent.to_string(), "engine.model is missing: must be a model folder");
        let unknown = ConfigProblem::unknown("run.stepz", "did you mean `steps`?");
        assert_eq!(unknown.to_string(), "unknown key run.stepz; did you mean `steps`?");
    }
}
