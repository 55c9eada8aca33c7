//! Sandboxes on a real Docker daemon. Without one, the tests report that they are skipped.
#![expect(clippy::unwrap_used, reason = "test helpers may fail like the tests that use them")]
#![expect(clippy::print_stderr, reason = "measurements are printed")]

mod common;
mod disk;
mod faults;
mod forward;
mod hosts;
mod images;
mod isolation;
mod provider;
mod proxy;
mod registry;
mod self_test;
mod ssh_server;
