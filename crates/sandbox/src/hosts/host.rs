//! One host of several: its provider, whether it is in service, and which images it cannot give.

use crate::api::{
    HostUse, SandboxError, SandboxErrorKind, SandboxProvider as _, SandboxSpec, SweepReport,
};
use crate::config::SandboxSettings;
use crate::hosts::placement::Offer;
use crate::provider::{DockerProvider, Surroundings};
use crate::slots::{Key, Taken};
use orchestrate_types::RunId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A host that could not give an image is asked for it again after this time.
const LACKS_FOR: Duration = Duration::from_mins(2);

#[derive(Debug, Default)]
struct State {
    /// Why it is out of service.
    away: Option<SandboxErrorKind>,
    lacking: HashMap<String, (Instant, SandboxErrorKind)>,
    taken_out: u64,
}

/// Whether a host may serve a request.
#[derive(Debug)]
pub(super) enum Standing {
    Fit,
    /// It is out of service, and may return.
    Away(SandboxErrorKind),
    /// It cannot give the image.
    Lacks(SandboxErrorKind),
}

/// The last sweep.
#[derive(Debug)]
struct Swept {
    run: RunId,
    epoch: i64,
    /// What it found and nobody was told yet.
    untold: SweepReport,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) title: String,
    config: SandboxSettings,
    around: Surroundings,
    /// Whom to tell when a slot is free, or the host comes or goes.
    freed: Arc<Notify>,
    /// Connected once; it stays the same while the daemon goes and comes.
    provider: OnceLock<DockerProvider>,
    state: Mutex<State>,
    /// Held while it is swept.
    swept: tokio::sync::Mutex<Option<Swept>>,
    /// Told when the host was taken out.
    pub(super) left: Notify,
}

impl Host {
    /// A host that nobody has connected to yet. The settings are for it alone.
    pub(super) fn new(
        title: &str,
        config: SandboxSettings,
        around: Surroundings,
        freed: Arc<Notify>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            config,
            around,
            freed,
            provider: OnceLock::new(),
            state: Mutex::default(),
            swept: tokio::sync::Mutex::default(),
            left: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
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

    /// Connects, or asks whether the daemon answers now.
    pub(super) async fn reach(&self, within: Duration) -> Result<(), SandboxError> {
        if let Some(provider) = self.provider.get() {
            return provider.shared.daemon.ping(within).await;
        }
        let (around, freed) = (self.around.clone(), Arc::clone(&self.freed));
        let connected = Box::pin(DockerProvider::join(&self.config, around, freed)).await?;
        // Only its care connects, so nobody was faster.
        let _ = self.provider.set(connected);
        Ok(())
    }

    /// Longest wait for an answer of its daemon.
    pub(super) fn patience(&self) -> Duration {
        self.config.call_timeout.0
    }

    pub(super) fn is_in_service(&self) -> bool {
        self.state().away.is_none()
    }

    /// The provider, where new sandboxes may be opened.
    pub(super) fn in_service(&self) -> Option<&DockerProvider> {
        self.provider().filter(|_| self.is_in_service())
    }

    /// From now on sandboxes are opened elsewhere.
    pub(super) fn take_out(&self, error: SandboxError) {
        let mut state = self.state();
        if state.away.is_none() {
            state.taken_out += 1;
            tracing::warn!(host = self.title, %error, "the Docker host is out of service");
        }
        state.away = Some(error.kind);
        drop(state);
        self.left.notify_one();
        self.freed.notify_waiters();
    }

    pub(super) fn put_back(&self) {
        if self.state().away.take().is_some() {
            tracing::info!(host = self.title, "the Docker host is in service");
            self.freed.notify_waiters();
        }
    }

    /// Remembers for a while that it cannot give an image.
    pub(super) fn lacks(&self, image: &str, kind: SandboxErrorKind) {
        tracing::warn!(host = self.title, image, reason = %kind, "other Docker hosts serve this image");
        self.state().lacking.insert(image.to_owned(), (Instant::now(), kind));
        self.freed.notify_waiters();
    }

    pub(super) fn standing(&self, image: &str) -> Standing {
        let mut state = self.state();
        if let Some((since, kind)) = state.lacking.get(image) {
            if since.elapsed() < LACKS_FOR {
                return Standing::Lacks(kind.clone());
            }
            state.lacking.remove(image);
        }
        state.away.clone().map_or(Standing::Fit, Standing::Away)
    }

    /// What it could give to a request now; `None`: nothing.
    pub(super) fn offer(&self, spec: &SandboxSpec) -> Option<Offer> {
        let shared = &self.in_service()?.shared;
        let (reusable, until) =
            (spec.reusable && shared.config.reuse, Instant::now() + spec.deadline);
        let offer = shared.slots.offer(&Key::of(spec), reusable, until)?;
        Some(Offer { image: shared.images.is_here(&spec.image), ..offer })
    }

    pub(super) fn try_take(&self, spec: &SandboxSpec) -> Option<Taken> {
        let shared = &self.in_service()?.shared;
        let (reusable, until) =
            (spec.reusable && shared.config.reuse, Instant::now() + spec.deadline);
        shared.slots.try_take(&Key::of(spec), reusable, until)
    }

    /// Takes back what nobody came for.
    pub(super) fn give_back(&self, taken: Taken) {
        match taken {
            Taken::Idle(idle) | Taken::Evict(idle) => {
                if let Some(provider) = self.provider() {
                    provider.shared.slots.put(*idle);
                }
            }
            Taken::Room(slot) => drop(slot),
        }
    }

    /// Removes what earlier coordinators of a run left, now and from time to time; once. Gives what
    /// was found, also where the host's own care was faster.
    pub(super) async fn sweep(
        &self,
        provider: &DockerProvider,
        run: RunId,
        epoch: i64,
    ) -> Result<SweepReport, SandboxError> {
        self.sweep_late(provider, run, epoch).await?;
        let mut done = self.swept.lock().await;
        Ok(done.as_mut().map(|swept| std::mem::take(&mut swept.untold)).unwrap_or_default())
    }

    /// As [`Host::sweep`] where nobody waits for the report.
    pub(super) async fn sweep_late(
        &self,
        provider: &DockerProvider,
        run: RunId,
        epoch: i64,
    ) -> Result<(), SandboxError> {
        let mut done = self.swept.lock().await;
        if done.as_ref().is_some_and(|swept| (swept.run, swept.epoch) == (run, epoch)) {
            return Ok(());
        }
        let untold = provider.sweep(run, epoch).await?;
        if !untold.removed.is_empty() {
            tracing::info!(host = self.title, removed = ?untold.removed, "an earlier coordinator's");
        }
        *done = Some(Swept { run, epoch, untold });
        Ok(())
    }

    pub(super) fn usage(&self) -> HostUse {
        let (in_service, taken_out) = {
            let state = self.state();
            (state.away.is_none(), state.taken_out)
        };
        let stats = self.provider().map(DockerProvider::stats);
        HostUse {
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
