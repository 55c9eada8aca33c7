//! Attacks over the network on the servers of the engine and of the trainer: each gets the expected
//! status, and none takes more memory than the limits permit.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod memory;
mod observed;
mod paths;
mod requests;
mod server;
mod tls;
