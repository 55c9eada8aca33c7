//! The prefill leader of a group: the first episode, whose first reply the others wait for.
//!
//! All episodes of a group start with the same prompt. If they were sent at once, the engine would
//! prefill that prompt once per episode and send its routing rows as often. Therefore the first
//! episode to arrive leads and the others follow after its first reply, when the prompt is in the
//! engine's prefix cache and its rows are in ours.
//!
//! The invariant: a group never waits for an episode that is gone. A leader that fails or is
//! dropped hands over to the next episode, and no episode waits longer than its `patience`.

use orchestrate_types::{GroupId, PolicyVersion};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;

/// The scope in which a prefilled prompt is shared: one group, policy version and worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PrefillKey {
    pub(crate) group: GroupId,
    pub(crate) version: PolicyVersion,
    pub(crate) worker: Option<String>,
}

#[derive(Debug, Default)]
struct PrefillState {
    is_done: AtomicBool,
    /// Held by the current leader.
    leadership: Arc<tokio::sync::Mutex<()>>,
}

/// The prefill leaders of all groups that currently have one.
#[derive(Debug, Clone, Default)]
pub struct PrefillLeaders {
    by_key: Arc<Mutex<HashMap<PrefillKey, Weak<PrefillState>>>>,
}

/// How an episode relates to the prefill of its group's prompt.
#[derive(Debug)]
pub(crate) enum PrefillRole {
    /// This episode prefills the prompt; [`PrefillLeader::finish`] releases the others.
    Leader(PrefillLeader),
    /// The prompt is prefilled already.
    Follower,
    /// The leader took too long; the episode does not wait any more.
    Alone,
}

/// Held by the leader until its first reply is stored. Dropping it lets the next episode lead.
#[derive(Debug)]
pub(crate) struct PrefillLeader {
    key: PrefillKey,
    leaders: PrefillLeaders,
    state: Arc<PrefillState>,
    _leadership: OwnedMutexGuard<()>,
}

impl PrefillLeaders {
    /// Waits for at most `patience` until this episode leads or the prompt is prefilled.
    pub(crate) async fn join(&self, key: PrefillKey, patience: Duration) -> PrefillRole {
        let state = {
            let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
            let known = by_key.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let state = Arc::new(PrefillState::default());
                by_key.insert(key.clone(), Arc::downgrade(&state));
                state
            })
        };
        let waiting = Arc::clone(&state.leadership).lock_owned();
        match tokio::time::timeout(patience, waiting).await {
            Ok(_) if state.is_done.load(Ordering::Acquire) => PrefillRole::Follower,
            Ok(leadership) => PrefillRole::Leader(PrefillLeader {
                key,
                leaders: self.clone(),
                state,
                _leadership: leadership,
            }),
            Err(_) => PrefillRole::Alone,
        }
    }
}

impl PrefillLeader {
    /// Releases the followers: the prompt is in the engine's cache and its rows are in ours.
    pub(crate) fn finish(self) {
        self.state.is_done.store(true, Ordering::Release);
    }
}

impl Drop for PrefillLeader {
    fn drop(&mut self) {
        let mut by_key = self.leaders.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        // Waiting episodes hold the state themselves. A later one becomes leader of a new state,
        // which costs little because the prompt is cached by then.
        let is_same =
            by_key.get(&self.key).is_some_and(|held| held.as_ptr() == Arc::as_ptr(&self.state));
        if is_same && self.state.is_done.load(Ordering::Acquire) {
            by_key.remove(&self.key);
        }
        by_key.retain(|_, state| state.strong_count() > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn key(seq: u32) -> PrefillKey {
        PrefillKey { group: GroupId::Train { seq }, version: PolicyVersion(1), worker: None }
    }

    async fn lead(leaders: &PrefillLeaders, seq: u32) -> PrefillLeader {
        match leaders.join(key(seq), PATIENCE).await {
            PrefillRole::Leader(leader) => leader,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn followers_wait_for_the_leaders_first_reply() {
        let leaders = PrefillLeaders::default();
        let leader = lead(&leaders, 1).await;
        let _other_group = lead(&leaders, 2).await;
        let mut follower = std::pin::pin!(leaders.join(key(1), PATIENCE));
        assert!(is_pending(follower.as_mut()).await);
        leader.finish();
        assert!(matches!(follower.await, PrefillRole::Follower));
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_leader_hands_over_to_the_next_episode() {
        let leaders = PrefillLeaders::default();
        let first = lead(&leaders, 1).await;
        let mut second = std::pin::pin!(leaders.join(key(1), PATIENCE));
        assert!(is_pending(second.as_mut()).await);
        drop(first);
        assert!(matches!(second.await, PrefillRole::Leader(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_is_bounded_and_finished_groups_are_forgotten() {
        let leaders = PrefillLeaders::default();
        let leader = lead(&leaders, 1).await;
        assert!(matches!(leaders.join(key(1), PATIENCE).await, PrefillRole::Alone));
        assert!(matches!(leaders.join(key(1), Duration::ZERO).await, PrefillRole::Alone));
        leader.finish();
        assert!(leaders.by_key.lock().unwrap().is_empty());
    }

    async fn is_pending<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
        let until = std::future::poll_fn(|cx| {
            std::task::Poll::Ready(future.as_mut().poll(cx).is_pending())
        });
        until.await
    }
}
