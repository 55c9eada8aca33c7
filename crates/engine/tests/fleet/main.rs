//! A fleet: places, faults, weights; with scripted workers, and with real servers that die.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests")]

mod faults;
mod places;
mod scripted;
mod servers;
mod weights;
