//! A container's name while it exists. Dropping it queues the removal; nothing has to be called.

use crate::daemon::Daemon;
use crate::slots::Slot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Owns a container by name, from just before it is created.
#[derive(Debug)]
pub(crate) struct Guard {
    doomed: Option<Doomed>,
    queue: mpsc::Sender<Doomed>,
    name: String,
}

impl Guard {
    pub(crate) fn new(name: String, slot: Slot, queue: mpsc::Sender<Doomed>) -> Self {
        Self { doomed: Some(Doomed { name: name.clone(), slot: Some(slot) }), queue, name }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(doomed) = self.doomed.take() else { return };
        if self.queue.try_send(doomed).is_err() {
            // After shutdown. The end of its stream ends the container, and a sweep finds the rest.
            tracing::warn!(container = %self.name, "dropped after shutdown, left to end by itself");
        }
    }
}

/// Removes what is queued, in the background, until told to finish.
#[derive(Debug)]
pub(crate) struct Reaper {
    pub(crate) daemon: Daemon,
    pub(crate) parallelism: usize,
    pub(crate) removed: Arc<AtomicU64>,
    pub(crate) failed: Arc<std::sync::Mutex<Vec<String>>>,
}

impl Reaper {
    /// Runs until `stop`, then removes what is still queued and returns.
    pub(crate) async fn run(self, mut queue: mpsc::Receiver<Doomed>, stop: CancellationToken) {
        let limit = Arc::new(Semaphore::new(self.parallelism));
        let mut removals = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                // Both branches are cancel-safe: a queued container stays queued, a finished
                // removal stays finished.
                () = stop.cancelled(), if !queue.is_closed() => queue.close(),
                Some(_) = removals.join_next() => {}
                doomed = queue.recv() => match doomed {
                    Some(doomed) => {
                        let removal = self.removal(doomed, Arc::clone(&limit), stop.clone());
                        removals.spawn(removal);
                    }
                    None => break,
                },
            }
        }
        while removals.join_next().await.is_some() {}
    }

    fn removal(
        &self,
        mut doomed: Doomed,
        limit: Arc<Semaphore>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (daemon, removed) = (self.daemon.clone(), Arc::clone(&self.removed));
        let failed = Arc::clone(&self.failed);
        async move {
            let mut pause = FIRST_PAUSE;
            for attempt in 1..=TRIES {
                let outcome = {
                    // Never closed; an error would only mean no limit.
                    let _permit = limit.acquire().await;
                    daemon.remove(&doomed.name).await
                };
                let Err(error) = outcome else {
                    removed.fetch_add(1, Ordering::Relaxed);
                    return;
                };
                tracing::warn!(container = %doomed.name, attempt, ?error, "removal failed");
                if attempt == TRIES_WITH_SLOT {
                    tracing::error!(container = %doomed.name, "cannot be removed; going on without its slot");
                    drop(doomed.slot.take());
                }
                if stop.is_cancelled() && attempt >= TRIES_WITH_SLOT {
                    break;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(doomed.name);
        }
    }
}
