//! The state that requests and background tasks share; what a host's error means for a request; and
//! which host pulls which image.

use super::host::{Host, HostStatus};
use super::placement::choose_puller;
use super::request::{OpenRequest, QueuedRequest};
use crate::api::{SandboxProvider as _, SweepReport};
use crate::error::{SandboxError, SandboxErrorKind};
use crate::provider::DAEMON_RETURN_TIMEOUT;
use futures::future::join_all;
use orchestrate_types::RunId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// How long a request waits for hosts to report whether they have its image.
const IMAGE_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a connection broke although the daemon answers.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) hosts: Vec<Host>,
    /// Notified when a slot becomes free, and when a host leaves or returns to service.
    pub(super) freed: Arc<Notify>,
    /// Waiting requests by ticket, that is, in order of arrival.
    pub(super) queue: Mutex<BTreeMap<u64, QueuedRequest>>,
    next_ticket: AtomicU64,
    /// Images of coming tasks, the nearest first.
    expected: watch::Sender<Vec<String>>,
    /// The run and epoch below which containers are swept.
    sweeping: Mutex<Option<(RunId, i64)>>,
}

impl Scheduler {
    pub(super) fn new(hosts: Vec<Host>, freed: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            hosts,
            freed,
            queue: Mutex::default(),
            next_ticket: AtomicU64::new(0),
            expected: watch::Sender::default(),
            sweeping: Mutex::default(),
        })
    }

    pub(super) fn new_request(&self) -> OpenRequest {
        OpenRequest::new(self.next_ticket.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn sweeping(&self) -> MutexGuard<'_, Option<(RunId, i64)>> {
        self.sweeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_expected_images(&self, images: &[String]) {
        self.expected.send_replace(images.to_vec());
    }

    /// Finds out which hosts have an image, if there is a choice of hosts.
    pub(super) async fn check_image_presence(&self, image: &str) {
        if self.hosts.len() < 2 {
            return;
        }
        let providers = self.hosts.iter().filter_map(Host::in_service);
        let checks =
            join_all(providers.map(|provider| provider.state.images.check_presence(image)));
        if tokio::time::timeout(IMAGE_CHECK_TIMEOUT, checks).await.is_err() {
            tracing::debug!(image, "not every Docker host reported whether it has the image");
        }
    }

    /// Assigns expected images to hosts whenever the list changes. Runs until dropped.
    pub(super) async fn keep_assigning_images(&self) {
        let mut expected = self.expected.subscribe();
        expected.mark_changed();
        while expected.changed().await.is_ok() {
            let images = expected.borrow_and_update().clone();
            for image in &images {
                self.check_image_presence(image).await;
            }
            if !expected.has_changed().unwrap_or(false) {
                self.assign_images(&images);
            }
        }
    }

    /// Announces each image to the hosts that have it, or else to the one host that is to pull it.
    fn assign_images(&self, images: &[String]) {
        let mut assigned = vec![Vec::new(); self.hosts.len()];
        for image in images {
            let is_available = |host: &Host| matches!(host.status(image), HostStatus::Available);
            let available = self.hosts.iter().enumerate().filter(|(_, host)| is_available(host));
            let available: Vec<(usize, &Host)> = available.collect();
            let has_image = |host: &Host| {
                let provider = host.provider();
                provider.is_some_and(|provider| provider.state.images.is_present_or_coming(image))
            };
            let mut chosen: Vec<usize> = available
                .iter()
                .filter(|(_, host)| has_image(host))
                .map(|(index, _)| *index)
                .collect();
            if chosen.is_empty() {
                let candidates = available.iter();
                let candidates =
                    candidates.map(|(index, host)| (*index, host.title.as_str(), host.capacity()));
                chosen.extend(choose_puller(image, candidates));
            }
            for (index, list) in assigned.iter_mut().enumerate() {
                if chosen.contains(&index) {
                    list.push(image.clone());
                }
            }
        }
        for (host, list) in self.hosts.iter().zip(assigned) {
            if let Some(provider) = host.provider() {
                provider.expect_images(&list);
            }
        }
    }

    /// A sandbox of this image was opened, so no host has to pull it ahead any more.
    pub(super) fn remove_expected_image(&self, image: &str) {
        for provider in self.hosts.iter().filter_map(Host::provider) {
            provider.state.images.remove_expected(image);
        }
    }

    /// Decides what a host's error means for a request: it continues, on this or another host, or
    /// it fails with the returned error.
    pub(super) async fn handle_open_error(
        &self,
        (host, index): (&Host, usize),
        error: SandboxError,
        image: &str,
        request: &mut OpenRequest,
    ) -> Result<(), SandboxError> {
        match &error.kind {
            SandboxErrorKind::NoDaemon(_) => {
                tracing::debug!(host = host.title, %error, "the connection broke");
                if !host.confirm_in_service().await {
                    return Ok(());
                }
                let until = *request
                    .give_up_at
                    .get_or_insert_with(|| Instant::now() + DAEMON_RETURN_TIMEOUT);
                if Instant::now() >= until {
                    return Err(error);
                }
                tokio::time::sleep(RECONNECT_PAUSE).await;
                Ok(())
            }
            SandboxErrorKind::TimedOut { .. } => {
                if host.confirm_in_service().await {
                    Err(error)
                } else {
                    Ok(())
                }
            }
            // Another program may have removed the image after the check; it can be pulled again.
            SandboxErrorKind::ImageMissing(_) if request.retried_missing_image.insert(index) => {
                Ok(())
            }
            SandboxErrorKind::ImageMissing(_)
            | SandboxErrorKind::NotPulled { .. }
            | SandboxErrorKind::ImageChanged { .. } => {
                if self.hosts.len() > 1 {
                    host.mark_image_unavailable(image, error.kind.clone());
                }
                request.failed_hosts.push((index, error));
                Ok(())
            }
            // A full disk or a faulty runtime: another host may work.
            SandboxErrorKind::Refused { .. }
            | SandboxErrorKind::Failed { .. }
            | SandboxErrorKind::DiskFull(_) => {
                request.failed_hosts.push((index, error));
                Ok(())
            }
            SandboxErrorKind::NotRecorded { .. }
            | SandboxErrorKind::Gone(_)
            | SandboxErrorKind::Damaged { .. }
            | SandboxErrorKind::Protocol(_)
            | SandboxErrorKind::NotClean(_)
            | SandboxErrorKind::TooLarge { .. }
            | SandboxErrorKind::SelfTestFailed(_) => Err(error),
        }
    }

    /// Appends the host to the names in a report, if there are several hosts.
    pub(super) fn with_host_name(&self, host: &Host, report: SweepReport) -> SweepReport {
        if self.hosts.len() < 2 {
            return report;
        }
        let on_host = |name: String| format!("{name} on {}", host.title);
        let pair_on_host = |(name, reason)| (on_host(name), reason);
        SweepReport {
            removed: report.removed.into_iter().map(on_host).collect(),
            kept: report.kept.into_iter().map(pair_on_host).collect(),
            failed: report.failed.into_iter().map(pair_on_host).collect(),
        }
    }
}
