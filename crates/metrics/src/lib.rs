//! What a run measures, and how the numbers are defined. Pure: no files, no journal.
//!
//! The one invariant: there is one definition of a solved episode ([`is_solved`]) and one of the tasks
//! that an evaluation counts ([`TaskScore::rate`]).

pub mod collapse;
mod score;

pub use score::{TaskScore, is_solved, mean_and_se};
