//! Who waits for a place, in the order of their coming.

use super::host::{Host, Standing};
use super::placement::{Offer, order};
use super::{Inner, Request};
use crate::api::{SandboxError, SandboxSpec};
use crate::provider::PATIENCE;
use crate::slots::Taken;
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// One who waits.
#[derive(Debug)]
pub(super) struct Waiting {
    spec: SandboxSpec,
    refused_by: Vec<usize>,
    answer: Option<oneshot::Sender<(usize, Taken)>>,
}

enum Place {
    Found(usize, Taken),
    /// Hosts that could have it are full.
    Full,
    /// No host in service can have it.
    Nowhere,
}

/// What a request has to hope for.
enum Outlook {
    /// A host in service may have it.
    Open,
    /// None is, and one may return.
    Away(SandboxError),
    /// No host can have it.
    Never(SandboxError),
}

impl Inner {
    fn queue(&self) -> MutexGuard<'_, BTreeMap<u64, Waiting>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives what is free to those who wait, who came first first. One who cannot have it (an agent
    /// where only graders have room, an image that this host lacks) holds up nobody behind.
    pub(super) fn serve_queue(&self) {
        self.queue().retain(|_, waiting| self.still_waits(waiting));
    }

    fn still_waits(&self, waiting: &mut Waiting) -> bool {
        let Some(answer) = waiting.answer.take_if(|answer| !answer.is_closed()) else {
            return false;
        };
        match self.place(&waiting.spec, &waiting.refused_by) {
            Place::Found(index, taken) => {
                if let Err((index, taken)) = answer.send((index, taken))
                    && let Some(host) = self.hosts.get(index)
                {
                    host.give_back(taken);
                }
                false
            }
            Place::Full => {
                waiting.answer = Some(answer);
                true
            }
            // Without an answer it looks around for itself.
            Place::Nowhere => false,
        }
    }

    fn place(&self, spec: &SandboxSpec, refused_by: &[usize]) -> Place {
        let mut place = Place::Nowhere;
        let mut offer = |(index, host): (usize, &Host)| -> Option<Offer> {
            if refused_by.contains(&index) || !matches!(host.standing(&spec.image), Standing::Fit) {
                return None;
            }
            place = Place::Full;
            host.offer(spec)
        };
        let offers: Vec<Option<Offer>> = self.hosts.iter().enumerate().map(&mut offer).collect();
        for index in order(&offers) {
            if let Some(taken) = self.hosts.get(index).and_then(|host| host.try_take(spec)) {
                return Place::Found(index, taken);
            }
        }
        place
    }

    /// Waits for a place, on whichever host. Cancel-safe.
    pub(super) async fn placed(
        &self,
        spec: &SandboxSpec,
        request: &mut Request,
    ) -> Result<(&Host, usize, Taken), SandboxError> {
        loop {
            match self.outlook(spec, request) {
                Outlook::Open => {}
                Outlook::Never(error) => return Err(error),
                Outlook::Away(error) => {
                    let until = *request.patience.get_or_insert_with(|| Instant::now() + PATIENCE);
                    if !self.somebody_returns(spec, request, until).await {
                        return Err(error);
                    }
                }
            }
            let (answer, answered) = oneshot::channel();
            let waiting = Waiting {
                spec: spec.clone(),
                refused_by: request.refused.iter().map(|(index, _)| *index).collect(),
                answer: Some(answer),
            };
            self.queue().insert(request.ticket, waiting);
            self.serve_queue();
            // An error: all who could have it left meanwhile.
            if let Ok((index, taken)) = answered.await
                && let Some(host) = self.hosts.get(index)
            {
                return Ok((host, index, taken));
            }
        }
    }

    fn outlook(&self, spec: &SandboxSpec, request: &Request) -> Outlook {
        let (mut away, mut lacking) = (None, None);
        for (index, host) in self.hosts.iter().enumerate() {
            if request.refused.iter().any(|(refused, _)| *refused == index) {
                continue;
            }
            match host.standing(&spec.image) {
                Standing::Fit => return Outlook::Open,
                Standing::Away(kind) => away = away.or_else(|| Some(host.error(kind))),
                Standing::Lacks(kind) => lacking = lacking.or_else(|| Some(host.error(kind))),
            }
        }
        let refused = request.refused.first().map(|(_, error)| SandboxError {
            sandbox: error.sandbox.clone(),
            kind: error.kind.clone(),
        });
        // There is at least one host, so there is one of these.
        away.map(Outlook::Away)
            .or_else(|| refused.or(lacking).map(Outlook::Never))
            .unwrap_or(Outlook::Open)
    }

    /// Whether a host that may have it is in service before `until`.
    async fn somebody_returns(
        &self,
        spec: &SandboxSpec,
        request: &Request,
        until: Instant,
    ) -> bool {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Listen before looking, or a return in between would be missed.
            freed.as_mut().enable();
            if !matches!(self.outlook(spec, request), Outlook::Away(_)) {
                return true;
            }
            if tokio::time::timeout_at(until, freed).await.is_err() {
                return false;
            }
        }
    }

    /// Serves the queue whenever something becomes free.
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
