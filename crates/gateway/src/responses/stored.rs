//! The responses of an episode that requests continue by their ids (`previous_response_id`).

use crate::message::{Message, Role};
use crate::sampler::Sampled;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of text that are stored for an episode: commands of the policy can send requests, too. Later
/// responses are not stored.
const MAX_BYTES: usize = 64 << 20;

/// The stored responses of an episode.
#[derive(Debug, Default)]
pub(crate) struct StoredResponses(Mutex<Stored>);

#[derive(Debug, Default)]
struct Stored {
    by_id: HashMap<String, Arc<Exchange>>,
    bytes: usize,
}

/// What a request added to a conversation, and its reply.
#[derive(Debug)]
struct Exchange {
    previous: Option<Arc<Exchange>>,
    /// Without the request's instructions, which do not apply to later ones.
    messages: Vec<Message>,
}

impl StoredResponses {
    fn lock(&self) -> MutexGuard<'_, Stored> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The conversation up to a response, oldest message first; `None` if it is not stored.
    pub(crate) fn conversation(&self, id: &str) -> Option<Vec<Message>> {
        let last = Arc::clone(self.lock().by_id.get(id)?);
        let exchanges =
            std::iter::successors(Some(&*last), |exchange| exchange.previous.as_deref());
        let exchanges: Vec<&Exchange> = exchanges.collect();
        Some(exchanges.iter().rev().flat_map(|exchange| exchange.messages.clone()).collect())
    }

    /// Stores a response to `asked`, which continued the response `previous`.
    pub(super) fn store(
        &self,
        id: String,
        previous: Option<&str>,
        asked: &[Message],
        reply: &Sampled,
    ) {
        let answer = Message {
            reasoning: reply.reasoning.clone(),
            reply: Some(reply.number),
            tool_calls: reply.tool_calls.clone(),
            ..Message::new(Role::Assistant, reply.content.clone())
        };
        let messages: Vec<Message> = asked.iter().cloned().chain([answer]).collect();
        let bytes: usize = messages.iter().map(Message::bytes).sum();
        let mut stored = self.lock();
        let before = previous.and_then(|id| stored.by_id.get(id).cloned());
        if stored.bytes + bytes > MAX_BYTES || before.is_some() != previous.is_some() {
            tracing::debug!(id, "a response is not stored: the episode has too many");
            return;
        }
        stored.bytes += bytes;
        stored.by_id.insert(id, Arc::new(Exchange { previous: before, messages }));
    }
}
