//! Sandboxes on a real Docker daemon; where none answers, skips are printed.
#![expect(clippy::unwrap_used, reason = "a helper of a test may fail as the test may")]
#![expect(clippy::print_stderr, reason = "measurements are shown")]

mod battery;
mod common;
mod disk;
mod faults;
mod hosts;
mod images;
mod provider;
mod proxy;
mod registry;
mod ssh_server;
