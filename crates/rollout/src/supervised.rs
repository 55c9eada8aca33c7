//! Expert conversations as training data, through the same code path as sampled episodes.
//!
//! The invariant: the token ids equal those an episode has in which the policy samples exactly
//! the expert's turns.

use crate::api::{Action, Message};
use crate::chat::{ChatError, ChatModel, message};
use crate::template::ChatTemplate;
use orchestrate_types::TokenId;
use serde::{Deserialize, Serialize};

/// One turn of an expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertTurn {
    /// Text before the calls; may be empty.
    pub content: String,
    /// Its calls.
    pub calls: Vec<Action>,
    /// What the environment answered, one text per call; empty for the last turn.
    pub observations: Vec<String>,
    /// Weight of this turn's tokens in the loss, closing token included.
    pub weight: f32,
}

/// A whole conversation written by an expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertEpisode {
    /// Opening messages, as [`crate::opening_messages`] builds them.
    pub prompt: Vec<Message>,
    /// Turns, in order.
    pub turns: Vec<ExpertTurn>,
}

/// Token ids with one loss weight each.
#[derive(Debug, Clone, PartialEq)]
pub struct Supervised {
    /// Token ids `[T]`.
    pub token_ids: Vec<TokenId>,
    /// Loss weight of each token as a *target*, `[T]`, ≥ 0.
    pub weights: Vec<f32>,
}

impl ExpertEpisode {
    /// The rendered text, for tokenizer training.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn text(&self, template: &ChatTemplate) -> Result<String, minijinja::Error> {
        let mut messages = self.prompt.clone();
        for turn in &self.turns {
            messages.push(Message {
                role: "assistant".to_owned(),
                content: turn.content.clone(),
                tool_calls: turn.calls.clone(),
            });
            messages.extend(turn.observations.iter().map(|text| message("tool", text)));
        }
        template.render(&messages, &[], false)
    }

    /// Token ids and weights: each turn's tokens weigh what the turn says, all others
    /// `other_weight` (0.25 is a good value for a small model that learns the format too).
    ///
    /// # Errors
    /// When the template or the tokenizer fails.
    pub fn supervised(&self, chat: &ChatModel, other_weight: f32) -> Result<Supervised, ChatError> {
        let mut token_ids = chat.prompt(&self.prompt)?.to_vec();
        let mut weights = vec![other_weight; token_ids.len()];
        for (index, turn) in self.turns.iter().enumerate() {
            token_ids.extend(chat.assistant(&turn.content, &turn.calls)?);
            weights.resize(token_ids.len(), turn.weight);
            if index + 1 < self.turns.len() {
                let new: Vec<Message> =
                    turn.observations.iter().map(|text| message("tool", text)).collect();
                token_ids.extend(chat.delta(&new, Some(chat.end_of_turn()))?);
                weights.resize(token_ids.len(), other_weight);
            }
        }
        Ok(Supervised { token_ids, weights })
    }
}
