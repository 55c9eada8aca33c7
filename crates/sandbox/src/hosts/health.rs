//! Health checks of a host, and its return to service with a growing pause between tries.

use super::host::Host;
use super::scheduler::Scheduler;
use std::time::Duration;
use tokio::time::Instant;

/// Interval between checks of a host in service. Requests notice a refused connection at once; the
/// checks are for hosts without requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit of the check that follows a call without an answer.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Scheduler {
    /// Runs the health checks of host `index` until dropped.
    pub(super) async fn run_health_checks(&self, index: usize) {
        let Some(host) = self.hosts.get(index) else { return };
        let mut pause = FIRST_PAUSE;
        loop {
            if host.is_in_service() {
                let returned_at = Instant::now();
                self.check_while_in_service(host).await;
                // The pause keeps growing for a host that soon fails again.
                if returned_at.elapsed() >= LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            match host.connect_or_ping(host.call_timeout()).await {
                Ok(()) => host.return_to_service(),
                Err(error) => host.take_out_of_service(error),
            }
        }
    }

    /// Checks the host until it is out of service.
    async fn check_while_in_service(&self, host: &Host) {
        loop {
            self.sweep_if_due(host).await;
            // Cancel-safe: the notification is stored.
            tokio::select! {
                biased;
                () = host.taken_out.notified() => {}
                () = tokio::time::sleep(CHECK_INTERVAL) => {
                    if let Err(error) = host.connect_or_ping(host.call_timeout()).await {
                        host.take_out_of_service(error);
                    }
                }
            }
            if !host.is_in_service() {
                return;
            }
        }
    }

    /// Sweeps a host that was out of service when the run started.
    async fn sweep_if_due(&self, host: &Host) {
        let due = *self.sweeping();
        let (Some((run, epoch)), Some(provider)) = (due, host.in_service()) else { return };
        if let Err(error) = host.sweep_once(provider, run, epoch).await {
            tracing::warn!(%error, "cannot list leftover containers");
        }
    }
}

impl Host {
    /// Checks a host after a failed call. Takes it out of service if it does not answer.
    pub(super) async fn confirm_in_service(&self) -> bool {
        match self.connect_or_ping(CONFIRM_TIMEOUT).await {
            Ok(()) => true,
            Err(error) => {
                self.take_out_of_service(error);
                false
            }
        }
    }
}
