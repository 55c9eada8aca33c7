//! One request for a sandbox, from its start to its end.

use crate::api::SandboxSpec;
use crate::error::SandboxError;
use crate::slots::Grant;
use std::collections::HashSet;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// A call of [`SandboxProvider::open`](crate::SandboxProvider::open) in progress.
#[derive(Debug)]
pub(super) struct OpenRequest {
    /// Position in the queue.
    pub(super) ticket: u64,
    /// Hosts, by index, that failed to open this sandbox.
    pub(super) failed_hosts: Vec<(usize, SandboxError)>,
    /// Hosts, by index, on which a missing image was retried.
    pub(super) retried_missing_image: HashSet<usize>,
    /// When to stop waiting for a host to return; `None` until the first wait.
    pub(super) give_up_at: Option<Instant>,
}

impl OpenRequest {
    pub(super) fn new(ticket: u64) -> Self {
        Self {
            ticket,
            failed_hosts: Vec::new(),
            retried_missing_image: HashSet::new(),
            give_up_at: None,
        }
    }
}

/// A request that waits in the queue.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    pub(super) spec: SandboxSpec,
    /// Hosts, by index, that failed to open this sandbox.
    pub(super) failed_hosts: Vec<usize>,
    /// Receives the index of the host and its grant.
    pub(super) answer: Option<oneshot::Sender<(usize, Grant)>>,
}
