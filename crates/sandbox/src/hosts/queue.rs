//! The queue of requests that wait for a slot, in order of arrival.

use super::host::{Host, HostStatus};
use super::placement::{HostOffer, rank_hosts};
use super::request::{OpenRequest, QueuedRequest};
use super::scheduler::Scheduler;
use crate::api::SandboxSpec;
use crate::error::SandboxError;
use crate::provider::DAEMON_RETURN_TIMEOUT;
use crate::slots::Grant;
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use tokio::sync::oneshot;
use tokio::time::Instant;

enum Placement {
    /// The host with this index granted a slot or an idle sandbox.
    Placed(usize, Grant),
    /// All hosts that could serve the request are full.
    Full,
    /// No host in service can serve the request.
    NoHost,
}

/// Whether waiting for a slot can succeed.
enum Prospect {
    /// A host in service may get a free slot.
    Open,
    /// No host in service can serve the request, but one that can may return to service.
    WaitForHost(SandboxError),
    /// No host can serve the request.
    Impossible(SandboxError),
}

impl Scheduler {
    fn queue(&self) -> MutexGuard<'_, BTreeMap<u64, QueuedRequest>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grants what is free to waiting requests, in order of arrival. A request that cannot use it
    /// (an agent if only graders may start, an image that the host cannot provide) does not block
    /// others.
    pub(super) fn serve_queue(&self) {
        self.queue().retain(|_, request| self.keeps_waiting(request));
    }

    fn keeps_waiting(&self, request: &mut QueuedRequest) -> bool {
        let Some(answer) = request.answer.take_if(|answer| !answer.is_closed()) else {
            return false;
        };
        match self.place(&request.spec, &request.failed_hosts) {
            Placement::Placed(index, grant) => {
                if let Err((index, grant)) = answer.send((index, grant))
                    && let Some(host) = self.hosts.get(index)
                {
                    host.return_grant(grant);
                }
                false
            }
            Placement::Full => {
                request.answer = Some(answer);
                true
            }
            // Dropping the sender makes the request examine its prospect.
            Placement::NoHost => false,
        }
    }

    fn place(&self, spec: &SandboxSpec, failed_hosts: &[usize]) -> Placement {
        let mut placement = Placement::NoHost;
        let mut offer = |(index, host): (usize, &Host)| -> Option<HostOffer> {
            let available = matches!(host.status(&spec.image), HostStatus::Available);
            if failed_hosts.contains(&index) || !available {
                return None;
            }
            placement = Placement::Full;
            host.offer(spec)
        };
        let offers: Vec<Option<HostOffer>> =
            self.hosts.iter().enumerate().map(&mut offer).collect();
        for index in rank_hosts(&offers) {
            if let Some(grant) = self.hosts.get(index).and_then(|host| host.try_take(spec)) {
                return Placement::Placed(index, grant);
            }
        }
        placement
    }

    /// Waits until a host grants a slot or an idle sandbox. Cancel-safe.
    pub(super) async fn wait_for_grant(
        &self,
        spec: &SandboxSpec,
        request: &mut OpenRequest,
    ) -> Result<(&Host, usize, Grant), SandboxError> {
        loop {
            match self.prospect(spec, request) {
                Prospect::Open => {}
                Prospect::Impossible(error) => return Err(error),
                Prospect::WaitForHost(error) => {
                    let until = *request
                        .give_up_at
                        .get_or_insert_with(|| Instant::now() + DAEMON_RETURN_TIMEOUT);
                    if !self.wait_for_host(spec, request, until).await {
                        return Err(error);
                    }
                }
            }
            let (answer, answered) = oneshot::channel();
            let queued = QueuedRequest {
                spec: spec.clone(),
                failed_hosts: request.failed_hosts.iter().map(|(index, _)| *index).collect(),
                answer: Some(answer),
            };
            self.queue().insert(request.ticket, queued);
            self.serve_queue();
            // An error: no host can serve the request any more.
            if let Ok((index, grant)) = answered.await
                && let Some(host) = self.hosts.get(index)
            {
                return Ok((host, index, grant));
            }
        }
    }

    fn prospect(&self, spec: &SandboxSpec, request: &OpenRequest) -> Prospect {
        let (mut out_of_service, mut without_image) = (None, None);
        for (index, host) in self.hosts.iter().enumerate() {
            if request.failed_hosts.iter().any(|(failed, _)| *failed == index) {
                continue;
            }
            match host.status(&spec.image) {
                HostStatus::Available => return Prospect::Open,
                HostStatus::OutOfService(kind) => {
                    out_of_service = out_of_service.or_else(|| Some(host.error(kind)));
                }
                HostStatus::ImageUnavailable(kind) => {
                    without_image = without_image.or_else(|| Some(host.error(kind)));
                }
            }
        }
        let failed = request.failed_hosts.first().map(|(_, error)| SandboxError {
            sandbox: error.sandbox.clone(),
            kind: error.kind.clone(),
        });
        // There is at least one host, so at least one of these is set.
        out_of_service
            .map(Prospect::WaitForHost)
            .or_else(|| failed.or(without_image).map(Prospect::Impossible))
            .unwrap_or(Prospect::Open)
    }

    /// Waits until a host that may serve the request returns to service. `false` if none does before
    /// `until`.
    async fn wait_for_host(
        &self,
        spec: &SandboxSpec,
        request: &OpenRequest,
        until: Instant,
    ) -> bool {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Registered before the check, so that a return in between is not missed.
            freed.as_mut().enable();
            if !matches!(self.prospect(spec, request), Prospect::WaitForHost(_)) {
                return true;
            }
            if tokio::time::timeout_at(until, freed).await.is_err() {
                return false;
            }
        }
    }

    /// Serves the queue whenever something becomes free. Runs until dropped.
    pub(super) async fn keep_serving(&self) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            self.serve_queue();
            freed.await;
        }
    }
}
