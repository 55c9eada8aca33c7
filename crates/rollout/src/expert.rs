//! Expert conversations, and the supervised training data made from them.
//!
//! The invariant: the token ids are those of an episode in which the policy samples exactly the
//! expert's turns. Both go through the same functions of [`ChatModel`].

use crate::api::{Action, Message};
use crate::chat::{ChatError, ChatModel, message};
use crate::template::ChatTemplate;
use orchestrate_types::TokenId;
use serde::{Deserialize, Serialize};

/// One turn of an expert conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertTurn {
    /// Text before the calls; may be empty.
    pub content: String,
    /// The turn's tool calls.
    pub calls: Vec<Action>,
    /// The environment's answers, one text per call; not used for the last turn.
    pub observations: Vec<String>,
    /// Loss weight of this turn's tokens, including the closing token.
    pub weight: f32,
}

/// A whole conversation of an expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertEpisode {
    /// The opening messages, as [`crate::opening_messages`] builds them.
    pub prompt: Vec<Message>,
    /// The turns, in order.
    pub turns: Vec<ExpertTurn>,
}

/// A training example for supervised learning: token ids with one loss weight each.
#[derive(Debug, Clone, PartialEq)]
pub struct SupervisedExample {
    /// Token ids, `[T]`.
    pub token_ids: Vec<TokenId>,
    /// Loss weight of each token as a *target*, `[T]`, ≥ 0.
    pub weights: Vec<f32>,
}

impl ExpertEpisode {
    /// The rendered conversation, for training a tokenizer.
    ///
    /// # Errors
    /// If the template rejects the conversation.
    pub fn text(&self, template: &ChatTemplate) -> Result<String, minijinja::Error> {
        let mut messages = self.prompt.clone();
        for turn in &self.turns {
            messages.push(Message {
                role: "assistant".to_owned(),
                content: turn.content.clone(),
                tool_calls: turn.calls.clone(),
                ..Message::default()
            });
            messages.extend(turn.observations.iter().map(|text| message("tool", text)));
        }
        template.render(&messages, &[], false)
    }

    /// Token ids and loss weights of the conversation.
    ///
    /// The tokens of each turn have the turn's weight, all others `other_weight` (0.25 works well
    /// for a small model that must learn the format too).
    ///
    /// # Errors
    /// If the template or the tokenizer fails.
    pub fn supervised_example(
        &self,
        chat: &ChatModel,
        other_weight: f32,
    ) -> Result<SupervisedExample, ChatError> {
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
        Ok(SupervisedExample { token_ids, weights })
    }
}
