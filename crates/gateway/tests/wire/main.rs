//! The gateway over HTTP, with a scripted sampler behind it.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "test helpers")]

mod any_body;
mod clients;
mod delivery;
mod http;
mod offers;
mod scripted;
mod server;
mod streaming;
mod tokens;
