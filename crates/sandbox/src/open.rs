//! Opening a sandbox on one Docker host: reuse an idle one, or create and start a container.

use crate::api::{Purpose, SandboxSpec};
use crate::container::{attempt_name, create_body, pooled_name};
use crate::daemon::{CallError, Daemon};
use crate::error::{SandboxError, SandboxErrorKind};
use crate::guard::{BackgroundJob, ContainerGuard};
use crate::image::{self, Additions, Images};
use crate::link::SupervisorLink;
use crate::sandbox::DockerSandbox;
use crate::slots::{Grant, IdleSandbox, ReuseKey, Slot};
use crate::state::ProviderState;
use bollard::models::ContainerCreateBody;
use bollard::query_parameters::CreateContainerOptions;
use orchestrate_types::ByteSize;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How often a container is created if a leftover of the same name has to be removed first.
const CREATE_TRIES: u32 = 3;

impl ProviderState {
    /// The key for reuse, if the sandbox may be reused.
    fn reuse_key(&self, spec: &SandboxSpec) -> Option<ReuseKey> {
        (spec.reusable && self.config.reuse).then(|| ReuseKey::of(spec))
    }

    /// Opens a sandbox with what the slots granted. `None` if the grant only freed a slot or the
    /// idle sandbox was lost; the caller must then ask the slots again.
    pub(crate) async fn open_with(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        grant: Grant,
    ) -> Result<Option<DockerSandbox>, SandboxError> {
        let owner = (spec.owner.run, spec.owner.epoch);
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).insert(owner);
        match grant {
            Grant::Reuse(idle) => {
                let IdleSandbox { key, link, guard, expires_at } = *idle;
                let mut sandbox =
                    DockerSandbox::new(link, guard, Arc::clone(self), Some(key), expires_at);
                if let Err(error) = sandbox.set_deadline(spec.deadline).await {
                    tracing::warn!(%error, "lost an idle sandbox");
                    return Ok(None);
                }
                self.counters.reused.fetch_add(1, Ordering::Relaxed);
                Ok(Some(sandbox))
            }
            Grant::Start(slot) => self.start(spec, self.reuse_key(spec), slot).await.map(Some),
            Grant::Evict(idle) => {
                self.evict(*idle).await;
                Ok(None)
            }
        }
    }

    async fn start(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        key: Option<ReuseKey>,
        mut slot: Slot,
    ) -> Result<DockerSandbox, SandboxError> {
        // The semaphore is never closed, so this cannot fail.
        let _permit = self.starts.acquire().await;
        self.disk.check(&self.daemon).await?;
        let additions = match spec.purpose {
            Purpose::Agent if self.images.has_agent_layer() => Additions::Agent,
            _ if spec.reusable => Additions::Supervisor,
            _ => Additions::None,
        };
        let image = self.images.prepare(&spec.image, additions).await?;
        let (wanted, lifetime) = if spec.reusable {
            let number = self.next_number.fetch_add(1, Ordering::Relaxed);
            let lifetime = self.config.reuse_lifetime.0.max(spec.deadline);
            (pooled_name(&spec.owner, spec.purpose, number), lifetime)
        } else {
            (attempt_name(&spec.owner, spec.purpose), spec.deadline)
        };
        let name = slot.reserve_name(&wanted);
        // From here on the container may exist, even if this future is dropped.
        let guard = ContainerGuard::new(name.clone(), slot, self.jobs.clone());
        let expires_at = Instant::now() + lifetime;
        let body = create_body(spec, &self.config, &image.reference, lifetime);
        let guard = self.create(guard, spec.image.clone(), body).await?;
        // From now on the container keeps the image from being removed.
        drop(image);
        if !spec.reusable {
            image::install_supervisor(&self.daemon, &name).await?;
        }
        let link = self.launch(&name).await?;
        self.counters.started.fetch_add(1, Ordering::Relaxed);
        let mut sandbox = DockerSandbox::new(link, guard, Arc::clone(self), key, expires_at);
        sandbox.writes_to_host_disk = !spec.reusable;
        if spec.reusable {
            sandbox.set_deadline(spec.deadline).await?;
        }
        Ok(sandbox)
    }

    /// Creates the container in the background, so that the request is never dropped half-way. The
    /// daemon would complete it anyway, after the guard had looked for a container to remove.
    async fn create(
        &self,
        guard: ContainerGuard,
        image: String,
        body: ContainerCreateBody,
    ) -> Result<ContainerGuard, SandboxError> {
        let shut_down = SandboxError {
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
                && let Some(removal) = guard.into_removal()
            {
                remover.remove(removal).await;
            }
        };
        if self.jobs.send(BackgroundJob::Finish(Box::pin(work))).await.is_err() {
            return Err(shut_down);
        }
        match answered.await {
            Ok((guard, outcome)) => outcome.map(|()| guard),
            Err(_) => Err(shut_down),
        }
    }

    /// Removes an idle container and waits until its slot is free, so that one request evicts one.
    async fn evict(&self, idle: IdleSandbox) {
        let IdleSandbox { link, guard, .. } = idle;
        let Some(removal) = guard.into_removal() else { return };
        let (done, removed) = oneshot::channel::<()>();
        let remover = Arc::clone(&self.remover);
        let work = async move {
            drop(link);
            remover.remove(removal).await;
            drop(done);
        };
        // If the queue is closed, the job is dropped, and its slot with it.
        if self.jobs.send(BackgroundJob::Finish(Box::pin(work))).await.is_ok() {
            let _ = removed.await;
        }
    }

    async fn launch(&self, name: &str) -> Result<SupervisorLink, SandboxError> {
        let mut link = SupervisorLink::attach(&self.daemon, name).await?;
        self.daemon
            .call(self.daemon.docker.start_container(name, None))
            .await
            .map_err(|error| error.at(name, "start"))?;
        let after = self.config.call_timeout.0;
        match tokio::time::timeout(after, link.wait_for_hello()).await {
            Ok(free) => {
                // For a host whose folders are not visible here, this is the first disk check.
                self.disk.check_free(&self.daemon, ByteSize(free?.bytes))?;
                Ok(link)
            }
            Err(_) => Err(SandboxError {
                sandbox: name.to_owned(),
                kind: SandboxErrorKind::TimedOut { call: "hello", after },
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
            // Only this program uses such names, and the name is not in use: the container is a
            // leftover of a create whose answer was lost, or of a coordinator that died.
            Err(CallError::Status(409, _)) if tries < CREATE_TRIES => {
                tracing::info!(container = name, "removing a leftover container of the same name");
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
