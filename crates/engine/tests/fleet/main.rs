//! Fleets: placement, faults and weight syncs, with scripted workers and with servers that are killed.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

mod faults;
mod placement;
mod scripted;
mod servers;
mod weights;
