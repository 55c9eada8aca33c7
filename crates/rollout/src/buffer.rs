//! The append-only token buffer of one episode.
//!
//! The invariant: the committed tokens always end with a sampled one. New environment text waits
//! as *pending* until the engine has processed it, so that every committed token but the last has
//! a routing row.

use orchestrate_engine::{Finish, Generation};
use orchestrate_types::{LengthMismatch, PolicyVersion, TokenId, Trajectory, TurnSpan};
use std::sync::Arc;

/// Token ids, mask, log-probabilities and versions of an episode while it grows.
#[derive(Debug, Clone, Default)]
pub struct TokenBuffer {
    ids: Vec<TokenId>,
    mask: Vec<u8>,
    logprobs: Vec<f32>,
    versions: Vec<i64>,
    turns: Vec<TurnSpan>,
    pending: Vec<TokenId>,
}

impl TokenBuffer {
    /// Tokens the engine has processed or sampled.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether nothing was sampled yet.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Committed and pending tokens together: the length of the next prompt.
    pub fn prompt_len(&self) -> usize {
        self.ids.len() + self.pending.len()
    }

    /// The last committed token.
    pub fn last(&self) -> Option<TokenId> {
        self.ids.last().copied()
    }

    /// Adds environment tokens that the next prompt carries.
    pub fn add_pending(&mut self, tokens: &[TokenId]) {
        self.pending.extend_from_slice(tokens);
    }

    /// All tokens to send for the next generation.
    pub fn prompt_for_turn(&self) -> Arc<[TokenId]> {
        self.ids.iter().chain(&self.pending).copied().collect()
    }

    /// Commits the pending tokens (mask 0) and a reply's tokens (mask 1). A reply that `resumes`
    /// an aborted one extends its turn; any other opens a turn. `version` stands for tokens that
    /// no span of the reply covers.
    pub fn push_reply(&mut self, reply: &Generation, resumes: bool, version: PolicyVersion) {
        let first = reply.versions.first().map_or(version, |span| span.version);
        self.ids.append(&mut self.pending);
        self.mask.resize(self.ids.len(), 0);
        self.logprobs.resize(self.ids.len(), 0.0);
        self.versions.resize(self.ids.len(), number(first));
        let prompt_end = self.ids.len();

        self.ids.extend_from_slice(&reply.output_ids);
        self.mask.resize(self.ids.len(), 1);
        self.logprobs.extend_from_slice(&reply.logprobs);
        self.versions.resize(self.ids.len(), number(first));
        for span in &reply.versions {
            let range = prompt_end + span.start..prompt_end + span.end;
            if let Some(versions) = self.versions.get_mut(range) {
                versions.fill(number(span.version));
            }
        }
        let finish = finish_word(&reply.finish).to_owned();
        match self.turns.last_mut() {
            Some(turn) if resumes => {
                turn.output_end = self.ids.len();
                turn.finish = finish;
            }
            Some(_) | None => self.turns.push(TurnSpan {
                prompt_end,
                output_end: self.ids.len(),
                policy_version: first,
                cached_tokens: reply.cached_tokens,
                finish,
            }),
        }
    }

    /// All committed tokens.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Takes the loss from committed tokens: they are context from now on.
    pub fn exclude(&mut self, range: std::ops::Range<usize>) {
        for at in range {
            if let (Some(mask), Some(logprob)) = (self.mask.get_mut(at), self.logprobs.get_mut(at))
            {
                (*mask, *logprob) = (0, 0.0);
            }
        }
    }

    /// Sampled tokens of the last turn.
    pub fn last_turn(&self) -> &[TokenId] {
        let range = self.turns.last().map_or(0..0, |turn| turn.prompt_end..turn.output_end);
        self.ids.get(range).unwrap_or_default()
    }

    /// The trajectory so far, pending tokens left out; `None` before the first reply.
    ///
    /// # Errors
    /// When a reply's arrays disagreed in length.
    pub fn into_trajectory(self) -> Result<Option<Trajectory>, LengthMismatch> {
        if self.turns.is_empty() {
            return Ok(None);
        }
        Trajectory::new(self.ids, self.mask, self.logprobs, self.versions, self.turns).map(Some)
    }
}

fn number(version: PolicyVersion) -> i64 {
    i64::try_from(version.0).unwrap_or(i64::MAX)
}

/// The engine's word for how a reply ended.
pub(crate) fn finish_word(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Abort => "abort",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_engine::VersionSpan;

    fn reply(ids: &[u32], finish: Finish, spans: &[(u64, usize, usize)]) -> Generation {
        Generation {
            output_ids: ids.to_vec(),
            logprobs: vec![-0.5; ids.len()],
            finish,
            cached_tokens: 0,
            routed_experts: None,
            versions: spans
                .iter()
                .map(|&(v, start, end)| VersionSpan { version: PolicyVersion(v), start, end })
                .collect(),
            num_retractions: 0,
            routing_wire_bytes: 0,
            worker: "fake".to_owned(),
        }
    }

    #[test]
    fn pending_text_is_committed_only_with_the_next_reply() {
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
    fn a_resumed_reply_extends_its_turn_and_keeps_both_versions() {
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
}
