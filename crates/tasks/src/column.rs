//! Checks of a row's columns: names, revisions, and the sizes of texts and lists.

use crate::text::printable;
use orchestrate_types::{TestTimeout, is_unprintable};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize as _, Deserializer};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Maximum length of a name (repository, version, family), in bytes.
const NAME_BYTES: usize = 200;
/// Maximum size of a text (issue, patch, script, file), in bytes.
const TEXT_BYTES: usize = 64 << 20;
/// Maximum length of a test's name, in bytes.
const TEST_BYTES: usize = 64 << 10;
/// Maximum number of tests or files in a row.
const COUNT: usize = 200_000;
/// Folder in which graders keep files of their own while they grade.
const STAGING_FOLDER: &str = ".grading";
/// Number of characters of a refused path that a message repeats.
const PATH_CHARS: usize = 120;

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

/// Reads a column that may be missing. Tools write an empty text for a missing value.
pub(crate) fn optional<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) if text.trim().is_empty() => Ok(None),
        value => serde_json::from_value(value).map_err(D::Error::custom),
    }
}

/// Reads a time limit in seconds. Tools write 60.0 for 60 if another row of the column has none.
pub(crate) fn time_limit<'de, D: Deserializer<'de>>(from: D) -> Result<TestTimeout, D::Error> {
    of_seconds(Value::deserialize(from)?).map_err(D::Error::custom)
}

/// Reads a time limit as [`time_limit`] does; it may be missing.
pub(crate) fn optional_time_limit<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<TestTimeout>, D::Error> {
    match Value::deserialize(from)? {
        Value::Null => Ok(None),
        value => of_seconds(value).map(Some).map_err(D::Error::custom),
    }
}

fn of_seconds(value: Value) -> serde_json::Result<TestTimeout> {
    let Some(seconds) = value.as_f64().filter(|_| value.is_f64()) else {
        return serde_json::from_value(value);
    };
    // All digits of a whole number, without a point.
    let whole: Option<u64> = seconds.to_string().parse().ok();
    let whole = whole.ok_or_else(|| {
        let reason = "is not a valid time limit: it must be a whole number from 1 to 86400";
        serde_json::Error::custom(format!("{seconds} {reason}"))
    })?;
    TestTimeout::from_secs(whole).map_err(serde_json::Error::custom)
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

/// Checks that the images that a row names in several columns are the same one.
pub(crate) fn same_image(named: &[(&'static str, &str)]) -> Result<(), ColumnProblem> {
    let Some(((first, image), others)) = named.split_first() else { return Ok(()) };
    match others.iter().find(|(_, other)| full_name(other) != full_name(image)) {
        None => Ok(()),
        Some((column, other)) => {
            let [other, image] = [other, image].map(|name| printable(name, PATH_CHARS));
            let reason = format!("it names `{other}`, but `{first}` names `{image}`; keep one");
            Err(ColumnProblem::new(column, reason))
        }
    }
}

/// The name of an image without the registry and the tag that apply when none is given.
fn full_name(image: &str) -> &str {
    let name = image.strip_prefix("docker.io/").unwrap_or(image);
    name.strip_suffix(":latest").unwrap_or(name)
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

/// Checks two lists of tests with different expectations: each entry names a test, and each test occurs
/// once. What is expected of the others is not known, and their share of the passed tests would be wrong.
pub(crate) fn test_lists(lists: [(&'static str, &[String]); 2]) -> Result<(), ColumnProblem> {
    let mut seen: BTreeMap<&str, &'static str> = BTreeMap::new();
    for (column, names) in lists {
        tests(column, names)?;
        for (index, name) in names.iter().enumerate() {
            if name.trim().is_empty() {
                let reason = format!("entry {} is empty; it must name a test", index + 1);
                return Err(ColumnProblem::new(column, reason));
            }
            let Some(before) = seen.insert(name, column) else { continue };
            let name = printable(name, PATH_CHARS);
            return Err(ColumnProblem::new(
                column,
                if before == column {
                    format!("it names the test `{name}` twice; name it once")
                } else {
                    format!(
                        "it names the test `{name}`, and so does `{before}`; name it in one of them"
                    )
                },
            ));
        }
    }
    Ok(())
}

/// Checks number and sizes of files, given their contents. Their paths are checked elsewhere.
pub(crate) fn files<'a>(
    column: &'static str,
    contents: impl IntoIterator<Item = &'a String>,
) -> Result<(), ColumnProblem> {
    let mut number = 0;
    for content in contents {
        number += 1;
        text(column, content)?;
    }
    count(column, number)
}

/// Checks that files can exist next to each other and next to `others`, and returns their paths: no
/// two of them have the same path, and no file has the path of another one's folder.
pub(crate) fn paths<'a>(
    column: &'static str,
    paths: impl IntoIterator<Item = &'a str>,
    others: &BTreeSet<&'a str>,
) -> Result<BTreeSet<&'a str>, ColumnProblem> {
    let problem = |path: &str, reason: &str| {
        Err(ColumnProblem::new(column, format!("`{}` {reason}", printable(path, PATH_CHARS))))
    };
    let mut own = BTreeSet::new();
    for path in paths {
        if path.split('/').next() == Some(STAGING_FOLDER) {
            return problem(path, "is in the folder of the grader's own files");
        }
        if !own.insert(path) {
            return problem(path, "occurs twice");
        }
    }
    let all: BTreeSet<&str> = own.union(others).copied().collect();
    for path in &all {
        let mut folders = path.match_indices('/').filter_map(|(at, _)| path.get(..at));
        if let Some(folder) = folders.find(|folder| all.contains(folder)) {
            return problem(folder, "is both a file and the folder of another file");
        }
    }
    Ok(own)
}

/// Checks the length of a list.
fn count(column: &'static str, number: usize) -> Result<(), ColumnProblem> {
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
