//! Checks of a row's columns: names, revisions, and the sizes of texts and lists.

use crate::task::TaskFile;
use orchestrate_types::is_unprintable;
use std::fmt;

/// Maximum length of a name (repository, version, family), in bytes.
const NAME_BYTES: usize = 200;
/// Maximum size of a text (issue, patch, script, file), in bytes.
const TEXT_BYTES: usize = 64 << 20;
/// Maximum length of a test's name, in bytes.
const TEST_BYTES: usize = 64 << 10;
/// Maximum number of tests or files in a row.
const COUNT: usize = 200_000;

/// A column whose value no task may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column `{column}`: {reason}")]
pub struct ColumnProblem {
    column: &'static str,
    reason: String,
}

impl ColumnProblem {
    pub(crate) fn new(column: &'static str, reason: impl fmt::Display) -> Self {
        Self { column, reason: reason.to_string() }
    }
}

/// Checks a name that is shown, and compared with known ones: it may be empty.
pub(crate) fn name(column: &'static str, text: &str) -> Result<(), ColumnProblem> {
    at_most(column, "bytes", text.len(), NAME_BYTES)?;
    match text.chars().find(|&c| is_unprintable(c)) {
        Some(c) => Err(ColumnProblem::new(column, format!("it contains {c:?}"))),
        None => Ok(()),
    }
}

/// Checks the name of a commit, which scripts pass to git.
pub(crate) fn revision(column: &'static str, text: &str) -> Result<(), ColumnProblem> {
    name(column, text)?;
    let is_valid =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '^' | '~');
    if text.starts_with('-') || !text.chars().all(is_valid) {
        return Err(ColumnProblem::new(column, "it is not the name of a commit"));
    }
    Ok(())
}

/// Checks the size of a text.
pub(crate) fn text(column: &'static str, text: &str) -> Result<(), ColumnProblem> {
    at_most(column, "bytes", text.len(), TEXT_BYTES)
}

/// Checks the names of tests.
pub(crate) fn tests<'a>(
    column: &'static str,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), ColumnProblem> {
    let mut number = 0;
    for name in names {
        number += 1;
        at_most(column, "bytes in a test's name", name.len(), TEST_BYTES)?;
    }
    count(column, number)
}

/// Checks the contents of files.
pub(crate) fn contents(column: &'static str, files: &[String]) -> Result<(), ColumnProblem> {
    files.iter().try_for_each(|content| text(column, content))
}

/// Checks number and sizes of files. Their paths are checked as they are read.
pub(crate) fn files(column: &'static str, files: &[TaskFile]) -> Result<(), ColumnProblem> {
    count(column, files.len())?;
    files.iter().try_for_each(|file| text(column, &file.content))
}

/// Checks the length of a list.
pub(crate) fn count(column: &'static str, number: usize) -> Result<(), ColumnProblem> {
    at_most(column, "entries", number, COUNT)
}

fn at_most(
    column: &'static str,
    unit: &str,
    number: usize,
    limit: usize,
) -> Result<(), ColumnProblem> {
    if number <= limit {
        return Ok(());
    }
    Err(ColumnProblem::new(column, format!("it has {number} {unit}, more than {limit}")))
}
