//! Requests to end a run or an evaluation early.

use crate::error::RunError;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Two requests to end early; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// First request: start no more episodes, end running ones after their current turn.
    pub drain: CancellationToken,
    /// Second request: end now. Nothing that is finished is lost.
    pub now: CancellationToken,
}

impl Stop {
    /// Calls `draining` on the first request. Resolves when everything must end immediately: on the
    /// second request, or `grace` after the first.
    pub(crate) async fn immediately(&self, grace: Duration, draining: impl Fn()) {
        let out_of_grace = async {
            self.drain.cancelled().await;
            draining();
            tokio::time::sleep(grace).await;
        };
        tokio::select! {
            () = self.now.cancelled() => {}
            () = out_of_grace => {}
        }
    }

    /// Fails with [`RunError::Stopped`] after either request.
    pub(crate) fn check(&self) -> Result<(), RunError> {
        if self.drain.is_cancelled() || self.now.is_cancelled() {
            Err(RunError::Stopped)
        } else {
            Ok(())
        }
    }
}
