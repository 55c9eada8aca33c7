//! A synthetic policy: one tool call per turn, the last of which is `submit`.

use crate::rows::mix;
use orchestrate_types::TokenId;
use serde::{Deserialize, Serialize};

/// A policy whose next tokens are a function of the prompt and the request's seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// The token that ends every message.
    pub end_of_message: TokenId,
    /// Header of an assistant message; not empty. Its first token never occurs inside a message.
    pub header: Vec<TokenId>,
    /// Number of `end_of_message` tokens in the first prompt.
    pub ends_before: usize,
    /// Number of `end_of_message` tokens that each turn adds: one by the policy, and one per
    /// observation.
    pub ends_per_turn: usize,
    /// Number of turns in an episode, at least 1.
    pub turns: usize,
    /// Tokens of a turn before its random part.
    pub call_head: Vec<TokenId>,
    /// Tokens to draw the random part from; not empty.
    pub drawn: Vec<TokenId>,
    /// Length of the random part, in tokens.
    pub drawn_tokens: usize,
    /// Tokens of a turn after its random part.
    pub call_tail: Vec<TokenId>,
    /// All tokens of the last turn.
    pub submit: Vec<TokenId>,
}

impl Script {
    /// A number, with the drawn tokens as its digits.
    pub(crate) fn digits(&self, number: i64) -> Vec<TokenId> {
        let digits = number.to_string().into_bytes();
        let token = |digit: u8| self.drawn.get(usize::from(digit.wrapping_sub(b'0'))).copied();
        digits.into_iter().filter_map(token).collect()
    }

    /// The tokens that follow `prompt` until the end of the turn. A prompt that ends inside a turn,
    /// because its reply was aborted, is continued.
    pub fn continuation(&self, prompt: &[TokenId], seed: u64) -> Vec<TokenId> {
        let ends = prompt.iter().filter(|token| **token == self.end_of_message).count();
        let turn = ends.saturating_sub(self.ends_before) / self.ends_per_turn.max(1);
        let first = self.header.first();
        let header = prompt.iter().rposition(|token| Some(token) == first).unwrap_or(0);
        let written = prompt.len().saturating_sub(header + self.header.len());
        if turn + 1 >= self.turns {
            return self.submit.get(written..).unwrap_or_default().to_vec();
        }
        let drawn = (0..self.drawn_tokens).map(|at| {
            let draw = mix(seed ^ mix(at as u64)) % (self.drawn.len() as u64).max(1);
            let index = usize::try_from(draw).unwrap_or(0);
            self.drawn.get(index).copied().unwrap_or(self.end_of_message)
        });
        let head = self.call_head.iter().copied();
        head.chain(drawn).chain(self.call_tail.iter().copied()).skip(written).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script() -> Script {
        Script {
            end_of_message: 2,
            header: vec![1, 7],
            ends_before: 1,
            ends_per_turn: 2,
            turns: 3,
            call_head: vec![10, 11],
            drawn: vec![20, 21, 22],
            drawn_tokens: 4,
            call_tail: vec![12, 2],
            submit: vec![30, 2],
        }
    }

    #[test]
    fn episode_has_all_turns_and_ends_with_submit() {
        let script = script();
        let mut tokens = vec![1, 5, 2, 1, 7];
        for turn in 0..3 {
            let reply = script.continuation(&tokens, turn);
            let expected = if turn == 2 { vec![30, 2] } else { reply.clone() };
            assert_eq!(reply, expected);
            assert_eq!(reply.len(), if turn == 2 { 2 } else { 8 });
            tokens.extend(&reply);
            tokens.extend([1, 6, 2, 1, 7]);
        }
    }

    #[test]
    fn aborted_turn_is_continued() {
        let script = script();
        let prompt = vec![1, 5, 2, 1, 7];
        let whole = script.continuation(&prompt, 9);
        for cut in 0..whole.len() {
            let resumed = [prompt.as_slice(), &whole[..cut]].concat();
            assert_eq!(script.continuation(&resumed, 9), whole[cut..]);
        }
        assert_ne!(whole, script.continuation(&prompt, 10));
    }
}
