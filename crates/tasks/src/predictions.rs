//! Predictions: one patch per task, in the files that SWE-bench's harness and agents exchange.
//!
//! The invariant: a patch is kept byte for byte. `git apply` and `patch` both reject one without
//! its final line end. Ids and names of models are checked when they are read: they become parts of
//! paths. A prediction without a patch says so (`null` or an empty text): one in which the patch has
//! another key is refused, because it would count as an empty patch, and so is one with two patches that
//! differ, because only one of them would be graded.

use crate::keys;
use crate::load::{self, LoadError};
use crate::text::printable;
use camino::Utf8Path;
use orchestrate_types::{ModelName, TaskId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Number of characters of an id that a message repeats.
const ID_CHARS: usize = 120;

const INSTANCE_ID: &str = "instance_id";
const MODEL: &str = "model_name_or_path";
const PATCH: &str = "model_patch";
/// The keys of a prediction. Others, such as the text that the model wrote, are ignored.
const KEYS: [&str; 3] = [INSTANCE_ID, MODEL, PATCH];
/// The other names under which published tools and documentation write the keys.
const OTHER_NAMES: [(&str, &str); 4] =
    [("model", MODEL), ("model_name", MODEL), ("prediction", PATCH), ("patch", PATCH)];
/// Keys under which agents' own outputs have the patch that they made. A prediction that is merged with its row
/// has the row's `patch`, too, which is another one.
const OWN_PATCHES: [&str; 2] = ["git_patch", "prediction"];
/// The patch of a row's hidden tests, which no agent makes.
const TEST_PATCH: &str = "test_patch";

/// One patch for one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prediction {
    /// Id of the task.
    pub instance_id: TaskId,
    /// The model that made the patch.
    #[serde(default = "ModelName::none")]
    pub model_name_or_path: ModelName,
    /// The patch; `None` if the agent made none. Like an empty one, it is not graded.
    pub model_patch: Option<String>,
}

/// Reads `predictions.jsonl` (a prediction per line), or JSON: a list, or an object by instance id
/// like mini-swe-agent's `preds.json`. Each may be compressed with gzip.
///
/// # Errors
/// If the file cannot be read, or with all of its entries that are not predictions: a grade of the
/// others would look like one of the whole file.
pub fn read(path: &Utf8Path) -> Result<Vec<Prediction>, LoadError> {
    let (mut predictions, mut invalid) = (Vec::new(), Vec::new());
    let mut add = |n: usize, entry: Result<Value, String>| match entry.and_then(of_value) {
        Ok(prediction) => predictions.push(prediction),
        Err(reason) => invalid.push((n, reason)),
    };
    for (n, entry) in load::values(path)?.enumerate() {
        match entry {
            Ok(Value::Object(entry)) if !entry.contains_key(INSTANCE_ID) => {
                for (place, (id, entry)) in entry.into_iter().enumerate() {
                    let is_object = entry.is_object();
                    add(n + place + 1, with_id(&id, entry));
                    // The object is rather one prediction, without its id.
                    if !is_object {
                        break;
                    }
                }
            }
            entry => add(n + 1, entry),
        }
    }
    if invalid.is_empty() {
        return Ok(predictions);
    }
    Err(LoadError::Entries { path: path.to_owned(), entries: invalid })
}

/// A prediction from its JSON value.
///
/// # Errors
/// The reason why it is not one: a key that is absent, that looks like another one's name, or whose
/// value has the wrong type.
fn of_value(entry: Value) -> Result<Prediction, String> {
    if let Value::Object(fields) = &entry {
        let has_patch = fields.contains_key(PATCH);
        let patch = fields.get(PATCH).and_then(Value::as_str).map(str::trim);
        let patch = patch.filter(|patch| !patch.is_empty());
        let other = keys::path_of_patch(fields, &|key, text| match patch {
            None => key != TEST_PATCH,
            Some(patch) => OWN_PATCHES.contains(&key) && text.trim() != patch,
        });
        if let Some(path) = other.as_ref().filter(|_| !has_patch) {
            return Err(format!("has no `{PATCH}`; did you mean its value at `{path}`?"));
        }
        keys::check(fields, &KEYS, &OTHER_NAMES)?;
        if let Some(path) = other {
            let problem = if patch.is_some() { "another patch than" } else { "no patch, unlike" };
            return Err(format!("has {problem} `{path}` in `{PATCH}`; keep the one that is meant"));
        }
        if !has_patch {
            return Err(format!("has no `{PATCH}`; it has {}", keys::listed(fields.keys())));
        }
    }
    serde_path_to_error::deserialize(entry).map_err(|error| error.to_string())
}

/// An entry of an object keyed by instance id, which may leave its id out.
///
/// # Errors
/// If it is not an object, or has another id than its key.
fn with_id(id: &str, mut entry: Value) -> Result<Value, String> {
    let Value::Object(fields) = &mut entry else {
        let id = printable(id, ID_CHARS);
        return Err(format!("has no `instance_id`, and `{id}` is not an object with a prediction"));
    };
    match fields.get(INSTANCE_ID).and_then(Value::as_str) {
        Some(own) if own != id => {
            let [own, id] = [own, id].map(|id| printable(id, ID_CHARS));
            return Err(format!("has the `instance_id` {own} under the id `{id}`"));
        }
        Some(_) | None => {}
    }
    fields.entry(INSTANCE_ID).or_insert_with(|| id.into());
    Ok(entry)
}

/// The content of `predictions.jsonl`.
///
/// # Errors
/// Never in practice: every prediction can be written.
pub fn jsonl(predictions: &[Prediction]) -> serde_json::Result<String> {
    let mut text = String::new();
    for prediction in predictions {
        text.push_str(&serde_json::to_string(prediction)?);
        text.push('\n');
    }
    Ok(text)
}

/// The content of mini-swe-agent's `preds.json`: an object by instance id. Of two predictions for
/// one task, the later one is kept.
///
/// # Errors
/// Never in practice: every prediction can be written.
pub fn preds_json(predictions: &[Prediction]) -> serde_json::Result<String> {
    let mut entries = Map::new();
    for prediction in predictions {
        entries.insert(prediction.instance_id.to_string(), serde_json::to_value(prediction)?);
    }
    serde_json::to_string_pretty(&entries)
}
