//! Images: found by name or pulled, decided once per run, given a supervisor where that is needed,
//! and removed when they were ours and nobody needs them.
//!
//! The invariant: containers start from an id, never from a name, and the id of a name is the one
//! in the run's [`ImageBook`]. So a tag that moves changes nothing during a run.

mod book;
mod cache;
mod census;
mod locality;
mod name;
mod news;
mod pull;
mod supervisor;

pub(crate) use book::MemoryBook;
pub use book::{ImageBook, ImageIdentity};
pub use census::{ImagesOnHost, images_on_hosts};
pub use news::{ImageNews, Listener};
pub(crate) use supervisor::install;

use crate::api::{SandboxError, SandboxErrorKind};
use crate::config::{PullPolicy, SandboxSettings};
use crate::daemon::{CallError, Daemon};
use crate::doctor;
use bollard::models::ImageInspect;
use name::Name;
use orchestrate_types::ByteSize;
use pull::PullError;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// After a pull that did not work, others who want the image are told the same for so long.
const FAILURE_STANDS: Duration = Duration::from_secs(30);
/// Between two notes that an image is in use.
const NOTE_USE_EVERY: Duration = Duration::from_mins(1);

/// An image with its id, and the same with the supervisor in it, once somebody needed that.
#[derive(Debug, Clone)]
struct Resolved {
    id: String,
    derived: Option<String>,
    /// Whether we pulled it, and when we last wrote down that it is used.
    noted: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    resolved: Option<Resolved>,
    failed: Option<(Instant, SandboxErrorKind)>,
}

/// One name. Who holds its lock pulls or removes the image: others wait.
#[derive(Debug, Default)]
struct Entry {
    state: Arc<tokio::sync::Mutex<State>>,
    /// Containers being made of it.
    users: AtomicUsize,
    /// Whether the daemon had it when it was asked, and nothing is known to have changed since.
    seen: tokio::sync::Mutex<Option<bool>>,
}

/// An image that stays while this is held: long enough to make a container, which then keeps it.
#[derive(Debug)]
pub(crate) struct Ready {
    /// What to start a container from.
    pub(crate) reference: String,
    entry: Arc<Entry>,
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.entry.users.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An image that we pulled, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledImage {
    /// Its names.
    pub names: String,
    /// Its size; layers that it shares with others are counted in full.
    pub bytes: ByteSize,
    /// Why it is still there; `None`: it was removed.
    pub kept: Option<String>,
}

/// The images of one daemon.
#[derive(Debug)]
pub(crate) struct Images {
    daemon: Daemon,
    pull: PullPolicy,
    mirror: Option<String>,
    cache: Option<ByteSize>,
    ahead: usize,
    min_free_disk: ByteSize,
    pulls: Semaphore,
    /// Held while images are removed, for two would remove more than is needed.
    removing: tokio::sync::Mutex<()>,
    known: Mutex<HashMap<String, Arc<Entry>>>,
    /// Names that are asked for later, the nearest first.
    expected: Mutex<Vec<String>>,
    /// The first few of them.
    upcoming: watch::Sender<Vec<String>>,
    book: Arc<dyn ImageBook>,
    listener: Listener,
}

impl Images {
    pub(crate) fn new(
        daemon: Daemon,
        config: &SandboxSettings,
        book: Arc<dyn ImageBook>,
        listener: Listener,
    ) -> Arc<Self> {
        Arc::new(Self {
            daemon,
            pull: config.pull,
            mirror: config.mirror.clone(),
            cache: config.image_cache,
            ahead: config.pull_ahead,
            min_free_disk: config.min_free_disk,
            pulls: Semaphore::new(config.pull_parallelism),
            removing: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            expected: Mutex::default(),
            upcoming: watch::Sender::default(),
            book,
            listener,
        })
    }

    fn entry(&self, name: &Name) -> Arc<Entry> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(name.to_string()).or_default())
    }

    /// The image to start a container from: pulled, checked against the book, and with the
    /// supervisor in it where that is needed.
    pub(crate) async fn ready(
        &self,
        image: &str,
        with_supervisor: bool,
    ) -> Result<Ready, SandboxError> {
        self.is_asked_for(image);
        self.bring(image, with_supervisor).await
    }

    async fn bring(&self, image: &str, with_supervisor: bool) -> Result<Ready, SandboxError> {
        let entry = self.entry(&Name::parse(image));
        // Held across a pull: whoever comes second wants the same image.
        let mut state = entry.state.lock().await;
        if let Some((at, kind)) = &state.failed
            && at.elapsed() < FAILURE_STANDS
        {
            return Err(self.error(kind.clone()));
        }
        match self.settle(&mut state, image, with_supervisor).await {
            Ok(reference) => {
                state.failed = None;
                entry.users.fetch_add(1, Ordering::AcqRel);
                drop(state);
                Ok(Ready { reference, entry })
            }
            Err(error) => {
                *entry.seen.lock().await = None;
                if matches!(error.kind, SandboxErrorKind::NotPulled { .. }) {
                    state.failed = Some((Instant::now(), error.kind.clone()));
                }
                Err(error)
            }
        }
    }

    async fn settle(
        &self,
        state: &mut State,
        image: &str,
        with_supervisor: bool,
    ) -> Result<String, SandboxError> {
        let name = Name::parse(image);
        let resolved = match &mut state.resolved {
            Some(resolved) => resolved,
            none => none.insert(self.identify(image, &name).await?),
        };
        if resolved.noted.is_some_and(|at| at.elapsed() > NOTE_USE_EVERY) {
            self.note_use(&resolved.id, &name).await;
            resolved.noted = Some(Instant::now());
        }
        if !with_supervisor {
            return Ok(resolved.id.clone());
        }
        if resolved.derived.is_none() {
            let derived = supervisor::derive(&self.daemon, image, &resolved.id).await?;
            resolved.derived = Some(derived);
        }
        Ok(resolved.derived.clone().unwrap_or_else(|| resolved.id.clone()))
    }

    /// Which image this name means in this run.
    async fn identify(&self, image: &str, name: &Name) -> Result<Resolved, SandboxError> {
        let found = match inspect(&self.daemon, image).await? {
            Some(found) => found,
            None => self.fetch(image, name).await?,
        };
        let ours = cache::is_marked(found.repo_tags.as_deref().unwrap_or_default(), name);
        let found = ImageIdentity::of(found, &name.repository())
            .ok_or_else(|| missing(&self.daemon, image))?;
        let recorded = self.book.record(image, &found).await?;
        self.compare(image, &recorded, &found)?;
        if ours {
            self.note_use(&found.id, name).await;
        }
        Ok(Resolved { id: found.id, derived: None, noted: ours.then(Instant::now) })
    }

    fn compare(
        &self,
        image: &str,
        recorded: &ImageIdentity,
        found: &ImageIdentity,
    ) -> Result<(), SandboxError> {
        if recorded.is(found) {
            return Ok(());
        }
        let (image, recorded, found) = (image.to_owned(), recorded.to_string(), found.to_string());
        Err(self.error(SandboxErrorKind::ImageChanged { image, recorded, found }))
    }

    /// Fails by name if an image that is here is not the one that the run began with.
    pub(crate) async fn check(
        &self,
        image: &str,
        recorded: &ImageIdentity,
    ) -> Result<(), SandboxError> {
        let repository = Name::parse(image).repository();
        let found = inspect(&self.daemon, image).await?;
        match found.and_then(|found| ImageIdentity::of(found, &repository)) {
            Some(found) => self.compare(image, recorded, &found),
            None => Ok(()),
        }
    }

    /// Pulls an image that is not here; what the run began with, where a registry has that.
    async fn fetch(&self, image: &str, name: &Name) -> Result<ImageInspect, SandboxError> {
        match self.pull {
            PullPolicy::Never => return Err(missing(&self.daemon, image)),
            PullPolicy::Missing => {}
        }
        let recorded = self.book.recorded(image).await?.and_then(|known| known.digest);
        let source = name.behind(self.mirror.as_deref());
        let source = recorded.map_or_else(|| source.clone(), |digest| source.at(&digest));
        let not_pulled = |message| {
            let image = image.to_owned();
            self.error(SandboxErrorKind::NotPulled { image, message })
        };
        // Never closed; an error would only mean no limit.
        let _permit = self.pulls.acquire().await;
        if let Some(free) = doctor::free_disk(&self.daemon).await?
            && free < self.min_free_disk
        {
            return Err(not_pulled(format!(
                "the Docker host has {} MiB free, less than sandbox.min_free_disk = {}; free \
                 some, bound what is kept by sandbox.image_cache, or lower the floor",
                free.0 >> 20,
                self.min_free_disk
            )));
        }
        match pull::pull(&self.daemon, &source, &self.listener).await {
            Ok(()) => {}
            Err(PullError::Absent) => {
                return Err(not_pulled(format!("its registry has no `{source}`")));
            }
            Err(PullError::Failed(words)) => return Err(not_pulled(words)),
        }
        let named = async {
            let docker = &self.daemon.docker;
            if let Some(tag) = name.tag().filter(|_| source != *name) {
                let options = bollard::query_parameters::TagImageOptions {
                    repo: Some(name.repository()),
                    tag: Some(tag.to_owned()),
                };
                self.daemon.call(docker.tag_image(&source.to_string(), Some(options))).await?;
            }
            let found = self.daemon.call(docker.inspect_image(&source.to_string())).await?;
            let id = found.id.clone().unwrap_or_default();
            for name in [&source, name] {
                cache::mark(&self.daemon, &id, name).await?;
            }
            self.daemon.call(docker.inspect_image(&id)).await
        };
        let found = named.await.map_err(|error| error.at(image, "image tag"))?;
        if let Some(most) = self.cache
            && let Err(error) = self.keep_within(most, &name.to_string()).await
        {
            tracing::warn!(%error, "cannot look after the images that were pulled");
        }
        Ok(found)
    }

    /// A use that is not written down costs an image its place at worst.
    async fn note_use(&self, id: &str, name: &Name) {
        if let Err(error) = cache::mark(&self.daemon, id, name).await {
            tracing::debug!(?error, %name, "cannot note that an image is used");
        }
    }

    /// Removes images that we pulled, the one used longest ago first, until the others fit.
    /// `newest` was just pulled, and stays.
    async fn keep_within(&self, most: ByteSize, newest: &str) -> Result<(), SandboxError> {
        let _alone = self.removing.lock().await;
        let failed = |error: CallError| error.at(&self.daemon.host, "image list");
        let mut images = Vec::new();
        for image in cache::pulled(&self.daemon).await.map_err(failed)? {
            let used = cache::last_used(&self.daemon, &image.id).await.map_err(failed)?;
            images.push((used, image));
        }
        images.sort_by(|a, b| a.0.cmp(&b.0));
        let mut total: u64 = images.iter().map(|(_, image)| image.bytes.0).sum();
        for (_, image) in images {
            if total <= most.0 {
                return Ok(());
            }
            if image.names.iter().any(|name| name == newest) {
                continue;
            }
            if self.remove(&image).await.map_err(failed)?.is_none() {
                total = total.saturating_sub(image.bytes.0);
                let bytes = image.bytes;
                self.listener.tell(&ImageNews::Removed { image: image.title(), bytes });
            }
        }
        if total > most.0 {
            tracing::warn!(
                bytes = total,
                cap = most.0,
                "images that we pulled need more than sandbox.image_cache, and all are needed"
            );
        }
        Ok(())
    }

    /// Removes one image, unless it is needed: then answers why.
    async fn remove(&self, image: &cache::Pulled) -> Result<Option<String>, CallError> {
        let soon: HashSet<String> =
            self.upcoming.borrow().iter().map(|name| Name::parse(name).to_string()).collect();
        if image.names.iter().any(|name| soon.contains(name)) {
            return Ok(Some("a task to come needs it".to_owned()));
        }
        let mut held = Vec::new();
        for name in &image.names {
            let entry = self.entry(&Name::parse(name));
            // Held until the end: who comes now finds the image gone, and pulls it.
            match Arc::clone(&entry.state).try_lock_owned() {
                Ok(state) if entry.users.load(Ordering::Acquire) == 0 => held.push((state, entry)),
                Ok(_) | Err(_) => return Ok(Some("a container is made of it now".to_owned())),
            }
        }
        if let Some(why) = cache::needed(&self.daemon, image).await? {
            return Ok(Some(why.to_owned()));
        }
        match cache::remove(&self.daemon, image).await {
            Ok(()) => {
                for (state, entry) in &mut held {
                    state.resolved = None;
                    *entry.seen.lock().await = None;
                }
                Ok(None)
            }
            Err(CallError::Status(409, words)) => Ok(Some(words)),
            Err(error) => Err(error),
        }
    }

    /// Removes all images that we pulled and nobody needs; `dry_run`: only looks.
    pub(crate) async fn remove_pulled(
        &self,
        dry_run: bool,
    ) -> Result<Vec<PulledImage>, SandboxError> {
        let _alone = self.removing.lock().await;
        let failed = |error: CallError| error.at(&self.daemon.host, "image removal");
        let mut seen = Vec::new();
        for image in cache::pulled(&self.daemon).await.map_err(failed)? {
            let kept = if dry_run {
                cache::needed(&self.daemon, &image).await.map(|why| why.map(str::to_owned))
            } else {
                self.remove(&image).await
            };
            let (names, bytes) = (image.title(), image.bytes);
            seen.push(PulledImage { names, bytes, kept: kept.map_err(failed)? });
        }
        Ok(seen)
    }

    /// Says which names are asked for next, the nearest first; the first few are pulled meanwhile,
    /// and none of those is removed.
    pub(crate) fn expect(&self, images: &[String]) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = HashSet::new();
        *expected = images.iter().filter(|&image| seen.insert(image)).cloned().collect();
        self.look_ahead(&expected);
    }

    /// One is not to come any more: it is here.
    pub(crate) fn is_asked_for(&self, image: &str) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = expected.iter().position(|name| name == image) {
            expected.remove(at);
            self.look_ahead(&expected);
        }
    }

    fn look_ahead(&self, expected: &[String]) {
        let nearest: Vec<String> = expected.iter().take(self.ahead).cloned().collect();
        self.upcoming.send_if_modified(|known| {
            let changed = *known != nearest;
            *known = nearest;
            changed
        });
    }

    /// Pulls what is asked for next, one at a time, so that pulls that somebody waits for have room.
    pub(crate) async fn pull_ahead(self: Arc<Self>, stop: CancellationToken) {
        let mut news = self.upcoming.subscribe();
        news.mark_changed();
        let work = async {
            while news.changed().await.is_ok() {
                // A list that comes meanwhile is looked at after the image under way.
                let images = news.borrow_and_update().clone();
                for image in images {
                    if let Err(error) = self.bring(&image, false).await {
                        tracing::warn!(%error, image, "an image of a task to come is not here");
                    }
                    if news.has_changed().unwrap_or(true) {
                        break;
                    }
                }
            }
        };
        // Cancel-safe: a pull that is dropped is begun again by whoever needs the image.
        stop.run_until_cancelled(Box::pin(work)).await;
    }

    /// Forgets an image, because the daemon did not know it any more.
    pub(crate) async fn forget(&self, image: &str) {
        let entry = self.entry(&Name::parse(image));
        *entry.seen.lock().await = None;
        entry.state.lock().await.resolved = None;
    }

    fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.daemon.host.clone(), kind }
    }
}

fn missing(daemon: &Daemon, image: &str) -> SandboxError {
    SandboxError {
        sandbox: daemon.host.clone(),
        kind: SandboxErrorKind::ImageMissing(image.to_owned()),
    }
}

/// The daemon's answer about an image; `None` where it is not there.
async fn inspect(daemon: &Daemon, image: &str) -> Result<Option<ImageInspect>, SandboxError> {
    match daemon.call(daemon.docker.inspect_image(image)).await {
        Ok(found) => Ok(Some(found)),
        Err(CallError::Status(404, _)) => Ok(None),
        Err(error) => Err(error.at(image, "image inspect")),
    }
}
