//! The client against a scripted server, and against recorded replies of SGLang 0.5.23.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests")]

mod recorded;
mod scripted;
mod server;
mod weights;
