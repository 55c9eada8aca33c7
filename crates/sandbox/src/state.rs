//! The state that a Docker provider shares with the sandboxes it opened.

use crate::config::SandboxSettings;
use crate::daemon::Daemon;
use crate::disk::DiskMonitor;
use crate::guard::{BackgroundJob, Remover};
use crate::image::Images;
use crate::slots::Slots;
use orchestrate_types::RunId;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use tokio::sync::{Semaphore, mpsc};

/// Counts since the provider connected.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) started: AtomicU64,
    pub(crate) reused: AtomicU64,
    pub(crate) resets_refused: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct ProviderState {
    pub(crate) daemon: Daemon,
    pub(crate) config: SandboxSettings,
    pub(crate) slots: Arc<Slots>,
    pub(crate) counters: Counters,
    pub(crate) images: Arc<Images>,
    /// Limits how many containers start at once.
    pub(crate) starts: Semaphore,
    pub(crate) jobs: mpsc::Sender<BackgroundJob>,
    pub(crate) remover: Arc<Remover>,
    /// Number of the next pooled container; part of its name.
    pub(crate) next_number: AtomicU32,
    pub(crate) disk: DiskMonitor,
    /// Runs, with epoch, that requested containers.
    pub(crate) owners: Mutex<HashSet<(RunId, i64)>>,
}
