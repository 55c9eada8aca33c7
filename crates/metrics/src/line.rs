//! A line of `metrics.jsonl` of either kind.

use crate::{EvalLine, StepLine};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of the lines that this program writes. Keys are added without raising it; it is raised when
/// the meaning of a key changes.
pub const SCHEMA_VERSION: u32 = 1;

/// One line of `metrics.jsonl`. Reads lines of this and of every older version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, try_from = "Value")]
pub enum MetricsLine {
    /// A global step.
    Step(Box<StepLine>),
    /// An evaluation.
    Evaluation(Box<EvalLine>),
}

/// Why a JSON value is not a metrics line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The value is neither a step nor an evaluation.
    #[error(
        "not a metrics line: it has neither `episodes` (a step) nor `eval_tasks` (an evaluation)"
    )]
    Unknown,
    /// A newer version of the program wrote the line.
    #[error(
        "metrics line has schema version {found}, but this program reads versions up to \
         {SCHEMA_VERSION}: upgrade it"
    )]
    Newer {
        /// The line's version.
        found: u64,
    },
    /// A key is missing, or its value has the wrong type.
    #[error("malformed metrics line at `{path}`: {source}")]
    Malformed {
        /// Path of the key.
        path: String,
        /// Why its value is invalid.
        source: serde_json::Error,
    },
}

impl MetricsLine {
    /// When the line was written, UTC; `None` in lines of versions that did not record it.
    pub fn time(&self) -> Option<Timestamp> {
        match self {
            Self::Step(line) => line.time,
            Self::Evaluation(line) => line.time,
        }
    }

    /// The step, if it is one.
    pub fn step(&self) -> Option<&StepLine> {
        match self {
            Self::Step(line) => Some(line),
            Self::Evaluation(_) => None,
        }
    }

    /// The evaluation, if it is one.
    pub fn evaluation(&self) -> Option<&EvalLine> {
        match self {
            Self::Step(_) => None,
            Self::Evaluation(line) => Some(line),
        }
    }
}

impl From<StepLine> for MetricsLine {
    fn from(line: StepLine) -> Self {
        Self::Step(Box::new(line))
    }
}

impl From<EvalLine> for MetricsLine {
    fn from(line: EvalLine) -> Self {
        Self::Evaluation(Box::new(line))
    }
}

impl TryFrom<Value> for MetricsLine {
    type Error = LineError;

    fn try_from(value: Value) -> Result<Self, LineError> {
        let has = |key| value.get(key).is_some();
        if let Some(found) = value.get("schema_version").and_then(Value::as_u64)
            && found > u64::from(SCHEMA_VERSION)
        {
            return Err(LineError::Newer { found });
        }
        if has("eval_tasks") || has("eval_pass_at_1") {
            read(value).map(Self::Evaluation)
        } else if has("episodes") || has("reward_mean") {
            read(value).map(Self::Step)
        } else {
            Err(LineError::Unknown)
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, LineError> {
    serde_path_to_error::deserialize(value).map_err(|error| LineError::Malformed {
        path: error.path().to_string(),
        source: error.into_inner(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kind_of_a_line_follows_from_its_keys() {
        let step = json!({"global_step": 3, "policy_version": 2, "episodes": 8, "loss": null});
        let line = MetricsLine::try_from(step).unwrap();
        let step = line.step().unwrap();
        assert_eq!((step.global_step, step.episodes, step.loss), (3, Some(8), None));
        assert_eq!((step.schema_version, step.time), (0, None));
        let evaluation = json!({"global_step": 0, "policy_version": 0, "eval_tasks": 5});
        let line = MetricsLine::try_from(evaluation).unwrap();
        assert_eq!(line.evaluation().unwrap().eval_tasks, Some(5));
    }

    #[test]
    fn anything_else_is_refused_with_the_reason() {
        for (value, reason) in [
            (json!({"global_step": 1}), "neither"),
            (json!({"schema_version": 2, "episodes": 1}), "upgrade"),
            (json!({"schema_version": u64::MAX, "episodes": 1}), "upgrade"),
            (json!({"schema_version": "1", "episodes": 1}), "`schema_version`"),
            (json!({"schema_version": null, "episodes": 1}), "`schema_version`"),
            (json!({"schema_version": 1.5, "episodes": 1}), "`schema_version`"),
            (json!({"schema_version": -1, "episodes": 1}), "`schema_version`"),
            (json!({"global_step": 1, "policy_version": 1, "episodes": "8"}), "`episodes`"),
            (json!({"policy_version": 1, "episodes": 8}), "global_step"),
            (json!([1]), "neither"),
        ] {
            let error = MetricsLine::try_from(value).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
