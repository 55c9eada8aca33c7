//! Computations on foreign bytes, away from the threads that run the event loop.
//!
//! The invariant: at most [`PARALLEL`] of them run at the same time, so that hostile contents of many
//! episodes neither take all CPU time nor all memory. Each must be bounded by itself, because a
//! computation cannot be interrupted.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Computations that run at the same time.
const PARALLEL: usize = 4;

static PERMITS: Semaphore = Semaphore::const_new(PARALLEL);

/// Why a computation has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OffloadError {
    /// It panicked, or the program is ending.
    #[error("a computation on the agent's files ended early: {0}")]
    Ended(#[from] tokio::task::JoinError),
    /// The program is ending.
    #[error("computations are no longer accepted")]
    Closed(#[from] tokio::sync::AcquireError),
}

/// Waits for a place, for a caller that holds foreign bytes over several steps.
pub(crate) async fn permit() -> Result<SemaphorePermit<'static>, OffloadError> {
    Ok(PERMITS.acquire().await?)
}

/// Runs `work` on a thread for blocking calls.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, OffloadError> {
    let permit = permit().await?;
    run_with(permit, work).await
}

/// Runs `work` in the place that the caller has.
pub(crate) async fn run_with<T: Send + 'static>(
    permit: SemaphorePermit<'static>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, OffloadError> {
    let working = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    Ok(working.await?)
}
