//! Plain rows: tasks whose environment an external worker provides.
//!
//! A plain row has the columns `id` and `prompt`, and any others that its environment reads. The
//! worker gets all of them, because it determines the reward.

use crate::column::ColumnProblem;
use crate::task::{Origin, Split, Task};
use orchestrate_types::TaskId;
use serde_json::{Map, Value};
use std::time::Duration;

/// Name of the environment of plain rows.
pub(crate) const ENVIRONMENT: &str = "plain";

/// Maximum size of a row as JSON, in bytes.
const ROW_BYTES: usize = 4 << 20;

/// A checked row.
#[derive(Debug, Clone, PartialEq)]
pub struct PlainRow {
    id: TaskId,
    prompt: String,
    columns: Map<String, Value>,
}

impl PlainRow {
    /// Whether a row has the columns of a plain one.
    pub(crate) fn matches(row: &Value) -> bool {
        row.get("id").is_some() && row.get("prompt").is_some()
    }

    /// Checks a row. The error says what is wrong, to be appended to the row's name.
    pub(crate) fn from_value(row: Value) -> Result<Self, String> {
        let Value::Object(columns) = row else { return Err("is not an object".to_owned()) };
        let text = |column: &str| {
            let value = columns.get(column).and_then(Value::as_str);
            value.map(str::to_owned).ok_or_else(|| format!("column `{column}` is not text"))
        };
        let (id, prompt) = (text("id")?, text("prompt")?);
        let id = TaskId::new(id.as_str())
            .map_err(|error| ColumnProblem::new("id", error).to_string())?;
        if columns.get("family").is_some_and(|family| !family.is_string() && !family.is_null()) {
            return Err("column `family` is not text".to_owned());
        }
        let size = serde_json::to_string(&columns).map_err(|error| error.to_string())?.len();
        if size > ROW_BYTES {
            return Err(format!("has {size} bytes; at most {ROW_BYTES} are allowed"));
        }
        Ok(Self { id, prompt, columns })
    }

    /// The task's id.
    pub fn id(&self) -> &str {
        self.id.as_str()
    }

    /// The prompt for the policy.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The family, for reports: the column `family` if there is one.
    pub fn family(&self) -> &str {
        self.columns.get("family").and_then(Value::as_str).unwrap_or(ENVIRONMENT)
    }

    /// The row as a task without a tree and without tests.
    pub fn to_task(&self) -> Task {
        Task {
            id: self.id.clone(),
            environment: ENVIRONMENT.to_owned(),
            family: self.family().to_owned(),
            split: Split::Train,
            problem_statement: self.prompt.clone(),
            image: String::new(),
            workdir: String::new(),
            agent_files: Vec::new(),
            hidden_files: Vec::new(),
            test_command: String::new(),
            test_timeout: Duration::ZERO,
            expected: std::collections::BTreeMap::new(),
            gold_patch: String::new(),
            origin: Origin::External(Box::new(self.columns.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_keep_their_columns_and_wrong_ones_are_named() {
        let row = json!({"id": "sum__1", "prompt": "1+1?", "answer": 2, "family": "sums"});
        let row = PlainRow::from_value(row).unwrap();
        let task = row.to_task();
        assert_eq!((task.id.as_str(), task.family.as_str()), ("sum__1", "sums"));
        let Origin::External(columns) = &task.origin else { panic!("{:?}", task.origin) };
        assert_eq!(columns["answer"], 2);
        let stored = serde_json::to_string(&task).unwrap();
        assert_eq!(serde_json::from_str::<Task>(&stored).unwrap(), task);
        let unnamed = json!({"id": "a", "prompt": "a", "family": null});
        assert_eq!(PlainRow::from_value(unnamed).unwrap().family(), ENVIRONMENT);
        for (row, text) in [
            (json!({"id": 3, "prompt": "a"}), "column `id` is not text"),
            (json!({"id": "a/b", "prompt": "a"}), "id"),
            (json!({"id": "a", "prompt": null}), "column `prompt` is not text"),
            (json!({"id": "a", "prompt": "a", "family": 3}), "column `family` is not text"),
        ] {
            let problem = PlainRow::from_value(row).unwrap_err();
            assert!(problem.contains(text), "{problem}");
        }
    }
}
