//! The disk of one Docker host: nothing starts where it is nearly full, nothing counts that ran while
//! it was full.
//!
//! The floor is looked at here before a start, and once more in what the supervisor greets with,
//! which works on hosts whose folders are not ours. That a disk became full is the supervisors' to
//! see ([`orchestrate_supervisor::Free`]); here it is remembered for their neighbours.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::daemon::Daemon;
use crate::doctor;
use orchestrate_types::ByteSize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Free disk is looked at no more often than this, as long as there is enough.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What is known of it.
#[derive(Debug)]
pub(crate) struct Disk {
    floor: ByteSize,
    enough_at: Mutex<Option<Instant>>,
    fills: AtomicU64,
}

impl Disk {
    pub(crate) fn new(floor: ByteSize) -> Self {
        Self { floor, enough_at: Mutex::default(), fills: AtomicU64::new(0) }
    }

    /// How often a sandbox met a full disk.
    pub(crate) fn fills(&self) -> u64 {
        self.fills.load(Ordering::Acquire)
    }

    /// One more did.
    pub(crate) fn note_full(&self) {
        self.fills.fetch_add(1, Ordering::AcqRel);
        self.set_enough(None);
    }

    fn set_enough(&self, at: Option<Instant>) {
        *self.enough_at.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Refuses to start below the floor. A host whose disk we cannot see passes.
    pub(crate) async fn check(&self, daemon: &Daemon) -> Result<(), SandboxError> {
        let enough_at = *self.enough_at.lock().unwrap_or_else(PoisonError::into_inner);
        if enough_at.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return Ok(());
        }
        if let Some(free) = doctor::free_disk(daemon).await? {
            self.check_free(daemon, free)?;
        }
        self.set_enough(Some(Instant::now()));
        Ok(())
    }

    /// The same for so many free bytes.
    pub(crate) fn check_free(&self, daemon: &Daemon, free: ByteSize) -> Result<(), SandboxError> {
        let floor = self.floor;
        if free >= floor {
            return Ok(());
        }
        self.set_enough(None);
        let words = format!(
            "{} MiB free, less than sandbox.min_free_disk = {floor}; free some or lower the floor",
            free.0 >> 20
        );
        let kind = SandboxErrorKind::DiskFull(words);
        Err(SandboxError { sandbox: daemon.host.clone(), kind })
    }
}
