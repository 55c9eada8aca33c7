//! The images of one daemon: prepared for containers, pulled ahead, checked and evicted.

use super::cache::{self, CachedImage};
use super::event::{ImageEvent, ImageListener};
use super::hooks::ImageHooks;
use super::layer::ImageLayer;
use super::lock::{ImageIdentity, ImageLock, InMemoryImageLock};
use super::name::ImageName;
use super::pull::{self, PullError};
use super::supervisor;
use crate::config::{PullPolicy, SandboxSettings};
use crate::daemon::{CallError, Daemon};
use crate::disk::free_disk;
use crate::error::{SandboxError, SandboxErrorKind};
use bollard::models::ImageInspect;
use bollard::query_parameters::TagImageOptions;
use orchestrate_types::ByteSize;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a failed pull is reported to others that need the image, before it is retried.
const FAILURE_VALID_FOR: Duration = Duration::from_secs(30);
/// Shortest interval between two records that an image is in use.
const USE_RECORD_INTERVAL: Duration = Duration::from_mins(1);

/// What an image is given before a container is created from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Additions {
    /// Nothing: the supervisor is copied into the container.
    None,
    /// The supervisor.
    Supervisor,
    /// The supervisor, and the files of the run's agent if it has some.
    Agent,
}

/// An image with its id, and its derived images once they were needed.
#[derive(Debug, Clone)]
pub(super) struct ResolvedImage {
    id: String,
    derived: HashMap<Additions, String>,
    /// When its use was last recorded; `None` if this program did not pull it.
    use_recorded_at: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct EntryState {
    pub(super) resolved: Option<ResolvedImage>,
    failed: Option<(Instant, SandboxErrorKind)>,
}

/// What is known about one image name.
#[derive(Debug, Default)]
pub(super) struct ImageEntry {
    /// Locked while the image is pulled or removed.
    pub(super) state: Arc<tokio::sync::Mutex<EntryState>>,
    /// Number of containers that are being created from it.
    users: AtomicUsize,
    /// Whether the daemon had it when last asked; `None` if unknown.
    pub(super) found: tokio::sync::Mutex<Option<bool>>,
}

/// Keeps an image from being removed until a container is created from it, which then keeps the image
/// itself.
#[derive(Debug)]
pub(crate) struct PreparedImage {
    /// What to create a container from.
    pub(crate) reference: String,
    entry: Arc<ImageEntry>,
}

impl Drop for PreparedImage {
    fn drop(&mut self) {
        self.entry.users.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An image that this program pulled, and whether it was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledImage {
    /// Names of the image, separated by commas.
    pub names: String,
    /// Size of the image, including layers that it shares with others.
    pub bytes: ByteSize,
    /// Why it was kept; `None` if it was removed.
    pub kept: Option<String>,
}

/// The images of one daemon.
#[derive(Debug)]
pub(crate) struct Images {
    pub(super) daemon: Daemon,
    policy: PullPolicy,
    mirror: Option<String>,
    cache_limit: Option<ByteSize>,
    pull_ahead: usize,
    min_free_disk: ByteSize,
    pulls: Semaphore,
    /// Locked while images are removed: two removals at once would remove more than needed.
    removing: tokio::sync::Mutex<()>,
    known: Mutex<HashMap<String, Arc<ImageEntry>>>,
    /// Names of the images of coming tasks, the nearest first.
    expected: Mutex<Vec<String>>,
    /// The first few of them, which are pulled ahead.
    upcoming: watch::Sender<Vec<String>>,
    lock: Arc<dyn ImageLock>,
    listener: ImageListener,
    agent_layer: Option<ImageLayer>,
}

impl Images {
    pub(crate) fn new(daemon: Daemon, config: &SandboxSettings, hooks: ImageHooks) -> Arc<Self> {
        Arc::new(Self {
            daemon,
            policy: config.pull,
            mirror: config.mirror.clone(),
            cache_limit: config.image_cache,
            pull_ahead: config.pull_ahead,
            min_free_disk: config.min_free_disk,
            pulls: Semaphore::new(config.pull_parallelism),
            removing: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            expected: Mutex::default(),
            upcoming: watch::Sender::default(),
            lock: hooks.lock.unwrap_or_else(|| Arc::new(InMemoryImageLock::default())),
            listener: hooks.listener,
            agent_layer: hooks.agent_layer,
        })
    }

    pub(super) fn entry(&self, name: &ImageName) -> Arc<ImageEntry> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(name.to_string()).or_default())
    }

    /// Whether agents have files in addition to their image.
    pub(crate) fn has_agent_layer(&self) -> bool {
        self.agent_layer.is_some()
    }

    /// Prepares an image for a container: pulls it if necessary, checks it against the image lock,
    /// and makes the additions.
    pub(crate) async fn prepare(
        &self,
        image: &str,
        additions: Additions,
    ) -> Result<PreparedImage, SandboxError> {
        self.remove_expected(image);
        self.ensure(image, additions).await
    }

    async fn ensure(
        &self,
        image: &str,
        additions: Additions,
    ) -> Result<PreparedImage, SandboxError> {
        let entry = self.entry(&ImageName::parse(image));
        // Held during the pull, so that concurrent requests wait for the same pull.
        let mut state = entry.state.lock().await;
        if let Some((at, kind)) = &state.failed
            && at.elapsed() < FAILURE_VALID_FOR
        {
            return Err(self.daemon.error(kind.clone()));
        }
        match self.resolve(&mut state, image, additions).await {
            Ok(reference) => {
                state.failed = None;
                entry.users.fetch_add(1, Ordering::AcqRel);
                drop(state);
                Ok(PreparedImage { reference, entry })
            }
            Err(error) => {
                *entry.found.lock().await = None;
                if matches!(error.kind, SandboxErrorKind::NotPulled { .. }) {
                    state.failed = Some((Instant::now(), error.kind.clone()));
                }
                Err(error)
            }
        }
    }

    /// The reference to create a container from: the image's id, or its derived image.
    async fn resolve(
        &self,
        state: &mut EntryState,
        image: &str,
        additions: Additions,
    ) -> Result<String, SandboxError> {
        let name = ImageName::parse(image);
        let resolved = match &mut state.resolved {
            Some(resolved) => resolved,
            none => none.insert(self.identify(image, &name).await?),
        };
        if resolved.use_recorded_at.is_some_and(|at| at.elapsed() > USE_RECORD_INTERVAL) {
            self.record_use(&resolved.id, &name).await;
            resolved.use_recorded_at = Some(Instant::now());
        }
        let layer = match additions {
            Additions::None => return Ok(resolved.id.clone()),
            Additions::Supervisor => None,
            Additions::Agent => self.agent_layer.as_ref(),
        };
        if let Some(derived) = resolved.derived.get(&additions) {
            return Ok(derived.clone());
        }
        let derived = supervisor::add_to_image(&self.daemon, image, &resolved.id, layer).await?;
        resolved.derived.insert(additions, derived.clone());
        Ok(derived)
    }

    /// Finds or pulls the image that this name stands for in the run.
    async fn identify(&self, image: &str, name: &ImageName) -> Result<ResolvedImage, SandboxError> {
        let found = match self.daemon.inspect_image(image).await? {
            Some(found) => found,
            None => self.fetch(image, name).await?,
        };
        let pulled_by_us = cache::is_marked(found.repo_tags.as_deref().unwrap_or_default(), name);
        let found =
            ImageIdentity::of(found, &name.repository()).ok_or_else(|| self.missing(image))?;
        let recorded = self.lock.record(image, &found).await?;
        self.check_same(image, &recorded, &found)?;
        if pulled_by_us {
            self.record_use(&found.id, name).await;
        }
        let use_recorded_at = pulled_by_us.then(Instant::now);
        Ok(ResolvedImage { id: found.id, derived: HashMap::new(), use_recorded_at })
    }

    fn missing(&self, image: &str) -> SandboxError {
        self.daemon.error(SandboxErrorKind::ImageMissing(image.to_owned()))
    }

    fn check_same(
        &self,
        image: &str,
        recorded: &ImageIdentity,
        found: &ImageIdentity,
    ) -> Result<(), SandboxError> {
        if recorded.is_same_image(found) {
            return Ok(());
        }
        let (image, recorded, found) = (image.to_owned(), recorded.to_string(), found.to_string());
        Err(self.daemon.error(SandboxErrorKind::ImageChanged { image, recorded, found }))
    }

    /// Fails if the host has an image of this name that is not the recorded one.
    pub(crate) async fn check(
        &self,
        image: &str,
        recorded: &ImageIdentity,
    ) -> Result<(), SandboxError> {
        let repository = ImageName::parse(image).repository();
        let found = self.daemon.inspect_image(image).await?;
        match found.and_then(|found| ImageIdentity::of(found, &repository)) {
            Some(found) => self.check_same(image, recorded, &found),
            None => Ok(()),
        }
    }

    /// Pulls an image that the host does not have: the recorded one, if its digest is known.
    async fn fetch(&self, image: &str, name: &ImageName) -> Result<ImageInspect, SandboxError> {
        match self.policy {
            PullPolicy::Never => return Err(self.missing(image)),
            PullPolicy::Missing => {}
        }
        let recorded = self.lock.recorded(image).await?.and_then(|known| known.digest);
        let source = name.at_mirror(self.mirror.as_deref());
        let source = recorded.map_or_else(|| source.clone(), |digest| source.with_digest(&digest));
        // The semaphore is never closed, so this cannot fail.
        let _permit = self.pulls.acquire().await;
        let free = free_disk(&self.daemon).await?.unwrap_or(ByteSize(u64::MAX));
        let pulled = if free < self.min_free_disk {
            Err(PullError::DiskFull { free, min_free: self.min_free_disk })
        } else {
            pull::pull(&self.daemon, &source, &self.listener).await
        };
        pulled.map_err(|error| {
            let (image, source) = (image.to_owned(), Arc::new(error));
            self.daemon.error(SandboxErrorKind::NotPulled { image, source })
        })?;
        let named = self.add_names(&source, name).await;
        let found = named.map_err(|error| error.at(image, "image tag"))?;
        if let Some(limit) = self.cache_limit
            && let Err(error) = self.evict_until_within(limit, &name.to_string()).await
        {
            tracing::warn!(%error, "cannot evict images that were pulled earlier");
        }
        Ok(found)
    }

    /// Gives an image that was pulled from `source` its usual name, and marks it as pulled.
    async fn add_names(
        &self,
        source: &ImageName,
        name: &ImageName,
    ) -> Result<ImageInspect, CallError> {
        let docker = &self.daemon.docker;
        if let Some(tag) = name.tag().filter(|_| source != name) {
            let options =
                TagImageOptions { repo: Some(name.repository()), tag: Some(tag.to_owned()) };
            self.daemon.call(docker.tag_image(&source.to_string(), Some(options))).await?;
        }
        let found = self.daemon.call(docker.inspect_image(&source.to_string())).await?;
        let id = found.id.clone().unwrap_or_default();
        for name in [source, name] {
            cache::mark(&self.daemon, &id, name).await?;
        }
        self.daemon.call(docker.inspect_image(&id)).await
    }

    /// Records that an image is used. A failure only makes the image a candidate for eviction
    /// earlier.
    async fn record_use(&self, id: &str, name: &ImageName) {
        if let Err(error) = cache::mark(&self.daemon, id, name).await {
            tracing::debug!(%error, %name, "cannot record the use of an image");
        }
    }

    /// Evicts images that this program pulled, least recently used first, until the rest fits into
    /// `limit`. `newest` was just pulled and is kept.
    async fn evict_until_within(&self, limit: ByteSize, newest: &str) -> Result<(), SandboxError> {
        let _exclusive = self.removing.lock().await;
        let failed = |error: CallError| error.at(&self.daemon.host, "image list");
        let mut images = Vec::new();
        for image in cache::list(&self.daemon).await.map_err(failed)? {
            let last_used = cache::last_used(&self.daemon, &image.id).await.map_err(failed)?;
            images.push((last_used, image));
        }
        images.sort_by(|a, b| a.0.cmp(&b.0));
        let mut total: u64 = images.iter().map(|(_, image)| image.bytes.0).sum();
        for (_, image) in images {
            if total <= limit.0 {
                return Ok(());
            }
            if image.names.iter().any(|name| name == newest) {
                continue;
            }
            if self.remove_unless_used(&image).await.map_err(failed)?.is_none() {
                total = total.saturating_sub(image.bytes.0);
                let bytes = image.bytes;
                self.listener.notify(&ImageEvent::Evicted { image: image.title(), bytes });
            }
        }
        if total > limit.0 {
            tracing::warn!(
                bytes = total,
                limit = limit.0,
                "pulled images exceed sandbox.image_cache, and all of them are in use"
            );
        }
        Ok(())
    }

    /// Removes an image, or returns why it must be kept.
    async fn remove_unless_used(&self, image: &CachedImage) -> Result<Option<String>, CallError> {
        let upcoming: HashSet<String> =
            self.upcoming.borrow().iter().map(|name| ImageName::parse(name).to_string()).collect();
        if image.names.iter().any(|name| upcoming.contains(name)) {
            return Ok(Some("a coming task needs it".to_owned()));
        }
        let mut locked = Vec::new();
        for name in &image.names {
            let entry = self.entry(&ImageName::parse(name));
            // Held until the end, so that a concurrent request finds the image gone and pulls it.
            match Arc::clone(&entry.state).try_lock_owned() {
                Ok(state) if entry.users.load(Ordering::Acquire) == 0 => {
                    locked.push((state, entry));
                }
                Ok(_) | Err(_) => {
                    return Ok(Some("a container is being created from it".to_owned()));
                }
            }
        }
        if let Some(reason) = cache::reason_to_keep(&self.daemon, image).await? {
            return Ok(Some(reason.to_owned()));
        }
        match cache::remove(&self.daemon, image).await {
            Ok(()) => {
                for (state, entry) in &mut locked {
                    state.resolved = None;
                    *entry.found.lock().await = None;
                }
                Ok(None)
            }
            Err(CallError::Status(409, message)) => Ok(Some(message)),
            Err(error) => Err(error),
        }
    }

    /// Removes all images that this program pulled and that nothing uses. With `dry_run`, only
    /// lists them.
    pub(crate) async fn remove_pulled(
        &self,
        dry_run: bool,
    ) -> Result<Vec<PulledImage>, SandboxError> {
        let _exclusive = self.removing.lock().await;
        let failed = |error: CallError| error.at(&self.daemon.host, "image removal");
        let mut reports = Vec::new();
        for image in cache::list(&self.daemon).await.map_err(failed)? {
            let kept = if dry_run {
                let reason = cache::reason_to_keep(&self.daemon, &image).await;
                reason.map(|reason| reason.map(str::to_owned))
            } else {
                self.remove_unless_used(&image).await
            };
            let (names, bytes) = (image.title(), image.bytes);
            reports.push(PulledImage { names, bytes, kept: kept.map_err(failed)? });
        }
        Ok(reports)
    }

    /// Sets the images of coming tasks, the nearest first. The first few are pulled ahead and are
    /// not evicted.
    pub(crate) fn set_expected(&self, images: &[String]) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = HashSet::new();
        *expected = images.iter().filter(|&image| seen.insert(image)).cloned().collect();
        self.update_upcoming(&expected);
    }

    /// Removes an image from the coming ones, because a task requested it.
    pub(crate) fn remove_expected(&self, image: &str) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = expected.iter().position(|name| name == image) {
            expected.remove(at);
            self.update_upcoming(&expected);
        }
    }

    pub(super) fn is_upcoming(&self, image: &str) -> bool {
        self.upcoming.borrow().iter().any(|name| name == image)
    }

    fn update_upcoming(&self, expected: &[String]) {
        let nearest: Vec<String> = expected.iter().take(self.pull_ahead).cloned().collect();
        self.upcoming.send_if_modified(|upcoming| {
            let changed = *upcoming != nearest;
            *upcoming = nearest;
            changed
        });
    }

    /// Pulls the upcoming images, one at a time, to leave capacity for pulls that a task waits for.
    pub(crate) async fn pull_ahead(self: Arc<Self>, stop: CancellationToken) {
        let mut upcoming = self.upcoming.subscribe();
        upcoming.mark_changed();
        let work = async {
            while upcoming.changed().await.is_ok() {
                let images = upcoming.borrow_and_update().clone();
                for image in images {
                    if let Err(error) = self.ensure(&image, Additions::None).await {
                        tracing::warn!(%error, image, "cannot pull the image of a coming task");
                    }
                    // A new list takes effect after the current image.
                    if upcoming.has_changed().unwrap_or(true) {
                        break;
                    }
                }
            }
        };
        // Cancel-safe: a pull that is dropped is restarted by the task that needs the image.
        stop.run_until_cancelled(Box::pin(work)).await;
    }

    /// Forgets what is known about an image, because the daemon no longer has it.
    pub(crate) async fn forget(&self, image: &str) {
        let entry = self.entry(&ImageName::parse(image));
        *entry.found.lock().await = None;
        entry.state.lock().await.resolved = None;
    }
}
