//! The status of each test, as a log reports it.
//!
//! The invariant: a map for known tests keeps all of them, and at most [`OTHER_NAMES_BYTES`] of
//! other names.

use indexmap::IndexMap;
use serde::{Serialize, Serializer};
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum number of bytes of other names that a map for known tests keeps. They are used only to
/// match truncated ids, and a log can contain any number of them.
pub const OTHER_NAMES_BYTES: usize = 64 << 20;

/// Maximum number of bytes that are kept of a word that is not a status.
const WORD_BYTES: usize = 64;

/// The status that a log reports for a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// The test passed.
    Passed,
    /// An assertion failed.
    Failed,
    /// The test was not run.
    Skipped,
    /// The test could not run.
    Error,
    /// The test failed as expected.
    Xfail,
    /// Any other word in place of a status, at most 64 bytes of it. It counts neither as success
    /// nor as failure.
    Other(Box<str>),
}

/// The words that start or end a line with a result.
pub(super) const WORDS: [&str; 5] = ["FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL"];

impl Status {
    /// The status written as `word`.
    pub fn of(word: &str) -> Self {
        match word {
            "PASSED" => Self::Passed,
            "FAILED" => Self::Failed,
            "SKIPPED" => Self::Skipped,
            "ERROR" => Self::Error,
            "XFAIL" => Self::Xfail,
            _ => {
                Self::Other(word.get(..word.floor_char_boundary(WORD_BYTES)).unwrap_or(word).into())
            }
        }
    }

    /// The status as the log writes it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Passed => "PASSED",
            Self::Failed => "FAILED",
            Self::Skipped => "SKIPPED",
            Self::Error => "ERROR",
            Self::Xfail => "XFAIL",
            Self::Other(word) => word,
        }
    }

    /// Whether it counts as a success: the test passed, or failed as expected.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Passed | Self::Xfail)
    }

    /// Whether it counts as a failure: the test failed or could not run.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed | Self::Error)
    }
}

impl Serialize for Status {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

/// Statuses by test name, in the order in which the names first appeared.
#[derive(Debug, Clone, Default)]
pub struct StatusMap {
    statuses: IndexMap<Box<str>, Status>,
    /// Names that are always kept; `None` = every name is.
    wanted: Option<Arc<HashSet<Box<str>>>>,
    /// Size of the other names that are kept, with their statuses.
    other_bytes: usize,
    /// Whether a test that failed was not kept.
    dropped_failure: bool,
}

impl StatusMap {
    /// An empty map that keeps every name.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty map that always keeps `names`, and others up to [`OTHER_NAMES_BYTES`].
    pub fn for_tests<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let wanted = Some(Arc::new(names.into_iter().map(Into::into).collect()));
        Self { wanted, ..Self::default() }
    }

    /// An empty map that always keeps the same names as this one.
    pub(super) fn fresh(&self) -> Self {
        Self { wanted: self.wanted.clone(), ..Self::default() }
    }

    /// Records a status, which replaces an earlier one of the same test.
    pub(super) fn insert(&mut self, name: &str, status: Status) {
        if let Some(known) = self.statuses.get_mut(name) {
            *known = status;
            return;
        }
        if self.wanted.as_ref().is_some_and(|wanted| !wanted.contains(name)) {
            let bytes = name.len() + size_of::<(Box<str>, Status)>() + WORD_BYTES;
            if self.other_bytes + bytes > OTHER_NAMES_BYTES {
                self.dropped_failure |= status.is_failure();
                return;
            }
            self.other_bytes += bytes;
        }
        self.statuses.insert(name.into(), status);
    }

    /// The status of a test; `None` if it is not in the map.
    pub fn get(&self, name: &str) -> Option<&Status> {
        self.statuses.get(name)
    }

    /// Whether the map has no test.
    pub fn is_empty(&self) -> bool {
        self.statuses.is_empty()
    }

    /// Number of tests in the map.
    pub fn len(&self) -> usize {
        self.statuses.len()
    }

    /// Names and statuses, in order of appearance.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Status)> {
        self.statuses.iter().map(|(name, status)| (name.as_ref(), status))
    }

    /// Whether any test failed or could not run, including tests that were not kept.
    pub(super) fn any_failure(&self) -> bool {
        self.dropped_failure || self.statuses.values().any(Status::is_failure)
    }
}

impl Serialize for StatusMap {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_names_are_kept_when_the_limit_is_reached() {
        let mut map = StatusMap::for_tests(["a"]);
        let long = "x".repeat(4 << 20);
        for n in 0..20 {
            map.insert(&format!("{n}{long}"), Status::Failed);
        }
        assert_eq!(map.len(), 15);
        map.insert("a", Status::Failed);
        map.insert("a", Status::of("ERROR:"));
        assert_eq!(map.get("a"), Some(&Status::Other("ERROR:".into())));
        assert!(map.any_failure());
    }

    #[test]
    fn a_long_word_is_cut_at_a_character_boundary() {
        let word = "ß".repeat(100);
        assert!(Status::of(&format!("a{word}")).as_str().len() <= WORD_BYTES);
    }
}
