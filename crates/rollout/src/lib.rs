//! One episode: chat template, append-only token buffer, actions, turn loop, grading, outcome.
//!
//! The invariant: token in, token out. What the policy sampled is never rendered again; only the
//! environment's new text is tokenised.

mod api;

pub use api::{Action, EpisodeReport, EpisodeRequest, Episodes, Message, Timings, TurnLog};
