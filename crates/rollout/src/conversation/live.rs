//! The text of a reply while it is sampled, for clients that read it as a stream.
//!
//! The engine reports tokens ([`TokenListener`]); they become text, and the text the parts of a reply
//! ([`PartialReply`]). Whatever a client is shown is the beginning of the reply that is stored, unless
//! an engine call fails and the next one samples other tokens: the client then sees that the text no
//! longer continues what it has.

use crate::chat::ChatModel;
use crate::reply::{PartialReply, StopFilter};
use orchestrate_engine::TokenListener;
use orchestrate_gateway::TextSink;
use orchestrate_types::TokenId;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The text of a reply that is being sampled, and the clients that read it.
#[derive(Debug)]
pub(super) struct LiveText {
    chat: Arc<ChatModel>,
    /// Tokens of the prompt.
    prompt: usize,
    /// Number of the reply among all of the attempt.
    number: u32,
    /// `None` once the reply is complete.
    state: Mutex<Option<LiveState>>,
}

#[derive(Debug)]
struct LiveState {
    /// The turn without the tokens of the call that runs.
    kept: LiveTurn,
    now: LiveTurn,
    sinks: Vec<TextSink>,
    /// Thinking and text that clients were shown of calls that failed.
    failed: Vec<(String, String)>,
}

/// A turn as far as it was sampled.
#[derive(Debug, Clone)]
struct LiveTurn {
    decoder: TextDecoder,
    filter: StopFilter,
    reply: PartialReply,
}

impl LiveText {
    /// The text of reply `number` to a prompt.
    pub(super) fn new(
        chat: Arc<ChatModel>,
        number: u32,
        prompt: &[TokenId],
        stops: Arc<[String]>,
        sink: TextSink,
    ) -> Self {
        let thinks = chat.opens_thinking(prompt);
        let turn = LiveTurn {
            decoder: TextDecoder::default(),
            filter: StopFilter::new(stops),
            reply: PartialReply::new(thinks, chat.tool_format()),
        };
        let sinks = vec![sink];
        let state = LiveState { kept: turn.clone(), now: turn, sinks, failed: Vec::new() };
        Self { chat, prompt: prompt.len(), number, state: Mutex::new(Some(state)) }
    }

    /// Changes the text, if the reply is not complete.
    fn change(&self, change: impl FnOnce(&mut LiveState)) {
        if let Some(state) = &mut *self.lock() {
            change(state);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<LiveState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a client was shown something else than this thinking and text, because a call failed.
    pub(super) fn has_shown_other(&self, reasoning: &str, content: &str) -> bool {
        self.lock().as_ref().is_some_and(|state| {
            let begins = |(thought, spoken): &(String, String)| {
                reasoning.starts_with(thought.as_str()) && content.starts_with(spoken.as_str())
            };
            !state.failed.iter().all(begins)
        })
    }

    /// Forgets the text and its clients: the reply is complete.
    pub(super) fn end(&self) {
        *self.lock() = None;
    }

    /// Shows the reply to one more client, from its beginning.
    pub(super) fn join(&self, sink: TextSink) {
        self.change(|state| {
            state.sinks.push(sink);
            self.show(state);
        });
    }

    /// Notes the tokens of a part of the turn that was stored, after those stored before.
    pub(super) fn keep(&self, ids: &[TokenId]) {
        self.change(|state| {
            state.now = state.kept.clone();
            state.now.push(&self.chat, ids);
            state.kept = state.now.clone();
            self.show(state);
        });
    }

    fn show(&self, state: &mut LiveState) {
        let LiveState { now, sinks, .. } = state;
        let (reasoning, content) = (now.reply.reasoning(), now.reply.content());
        sinks.retain(|sink| sink.show(self.prompt, self.number, reasoning, content));
    }
}

impl TokenListener for LiveText {
    fn begin(&self) {
        self.change(|state| {
            let shown = |turn: &LiveTurn| {
                (turn.reply.reasoning().to_owned(), turn.reply.content().to_owned())
            };
            let now = shown(&state.now);
            if now != shown(&state.kept) {
                state.failed.push(now);
            }
            state.now = state.kept.clone();
        });
    }

    fn sampled(&self, ids: &[TokenId]) {
        self.change(|state| {
            state.now.push(&self.chat, ids);
            self.show(state);
        });
    }
}

impl LiveTurn {
    fn push(&mut self, chat: &ChatModel, ids: &[TokenId]) {
        // One by one: a reply ends with the token that completes a stop string.
        for id in ids {
            let text = self.filter.push(&self.decoder.push(chat, *id));
            if !text.is_empty() {
                self.reply.push(&text);
            }
        }
    }
}

/// Token ids to text, as [`ChatModel::decode`] does it for all of them at once.
#[derive(Debug, Clone, Default)]
struct TextDecoder {
    /// The first bytes of a character.
    held: Vec<u8>,
    /// A token that is not part of the text if it is the last one.
    stop: Option<TokenId>,
}

impl TextDecoder {
    fn push(&mut self, chat: &ChatModel, id: TokenId) -> String {
        if let Some(stop) = self.stop.take() {
            self.held.extend_from_slice(chat.known_bytes(stop));
        }
        if chat.stop_token_ids().contains(&id) {
            self.stop = Some(id);
        } else {
            self.held.extend_from_slice(chat.known_bytes(id));
        }
        let mut text = String::new();
        loop {
            let (valid, invalid) = match std::str::from_utf8(&self.held) {
                Ok(valid) => (valid, None),
                Err(error) => {
                    let (valid, _) = self.held.split_at(error.valid_up_to());
                    (std::str::from_utf8(valid).unwrap_or_default(), error.error_len())
                }
            };
            text.push_str(valid);
            let done = valid.len() + invalid.unwrap_or(0);
            self.held.drain(..done);
            if invalid.is_none() {
                // The rest, if any, may become a character.
                return text;
            }
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::chat;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prop_tokens_in_pieces_have_the_text_of_all_of_them(
            ids in prop::collection::vec(0_u32..400, 0..40),
            text in "\\PC{0,20}",
        ) {
            let chat = chat();
            let ids = [ids, chat.encode(&text).unwrap()].concat();
            let mut decoder = TextDecoder::default();
            let pieces: String = ids.iter().map(|id| decoder.push(&chat, *id)).collect();
            let whole = chat.decode(&ids).unwrap();
            // A character that is cut off at the end becomes U+FFFD.
            let rest = whole.strip_prefix(&pieces).unwrap();
            prop_assert!(rest.chars().all(|c| c == char::REPLACEMENT_CHARACTER), "{rest:?}");
            prop_assert!(decoder.held.len() < 4);
        }
    }
}
