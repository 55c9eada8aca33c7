//! A container's name while it exists, and the task that works in the background.
//!
//! Dropping a [`Guard`] queues the removal; nothing has to be called.

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

/// Containers that wait for removal: each is queued once and holds its slot, so there are at most
/// as many as the largest `max_containers`, and some that gave their slot back.
pub(crate) const QUEUE: usize = 8192;
/// Tries before a container goes to quarantine: its slot is free then, though it may still be there.
const TRIES: u32 = 4;
/// Of these, how many may end without an answer: each of them costs a whole time-out.
const SILENT_TRIES: u32 = 2;
/// How many may find no daemon: it may be restarting.
const ABSENT_TRIES: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Between two looks at whether the daemon now lets go of what is in quarantine.
const ASK_AGAIN: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// A container that its daemon does not let go. It holds nobody up, and is asked for again.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Quarantined {
    /// Container name.
    pub name: String,
    /// The Docker host.
    pub host: String,
    /// The daemon's last words.
    pub reason: String,
    /// How often its removal was asked for.
    pub tries: u32,
}

impl std::fmt::Display for Quarantined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, host, reason, tries } = self;
        write!(f, "{name} on {host}, after {tries} tries: {reason}")
    }
}

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

/// What is in quarantine, with the name that stays taken until it is gone.
#[derive(Debug)]
struct Held {
    _doomed: Doomed,
    report: Quarantined,
}

/// How containers are removed.
#[derive(Debug)]
pub(crate) struct Remover {
    daemon: Daemon,
    limit: Semaphore,
    stop: CancellationToken,
    /// Containers removed.
    pub(crate) removed: AtomicU64,
    quarantine: Mutex<BTreeMap<String, Held>>,
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

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, Held>> {
        self.quarantine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the daemon does not let go, by name.
    pub(crate) fn quarantined(&self) -> Vec<Quarantined> {
        self.held().values().map(|held| held.report.clone()).collect()
    }

    /// It is gone, whoever removed it.
    pub(crate) fn release(&self, name: &str) {
        if self.held().remove(name).is_some() {
            tracing::info!(container = name, "the daemon let go of it");
            self.removed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Performs queued jobs until told to stop, then what is still queued, and returns.
    pub(crate) async fn run(self: Arc<Self>, mut queue: mpsc::Receiver<Job>) {
        let mut jobs = JoinSet::new();
        let this = Arc::clone(&self);
        jobs.spawn(async move { this.ask_again().await });
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

    /// Removes one container, with some tries and growing pauses; what then still is there goes to
    /// quarantine.
    pub(crate) async fn remove(&self, doomed: Doomed) {
        let (mut pause, mut tries, mut silent, mut absent) = (FIRST_PAUSE, 0, 0, 0);
        let reason = loop {
            let outcome = {
                // Never closed; an error would only mean no limit.
                let _permit = self.limit.acquire().await;
                self.daemon.remove(&doomed.name).await
            };
            let Err(error) = outcome else {
                self.removed.fetch_add(1, Ordering::Relaxed);
                return;
            };
            tries += 1;
            silent += u32::from(matches!(error, CallError::TimedOut(_)));
            tracing::debug!(container = %doomed.name, tries, ?error, "removal failed");
            absent += u32::from(matches!(error, CallError::Lost(_)));
            let patience = if self.stop.is_cancelled() { 0 } else { absent.min(ABSENT_TRIES) };
            if tries >= TRIES + patience || silent >= SILENT_TRIES {
                break error.words();
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        };
        self.quarantine(doomed, reason, tries);
    }

    fn quarantine(&self, mut doomed: Doomed, reason: String, tries: u32) {
        // Others may start in its place; its name stays taken.
        if let Some(slot) = &mut doomed.slot {
            slot.free_room();
        }
        let name = doomed.name.clone();
        let report =
            Quarantined { name: name.clone(), host: self.daemon.host.clone(), reason, tries };
        tracing::warn!(container = %report, "cannot be removed; going on without its slot");
        self.held().insert(name, Held { _doomed: doomed, report });
    }

    /// Asks for what is in quarantine, one by one: who waits for these holds nobody else up.
    async fn ask_again(&self) {
        let rest = || self.stop.run_until_cancelled(tokio::time::sleep(ASK_AGAIN));
        while rest().await.is_some() {
            for Quarantined { name, .. } in self.quarantined() {
                let asked = self.stop.run_until_cancelled(self.daemon.remove(&name)).await;
                match asked {
                    None => return,
                    Some(Ok(())) => self.release(&name),
                    Some(Err(error)) => {
                        if let Some(held) = self.held().get_mut(&name) {
                            held.report.tries += 1;
                            held.report.reason = error.words();
                        }
                    }
                }
            }
        }
    }
}
