//! A container's name while it exists, and the task that works in the background.
//!
//! Dropping a [`Guard`] queues the removal; nothing has to be called.

use crate::daemon::Daemon;
use crate::slots::Slot;
use futures::future::BoxFuture;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Containers that wait for removal: each is queued once and holds its slot, so there are at most
/// as many as the largest `max_containers`, and some that gave their slot back.
pub(crate) const QUEUE: usize = 8192;
/// Tries before the slot is given back though the container may still be there.
const TRIES_WITH_SLOT: u32 = 4;
/// Tries before only a sweep can help.
const TRIES: u32 = 20;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A container to remove, and the slot it holds until then.
#[derive(Debug)]
pub(crate) struct Doomed {
    name: String,
    slot: Option<Slot>,
}

/// What is done in the background.
pub(crate) enum Job {
    /// Remove a container.
    Remove(Doomed),
    /// Bring something to its end, whoever asked for it.
    Finish(BoxFuture<'static, ()>),
}

/// Owns a container by name, from just before it is created.
#[derive(Debug)]
pub(crate) struct Guard {
    doomed: Option<Doomed>,
    queue: mpsc::Sender<Job>,
    name: String,
}

impl Guard {
    pub(crate) fn new(name: String, slot: Slot, queue: mpsc::Sender<Job>) -> Self {
        Self { doomed: Some(Doomed { name: name.clone(), slot: Some(slot) }), queue, name }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Gives up the ownership, to a removal that somebody performs.
    pub(crate) fn into_doomed(mut self) -> Option<Doomed> {
        self.doomed.take()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(doomed) = self.doomed.take() else { return };
        if self.queue.try_send(Job::Remove(doomed)).is_err() {
            // After shutdown. The end of its stream ends the container, and a sweep finds the rest.
            tracing::warn!(container = %self.name, "dropped after shutdown, left to end by itself");
        }
    }
}

/// How containers are removed.
#[derive(Debug)]
pub(crate) struct Remover {
    daemon: Daemon,
    limit: Semaphore,
    stop: CancellationToken,
    /// Containers removed.
    pub(crate) removed: AtomicU64,
    /// Names of those that could not be.
    pub(crate) failed: Mutex<Vec<String>>,
}

impl Remover {
    pub(crate) fn new(daemon: Daemon, parallelism: usize, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            daemon,
            limit: Semaphore::new(parallelism),
            stop,
            removed: AtomicU64::new(0),
            failed: Mutex::default(),
        })
    }

    /// Performs queued jobs until told to stop, then what is still queued, and returns.
    pub(crate) async fn run(self: Arc<Self>, mut queue: mpsc::Receiver<Job>) {
        let mut jobs = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                // All branches are cancel-safe: a queued job stays queued, a finished one finished.
                () = self.stop.cancelled(), if !queue.is_closed() => queue.close(),
                Some(_) = jobs.join_next() => {}
                job = queue.recv() => match job {
                    Some(Job::Remove(doomed)) => {
                        let this = Arc::clone(&self);
                        jobs.spawn(async move { this.remove(doomed).await });
                    }
                    Some(Job::Finish(work)) => {
                        jobs.spawn(work);
                    }
                    None => break,
                },
            }
        }
        while jobs.join_next().await.is_some() {}
    }

    /// Removes one container, with many tries and growing pauses.
    pub(crate) async fn remove(&self, mut doomed: Doomed) {
        let mut pause = FIRST_PAUSE;
        for attempt in 1..=TRIES {
            let outcome = {
                // Never closed; an error would only mean no limit.
                let _permit = self.limit.acquire().await;
                self.daemon.remove(&doomed.name).await
            };
            let Err(error) = outcome else {
                self.removed.fetch_add(1, Ordering::Relaxed);
                return;
            };
            tracing::warn!(container = %doomed.name, attempt, ?error, "removal failed");
            if attempt == TRIES_WITH_SLOT {
                tracing::error!(container = %doomed.name, "cannot be removed; going on without its slot");
                drop(doomed.slot.take());
            }
            if self.stop.is_cancelled() && attempt >= TRIES_WITH_SLOT {
                break;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).push(doomed.name);
    }
}
