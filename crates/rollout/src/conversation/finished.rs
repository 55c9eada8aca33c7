//! What a conversation ends with.

use super::Conversation;
use super::tree::{Branch, ForkCause, Recognition};
use crate::api::{EpisodeBranch, RowCounts, TurnLog};
use crate::sequence::{Counters, Sequence};
use orchestrate_types::Limit;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a conversation ended with.
#[derive(Debug, Default)]
pub(crate) struct FinishedConversation {
    pub(crate) branches: Vec<EpisodeBranch>,
    pub(crate) routing_problem: Option<String>,
    pub(crate) rows: RowCounts,
    pub(crate) counters: Counters,
    pub(crate) turns: Vec<TurnLog>,
    pub(crate) forks: BTreeMap<ForkCause, u64>,
    pub(crate) recognised: BTreeMap<Recognition, u64>,
    pub(crate) generate_s: f64,
    /// The limit that ended it.
    pub(crate) limit: Option<Limit>,
    /// Our failure, which breaks the attempt.
    pub(crate) failure: Option<String>,
    /// Why the last request was refused, if the fault is the environment's or the agent's program's.
    pub(crate) refusal: Option<String>,
    /// Whether the run stops.
    pub(crate) stopped: bool,
}

/// Ends a conversation when it is dropped, if that was not done before: an attempt that is given up must
/// not leave generations behind, which would wait for an engine that may be gone.
#[derive(Debug)]
pub(crate) struct EndOnDrop(pub(crate) Arc<Conversation>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Lets a branch that ends where another one forked from it be part of that one, and drops branches
/// without a reply of their own.
pub(super) fn hand_over(branches: &mut Vec<Branch<Sequence>>) {
    let mut is_whole = vec![false; branches.len()];
    for index in 0..branches.len() {
        let (before, after) = branches.split_at_mut(index + 1);
        let Some(parent) = before.last() else { continue };
        let end = parent.sequence.buffer.len();
        let is_heir = |child: &&mut Branch<Sequence>| {
            let continues = child.parent == Some((index, end)) && child.sequence.buffer.len() > end;
            continues && child.sequence.has_rows_of(&parent.sequence)
        };
        let heir = after.iter_mut().find(is_heir);
        if let (Some(heir), Some(part)) = (heir, is_whole.get_mut(index)) {
            heir.sequence.buffer.take_over(&parent.sequence.buffer);
            *part = true;
        }
    }
    let mut part_of_another = is_whole.into_iter();
    branches.retain(|branch| {
        let is_part = part_of_another.next().unwrap_or(false);
        !is_part && branch.sequence.buffer.has_own_reply()
    });
}
