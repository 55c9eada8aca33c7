//! What is wrong with one configured value.

use std::fmt;

/// One problem with one configured value, in words a person can act on.
///
/// Sections are checked as a whole: a check returns every problem it finds, so that a
/// configuration can be put right in one go.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConfigProblem {
    /// Dotted key as written in the configuration, e.g. `algorithm.clip_low`.
    pub key: String,
    /// The value as found; empty when it is missing. Never a secret.
    pub value: String,
    /// What to write instead.
    pub remedy: String,
}

impl ConfigProblem {
    /// A problem with `value` at `key`.
    pub fn new(
        key: impl Into<String>,
        value: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        Self { key: key.into(), value: value.to_string(), remedy: remedy.into() }
    }

    /// A problem with a required `key` that is absent.
    pub fn missing(key: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { key: key.into(), value: String::new(), remedy: remedy.into() }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.value.is_empty() {
            write!(f, "{} is missing: {}", self.key, self.remedy)
        } else {
            write!(f, "{} = {} is not usable: {}", self.key, self.value, self.remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_key_value_and_remedy() {
        let wrong = ConfigProblem::new("algorithm.clip_low", 1.5, "use a number below 1");
        assert_eq!(
            wrong.to_string(),
            "algorithm.clip_low = 1.5 is not usable: use a number below 1"
        );
        let absent = ConfigProblem::missing("engine.model", "name the model folder");
        assert_eq!(absent.to_string(), "engine.model is missing: name the model folder");
    }
}
