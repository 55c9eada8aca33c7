//! Requests of clients that render their prompts themselves and send token ids.

use super::tree::{ForkCause, IN_TOKENS, Place, Step, Tree};
use crate::line::Line;
use orchestrate_types::TokenId;

impl Tree<Line> {
    /// Finds the place of a prompt in tokens: after the longest common beginning that ends with a
    /// reply. `was_answered` says whether this prompt was sampled before.
    pub(super) fn locate_tokens(&self, prompt: &[TokenId], was_answered: bool) -> Place {
        let mut best: Option<(usize, bool, Place)> = None;
        let mut is_first = true;
        for (index, branch) in self.branches.iter().enumerate() {
            if branch.tools != IN_TOKENS {
                continue;
            }
            is_first = false;
            let ids = branch.line.buffer.ids();
            let common = ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            let replies = branch.steps.iter().enumerate().rev();
            let last = replies.filter_map(|(step, reply)| match reply {
                Step::Reply { end, .. } if *end <= common => Some((step + 1, *end)),
                Step::Reply { .. } | Step::Given(_) => None,
            });
            let Some((steps, tokens)) = last.max_by_key(|(_, end)| *end) else { continue };
            let is_tip = steps == branch.steps.len() && !branch.is_busy;
            if best.is_some_and(|(most, tip, _)| (most, tip) >= (tokens, is_tip)) {
                continue;
            }
            let cause = if was_answered { ForkCause::Repeated } else { ForkCause::History };
            let place = if is_tip {
                Place::Tip { branch: index }
            } else {
                Place::Fork { branch: index, steps, tokens, cause }
            };
            best = Some((tokens, is_tip, place));
        }
        let cause = match (is_first, was_answered) {
            (true, _) => None,
            (false, true) => Some(ForkCause::Repeated),
            (false, false) => Some(ForkCause::Opening),
        };
        best.map_or(Place::Root { cause }, |(_, _, place)| place)
    }
}
