//! Files of a task.

use orchestrate_types::RelativePath;
use serde::{Deserialize, Deserializer, Serialize};

/// A text file of a task, relative to the task's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFile {
    /// Relative path, which is checked to be a [`RelativePath`] when the file is read from a row.
    #[serde(deserialize_with = "inside")]
    pub path: String,
    /// Content.
    pub content: String,
}

/// A path that stays inside its tree.
fn inside<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    RelativePath::deserialize(from).map(String::from)
}
