//! Files of a task.

use orchestrate_types::RelativePath;
use serde::{Deserialize, Deserializer, Serialize};

/// A text file of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFile {
    /// Path relative to the task's folder; checked to be a [`RelativePath`] when read from a row.
    #[serde(deserialize_with = "inside")]
    pub path: String,
    /// Content.
    pub content: String,
}

/// Deserialises a path, and checks that it stays inside its tree.
fn inside<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    RelativePath::deserialize(from).map(String::from)
}
