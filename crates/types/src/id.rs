//! Ids of runs, groups, episodes, attempts and requests.
//!
//! The invariant: every id but [`RunId`] is derived, not random. After a crash the same episode gets
//! the same id, so unique constraints and deterministic container names work.

use serde::{Deserialize, Serialize};
use std::fmt::{self, Write as _};
use std::str::FromStr;

/// A token id: an index into the vocabulary of the tokenizer and the engine.
pub type TokenId = u32;

/// Number of weight updates since the starting checkpoint, which is version 0.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct PolicyVersion(pub u64);

impl PolicyVersion {
    /// The version after one more weight update.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A text that is not a valid id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {kind} id (expected e.g. `{example}`)")]
pub struct IdError {
    kind: &'static str,
    example: &'static str,
    text: String,
}

/// Id of a run: a version 7 UUID, generated once when the run folder is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(uuid::Uuid);

impl RunId {
    /// Generates a new id. Called only where a run is created.
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7())
    }

    /// The last 12 hexadecimal digits: short enough for container names, and random enough to be
    /// unique.
    pub fn short(self) -> String {
        let text = self.0.simple().to_string();
        text.chars().skip(20).collect()
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for RunId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        uuid::Uuid::parse_str(text).map(Self).map_err(|_| IdError {
            kind: "a run",
            example: "01900000-0000-7000-8000-000000000000",
            text: text.to_owned(),
        })
    }
}

/// Id of a group: the `group_size` episodes of one task that are compared for the advantage.
///
/// Written `t000012` (the run's 13th training group) or `v00010-00123` (task 123 of the evaluation
/// after global step 10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupId {
    /// A training group, by its sequence number in the run.
    Train {
        /// Sequence number over the whole run, from 0.
        seq: u32,
    },
    /// An evaluation group: all samples of one held-out task in one evaluation.
    Eval {
        /// Global step after which the evaluation ran; 0 = before training.
        round: u32,
        /// Index of the task in the evaluation set, from 0.
        index: u32,
    },
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Train { seq } => write!(f, "t{seq:06}"),
            Self::Eval { round, index } => write!(f, "v{round:05}-{index:05}"),
        }
    }
}

impl FromStr for GroupId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let error = || IdError { kind: "a group", example: "t000012", text: text.to_owned() };
        let number = |s: &str| s.parse::<u32>().map_err(|_| error());
        if let Some(rest) = text.strip_prefix('t') {
            Ok(Self::Train { seq: number(rest)? })
        } else if let Some(rest) = text.strip_prefix('v') {
            let (round, index) = rest.split_once('-').ok_or_else(error)?;
            Ok(Self::Eval { round: number(round)?, index: number(index)? })
        } else {
            Err(error())
        }
    }
}

/// Id of an episode: one try at a task. Written `t000012.03`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpisodeId {
    /// The group that the episode belongs to.
    pub group: GroupId,
    /// Index within the group, from 0.
    pub member: u16,
}

impl fmt::Display for EpisodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.group, self.member)
    }
}

impl FromStr for EpisodeId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let error = || IdError { kind: "an episode", example: "t000012.03", text: text.to_owned() };
        let (group, member) = text.rsplit_once('.').ok_or_else(error)?;
        Ok(Self {
            group: group.parse().map_err(|_| error())?,
            member: member.parse().map_err(|_| error())?,
        })
    }
}

/// Id of an attempt: one physical try of an episode. An infrastructure failure starts a new
/// attempt.
///
/// Written `t000012.03-a01`, in fixed width so that no id is a prefix of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId {
    /// The episode that the attempt belongs to.
    pub episode: EpisodeId,
    /// Number of the attempt, from 1.
    pub attempt: u16,
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-a{:02}", self.episode, self.attempt)
    }
}

impl FromStr for AttemptId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let error =
            || IdError { kind: "an attempt", example: "t000012.03-a01", text: text.to_owned() };
        let (episode, attempt) = text.rsplit_once("-a").ok_or_else(error)?;
        Ok(Self {
            episode: episode.parse().map_err(|_| error())?,
            attempt: attempt.parse().map_err(|_| error())?,
        })
    }
}

/// Id of a generation request (SGLang's `rid`): run, attempt, turn and try.
///
/// It has a fixed width and is new for every try, because SGLang aborts requests by *prefix*.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(String);

impl RequestId {
    /// The id of try `tries` (from 0) of turn `turn` (from 0) of an attempt.
    pub fn new(run: RunId, attempt: AttemptId, turn: u32, tries: u32) -> Self {
        // Built for every turn, so reserve enough space at once.
        let mut id = String::with_capacity(64);
        // Writing to a `String` cannot fail.
        let _ = write!(id, "{}-{attempt}-n{turn:03}-r{tries:02}", run.short());
        Self(id)
    }

    /// The id as it is sent to the engine.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! serde_as_text {
    ($($id:ty),*) => {$(
        impl Serialize for $id {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $id {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
serde_as_text!(GroupId, EpisodeId, AttemptId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text() {
        for group in [GroupId::Train { seq: 12 }, GroupId::Eval { round: 10, index: 123 }] {
            let attempt = AttemptId { episode: EpisodeId { group, member: 3 }, attempt: 1 };
            assert_eq!(attempt.to_string().parse::<AttemptId>().unwrap(), attempt);
        }
        assert!("x12.0-a1".parse::<AttemptId>().is_err());
    }

    #[test]
    fn no_request_id_is_a_prefix_of_another() {
        let run = RunId::generate();
        let attempt = "t000001.01-a01".parse().unwrap();
        let ids: Vec<String> =
            (0..12).map(|i| RequestId::new(run, attempt, i, i).to_string()).collect();
        for (i, a) in ids.iter().enumerate() {
            for (j, b) in ids.iter().enumerate() {
                assert!(i == j || !b.starts_with(a.as_str()));
            }
        }
    }
}
