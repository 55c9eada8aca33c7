//! The care of one host: a look at it now and then, and back-off while it is out of service.

use super::Inner;
use super::host::Host;
use crate::api::SandboxError;
use std::time::Duration;
use tokio::time::Instant;

/// Between two looks at a host in service. A refused connection is found at once by whoever meets
/// it; this is for hosts that nobody asks for anything.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Whoever had no answer in time asks once more whether the daemon answers at all.
const DOUBT_WITHIN: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Inner {
    /// Looks after host `index` until dropped.
    pub(super) async fn care(&self, index: usize) {
        let Some(host) = self.hosts.get(index) else { return };
        let mut pause = FIRST_PAUSE;
        loop {
            if host.is_in_service() {
                let returned = Instant::now();
                self.while_in_service(host).await;
                // One that does not stay is asked less and less often.
                if returned.elapsed() >= LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            match host.reach(host.patience()).await {
                Ok(()) => host.put_back(),
                Err(error) => host.take_out(error),
            }
        }
    }

    /// Until somebody takes it out, or it does not answer.
    async fn while_in_service(&self, host: &Host) {
        loop {
            self.sweep_late(host).await;
            // Cancel-safe: that it left is remembered.
            tokio::select! {
                biased;
                () = host.left.notified() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {
                    if let Err(error) = host.reach(host.patience()).await {
                        host.take_out(error);
                    }
                }
            }
            if !host.is_in_service() {
                return;
            }
        }
    }

    /// What an earlier coordinator left on a host that was away when the run began.
    async fn sweep_late(&self, host: &Host) {
        let due = *self.sweeping();
        let (Some((run, epoch)), Some(provider)) = (due, host.in_service()) else { return };
        if let Err(error) = host.sweep_late(provider, run, epoch).await {
            tracing::warn!(%error, "cannot look for containers left behind");
        }
    }
}

impl Host {
    /// Whether it answers after all; one that does not is taken out.
    pub(super) async fn answers(&self) -> bool {
        let looked: Result<(), SandboxError> = self.reach(DOUBT_WITHIN).await;
        match looked {
            Ok(()) => true,
            Err(error) => {
                self.take_out(error);
                false
            }
        }
    }
}
