//! The vocabulary of all other crates: ids, policy versions, turns, trajectories, outcomes, and names
//! from files that other people wrote.
//!
//! This crate does no I/O and nothing asynchronous. Its invariant: a [`Trajectory`] whose arrays
//! differ in length cannot be built ([`Trajectory::new`]). Read [`Outcome`] next.

mod byte_reader;
mod clock;
mod duration;
mod foreign_json;
mod id;
mod model;
mod name;
mod outcome;
mod problem;
mod secret;
mod test_timeout;
mod text;
mod token_ids;
mod trajectory;

pub use byte_reader::{ByteReader, EndsEarly};
pub use clock::{now, timestamp, unix_micros, utc};
pub use duration::{ByteSize, HumanDuration, ParseUnitError};
pub use foreign_json::{UniqueKeys, exact_json, mended_json, rounded_integer, whole_zeros};
pub use id::{AttemptId, EpisodeId, GroupId, IdError, PolicyVersion, RequestId, RunId, TokenId};
pub use model::ModelShape;
pub use name::{GradingRun, ImageName, ModelName, NameError, RelativePath, TaskId, is_unprintable};
pub use outcome::{AbortCause, Attribution, Limit, Outcome, Retry, Stage};
pub use problem::{ConfigProblem, Found};
pub use secret::{NOT_SHOWN, has_credentials, without_credentials};
pub use test_timeout::{TestTimeout, TimeoutError};
pub use text::counted;
pub use token_ids::check_token_ids;
pub use trajectory::{LengthMismatch, Trajectory, TurnSpan};
