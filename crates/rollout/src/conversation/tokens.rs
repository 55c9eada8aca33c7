//! Requests of clients that render their prompts themselves and send token ids.

use super::tree::{BranchPoint, ForkCause, IN_TOKENS, Segment, Tree};
use crate::sequence::Sequence;
use orchestrate_types::TokenId;

impl Tree<Sequence> {
    /// Finds the branch point of a prompt in tokens: after the longest common beginning that ends with a
    /// reply. `was_answered` says whether this prompt was sampled before.
    pub(super) fn locate_tokens(&self, prompt: &[TokenId], was_answered: bool) -> BranchPoint {
        let mut best: Option<(usize, bool, BranchPoint)> = None;
        let mut is_first = true;
        for (index, branch) in self.branches.iter().enumerate() {
            if branch.tools != IN_TOKENS {
                continue;
            }
            is_first = false;
            let ids = branch.sequence.buffer.ids();
            let common = ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            let replies = branch.segments.iter().enumerate().rev();
            let last = replies.filter_map(|(segment, reply)| match reply {
                Segment::Reply { end, .. } if *end <= common => Some((segment + 1, *end)),
                Segment::Reply { .. } | Segment::Message(_) => None,
            });
            let Some((segments, tokens)) = last.max_by_key(|(_, end)| *end) else { continue };
            let is_tip = segments == branch.segments.len() && !branch.is_busy;
            if best.is_some_and(|(most, tip, _)| (most, tip) >= (tokens, is_tip)) {
                continue;
            }
            let cause = if was_answered { ForkCause::Repeated } else { ForkCause::History };
            let point = if is_tip {
                BranchPoint::Tip { branch: index }
            } else {
                BranchPoint::Fork { branch: index, segments, tokens, cause }
            };
            best = Some((tokens, is_tip, point));
        }
        let cause = match (is_first, was_answered) {
            (true, _) => None,
            (false, true) => Some(ForkCause::Repeated),
            (false, false) => Some(ForkCause::Opening),
        };
        best.map_or(BranchPoint::Root { cause }, |(_, _, point)| point)
    }
}
