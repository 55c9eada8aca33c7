//! The vocabulary of all other crates: ids, policy versions, turns, trajectories, outcomes.
//!
//! This crate does no I/O and nothing asynchronous. Its invariant: a [`Trajectory`] whose arrays
//! differ in length cannot be built ([`Trajectory::new`]). Read [`Outcome`] next.

mod clock;
mod duration;
mod id;
mod model;
mod outcome;
mod problem;
mod trajectory;

pub use clock::{now, unix_micros};
pub use duration::{ByteSize, HumanDuration, ParseUnitError};
pub use id::{AttemptId, EpisodeId, GroupId, IdError, PolicyVersion, RequestId, RunId, TokenId};
pub use model::ModelShape;
pub use outcome::{AbortCause, Limit, Outcome, Retry, Stage};
pub use problem::{ConfigProblem, Found};
pub use trajectory::{LengthMismatch, Trajectory, TurnSpan};
