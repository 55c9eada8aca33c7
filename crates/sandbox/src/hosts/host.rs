//! One of several hosts: its provider, whether it is in service, and images that it cannot provide.

use super::placement::HostOffer;
use crate::api::{HostUsage, SandboxProvider as _, SandboxSpec, SweepReport};
use crate::config::SandboxSettings;
use crate::error::{SandboxError, SandboxErrorKind};
use crate::image::ImageHooks;
use crate::provider::DockerProvider;
use crate::slots::{Grant, ReuseKey};
use orchestrate_types::RunId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long a host is not used for an image that it could not provide.
const IMAGE_RETRY_AFTER: Duration = Duration::from_mins(2);

#[derive(Debug, Default)]
struct ServiceState {
    /// Why it is out of service; `None` if it is in service.
    out_of_service: Option<SandboxErrorKind>,
    unavailable_images: HashMap<String, (Instant, SandboxErrorKind)>,
    times_taken_out: u64,
}

/// Whether a host can serve a request for an image.
#[derive(Debug)]
pub(super) enum HostStatus {
    Available,
    /// It is out of service for this reason, and may return.
    OutOfService(SandboxErrorKind),
    /// It cannot provide the image, for this reason.
    ImageUnavailable(SandboxErrorKind),
}

/// The last sweep of a host.
#[derive(Debug)]
struct LastSweep {
    run: RunId,
    epoch: i64,
    /// What was found since the last report.
    unreported: SweepReport,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) title: String,
    config: SandboxSettings,
    hooks: ImageHooks,
    /// Notified when a slot becomes free, and when the host leaves or returns to service.
    freed: Arc<Notify>,
    /// Set on the first connection and kept when the daemon becomes unreachable.
    provider: OnceLock<DockerProvider>,
    state: Mutex<ServiceState>,
    /// Locked during a sweep.
    last_sweep: tokio::sync::Mutex<Option<LastSweep>>,
    /// Notified when the host goes out of service.
    pub(super) taken_out: Notify,
}

impl Host {
    /// A host without a connection. `config` must name this host only.
    pub(super) fn new(
        title: &str,
        config: SandboxSettings,
        hooks: ImageHooks,
        freed: Arc<Notify>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            config,
            hooks,
            freed,
            provider: OnceLock::new(),
            state: Mutex::default(),
            last_sweep: tokio::sync::Mutex::default(),
            taken_out: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn provider(&self) -> Option<&DockerProvider> {
        self.provider.get()
    }

    pub(super) fn capacity(&self) -> usize {
        self.config.max_containers
    }

    pub(super) fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.title.clone(), kind }
    }

    /// Connects, or checks that the daemon answers if there is a connection.
    pub(super) async fn connect_or_ping(&self, limit: Duration) -> Result<(), SandboxError> {
        if let Some(provider) = self.provider.get() {
            return provider.state.daemon.ping(limit).await;
        }
        let (hooks, freed) = (self.hooks.clone(), Arc::clone(&self.freed));
        let connecting = DockerProvider::connect_notifying(&self.config, hooks, freed);
        let connected = Box::pin(connecting).await?;
        // Only the health checks connect, so it is not set yet.
        let _ = self.provider.set(connected);
        Ok(())
    }

    /// Time limit of one call of its daemon.
    pub(super) fn call_timeout(&self) -> Duration {
        self.config.call_timeout.0
    }

    pub(super) fn is_in_service(&self) -> bool {
        self.state().out_of_service.is_none()
    }

    /// The provider, if new sandboxes may be opened.
    pub(super) fn in_service(&self) -> Option<&DockerProvider> {
        self.provider().filter(|_| self.is_in_service())
    }

    /// Takes the host out of service: new sandboxes are opened on other hosts.
    pub(super) fn take_out_of_service(&self, error: SandboxError) {
        let mut state = self.state();
        if state.out_of_service.is_none() {
            state.times_taken_out += 1;
            tracing::warn!(host = self.title, %error, "the Docker host is out of service");
        }
        state.out_of_service = Some(error.kind);
        drop(state);
        self.taken_out.notify_one();
        self.freed.notify_waiters();
    }

    pub(super) fn return_to_service(&self) {
        if self.state().out_of_service.take().is_some() {
            tracing::info!(host = self.title, "the Docker host is in service");
            self.freed.notify_waiters();
        }
    }

    /// Stops using the host for this image for a while.
    pub(super) fn mark_image_unavailable(&self, image: &str, kind: SandboxErrorKind) {
        tracing::warn!(
            host = self.title,
            image,
            reason = %kind,
            "the Docker host cannot provide an image"
        );
        self.state().unavailable_images.insert(image.to_owned(), (Instant::now(), kind));
        self.freed.notify_waiters();
    }

    pub(super) fn status(&self, image: &str) -> HostStatus {
        let mut state = self.state();
        if let Some((since, kind)) = state.unavailable_images.get(image) {
            if since.elapsed() < IMAGE_RETRY_AFTER {
                return HostStatus::ImageUnavailable(kind.clone());
            }
            state.unavailable_images.remove(image);
        }
        state.out_of_service.clone().map_or(HostStatus::Available, HostStatus::OutOfService)
    }

    /// What the host could provide for a request now; `None` if nothing.
    pub(super) fn offer(&self, spec: &SandboxSpec) -> Option<HostOffer> {
        let state = &self.in_service()?.state;
        let (reusable, until) =
            (spec.reusable && state.config.reuse, Instant::now() + spec.deadline);
        let available = state.slots.availability(&ReuseKey::of(spec), reusable, until)?;
        Some(HostOffer {
            idle: available.idle,
            image: state.images.is_present_or_coming(&spec.image),
            used: available.used,
            capacity: available.capacity,
        })
    }

    pub(super) fn try_take(&self, spec: &SandboxSpec) -> Option<Grant> {
        let state = &self.in_service()?.state;
        let (reusable, until) =
            (spec.reusable && state.config.reuse, Instant::now() + spec.deadline);
        state.slots.try_take(&ReuseKey::of(spec), reusable, until)
    }

    /// Returns a grant that was not used.
    pub(super) fn return_grant(&self, grant: Grant) {
        match grant {
            Grant::Reuse(idle) | Grant::Evict(idle) => {
                if let Some(provider) = self.provider() {
                    provider.state.slots.put(*idle);
                }
            }
            Grant::Start(slot) => drop(slot),
        }
    }

    /// Removes leftover containers of earlier coordinators, now and periodically. Returns what was
    /// found since the last report, including what the health checks found.
    pub(super) async fn sweep(
        &self,
        provider: &DockerProvider,
        run: RunId,
        epoch: i64,
    ) -> Result<SweepReport, SandboxError> {
        self.sweep_once(provider, run, epoch).await?;
        let mut last = self.last_sweep.lock().await;
        Ok(last.as_mut().map(|sweep| std::mem::take(&mut sweep.unreported)).unwrap_or_default())
    }

    /// Sweeps unless that was done for this run and epoch. Keeps the report for [`Host::sweep`].
    pub(super) async fn sweep_once(
        &self,
        provider: &DockerProvider,
        run: RunId,
        epoch: i64,
    ) -> Result<(), SandboxError> {
        let mut last = self.last_sweep.lock().await;
        if last.as_ref().is_some_and(|sweep| (sweep.run, sweep.epoch) == (run, epoch)) {
            return Ok(());
        }
        let unreported = provider.sweep(run, epoch).await?;
        if !unreported.removed.is_empty() {
            let removed = &unreported.removed;
            tracing::info!(host = self.title, ?removed, "removed leftover containers");
        }
        *last = Some(LastSweep { run, epoch, unreported });
        Ok(())
    }

    pub(super) fn usage(&self) -> HostUsage {
        let (in_service, taken_out) = {
            let state = self.state();
            (state.out_of_service.is_none(), state.times_taken_out)
        };
        let stats = self.provider().map(DockerProvider::stats);
        HostUsage {
            host: self.title.clone(),
            in_service,
            taken_out,
            capacity: self.capacity(),
            open: stats.map_or(0, |stats| stats.open),
            idle: stats.map_or(0, |stats| stats.idle),
            started: stats.map_or(0, |stats| stats.started),
        }
    }
}
