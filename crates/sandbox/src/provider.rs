//! Sandboxes on one Docker host.

use crate::api::{QuarantinedContainer, Sandbox, SandboxProvider, SandboxSpec, SweepReport};
use crate::config::SandboxSettings;
use crate::container::check_spec;
use crate::daemon::Daemon;
use crate::disk::DiskMonitor;
use crate::error::{SandboxError, SandboxErrorKind};
use crate::guard::{JOB_QUEUE_CAPACITY, Remover};
use crate::image::{ImageHooks, ImageIdentity, Images, PulledImage};
use crate::isolation;
use crate::slots::{ReuseKey, Slots};
use crate::state::{Counters, ProviderState};
use orchestrate_types::RunId;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long to wait for a daemon that does not answer, for example because it restarts.
pub(crate) const DAEMON_RETURN_TIMEOUT: Duration = Duration::from_mins(1);
/// How long shutdown waits for removals before it reports what is left.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_mins(2);

/// Container counts of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProviderStats {
    /// Containers started so far.
    pub started: u64,
    /// How often a container served another attempt.
    pub reused: u64,
    /// Containers that were discarded because their reset failed.
    pub resets_refused: u64,
    /// Containers removed so far.
    pub removed: u64,
    /// Containers that the daemon currently fails to remove.
    pub quarantined: usize,
    /// Containers in use, including those that are starting or being removed.
    pub open: usize,
    /// Idle containers in the pool.
    pub idle: usize,
}

/// Opens sandboxes on one Docker daemon.
///
/// Dropping it without [`SandboxProvider::shutdown`] also ends all containers (because their
/// streams close), but does not wait for that.
#[derive(Debug)]
pub struct DockerProvider {
    pub(crate) state: Arc<ProviderState>,
    stop: CancellationToken,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

impl DockerProvider {
    /// Connects to the daemon. The settings must name a single host. Must be called within a Tokio
    /// runtime, because removals run in the background.
    ///
    /// # Errors
    /// [`SandboxErrorKind::NoDaemon`] with a hint if no daemon answers; `Refused` for settings with
    /// several hosts, which [`DockerHosts`](crate::DockerHosts) supports.
    pub async fn connect(config: SandboxSettings) -> Result<Self, SandboxError> {
        Self::connect_with(config, ImageHooks::default()).await
    }

    /// Connects like [`DockerProvider::connect`], with a run's image lock and listener.
    ///
    /// # Errors
    /// The same as [`DockerProvider::connect`].
    pub async fn connect_with(
        config: SandboxSettings,
        hooks: ImageHooks,
    ) -> Result<Self, SandboxError> {
        Self::connect_notifying(&config, hooks, Arc::default()).await
    }

    /// Connects like [`DockerProvider::connect_with`]. `freed` is notified when a slot or an idle
    /// container becomes available.
    pub(crate) async fn connect_notifying(
        config: &SandboxSettings,
        hooks: ImageHooks,
        freed: Arc<Notify>,
    ) -> Result<Self, SandboxError> {
        let hosts = config.docker_hosts();
        let [host] = hosts.as_slice() else {
            let message = format!(
                "this command works on one Docker host, but the settings name {}; choose one with \
                 --set 'sandbox.hosts=[{{url=\"…\"}}]'",
                hosts.len()
            );
            let kind = SandboxErrorKind::Refused { call: "connect", message };
            return Err(SandboxError { sandbox: "sandbox.hosts".to_owned(), kind });
        };
        let config = config.on(host);
        let daemon = Daemon::connect(host, config.call_timeout.0).await?;
        isolation::check(&daemon, config.runtime.as_deref(), config.user_namespace).await?;
        let (jobs, queue) = mpsc::channel(JOB_QUEUE_CAPACITY);
        let stop = CancellationToken::new();
        let remover = Remover::new(daemon.clone(), config.remove_parallelism, stop.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&remover).run(queue));
        let images = Images::new(daemon.clone(), &config, hooks);
        tasks.spawn(Arc::clone(&images).pull_ahead(stop.clone()));
        let state = Arc::new(ProviderState {
            daemon,
            slots: Slots::new(config.max_containers, freed),
            counters: Counters::default(),
            images,
            starts: Semaphore::new(config.start_parallelism),
            jobs,
            remover,
            next_number: AtomicU32::new(0),
            disk: DiskMonitor::new(config.min_free_disk),
            owners: Mutex::default(),
            config,
        });
        Ok(Self { state, stop, tasks: tokio::sync::Mutex::new(tasks) })
    }

    /// The settings in use.
    pub fn config(&self) -> &SandboxSettings {
        &self.state.config
    }

    /// Checks that this host's copy of each recorded image, if it has one, is still the same image.
    ///
    /// # Errors
    /// [`SandboxErrorKind::ImageChanged`] for the first image that differs; any error of the
    /// daemon.
    pub async fn check_images(
        &self,
        recorded: &[(String, ImageIdentity)],
    ) -> Result<(), SandboxError> {
        for (image, identity) in recorded {
            self.state.images.check(image, identity).await?;
        }
        Ok(())
    }

    /// Removes images that this program pulled in any run and that are not in use. With `dry_run`,
    /// only lists them.
    ///
    /// # Errors
    /// Any error of the daemon, except that an image in use cannot be removed.
    pub async fn remove_pulled_images(
        &self,
        dry_run: bool,
    ) -> Result<Vec<PulledImage>, SandboxError> {
        self.state.images.remove_pulled(dry_run).await
    }

    /// Container counts for metrics and reports.
    pub fn stats(&self) -> ProviderStats {
        let state = &self.state;
        let (open, idle) = state.slots.counts();
        ProviderStats {
            started: state.counters.started.load(Ordering::Relaxed),
            reused: state.counters.reused.load(Ordering::Relaxed),
            resets_refused: state.counters.resets_refused.load(Ordering::Relaxed),
            removed: state.remover.removed.load(Ordering::Relaxed),
            quarantined: state.remover.quarantined().len(),
            open,
            idle,
        }
    }
}

#[async_trait::async_trait]
impl SandboxProvider for DockerProvider {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        check_spec(spec)?;
        let state = &self.state;
        let (mut give_up_at, mut retried_missing_image) = (None, false);
        loop {
            let until = Instant::now() + spec.deadline;
            let reusable = spec.reusable && state.config.reuse;
            let grant = state.slots.take(&ReuseKey::of(spec), reusable, until).await;
            match state.open_with(spec, grant).await {
                Ok(Some(sandbox)) => return Ok(Box::new(sandbox)),
                Ok(None) => {}
                Err(error) if matches!(error.kind, SandboxErrorKind::NoDaemon(_)) => {
                    let until =
                        *give_up_at.get_or_insert_with(|| Instant::now() + DAEMON_RETURN_TIMEOUT);
                    tracing::warn!(%error, "waiting for the Docker daemon");
                    if !state.daemon.wait_until_reachable(until).await {
                        return Err(error);
                    }
                }
                // Another program may have removed the image after the check; it can be pulled
                // again.
                Err(error)
                    if matches!(error.kind, SandboxErrorKind::ImageMissing(_))
                        && !retried_missing_image =>
                {
                    retried_missing_image = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn expect_images(&self, images: &[String]) {
        self.state.images.set_expected(images);
    }

    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError> {
        let swept = self.state.sweep_epochs(run, epoch).await?;
        let periodic = Arc::clone(&self.state).keep_sweeping(run, epoch, self.stop.clone());
        self.tasks.lock().await.spawn(periodic);
        Ok(swept)
    }

    fn quarantined(&self) -> Vec<QuarantinedContainer> {
        self.state.remover.quarantined()
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        drop(self.state.slots.close());
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        let finished = tokio::time::timeout(SHUTDOWN_TIMEOUT, async {
            while tasks.join_next().await.is_some() {}
        });
        let in_time = finished.await.is_ok();
        let left = match self.state.remove_own().await {
            Ok(left) => left,
            Err(error) => {
                tracing::warn!(%error, "cannot list leftover containers");
                self.quarantined().into_iter().map(|container| container.name).collect()
            }
        };
        let kind = match (in_time, left.is_empty()) {
            (true, true) => return Ok(()),
            (false, _) => SandboxErrorKind::TimedOut { call: "shutdown", after: SHUTDOWN_TIMEOUT },
            (true, false) => SandboxErrorKind::Refused {
                call: "remove",
                message: format!(
                    "these containers remain: {}; run `orchestrate gc` to remove them",
                    left.join(", ")
                ),
            },
        };
        Err(self.state.daemon.error(kind))
    }
}
