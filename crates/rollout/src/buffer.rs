//! The token buffer of one episode: the only source of prompts, and of the trajectory at the end.
//!
//! An episode alternates between text of the environment (prompt, observations) and text that the
//! policy samples. The buffer holds the ids of both in order and appends to them. Environment tokens
//! are added as *pending*; the next reply commits them together with its sampled tokens:
//!
//! ```text
//! add_pending(prompt) → push_reply(turn 0) → add_pending(observation) → push_reply(turn 1) → …
//! ```
//!
//! The invariant: the committed tokens end with a sampled token. The engine has therefore processed
//! every committed token but the last, and each of them has a routing row.
//!
//! Sampled tokens are never rendered or tokenized again. Where a chat template drops some of them
//! from later prompts, the sequence departs from its past at a [`Fork`].

use orchestrate_engine::{Finish, Generation, VersionSpan};
use orchestrate_types::{LengthMismatch, PolicyVersion, TokenId, Trajectory, TurnSpan};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Token ids of a running episode, with log-probabilities and policy versions of the sampled ones.
///
/// Most tokens are the environment's, which all have mask 0 and log-probability 0. Only their ids
/// are held here; [`Self::into_trajectory`] builds the arrays over all tokens once, at the end.
#[derive(Debug, Clone, Default)]
pub struct TokenBuffer {
    /// Committed tokens, then pending ones: the next prompt. Shared with the request while the
    /// engine works, and grown in place once the request is dropped.
    ids: Arc<Vec<TokenId>>,
    committed: usize,
    replies: Vec<SampledReply>,
    turns: Vec<TurnSpan>,
    /// Sampled ranges that carry no loss.
    excluded: Vec<Range<usize>>,
    /// Which committed tokens the next prompt leaves out.
    fork: Option<Fork>,
}

/// Where a prompt stops being a continuation of the one before, because tokens are left out of it.
///
/// Tokens after the fork that stay become context and carry no loss: they were sampled after other
/// tokens than those that now precede them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// Number of leading tokens that both prompts share.
    pub at: usize,
    /// Number of tokens after these that are left out.
    pub left_out: usize,
}

/// The sampled tokens of one reply.
#[derive(Debug, Clone)]
struct SampledReply {
    range: Range<usize>,
    logprobs: Arc<[f32]>,
    /// Version of the environment's tokens before this reply, and of sampled ones that no span
    /// covers.
    version: PolicyVersion,
    /// Positions are relative to the start of `range`.
    spans: Arc<[VersionSpan]>,
}

impl TokenBuffer {
    /// Number of committed tokens: those that the engine has processed or sampled.
    pub fn len(&self) -> usize {
        self.committed
    }

    /// Whether nothing is committed, which is the case until the first reply.
    pub fn is_empty(&self) -> bool {
        self.committed == 0
    }

    /// Length of the next prompt: committed and pending tokens, without those that a fork leaves
    /// out.
    pub fn prompt_len(&self) -> usize {
        self.ids.len() - self.fork.map_or(0, |fork| fork.left_out)
    }

    /// Number of leading tokens that the next prompt shares with the last prompt and its reply.
    pub fn common_len(&self) -> usize {
        self.fork.map_or(self.committed, |fork| fork.at)
    }

    /// Leaves tokens out of the next prompt and all later ones: the `header` tokens before the last
    /// turn and its first `thinking` tokens.
    ///
    /// The committed tokens change with the next reply only; if none comes, the trajectory keeps
    /// them.
    pub fn fork_last_turn(&mut self, header: usize, thinking: usize) {
        let last = self.turns.last().map_or(0..0, |turn| turn.prompt_end..turn.output_end);
        let at = last.start.saturating_sub(header);
        let left_out = last.start - at + thinking.min(last.len());
        self.fork = (left_out > 0).then_some(Fork { at, left_out });
    }

    /// The fork that the next reply will apply, if any.
    pub fn fork(&self) -> Option<Fork> {
        self.fork
    }

    /// The last committed token.
    pub fn last(&self) -> Option<TokenId> {
        self.ids().last().copied()
    }

    /// Appends tokens of the environment to the next prompt.
    pub fn add_pending(&mut self, tokens: &[TokenId]) {
        Arc::make_mut(&mut self.ids).extend_from_slice(tokens);
    }

    /// The prompt of the next generation, shared without a copy unless it forks.
    pub fn prompt_for_turn(&self) -> Arc<Vec<TokenId>> {
        let Some(Fork { at, left_out }) = self.fork else { return Arc::clone(&self.ids) };
        let (head, rest) = self.ids.split_at(at.min(self.ids.len()));
        Arc::new([head, rest.get(left_out..).unwrap_or_default()].concat())
    }

    /// Applies the pending fork, if any.
    fn apply_fork(&mut self) {
        let Some(Fork { at, left_out }) = self.fork.take() else { return };
        Arc::make_mut(&mut self.ids).drain(at..at + left_out);
        self.replies.retain(|reply| reply.range.end <= at);
        self.turns.retain(|turn| turn.output_end <= at);
        self.excluded.retain(|range| range.end <= at);
    }

    /// Commits the pending tokens (mask 0) and a reply's tokens (mask 1).
    ///
    /// A reply that `resumes` an aborted one extends its turn; any other starts a turn. `version`
    /// is the policy version of tokens that no span of the reply covers.
    pub fn push_reply(&mut self, reply: &Generation, resumes: bool, version: PolicyVersion) {
        let version = reply.versions().first().map_or(version, |span| span.version);
        self.apply_fork();
        let prompt_end = self.ids.len();
        Arc::make_mut(&mut self.ids).extend_from_slice(reply.output_ids());
        let output_end = self.ids.len();
        self.committed = output_end;
        self.replies.push(SampledReply {
            range: prompt_end..output_end,
            logprobs: reply.logprobs().into(),
            version,
            spans: reply.versions().into(),
        });
        let finish = finish_name(reply.finish()).to_owned();
        match self.turns.last_mut() {
            Some(turn) if resumes => {
                turn.output_end = output_end;
                turn.finish = finish;
            }
            Some(_) | None => self.turns.push(TurnSpan {
                prompt_end,
                output_end,
                policy_version: version,
                cached_tokens: reply.cached_tokens,
                finish,
            }),
        }
    }

    /// All committed token ids.
    pub fn ids(&self) -> &[TokenId] {
        self.ids.get(..self.committed).unwrap_or_default()
    }

    /// Removes committed tokens from the loss: their mask and log-probability become 0.
    pub fn exclude(&mut self, range: Range<usize>) {
        self.excluded.push(range);
    }

    /// A second buffer with the first `tokens` committed tokens as context: their loss stays with this
    /// buffer, so that no token is trained on twice, and they are of the policy version of the first reply
    /// that is sampled after them, as their rows are.
    ///
    /// `tokens` must be the end of a reply, or 0.
    #[must_use]
    pub(crate) fn branch(&self, tokens: usize) -> Self {
        let ids = self.ids().get(..tokens).unwrap_or_default();
        let turns = self.turns.iter().filter(|turn| turn.output_end <= tokens).cloned().collect();
        Self { ids: Arc::new(ids.to_vec()), committed: ids.len(), turns, ..Self::default() }
    }

    /// Takes over the replies of `parent`, from which this buffer branched at its end, and their loss.
    pub(crate) fn take_over(&mut self, parent: &Self) {
        self.replies.splice(0..0, parent.replies.iter().cloned());
        self.excluded.extend(parent.excluded.iter().cloned());
    }

    /// Whether a reply with loss was sampled in this buffer, not only in the one that it branched from.
    pub(crate) fn has_own_reply(&self) -> bool {
        self.replies.iter().any(|reply| !self.excluded.contains(&reply.range))
    }

    /// Log-probabilities of the last turn's tokens.
    pub(crate) fn last_logprobs(&self) -> Vec<f32> {
        let start = self.turns.last().map_or(0, |turn| turn.prompt_end);
        let replies = self.replies.iter().filter(|reply| reply.range.start >= start);
        replies.flat_map(|reply| reply.logprobs.iter().copied()).collect()
    }

    /// The prompt of the last turn.
    pub(crate) fn last_prompt(&self) -> &[TokenId] {
        let end = self.turns.last().map_or(0, |turn| turn.prompt_end);
        self.ids.get(..end).unwrap_or_default()
    }

    /// Sampled tokens of the last turn.
    pub fn last_turn(&self) -> &[TokenId] {
        let range = self.turns.last().map_or(0..0, |turn| turn.prompt_end..turn.output_end);
        self.ids.get(range).unwrap_or_default()
    }

    /// The trajectory of all committed tokens, without pending ones; `None` before the first reply.
    ///
    /// # Errors
    /// If a reply had a different number of tokens and log-probabilities.
    pub fn into_trajectory(self) -> Result<Option<Trajectory>, LengthMismatch> {
        if self.turns.is_empty() {
            return Ok(None);
        }
        let tokens = self.committed;
        let mut ids = Arc::unwrap_or_clone(self.ids);
        ids.truncate(tokens);
        let (mut mask, mut logprobs) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let mut versions = Vec::with_capacity(tokens);
        for reply in &self.replies {
            let Range { start, end } = reply.range;
            mask.resize(start, 0);
            mask.resize(end, 1);
            // Nothing is truncated here, so that a reply with too many is found by its length.
            logprobs.resize(start.max(logprobs.len()), 0.0);
            logprobs.extend_from_slice(&reply.logprobs);
            versions.resize(end, version_number(reply.version));
            for span in reply.spans.iter() {
                let range = start + span.start..start + span.end;
                if let Some(versions) = versions.get_mut(range) {
                    versions.fill(version_number(span.version));
                }
            }
        }
        for index in self.excluded.into_iter().flatten() {
            if let (Some(mask), Some(logprob)) = (mask.get_mut(index), logprobs.get_mut(index)) {
                (*mask, *logprob) = (0, 0.0);
            }
        }
        Trajectory::new(ids, mask, logprobs, versions, self.turns).map(Some)
    }
}

fn version_number(version: PolicyVersion) -> i64 {
    i64::try_from(version.0).unwrap_or(i64::MAX)
}

/// The name under which a trajectory records why a reply ended.
fn finish_name(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Abort => "abort",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_engine::SampledTokens;

    /// A reply of these tokens; without spans all of them have policy version 0.
    fn reply(ids: &[u32], finish: Finish, spans: &[(u64, usize, usize)]) -> Generation {
        let spans = if spans.is_empty() { &[(0, 0, ids.len())] } else { spans };
        let versions = spans
            .iter()
            .map(|&(v, start, end)| VersionSpan { version: PolicyVersion(v), start, end })
            .collect();
        let logprobs = vec![-0.5; ids.len()];
        let sampled = SampledTokens { output_ids: ids.to_vec(), logprobs, versions };
        Generation::new(sampled, finish, ids.len()).unwrap()
    }

    #[test]
    fn pending_tokens_are_committed_with_the_next_reply() {
        let mut buffer = TokenBuffer::default();
        buffer.add_pending(&[1, 2]);
        assert_eq!(*buffer.prompt_for_turn(), [1, 2]);
        assert!(buffer.is_empty());
        buffer.push_reply(&reply(&[3, 4], Finish::Stop, &[(5, 0, 2)]), false, PolicyVersion(0));
        buffer.add_pending(&[9]);
        assert_eq!((buffer.len(), buffer.prompt_len()), (4, 5));
        let trajectory = buffer.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.token_ids(), [1, 2, 3, 4]);
        assert_eq!(trajectory.loss_mask(), [0, 0, 1, 1]);
        assert_eq!(trajectory.policy_versions(), [5, 5, 5, 5]);
    }

    #[test]
    fn resumed_reply_extends_its_turn_and_keeps_both_versions() {
        let mut buffer = TokenBuffer::default();
        buffer.add_pending(&[1]);
        buffer.push_reply(&reply(&[2, 3], Finish::Abort, &[(1, 0, 2)]), false, PolicyVersion(1));
        buffer.push_reply(&reply(&[4], Finish::Stop, &[(2, 0, 1)]), true, PolicyVersion(1));
        assert_eq!(buffer.last_turn(), [2, 3, 4]);
        let trajectory = buffer.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.turns().len(), 1);
        assert_eq!(trajectory.turns()[0].finish, "stop");
        assert_eq!(trajectory.policy_versions(), [1, 1, 1, 2]);
    }

    #[test]
    fn excluded_tokens_carry_no_loss() {
        let mut buffer = TokenBuffer::default();
        buffer.add_pending(&[1]);
        buffer.push_reply(&reply(&[2, 3, 4], Finish::Stop, &[(7, 0, 3)]), false, PolicyVersion(7));
        buffer.exclude(1..3);
        let trajectory = buffer.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.loss_mask(), [0, 0, 0, 1]);
        assert_eq!(trajectory.rollout_logprobs(), [0.0, 0.0, 0.0, -0.5]);
        assert_eq!(trajectory.policy_versions(), [7; 4]);
    }

    #[test]
    fn context_of_a_branch_is_of_the_version_that_reads_it_unless_the_branch_takes_it_over() {
        let mut parent = TokenBuffer::default();
        parent.add_pending(&[1]);
        parent.push_reply(&reply(&[2, 3], Finish::Stop, &[(1, 0, 2)]), false, PolicyVersion(1));
        let mut branch = parent.branch(3);
        assert!(!branch.has_own_reply());
        branch.add_pending(&[4]);
        branch.push_reply(&reply(&[5], Finish::Stop, &[(2, 0, 1)]), false, PolicyVersion(1));
        assert!(branch.has_own_reply());
        let mut heir = branch.clone();
        let trajectory = branch.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.policy_versions(), [2; 5]);
        assert_eq!(trajectory.loss_mask(), [0, 0, 0, 0, 1]);
        assert_eq!(trajectory.turns().len(), 2);
        heir.take_over(&parent);
        let trajectory = heir.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.policy_versions(), [1, 1, 1, 2, 2]);
        assert_eq!(trajectory.loss_mask(), [0, 1, 1, 0, 1]);
        assert_eq!(trajectory.rollout_logprobs(), [0.0, -0.5, -0.5, 0.0, -0.5]);
    }

    #[test]
    fn fork_drops_tokens_and_removes_the_rest_of_their_turn_from_the_loss() {
        let mut buffer = TokenBuffer::default();
        let version = PolicyVersion(0);
        buffer.add_pending(&[1, 2]);
        buffer.push_reply(&reply(&[3, 4, 5], Finish::Stop, &[]), false, version);
        buffer.add_pending(&[6, 90]);
        buffer.push_reply(&reply(&[91, 92, 7, 8], Finish::Stop, &[]), false, version);
        buffer.add_pending(&[9]);
        let whole = buffer.clone();
        buffer.fork_last_turn(1, 2);
        assert_eq!(buffer.fork(), Some(Fork { at: 6, left_out: 3 }));
        assert_eq!(*buffer.prompt_for_turn(), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!((buffer.prompt_len(), buffer.common_len(), buffer.len()), (9, 6, 11));
        let unanswered = buffer.clone().into_trajectory().unwrap();
        assert_eq!(
            unanswered,
            whole.into_trajectory().unwrap(),
            "the fork is applied with the next reply"
        );
        buffer.push_reply(&reply(&[10], Finish::Stop, &[]), false, version);
        assert_eq!(buffer.fork(), None);
        let trajectory = buffer.into_trajectory().unwrap().unwrap();
        assert_eq!(trajectory.token_ids(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(trajectory.loss_mask(), [0, 0, 1, 1, 1, 0, 0, 0, 0, 1]);
        let spans: Vec<_> = trajectory.turns().iter().map(|t| t.prompt_end..t.output_end).collect();
        assert_eq!(spans, [2..5, 9..10]);
    }
}
