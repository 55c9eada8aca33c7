//! The Docker implementation of the seam.

use crate::api::{
    Sandbox, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec, SweepReport,
};
use crate::config::SandboxSettings;
use crate::container::{attempt_name, check_spec, create_body, pooled_name};
use crate::daemon::{CallError, Daemon};
use crate::disk::Disk;
use crate::guard::{Guard, Job, QUEUE, Quarantined, Remover};
use crate::image::{self, ImageBook, ImageIdentity, Images, Listener, MemoryBook, PulledImage};
use crate::isolation;
use crate::link::Link;
use crate::sandbox::DockerSandbox;
use crate::slots::{Idle, Key, Slot, Slots, Taken};
use bollard::models::ContainerCreateBody;
use bollard::query_parameters::CreateContainerOptions;
use orchestrate_types::{ByteSize, RunId};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Times a name that is taken by a leftover is freed and tried again.
const CREATE_TRIES: u32 = 3;
/// A daemon that restarts is waited for so long, and then given up.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);
/// Shutdown waits this long for removals, then names what is left.
const SHUTDOWN_WITHIN: Duration = Duration::from_mins(2);

/// Counts since the provider was made.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    started: AtomicU64,
    reused: AtomicU64,
    pub(crate) resets_refused: AtomicU64,
}

/// How many containers there are and were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProviderStats {
    /// Containers started.
    pub started: u64,
    /// Times a clean container served another attempt.
    pub reused: u64,
    /// Containers that could not be proved clean, and were thrown away.
    pub resets_refused: u64,
    /// Containers removed.
    pub removed: u64,
    /// Containers that the daemon does not let go now.
    pub quarantined: usize,
    /// In use now, being started and being removed included.
    pub open: usize,
    /// Clean and waiting now.
    pub idle: usize,
}

/// What open sandboxes share with their provider.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) daemon: Daemon,
    pub(crate) config: SandboxSettings,
    pub(crate) slots: Arc<Slots>,
    pub(crate) counters: Counters,
    pub(crate) images: Arc<Images>,
    starts: Semaphore,
    jobs: mpsc::Sender<Job>,
    pub(crate) remover: Arc<Remover>,
    next_number: AtomicU32,
    pub(crate) disk: Disk,
    /// Runs, with epoch, for which containers were asked.
    pub(crate) owners: Mutex<HashSet<(RunId, i64)>>,
}

/// What a provider tells, and what it is told, besides sandboxes.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// Where it is written what the run's images are; `None`: that is remembered only.
    pub book: Option<Arc<dyn ImageBook>>,
    /// Who hears of images being pulled.
    pub listener: Listener,
}

/// Sandboxes from one Docker daemon.
///
/// Dropping it without [`SandboxProvider::shutdown`] ends all containers too (their streams close),
/// but does not wait for that.
#[derive(Debug)]
pub struct DockerProvider {
    pub(crate) shared: Arc<Shared>,
    stop: CancellationToken,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

impl DockerProvider {
    /// Connects to the daemon of settings with one host. Must be called within a Tokio runtime, in
    /// which removals then run.
    ///
    /// # Errors
    /// [`SandboxErrorKind::NoDaemon`] with a hint where none answers; `Refused` for settings with
    /// several hosts, which [`DockerHosts`](crate::DockerHosts) serves.
    pub async fn connect(config: SandboxSettings) -> Result<Self, SandboxError> {
        Self::connect_with(config, Surroundings::default()).await
    }

    /// As [`DockerProvider::connect`], for a run.
    ///
    /// # Errors
    /// As there.
    pub async fn connect_with(
        config: SandboxSettings,
        around: Surroundings,
    ) -> Result<Self, SandboxError> {
        Self::join(&config, around, Arc::default()).await
    }

    /// As [`DockerProvider::connect_with`]; `freed` is told whenever a slot or an idle container is
    /// there to be taken.
    pub(crate) async fn join(
        config: &SandboxSettings,
        around: Surroundings,
        freed: Arc<Notify>,
    ) -> Result<Self, SandboxError> {
        let hosts = config.docker_hosts();
        let [host] = hosts.as_slice() else {
            let message = format!(
                "this works on one Docker host, and the settings name {}; choose one by \
                 --set 'sandbox.hosts=[{{url=\"…\"}}]'",
                hosts.len()
            );
            let kind = SandboxErrorKind::Refused { call: "connect", message };
            return Err(SandboxError { sandbox: "sandbox.hosts".to_owned(), kind });
        };
        let config = config.on(host);
        let daemon = Daemon::connect(host, config.call_timeout.0).await?;
        isolation::check(&daemon, &config).await?;
        let (jobs, queue) = mpsc::channel(QUEUE);
        let stop = CancellationToken::new();
        let remover = Remover::new(daemon.clone(), config.remove_parallelism, stop.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&remover).run(queue));
        let book = around.book.unwrap_or_else(|| Arc::new(MemoryBook::default()));
        let images = Images::new(daemon.clone(), &config, book, around.listener);
        tasks.spawn(Arc::clone(&images).pull_ahead(stop.clone()));
        let shared = Arc::new(Shared {
            daemon,
            slots: Slots::new(config.max_containers, freed),
            counters: Counters::default(),
            images,
            starts: Semaphore::new(config.start_parallelism),
            jobs,
            remover,
            next_number: AtomicU32::new(0),
            disk: Disk::new(config.min_free_disk),
            owners: Mutex::default(),
            config,
        });
        Ok(Self { shared, stop, tasks: tokio::sync::Mutex::new(tasks) })
    }

    /// The config in force.
    pub fn config(&self) -> &SandboxSettings {
        &self.shared.config
    }

    /// Fails by name if one of these images is here and not the one that it was.
    ///
    /// # Errors
    /// [`SandboxErrorKind::ImageChanged`] for the first such image; when the daemon does not answer.
    pub async fn check_images(
        &self,
        recorded: &[(String, ImageIdentity)],
    ) -> Result<(), SandboxError> {
        for (image, identity) in recorded {
            self.shared.images.check(image, identity).await?;
        }
        Ok(())
    }

    /// Removes the images that this program pulled, in any run, and that nobody needs now;
    /// `dry_run`: only says which there are.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses for another reason than that one is in use.
    pub async fn remove_pulled_images(
        &self,
        dry_run: bool,
    ) -> Result<Vec<PulledImage>, SandboxError> {
        self.shared.images.remove_pulled(dry_run).await
    }

    /// Counts for metrics and reports.
    pub fn stats(&self) -> ProviderStats {
        let shared = &self.shared;
        let (open, idle) = shared.slots.counts();
        ProviderStats {
            started: shared.counters.started.load(Ordering::Relaxed),
            reused: shared.counters.reused.load(Ordering::Relaxed),
            resets_refused: shared.counters.resets_refused.load(Ordering::Relaxed),
            removed: shared.remover.removed.load(Ordering::Relaxed),
            quarantined: shared.remover.quarantined().len(),
            open,
            idle,
        }
    }
}

/// What becomes of one request, on one host.
impl Shared {
    /// The key of sandboxes that are used again, where this one may be.
    fn key(&self, spec: &SandboxSpec) -> Option<Key> {
        (spec.reusable && self.config.reuse).then(|| Key::of(spec))
    }

    /// Makes a sandbox of what was taken. `None`: that made room, or was lost; take again.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        taken: Taken,
    ) -> Result<Option<DockerSandbox>, SandboxError> {
        let owner = (spec.owner.run, spec.owner.epoch);
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).insert(owner);
        match taken {
            Taken::Idle(idle) => {
                let Idle { key, link, guard, ends } = *idle;
                let mut sandbox =
                    DockerSandbox::new(link, guard, Arc::clone(self), Some(key), ends);
                if let Err(error) = sandbox.set_deadline(spec.deadline).await {
                    tracing::warn!(%error, "an idle sandbox was lost");
                    return Ok(None);
                }
                self.counters.reused.fetch_add(1, Ordering::Relaxed);
                Ok(Some(sandbox))
            }
            Taken::Room(slot) => self.start(spec, self.key(spec), slot).await.map(Some),
            Taken::Evict(idle) => {
                self.evict(*idle).await;
                Ok(None)
            }
        }
    }

    async fn start(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        key: Option<Key>,
        mut slot: Slot,
    ) -> Result<DockerSandbox, SandboxError> {
        // Never closed; an error would only mean no limit.
        let _permit = self.starts.acquire().await;
        self.disk.check(&self.daemon).await?;
        let image = self.images.ready(&spec.image, spec.reusable).await?;
        let (wanted, lifetime) = if spec.reusable {
            let number = self.next_number.fetch_add(1, Ordering::Relaxed);
            let lifetime = self.config.reuse_lifetime.0.max(spec.deadline);
            (pooled_name(&spec.owner, spec.purpose, number), lifetime)
        } else {
            (attempt_name(&spec.owner, spec.purpose), spec.deadline)
        };
        let name = slot.name(&wanted);
        // From here on the container may exist, even if this future is dropped.
        let guard = Guard::new(name.clone(), slot, self.jobs.clone());
        let ends = Instant::now() + lifetime;
        let body = create_body(spec, &self.config, &image.reference, lifetime);
        let guard = self.create(guard, spec.image.clone(), body).await?;
        // The container keeps it from now on.
        drop(image);
        if !spec.reusable {
            image::install(&self.daemon, &name).await?;
        }
        let link = self.launch(&name).await?;
        self.counters.started.fetch_add(1, Ordering::Relaxed);
        let mut sandbox = DockerSandbox::new(link, guard, Arc::clone(self), key, ends);
        sandbox.on_disk = !spec.reusable;
        if spec.reusable {
            sandbox.set_deadline(spec.deadline).await?;
        }
        Ok(sandbox)
    }

    /// Creates the container in the background, so that the request is never dropped half-way: the
    /// daemon would finish it all the same, after we had looked for something to remove.
    async fn create(
        &self,
        guard: Guard,
        image: String,
        body: ContainerCreateBody,
    ) -> Result<Guard, SandboxError> {
        let closed = SandboxError {
            sandbox: guard.name().to_owned(),
            kind: SandboxErrorKind::Refused {
                call: "open",
                message: "the provider was shut down".to_owned(),
            },
        };
        let (answer, answered) = oneshot::channel();
        let (daemon, remover) = (self.daemon.clone(), Arc::clone(&self.remover));
        let images = Arc::clone(&self.images);
        let work = async move {
            let outcome = create(&daemon, &images, guard.name(), image, body).await;
            if let Err((guard, _)) = answer.send((guard, outcome))
                && let Some(doomed) = guard.into_doomed()
            {
                remover.remove(doomed).await;
            }
        };
        if self.jobs.send(Job::Finish(Box::pin(work))).await.is_err() {
            return Err(closed);
        }
        match answered.await {
            Ok((guard, outcome)) => outcome.map(|()| guard),
            Err(_) => Err(closed),
        }
    }

    /// Removes an idle container and waits until its slot is free, so that one request evicts one.
    async fn evict(&self, idle: Idle) {
        let Idle { link, guard, .. } = idle;
        let Some(doomed) = guard.into_doomed() else { return };
        let (done, gone) = oneshot::channel::<()>();
        let remover = Arc::clone(&self.remover);
        let work = async move {
            drop(link);
            remover.remove(doomed).await;
            drop(done);
        };
        // A closed queue drops the work, and the slot with it.
        if self.jobs.send(Job::Finish(Box::pin(work))).await.is_ok() {
            let _ = gone.await;
        }
    }

    async fn launch(&self, name: &str) -> Result<Link, SandboxError> {
        let mut link = Link::attach(&self.daemon, name).await?;
        self.daemon
            .call(self.daemon.docker.start_container(name, None))
            .await
            .map_err(|error| error.at(name, "start"))?;
        let after = self.config.call_timeout.0;
        match tokio::time::timeout(after, link.hello()).await {
            Ok(greeted) => {
                // For a host whose folders we cannot see this is the first that we hear of its disk.
                self.disk.check_free(&self.daemon, ByteSize(greeted?.bytes))?;
                Ok(link)
            }
            Err(_) => Err(SandboxError {
                sandbox: name.to_owned(),
                kind: SandboxErrorKind::TimedOut { call: "greeting", after },
            }),
        }
    }
}

async fn create(
    daemon: &Daemon,
    images: &Images,
    name: &str,
    image: String,
    body: ContainerCreateBody,
) -> Result<(), SandboxError> {
    let mut tries = 0;
    loop {
        tries += 1;
        let options = CreateContainerOptions { name: Some(name.to_owned()), ..Default::default() };
        match daemon.call(daemon.docker.create_container(Some(options), body.clone())).await {
            Ok(_) => return Ok(()),
            // The name says that it is ours, and we know that we do not use it: the remainder
            // of a create whose answer was lost, or of a coordinator that died.
            Err(CallError::Status(409, _)) if tries < CREATE_TRIES => {
                tracing::info!(container = name, "removing a leftover of the same name");
                daemon.remove(name).await.map_err(|error| error.at(name, "remove"))?;
            }
            Err(CallError::Status(404, _)) => {
                images.forget(&image).await;
                let kind = SandboxErrorKind::ImageMissing(image);
                return Err(SandboxError { sandbox: name.to_owned(), kind });
            }
            Err(error) => return Err(error.at(name, "create")),
        }
    }
}

#[async_trait::async_trait]
impl SandboxProvider for DockerProvider {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        check_spec(spec)?;
        let shared = &self.shared;
        let (mut patience, mut looked_again) = (None, false);
        loop {
            let until = Instant::now() + spec.deadline;
            let reusable = spec.reusable && shared.config.reuse;
            let taken = shared.slots.take(&Key::of(spec), reusable, until).await;
            match shared.serve(spec, taken).await {
                Ok(Some(sandbox)) => return Ok(Box::new(sandbox)),
                Ok(None) => {}
                Err(error) if matches!(error.kind, SandboxErrorKind::NoDaemon(_)) => {
                    let until = *patience.get_or_insert_with(|| Instant::now() + PATIENCE);
                    tracing::warn!(%error, "waiting for the daemon");
                    if !shared.daemon.returns(until).await {
                        return Err(error);
                    }
                }
                // Another program removed it since we looked; it may be pulled again.
                Err(error)
                    if matches!(error.kind, SandboxErrorKind::ImageMissing(_)) && !looked_again =>
                {
                    looked_again = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn expect_images(&self, images: &[String]) {
        self.shared.images.expect(images);
    }

    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError> {
        let swept = self.shared.sweep_epochs(run, epoch).await?;
        let again = Arc::clone(&self.shared).keep_sweeping(run, epoch, self.stop.clone());
        self.tasks.lock().await.spawn(again);
        Ok(swept)
    }

    fn quarantined(&self) -> Vec<Quarantined> {
        self.shared.remover.quarantined()
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        drop(self.shared.slots.close());
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        let finished = tokio::time::timeout(SHUTDOWN_WITHIN, async {
            while tasks.join_next().await.is_some() {}
        });
        let in_time = finished.await.is_ok();
        let failed = match self.shared.remove_own().await {
            Ok(left) => left,
            Err(error) => {
                tracing::warn!(%error, "cannot look for what is left");
                self.shared.remover.quarantined().into_iter().map(|held| held.name).collect()
            }
        };
        let kind = match (in_time, failed.is_empty()) {
            (true, true) => return Ok(()),
            (false, _) => SandboxErrorKind::TimedOut { call: "shutdown", after: SHUTDOWN_WITHIN },
            (true, false) => SandboxErrorKind::Refused {
                call: "remove",
                message: format!("left behind: {}; try `orchestrate gc`", failed.join(", ")),
            },
        };
        Err(SandboxError { sandbox: self.shared.daemon.host.clone(), kind })
    }
}
