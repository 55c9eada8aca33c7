//! Requests to an engine: a prompt, and how to continue it.

use crate::message::ChatMessage;
use orchestrate_types::{PolicyVersion, RequestId, TokenId};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// How to sample. Log-probabilities describe the distribution after temperature and top-p.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Softmax temperature; 0 = greedy.
    pub temperature: f32,
    /// Nucleus mass that is kept; 1.0 = all.
    pub top_p: f32,
    /// Maximum number of tokens to sample in this call.
    pub max_new_tokens: usize,
    /// Tokens that end the turn. The one that was sampled is the last output token.
    pub stop_token_ids: Vec<TokenId>,
    /// Seed of this call's random stream.
    pub seed: u64,
}

/// A request for one generation.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// Unique for every try.
    pub request_id: RequestId,
    /// The conversation. Calls of one session go to the worker that holds its KV cache.
    pub session: String,
    /// The whole conversation so far.
    pub prompt: Prompt,
    /// How to sample.
    pub sampling: Sampling,
    /// Requests with a higher priority run first. It grows with the turn, so that conversations
    /// close to their end are finished first.
    pub priority: i32,
    /// Maximum time that this call may take.
    pub deadline: Duration,
    /// Who is told of tokens before the reply is complete. An engine that cannot stream tells nothing.
    pub listener: Option<Arc<dyn TokenListener>>,
}

/// Is told the tokens of a generation while the engine samples them.
///
/// The reply itself is not affected: it has all tokens, and only it was checked. The methods are called
/// while a reply is read, so they must be fast.
pub trait TokenListener: Debug + Send + Sync {
    /// A call begins. What an earlier call of the same request reported is void: it failed.
    fn begin(&self);

    /// These tokens follow those since [`TokenListener::begin`]. Their ids are as the server sent them.
    fn sampled(&self, ids: &[TokenId]);
}

/// A conversation, in the form that the engine takes; see
/// [`Engine::takes_messages`](crate::Engine::takes_messages).
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Token ids. The reply is [`Reply::Tokens`](crate::Reply::Tokens).
    Tokens(TokenPrompt),
    /// Chat messages. The reply is [`Reply::Message`](crate::Reply::Message).
    Messages(MessagePrompt),
}

impl Prompt {
    /// Length in tokens; an estimate for a prompt in messages.
    pub fn token_count(&self) -> usize {
        match self {
            Self::Tokens(prompt) => prompt.ids.len(),
            Self::Messages(prompt) => prompt.estimated_tokens,
        }
    }
}

/// A prompt in token ids. Cloning it does not copy them.
#[derive(Debug, Clone)]
pub struct TokenPrompt {
    /// All tokens so far, `[P]`, shared with the episode that owns them.
    pub ids: Arc<Vec<TokenId>>,
    /// First absolute position whose routing row is requested; `None` = no rows.
    pub routed_experts_start: Option<usize>,
    /// Namespace of the prefix cache: the KV cache of another policy version is never reused.
    pub cache_namespace: PolicyVersion,
}

/// A prompt in messages. Cloning it does not copy them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MessagePrompt {
    /// All messages so far.
    pub messages: Arc<Vec<ChatMessage>>,
    /// JSON schemas of the tools. With them the server separates tool calls from text.
    pub tools: Arc<Vec<serde_json::Value>>,
    /// Length in tokens by our own tokenizer and template, which may differ from the server's.
    pub estimated_tokens: usize,
    /// The prompt of the conversation's last reply; `None` before the first one.
    pub counted: Option<CountedPrompt>,
}

/// Length in tokens of an earlier prompt of the same conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountedPrompt {
    /// As [`MessagePrompt::estimated_tokens`].
    pub estimated: usize,
    /// As the server reported it with its reply.
    pub reported: usize,
}

impl MessagePrompt {
    /// Estimated tokens of what the server has not counted yet.
    pub(crate) fn uncounted_tokens(&self) -> usize {
        let counted = self.counted.map_or(0, |counted| counted.estimated);
        self.estimated_tokens.saturating_sub(counted)
    }

    /// Length in tokens as well as it is known: what the server counted, and an estimate of the rest.
    pub(crate) fn known_tokens(&self) -> usize {
        let counted = self.counted.map_or(0, |counted| counted.reported);
        counted.saturating_add(self.uncounted_tokens())
    }
}

/// A conversation that is about to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOpening<'a> {
    /// The conversation, as in [`GenerateRequest::session`].
    pub session: &'a str,
    /// Conversations of the same group start with the same prompt.
    pub group: Option<&'a str>,
    /// Length of that prompt in tokens.
    pub prompt_tokens: usize,
}
