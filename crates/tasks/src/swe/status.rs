//! What a log says about each test.
//!
//! The invariant: a map made for known tests holds them all, and of other names no more than
//! [`OTHER_NAMES_BYTES`].

use indexmap::IndexMap;
use serde::{Serialize, Serializer};
use std::collections::HashSet;
use std::sync::Arc;

/// Bytes of unrequested names that a map keeps. They matter to nothing but the
/// matching of truncated ids, and a log can hold any number of them.
pub const OTHER_NAMES_BYTES: usize = 64 << 20;

/// Bytes of a word that is not a status.
const WORD_BYTES: usize = 64;

/// The word that a log puts next to a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// It passed.
    Passed,
    /// An assertion failed.
    Failed,
    /// It was not run.
    Skipped,
    /// It could not run.
    Error,
    /// It failed, as it should.
    Xfail,
    /// Any other word where a status should be; counts neither as success nor as failure.
    Other(Box<str>),
}

/// The words with which a line of results begins or ends.
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

    /// The word.
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

    /// Whether it counts as a success: passed, or failed as it should.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Passed | Self::Xfail)
    }

    /// Whether it says that something went wrong.
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
    /// Names that are kept in any case; absent = all are.
    wanted: Option<Arc<HashSet<Box<str>>>>,
    other_bytes: usize,
    dropped_failure: bool,
}

impl StatusMap {
    /// An empty map that keeps every name.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty map that keeps `names` whatever happens, and others while there is room.
    pub fn for_tests<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let wanted = Some(Arc::new(names.into_iter().map(Into::into).collect()));
        Self { wanted, ..Self::default() }
    }

    /// An empty map that keeps the same names.
    pub(super) fn fresh(&self) -> Self {
        Self { wanted: self.wanted.clone(), ..Self::default() }
    }

    /// Notes a status; the last one of a name stands.
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

    /// The status of a test.
    pub fn get(&self, name: &str) -> Option<&Status> {
        self.statuses.get(name)
    }

    /// Whether no test is known.
    pub fn is_empty(&self) -> bool {
        self.statuses.is_empty()
    }

    /// How many tests are known.
    pub fn len(&self) -> usize {
        self.statuses.len()
    }

    /// Names and statuses, in order of appearance.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Status)> {
        self.statuses.iter().map(|(name, status)| (name.as_ref(), status))
    }

    /// Whether any test failed, or could not run.
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
    fn wanted_names_are_kept_when_there_is_no_more_room() {
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
    fn a_word_is_cut_at_a_character() {
        let word = "ß".repeat(100);
        assert!(Status::of(&format!("a{word}")).as_str().len() <= WORD_BYTES);
    }
}
