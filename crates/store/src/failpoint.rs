//! Hooks around every write, with which tests stop a run between any two of them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

/// Called around every write with the name of the point, e.g. `seal_attempt.before`. A future
/// that never resolves simulates a process that died there: the test drops the caller.
pub trait Failpoint: Send + Sync + fmt::Debug {
    /// Called when a write reaches the point `name`; the write continues when the future resolves.
    fn reach(&self, name: &str) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}
