//! Several Docker hosts behind the one seam.
//!
//! A [`DockerHosts`] holds one [`DockerProvider`] for each host, and decides only where a sandbox is
//! opened: whatever happens on a host is its provider's business. One that does not answer is out
//! of service until it does; sandboxes that were open there break, new ones go elsewhere.
//!
//! The invariant: an image is the same on all hosts of a run, because all write into one
//! [`ImageBook`](crate::ImageBook). A host that has another under its name serves it to nobody.
//!
//! | File | What |
//! |---|---|
//! | `placement.rs` | which host is best, and which pulls an image (pure) |
//! | `queue.rs` | who waits for a place, first come first served |
//! | `host.rs` | one host: in service or not, what it offers, which images it lacks |
//! | `care.rs` | looks at hosts; the way back into service |

mod care;
mod host;
mod placement;
mod queue;

pub(crate) use placement::Offer;

use crate::api::{
    HostUse, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec, SweepReport,
};
use crate::config::SandboxSettings;
use crate::container::check_spec;
use crate::guard::Quarantined;
use crate::host::DockerHost;
use crate::image::{ImageIdentity, MemoryBook};
use crate::provider::{DockerProvider, PATIENCE, Surroundings};
use futures::future::join_all;
use host::Host;
use orchestrate_types::RunId;
use placement::puller;
use queue::Waiting;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Who asks for a sandbox does not wait longer to hear which hosts have the image.
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// After a connection that broke although the daemon answers.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Sandboxes from the Docker daemons of one or more hosts.
///
/// Dropping it without [`SandboxProvider::shutdown`] ends all containers too (their streams close),
/// but does not wait for that.
#[derive(Debug)]
pub struct DockerHosts {
    inner: Arc<Inner>,
    stop: CancellationToken,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

#[derive(Debug)]
struct Inner {
    hosts: Vec<Host>,
    freed: Arc<Notify>,
    queue: Mutex<BTreeMap<u64, Waiting>>,
    next_ticket: AtomicU64,
    /// Images that are asked for later, the nearest first.
    expected: watch::Sender<Vec<String>>,
    /// The run and epoch below which containers are swept.
    sweeping: Mutex<Option<(RunId, i64)>>,
}

/// One call of [`SandboxProvider::open`].
#[derive(Debug)]
struct Request {
    ticket: u64,
    /// Hosts that did not open this sandbox.
    refused: Vec<(usize, SandboxError)>,
    /// Hosts whose image vanished once.
    looked_again: HashSet<usize>,
    /// Until when a host may return.
    patience: Option<Instant>,
}

impl DockerHosts {
    /// Connects to every host. One that does not answer is out of service, and asked again from time
    /// to time; [`SandboxProvider::hosts`] tells. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxErrorKind::NoDaemon`] with a hint where none answers; what is wrong with a host that
    /// no waiting heals.
    pub async fn connect(
        config: &SandboxSettings,
        around: Surroundings,
    ) -> Result<Self, SandboxError> {
        // One book: an image is the same everywhere.
        let book = around.book.clone().unwrap_or_else(|| Arc::new(MemoryBook::default()));
        let around = Surroundings { book: Some(book), ..around };
        let freed = Arc::<Notify>::default();
        let make = |host: &DockerHost| {
            Host::new(host.title(), config.on(host), around.clone(), Arc::clone(&freed))
        };
        let hosts: Vec<Host> = config.docker_hosts().iter().map(make).collect();
        let reached = join_all(hosts.iter().map(|host| host.reach(host.patience()))).await;
        let mut absent = Vec::new();
        for (host, reached) in hosts.iter().zip(reached) {
            match reached {
                Ok(()) => {}
                Err(error) if is_silence(&error) => absent.push((host, error)),
                Err(error) => return Err(error),
            }
        }
        if absent.len() == hosts.len() {
            return Err(absent.swap_remove(0).1);
        }
        for (host, error) in absent {
            host.take_out(error);
        }
        let inner = Arc::new(Inner {
            hosts,
            freed,
            queue: Mutex::default(),
            next_ticket: AtomicU64::new(0),
            expected: watch::Sender::default(),
            sweeping: Mutex::default(),
        });
        Ok(Self::start(inner))
    }

    fn start(inner: Arc<Inner>) -> Self {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for index in 0..inner.hosts.len() {
            let (inner, stop) = (Arc::clone(&inner), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(inner.care(index)).await;
            });
        }
        let (serving, stopped) = (Arc::clone(&inner), stop.clone());
        tasks.spawn(async move {
            stopped.run_until_cancelled(serving.keep_serving()).await;
        });
        let (dealing, stopped) = (Arc::clone(&inner), stop.clone());
        tasks.spawn(async move {
            stopped.run_until_cancelled(dealing.keep_dealing()).await;
        });
        Self { inner, stop, tasks: tokio::sync::Mutex::new(tasks) }
    }

    /// Looks whether these images are what they were, where they are. A host where one is not serves
    /// it to nobody.
    ///
    /// # Errors
    /// [`SandboxErrorKind::ImageChanged`] for the first image that is another on every host that has
    /// one of its name; when a daemon does not answer.
    pub async fn check_images(
        &self,
        recorded: &[(String, ImageIdentity)],
    ) -> Result<(), SandboxError> {
        for (image, identity) in recorded {
            let (mut changed, mut may_have_it) = (Vec::new(), false);
            for host in &self.inner.hosts {
                // One that is away is looked at when it serves the image.
                let Some(provider) = host.in_service() else { continue };
                match provider.shared.images.check(image, identity).await {
                    Ok(()) => may_have_it = true,
                    Err(error) if matches!(error.kind, SandboxErrorKind::ImageChanged { .. }) => {
                        changed.push((host, error));
                    }
                    Err(error) => return Err(error),
                }
            }
            if !may_have_it && let Some((_, error)) = changed.pop() {
                return Err(error);
            }
            for (host, error) in changed {
                host.lacks(image, error.kind);
            }
        }
        Ok(())
    }
}

/// Whether waiting may help.
fn is_silence(error: &SandboxError) -> bool {
    matches!(error.kind, SandboxErrorKind::NoDaemon(_) | SandboxErrorKind::TimedOut { .. })
}

impl Inner {
    fn sweeping(&self) -> MutexGuard<'_, Option<(RunId, i64)>> {
        self.sweeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out which hosts have an image, where there is a choice.
    async fn look_for(&self, image: &str) {
        if self.hosts.len() < 2 {
            return;
        }
        let providers = self.hosts.iter().filter_map(Host::in_service);
        let looks = join_all(providers.map(|provider| provider.shared.images.look(image)));
        if tokio::time::timeout(LOOK_WITHIN, looks).await.is_err() {
            tracing::debug!(image, "not every Docker host says whether it has the image");
        }
    }

    /// Tells each host which images it is to have: those that it has, and of the others its part.
    async fn keep_dealing(&self) {
        let mut news = self.expected.subscribe();
        news.mark_changed();
        while news.changed().await.is_ok() {
            let images = news.borrow_and_update().clone();
            for image in &images {
                self.look_for(image).await;
            }
            if !news.has_changed().unwrap_or(false) {
                self.deal(&images);
            }
        }
    }

    fn deal(&self, images: &[String]) {
        let mut dealt = vec![Vec::new(); self.hosts.len()];
        for image in images {
            let fit = |host: &Host| matches!(host.standing(image), host::Standing::Fit);
            let able = self.hosts.iter().enumerate().filter(|(_, host)| fit(host));
            let able: Vec<(usize, &Host)> = able.collect();
            let here = |host: &Host| {
                host.provider().is_some_and(|provider| provider.shared.images.is_here(image))
            };
            let mut keep: Vec<usize> =
                able.iter().filter(|(_, host)| here(host)).map(|(index, _)| *index).collect();
            if keep.is_empty() {
                let able = able.iter();
                let able = able.map(|(index, host)| (*index, host.title.as_str(), host.capacity()));
                keep.extend(puller(image, able));
            }
            for (index, list) in dealt.iter_mut().enumerate() {
                if keep.contains(&index) {
                    list.push(image.clone());
                }
            }
        }
        for (host, list) in self.hosts.iter().zip(dealt) {
            if let Some(provider) = host.provider() {
                provider.expect_images(&list);
            }
        }
    }

    /// An image was asked for and is on a host: nobody else has to bring it.
    fn is_served(&self, image: &str) {
        for provider in self.hosts.iter().filter_map(Host::provider) {
            provider.shared.images.is_asked_for(image);
        }
    }

    /// What an error means: the request goes on, elsewhere or here; else it fails.
    async fn judge(
        &self,
        (host, index): (&Host, usize),
        error: SandboxError,
        image: &str,
        request: &mut Request,
    ) -> Result<(), SandboxError> {
        match &error.kind {
            SandboxErrorKind::NoDaemon(_) => {
                tracing::debug!(host = host.title, %error, "the connection broke");
                if !host.answers().await {
                    return Ok(());
                }
                let until = *request.patience.get_or_insert_with(|| Instant::now() + PATIENCE);
                if Instant::now() >= until {
                    return Err(error);
                }
                tokio::time::sleep(TRY_AGAIN).await;
                Ok(())
            }
            SandboxErrorKind::TimedOut { .. } => {
                if host.answers().await {
                    Err(error)
                } else {
                    Ok(())
                }
            }
            // Another program removed it since we looked; it may be pulled again.
            SandboxErrorKind::ImageMissing(_) if request.looked_again.insert(index) => Ok(()),
            SandboxErrorKind::ImageMissing(_)
            | SandboxErrorKind::NotPulled { .. }
            | SandboxErrorKind::ImageChanged { .. } => {
                if self.hosts.len() > 1 {
                    host.lacks(image, error.kind.clone());
                }
                request.refused.push((index, error));
                Ok(())
            }
            // A full disk, a sick runtime: another host may be well.
            SandboxErrorKind::Refused { .. } | SandboxErrorKind::DiskFull(_) => {
                request.refused.push((index, error));
                Ok(())
            }
            SandboxErrorKind::NotRecorded { .. }
            | SandboxErrorKind::Gone(_)
            | SandboxErrorKind::Protocol(_)
            | SandboxErrorKind::NotClean(_)
            | SandboxErrorKind::TooLarge { .. }
            | SandboxErrorKind::Unfit(_) => Err(error),
        }
    }

    /// Names that say on which host a container is, where that is a question.
    fn named(&self, host: &Host, report: SweepReport) -> SweepReport {
        if self.hosts.len() < 2 {
            return report;
        }
        let on = |name: String| format!("{name} on {}", host.title);
        let with = |(name, reason)| (on(name), reason);
        SweepReport {
            removed: report.removed.into_iter().map(on).collect(),
            kept: report.kept.into_iter().map(with).collect(),
            failed: report.failed.into_iter().map(with).collect(),
        }
    }
}

#[async_trait::async_trait]
impl SandboxProvider for DockerHosts {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        check_spec(spec)?;
        let inner = &*self.inner;
        inner.look_for(&spec.image).await;
        let mut request = Request {
            ticket: inner.next_ticket.fetch_add(1, Ordering::Relaxed),
            refused: Vec::new(),
            looked_again: HashSet::new(),
            patience: None,
        };
        loop {
            let (host, index, taken) = inner.placed(spec, &mut request).await?;
            // Whoever gave a place is connected.
            let Some(provider) = host.provider() else { continue };
            match Box::pin(provider.shared.serve(spec, taken)).await {
                Ok(Some(sandbox)) => {
                    tracing::debug!(host = host.title, sandbox = sandbox.name(), "opened");
                    inner.is_served(&spec.image);
                    return Ok(Box::new(sandbox));
                }
                Ok(None) => {}
                Err(error) => inner.judge((host, index), error, &spec.image, &mut request).await?,
            }
        }
    }

    fn expect_images(&self, images: &[String]) {
        self.inner.expected.send_replace(images.to_vec());
    }

    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError> {
        let inner = &*self.inner;
        *inner.sweeping() = Some((run, epoch));
        let here = inner.hosts.iter().filter_map(|host| Some((host, host.in_service()?)));
        let swept = join_all(here.map(async |(host, provider)| {
            host.sweep(provider, run, epoch).await.map(|swept| inner.named(host, swept))
        }));
        let (mut all, mut failed) = (SweepReport::default(), None);
        let mut worked = false;
        for swept in swept.await {
            match swept {
                Ok(mut swept) => {
                    worked = true;
                    all.removed.append(&mut swept.removed);
                    all.kept.append(&mut swept.kept);
                    all.failed.append(&mut swept.failed);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot look for containers left behind");
                    failed = failed.or(Some(error));
                }
            }
        }
        // The others are swept when they answer.
        match failed.filter(|_| !worked) {
            Some(error) => Err(error),
            None => Ok(all),
        }
    }

    fn quarantined(&self) -> Vec<Quarantined> {
        let providers = self.inner.hosts.iter().filter_map(Host::provider);
        providers.flat_map(DockerProvider::quarantined).collect()
    }

    fn hosts(&self) -> Vec<HostUse> {
        self.inner.hosts.iter().map(Host::usage).collect()
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
        let providers = self.inner.hosts.iter().filter_map(Host::provider);
        let ended = join_all(providers.map(DockerProvider::shutdown)).await;
        let mut errors = ended.into_iter().filter_map(Result::err);
        let first = errors.next();
        for error in errors {
            tracing::warn!(%error, "a Docker host");
        }
        first.map_or(Ok(()), Err)
    }
}
