//! Ownership of a container by name, and its removal in the background.
//!
//! Dropping a [`ContainerGuard`] queues the removal, so no path can forget it.

use crate::api::QuarantinedContainer;
use crate::daemon::{CallError, Daemon};
use crate::slots::Slot;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Capacity of the queue of background jobs. Each container is queued once and holds its slot, so
/// the largest `max_containers` plus some containers in quarantine must fit.
pub(crate) const JOB_QUEUE_CAPACITY: usize = 8192;
/// Tries before a container is put in quarantine, where it no longer occupies a slot.
const TRIES: u32 = 4;
/// How many of these tries may time out: each of them takes the whole call timeout.
const TIMED_OUT_TRIES: u32 = 2;
/// How many additional tries may fail to reach the daemon, which may be restarting.
const UNREACHABLE_TRIES: u32 = 20;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Interval between removal attempts for containers in quarantine.
const QUARANTINE_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// A container to remove, and the slot that it occupies until then.
#[derive(Debug)]
pub(crate) struct Removal {
    container: String,
    slot: Option<Slot>,
}

/// Work that runs in the background.
pub(crate) enum BackgroundJob {
    /// Remove a container.
    Remove(Removal),
    /// Run a future to its end, even if its requester is dropped.
    Finish(BoxFuture<'static, ()>),
}

/// Owns a container by name, from just before it is created.
#[derive(Debug)]
pub(crate) struct ContainerGuard {
    removal: Option<Removal>,
    queue: mpsc::Sender<BackgroundJob>,
    name: String,
}

impl ContainerGuard {
    pub(crate) fn new(name: String, slot: Slot, queue: mpsc::Sender<BackgroundJob>) -> Self {
        Self { removal: Some(Removal { container: name.clone(), slot: Some(slot) }), queue, name }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Hands the ownership to a removal that the caller performs.
    pub(crate) fn into_removal(mut self) -> Option<Removal> {
        self.removal.take()
    }
}

impl Drop for ContainerGuard {
    fn drop(&mut self) {
        let Some(removal) = self.removal.take() else { return };
        if self.queue.try_send(BackgroundJob::Remove(removal)).is_err() {
            // After shutdown. The container ends with its stream, and a sweep finds what is left.
            tracing::warn!(container = %self.name, "dropped after shutdown; it ends by itself");
        }
    }
}

/// A container in quarantine. Its removal keeps the name reserved.
#[derive(Debug)]
struct QuarantineEntry {
    _removal: Removal,
    report: QuarantinedContainer,
}

/// Removes containers.
#[derive(Debug)]
pub(crate) struct Remover {
    daemon: Daemon,
    limit: Semaphore,
    stop: CancellationToken,
    /// Containers removed so far.
    pub(crate) removed: AtomicU64,
    quarantine: Mutex<BTreeMap<String, QuarantineEntry>>,
}

impl Remover {
    pub(crate) fn new(daemon: Daemon, parallelism: usize, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            daemon,
            limit: Semaphore::new(parallelism),
            stop,
            removed: AtomicU64::new(0),
            quarantine: Mutex::default(),
        })
    }

    fn quarantine(&self) -> MutexGuard<'_, BTreeMap<String, QuarantineEntry>> {
        self.quarantine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Containers in quarantine, sorted by name.
    pub(crate) fn quarantined(&self) -> Vec<QuarantinedContainer> {
        self.quarantine().values().map(|entry| entry.report.clone()).collect()
    }

    /// Takes a container that no longer exists out of quarantine.
    pub(crate) fn release(&self, name: &str) {
        if self.quarantine().remove(name).is_some() {
            tracing::info!(container = name, "removed a container from quarantine");
            self.removed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Runs queued jobs until cancelled, then the jobs that are still queued, and returns.
    pub(crate) async fn run(self: Arc<Self>, mut queue: mpsc::Receiver<BackgroundJob>) {
        let mut jobs = JoinSet::new();
        let this = Arc::clone(&self);
        jobs.spawn(async move { this.retry_quarantined().await });
        loop {
            tokio::select! {
                biased;
                // All branches are cancel-safe: a queued job stays queued, a finished one stays finished.
                () = self.stop.cancelled(), if !queue.is_closed() => queue.close(),
                Some(_) = jobs.join_next() => {}
                job = queue.recv() => match job {
                    Some(BackgroundJob::Remove(removal)) => {
                        let this = Arc::clone(&self);
                        jobs.spawn(async move { this.remove(removal).await });
                    }
                    Some(BackgroundJob::Finish(work)) => {
                        jobs.spawn(work);
                    }
                    None => break,
                },
            }
        }
        while jobs.join_next().await.is_some() {}
    }

    /// Removes one container, with a few tries and growing pauses. Puts it in quarantine if it
    /// still exists after that.
    pub(crate) async fn remove(&self, removal: Removal) {
        let (mut pause, mut tries, mut timed_out, mut unreachable) = (FIRST_PAUSE, 0, 0, 0);
        let reason = loop {
            let outcome = {
                // The semaphore is never closed, so this cannot fail.
                let _permit = self.limit.acquire().await;
                self.daemon.remove(&removal.container).await
            };
            let Err(error) = outcome else {
                self.removed.fetch_add(1, Ordering::Relaxed);
                return;
            };
            tries += 1;
            timed_out += u32::from(matches!(error, CallError::TimedOut(_)));
            unreachable += u32::from(error.is_unreachable());
            tracing::debug!(container = %removal.container, tries, %error, "removal failed");
            let extra =
                if self.stop.is_cancelled() { 0 } else { unreachable.min(UNREACHABLE_TRIES) };
            if tries >= TRIES + extra || timed_out >= TIMED_OUT_TRIES {
                break error.to_string();
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        };
        self.put_in_quarantine(removal, reason, tries);
    }

    fn put_in_quarantine(&self, mut removal: Removal, reason: String, tries: u32) {
        // Another container may start in its place, but not under its name.
        if let Some(slot) = &mut removal.slot {
            slot.release_capacity();
        }
        let name = removal.container.clone();
        let report = QuarantinedContainer {
            name: name.clone(),
            host: self.daemon.host.clone(),
            reason,
            tries,
        };
        tracing::warn!(container = %report, "cannot remove a container; its slot is free again");
        self.quarantine().insert(name, QuarantineEntry { _removal: removal, report });
    }

    /// Retries containers in quarantine one by one, so that slow removals do not delay others.
    async fn retry_quarantined(&self) {
        let pause = || self.stop.run_until_cancelled(tokio::time::sleep(QUARANTINE_RETRY_INTERVAL));
        while pause().await.is_some() {
            for QuarantinedContainer { name, .. } in self.quarantined() {
                let outcome = self.stop.run_until_cancelled(self.daemon.remove(&name)).await;
                match outcome {
                    None => return,
                    Some(Ok(())) => self.release(&name),
                    Some(Err(error)) => {
                        if let Some(entry) = self.quarantine().get_mut(&name) {
                            entry.report.tries += 1;
                            entry.report.reason = error.to_string();
                        }
                    }
                }
            }
        }
    }
}
