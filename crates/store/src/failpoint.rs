//! Tests stop a run between any two writes here.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

/// Called around every write with the name of the point, e.g. `seal_attempt.before`. A future
/// that never resolves is a process that died there: the test drops the caller.
pub trait Failpoint: Send + Sync + fmt::Debug {
    /// Reached the point `name`.
    fn reach(&self, name: &str) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}
