//! What hostile agents, kills and faults may lead to: no reward, and nothing left behind.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod attacks;
mod leaks;
mod world;
