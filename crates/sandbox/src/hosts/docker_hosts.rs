//! The provider of sandboxes on several Docker hosts.

use super::host::Host;
use super::scheduler::Scheduler;
use crate::api::{
    HostUsage, QuarantinedContainer, Sandbox, SandboxProvider, SandboxSpec, SweepReport,
};
use crate::config::SandboxSettings;
use crate::container::check_spec;
use crate::error::{SandboxError, SandboxErrorKind};
use crate::host::DockerHost;
use crate::image::{ImageHooks, ImageIdentity, InMemoryImageLock};
use crate::provider::DockerProvider;
use futures::future::join_all;
use orchestrate_types::RunId;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Opens sandboxes on the Docker daemons of one or more hosts.
///
/// Dropping it without [`SandboxProvider::shutdown`] also ends all containers (because their
/// streams close), but does not wait for that.
#[derive(Debug)]
pub struct DockerHosts {
    scheduler: Arc<Scheduler>,
    stop: CancellationToken,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

impl DockerHosts {
    /// Connects to all hosts. One that does not answer is out of service and retried periodically;
    /// [`SandboxProvider::hosts`] reports its state. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxErrorKind::NoDaemon`] with a hint if no host answers; any error of a host that
    /// retrying would not fix.
    pub async fn connect(
        config: &SandboxSettings,
        hooks: ImageHooks,
    ) -> Result<Self, SandboxError> {
        // All hosts share one image lock, so that an image is the same on all of them.
        let lock = hooks.lock.clone().unwrap_or_else(|| Arc::new(InMemoryImageLock::default()));
        let hooks = ImageHooks { lock: Some(lock), ..hooks };
        let freed = Arc::<Notify>::default();
        let new_host = |host: &DockerHost| {
            Host::new(host.title(), config.on(host), hooks.clone(), Arc::clone(&freed))
        };
        let hosts: Vec<Host> = config.docker_hosts().iter().map(new_host).collect();
        let connecting = hosts.iter().map(|host| host.connect_or_ping(host.call_timeout()));
        let outcomes = join_all(connecting).await;
        let mut unreachable = Vec::new();
        for (host, outcome) in hosts.iter().zip(outcomes) {
            match outcome {
                Ok(()) => {}
                Err(error) if is_unreachable(&error) => unreachable.push((host, error)),
                Err(error) => return Err(error),
            }
        }
        if unreachable.len() == hosts.len() {
            return Err(unreachable.swap_remove(0).1);
        }
        for (host, error) in unreachable {
            host.take_out_of_service(error);
        }
        Ok(Self::start(Scheduler::new(hosts, freed)))
    }

    /// Starts the background tasks.
    fn start(scheduler: Arc<Scheduler>) -> Self {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for index in 0..scheduler.hosts.len() {
            let (scheduler, stop) = (Arc::clone(&scheduler), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(scheduler.run_health_checks(index)).await;
            });
        }
        let (serving, stopped) = (Arc::clone(&scheduler), stop.clone());
        tasks.spawn(async move {
            stopped.run_until_cancelled(serving.keep_serving()).await;
        });
        let (assigning, stopped) = (Arc::clone(&scheduler), stop.clone());
        tasks.spawn(async move {
            stopped.run_until_cancelled(assigning.keep_assigning_images()).await;
        });
        Self { scheduler, stop, tasks: tokio::sync::Mutex::new(tasks) }
    }

    /// Checks on every host in service that its copies of the recorded images are still the same. A
    /// host where an image differs is not used for that image.
    ///
    /// # Errors
    /// [`SandboxErrorKind::ImageChanged`] for the first image that differs on every host that has an
    /// image of its name; any error of a daemon.
    pub async fn check_images(
        &self,
        recorded: &[(String, ImageIdentity)],
    ) -> Result<(), SandboxError> {
        for (image, identity) in recorded {
            let (mut changed, mut is_usable_somewhere) = (Vec::new(), false);
            for host in &self.scheduler.hosts {
                // A host that is out of service is checked when it first provides the image.
                let Some(provider) = host.in_service() else { continue };
                match provider.state.images.check(image, identity).await {
                    Ok(()) => is_usable_somewhere = true,
                    Err(error) if matches!(error.kind, SandboxErrorKind::ImageChanged { .. }) => {
                        changed.push((host, error));
                    }
                    Err(error) => return Err(error),
                }
            }
            if !is_usable_somewhere && let Some((_, error)) = changed.pop() {
                return Err(error);
            }
            for (host, error) in changed {
                host.mark_image_unavailable(image, error.kind);
            }
        }
        Ok(())
    }
}

/// Whether the host did not answer, so that it may return.
fn is_unreachable(error: &SandboxError) -> bool {
    matches!(error.kind, SandboxErrorKind::NoDaemon(_) | SandboxErrorKind::TimedOut { .. })
}

#[async_trait::async_trait]
impl SandboxProvider for DockerHosts {
    async fn open(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        check_spec(spec)?;
        let scheduler = &*self.scheduler;
        scheduler.check_image_presence(&spec.image).await;
        let mut request = scheduler.new_request();
        loop {
            let (host, index, grant) = scheduler.wait_for_grant(spec, &mut request).await?;
            // A host that granted something is connected.
            let Some(provider) = host.provider() else { continue };
            match Box::pin(provider.state.open_with(spec, grant)).await {
                Ok(Some(sandbox)) => {
                    tracing::debug!(host = host.title, sandbox = sandbox.name(), "opened");
                    scheduler.remove_expected_image(&spec.image);
                    return Ok(Box::new(sandbox));
                }
                Ok(None) => {}
                Err(error) => {
                    let host = (host, index);
                    scheduler.handle_open_error(host, error, &spec.image, &mut request).await?;
                }
            }
        }
    }

    fn expect_images(&self, images: &[String]) {
        self.scheduler.set_expected_images(images);
    }

    async fn sweep(&self, run: RunId, epoch: i64) -> Result<SweepReport, SandboxError> {
        let scheduler = &*self.scheduler;
        *scheduler.sweeping() = Some((run, epoch));
        let hosts = scheduler.hosts.iter().filter_map(|host| Some((host, host.in_service()?)));
        let reports = join_all(hosts.map(async |(host, provider)| {
            let report = host.sweep(provider, run, epoch).await;
            report.map(|report| scheduler.with_host_name(host, report))
        }));
        let (mut all, mut first_error) = (SweepReport::default(), None);
        let mut any_succeeded = false;
        for report in reports.await {
            match report {
                Ok(mut report) => {
                    any_succeeded = true;
                    all.removed.append(&mut report.removed);
                    all.kept.append(&mut report.kept);
                    all.failed.append(&mut report.failed);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot list leftover containers");
                    first_error = first_error.or(Some(error));
                }
            }
        }
        // The other hosts are swept when they return to service.
        match first_error.filter(|_| !any_succeeded) {
            Some(error) => Err(error),
            None => Ok(all),
        }
    }

    fn quarantined(&self) -> Vec<QuarantinedContainer> {
        let providers = self.scheduler.hosts.iter().filter_map(Host::provider);
        providers.flat_map(DockerProvider::quarantined).collect()
    }

    fn hosts(&self) -> Vec<HostUsage> {
        self.scheduler.hosts.iter().map(Host::usage).collect()
    }

    async fn shutdown(&self) -> Result<(), SandboxError> {
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
        let providers = self.scheduler.hosts.iter().filter_map(Host::provider);
        let outcomes = join_all(providers.map(DockerProvider::shutdown)).await;
        let mut errors = outcomes.into_iter().filter_map(Result::err);
        let first = errors.next();
        for error in errors {
            tracing::warn!(%error, "shutting down a Docker host failed");
        }
        first.map_or(Ok(()), Err)
    }
}
