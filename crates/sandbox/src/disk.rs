//! The disk of one Docker host. Nothing starts there while it is nearly full, and results produced
//! while it was full do not count.
//!
//! The limit is checked before a start, and again with the free space in the supervisor's hello,
//! which also works for hosts whose folders are not visible here. Supervisors detect that a disk
//! became full ([`orchestrate_supervisor::FreeSpace`]); this module records it for the other
//! sandboxes of the host.

use crate::daemon::Daemon;
use crate::error::{SandboxError, SandboxErrorKind};
use orchestrate_types::ByteSize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Shortest interval between checks of the free space while there is enough.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Tracks the free space of one host.
#[derive(Debug)]
pub(crate) struct DiskMonitor {
    min_free: ByteSize,
    /// When there last was enough free space.
    enough_at: Mutex<Option<Instant>>,
    full_count: AtomicU64,
}

impl DiskMonitor {
    pub(crate) fn new(min_free: ByteSize) -> Self {
        Self { min_free, enough_at: Mutex::default(), full_count: AtomicU64::new(0) }
    }

    /// How often a sandbox reported a full disk.
    pub(crate) fn full_count(&self) -> u64 {
        self.full_count.load(Ordering::Acquire)
    }

    /// Records that a sandbox reported a full disk.
    pub(crate) fn record_full(&self) {
        self.full_count.fetch_add(1, Ordering::AcqRel);
        self.set_enough_at(None);
    }

    fn set_enough_at(&self, at: Option<Instant>) {
        *self.enough_at.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Fails if there is too little free space to start a container. A host whose disk is not
    /// visible from here passes.
    pub(crate) async fn check(&self, daemon: &Daemon) -> Result<(), SandboxError> {
        let enough_at = *self.enough_at.lock().unwrap_or_else(PoisonError::into_inner);
        if enough_at.is_some_and(|at| at.elapsed() < CHECK_INTERVAL) {
            return Ok(());
        }
        if let Some(free) = free_disk(daemon).await? {
            self.check_free(daemon, free)?;
        }
        self.set_enough_at(Some(Instant::now()));
        Ok(())
    }

    /// Fails if `free` is too little to start a container.
    pub(crate) fn check_free(&self, daemon: &Daemon, free: ByteSize) -> Result<(), SandboxError> {
        let min_free = self.min_free;
        if free >= min_free {
            return Ok(());
        }
        self.set_enough_at(None);
        let message = format!(
            "{} MiB free, less than sandbox.min_free_disk = {min_free}; free some space or lower the \
             limit",
            free.0 >> 20
        );
        Err(daemon.error(SandboxErrorKind::DiskFull(message)))
    }
}

/// Free space under the daemon's data folder; `None` if the folder is not on this machine.
pub(crate) async fn free_disk(daemon: &Daemon) -> Result<Option<ByteSize>, SandboxError> {
    if !daemon.is_local() {
        return Ok(None);
    }
    let info =
        daemon.call(daemon.docker.info()).await.map_err(|error| error.at(&daemon.host, "info"))?;
    // The socket may lead into a virtual machine, whose folders do not exist here.
    Ok(info.docker_root_dir.and_then(|path| free_bytes(&path)))
}

/// Free space on the file system of `path`; `None` if the path does not exist.
pub(crate) fn free_bytes(path: &str) -> Option<ByteSize> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(ByteSize(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
