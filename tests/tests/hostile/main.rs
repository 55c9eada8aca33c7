//! Hostile agents, kills and faults: none may earn a reward or leave anything behind.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod attacks;
mod leaks;
mod world;
