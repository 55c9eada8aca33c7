//! Who of a group goes first.
//!
//! Members of a group begin with the same prompt. If all asked at once, each would have it
//! prefilled and each would fetch its routing rows. So the first one to come leads; the others
//! wait for its first reply, after which the prompt is in the engine's prefix cache and its rows
//! are in ours. A leader that fails, or is dropped, hands over to the next one.

use orchestrate_types::{GroupId, PolicyVersion};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;

/// Where a prompt is shared: one group, under the same weights, on the same worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LeadKey {
    pub(crate) group: GroupId,
    pub(crate) version: PolicyVersion,
    pub(crate) worker: Option<String>,
}

#[derive(Debug, Default)]
struct Lead {
    is_done: AtomicBool,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// The leads of all groups that have members waiting or leading.
#[derive(Debug, Clone, Default)]
pub struct Leads {
    by_key: Arc<Mutex<HashMap<LeadKey, Weak<Lead>>>>,
}

/// A member's part in its group's beginning.
#[derive(Debug)]
pub(crate) enum Part {
    /// Goes first; [`Leading::done`] lets the others go.
    Leads(Leading),
    /// The prompt is there.
    Follows,
    /// Waited long enough for a leader that is slow.
    GoesAlone,
}

/// Held by the leader until its first reply is stored. Dropping it lets the next member lead.
#[derive(Debug)]
pub(crate) struct Leading {
    key: LeadKey,
    leads: Leads,
    lead: Arc<Lead>,
    _turn: OwnedMutexGuard<()>,
}

impl Leads {
    /// Waits, at most `patience`, until it is this member's turn to lead or none has to.
    pub(crate) async fn join(&self, key: LeadKey, patience: Duration) -> Part {
        let lead = {
            let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
            let known = by_key.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lead = Arc::new(Lead::default());
                by_key.insert(key.clone(), Arc::downgrade(&lead));
                lead
            })
        };
        let turn = tokio::time::timeout(patience, Arc::clone(&lead.turn).lock_owned()).await;
        match turn {
            Ok(_) if lead.is_done.load(Ordering::Acquire) => Part::Follows,
            Ok(turn) => Part::Leads(Leading { key, leads: self.clone(), lead, _turn: turn }),
            Err(_) => Part::GoesAlone,
        }
    }
}

impl Leading {
    /// The prompt is in the engine's cache and its rows are in ours.
    pub(crate) fn done(self) {
        self.lead.is_done.store(true, Ordering::Release);
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        let mut by_key = self.leads.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        // Who waits holds the lead itself; who comes later leads anew and finds everything there.
        let is_same =
            by_key.get(&self.key).is_some_and(|held| held.as_ptr() == Arc::as_ptr(&self.lead));
        if is_same && self.lead.is_done.load(Ordering::Acquire) {
            by_key.remove(&self.key);
        }
        by_key.retain(|_, lead| lead.strong_count() > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn key(seq: u32) -> LeadKey {
        LeadKey { group: GroupId::Train { seq }, version: PolicyVersion(1), worker: None }
    }

    async fn leading(leads: &Leads, seq: u32) -> Leading {
        match leads.join(key(seq), PATIENCE).await {
            Part::Leads(leading) => leading,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn followers_wait_for_the_first_reply_and_then_go_together() {
        let leads = Leads::default();
        let leader = leading(&leads, 1).await;
        let _other_group = leading(&leads, 2).await;
        let mut follower = std::pin::pin!(leads.join(key(1), PATIENCE));
        assert!(futures_pending(follower.as_mut()).await);
        leader.done();
        assert!(matches!(follower.await, Part::Follows));
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_fails_hands_over() {
        let leads = Leads::default();
        let first = leading(&leads, 1).await;
        let mut second = std::pin::pin!(leads.join(key(1), PATIENCE));
        assert!(futures_pending(second.as_mut()).await);
        drop(first);
        assert!(matches!(second.await, Part::Leads(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_longer_than_allowed_and_nothing_is_left() {
        let leads = Leads::default();
        let leader = leading(&leads, 1).await;
        assert!(matches!(leads.join(key(1), PATIENCE).await, Part::GoesAlone));
        assert!(matches!(leads.join(key(1), Duration::ZERO).await, Part::GoesAlone));
        leader.done();
        assert!(leads.by_key.lock().unwrap().is_empty());
    }

    async fn futures_pending<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
        let until = std::future::poll_fn(|cx| {
            std::task::Poll::Ready(future.as_mut().poll(cx).is_pending())
        });
        until.await
    }
}
