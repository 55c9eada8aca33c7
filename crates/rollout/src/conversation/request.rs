//! Requests for replies, and why there may be none.

use super::tree::HistoryMessage;
use crate::api::{Message, MessageExtra};
use orchestrate_gateway::AskedSampling;
use orchestrate_types::TokenId;
use std::sync::Arc;

/// What a request wants continued: always the whole history, without the reply.
#[derive(Debug, Clone)]
pub(crate) enum RequestPrompt {
    /// Messages, which the chat template renders.
    Messages {
        /// Oldest first.
        messages: Vec<Arc<HistoryMessage>>,
        /// JSON schemas of the tools that the agent offers, in the form that chat templates read.
        tools: Arc<Vec<serde_json::Value>>,
        /// Whether the model is asked to think, as [`crate::ChatModel`] decides it.
        thinking: Option<bool>,
    },
    /// The prompt in token ids, `[P]`, of a client that renders it itself.
    Tokens(Arc<[TokenId]>),
}

impl RequestPrompt {
    /// The messages; none of a prompt in tokens.
    pub(super) fn messages(&self) -> &[Arc<HistoryMessage>] {
        match self {
            Self::Messages { messages, .. } => messages,
            Self::Tokens(_) => &[],
        }
    }

    /// Bytes of the texts of the messages from number `first` on. Tokens are counted as 0: they are not
    /// tokenized.
    pub(super) fn bytes_from(&self, first: usize) -> usize {
        self.messages().iter().skip(first).map(|entry| entry.bytes()).sum()
    }

    pub(super) fn tools(&self) -> Arc<Vec<serde_json::Value>> {
        match self {
            Self::Messages { tools, .. } => Arc::clone(tools),
            Self::Tokens(_) => Arc::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Messages { messages, .. } => messages.is_empty(),
            Self::Tokens(ids) => ids.is_empty(),
        }
    }
}

/// A request for a reply.
#[derive(Debug, Clone)]
pub(crate) struct ReplyRequest {
    /// What the reply continues.
    pub(crate) prompt: RequestPrompt,
    /// Maximum number of tokens that the agent asks for.
    pub(crate) max_tokens: Option<usize>,
    /// Strings that end the reply; none is empty.
    pub(crate) stops: Arc<[String]>,
    /// How the reply is to be sampled, where the agent decides.
    pub(crate) sampling: AskedSampling,
    /// Number of this sample among those that one request asks for.
    pub(crate) sample: usize,
    /// Whether the agent says that it repeats a request whose reply it did not get.
    pub(crate) repeats: bool,
    /// Fields of the request that something else decides.
    pub(crate) overridden: Arc<[String]>,
}

/// Why there is no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ReplyError {
    /// The request cannot be rendered as a prompt.
    #[error("{0}")]
    Refused(String),
    /// The prompt leaves no room for a reply.
    #[error("the prompt has {prompt} tokens, but at most {limit} are possible")]
    TooLong {
        /// Its length in tokens.
        prompt: usize,
        /// Longest sequence in tokens.
        limit: usize,
    },
    /// The episode has no generations or time left, or has ended.
    #[error("{0}")]
    Ended(String),
    /// The engine failed. The attempt is broken.
    #[error("{0}")]
    Failed(String),
}

/// Digest of a prompt, `[P]`.
pub(super) fn digest_of_ids(ids: &[TokenId]) -> [u8; 32] {
    let mut bytes = Vec::with_capacity(size_of_val(ids));
    for id in ids {
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    *blake3::hash(&bytes).as_bytes()
}

/// Digest of everything that makes two requests the same. `tools` is the digest of the request's tools.
pub(super) fn digest_of(request: &ReplyRequest, tools: &[u8; 32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    match &request.prompt {
        RequestPrompt::Messages { messages, .. } => {
            part(tools);
            part(&(messages.len() as u64).to_le_bytes());
            for entry in messages {
                let Message { role, content, tool_calls, extra } = &entry.message;
                let MessageExtra { reasoning: _, call_ids, tool_call_id, name } = extra;
                part(role.as_bytes());
                part(content.as_bytes());
                part(&(tool_calls.len() as u64).to_le_bytes());
                for call in tool_calls {
                    part(call.name.as_bytes());
                    part(call.arguments.to_string().as_bytes());
                }
                for id in call_ids {
                    part(id.as_bytes());
                }
                part(tool_call_id.as_deref().unwrap_or_default().as_bytes());
                part(name.as_deref().unwrap_or_default().as_bytes());
                // All of these tell replies with the same message apart.
                for (index, id) in entry.own_call_ids() {
                    part(&(index as u64).to_le_bytes());
                    part(id.as_bytes());
                }
                part(&entry.reply.map(u32::to_le_bytes).unwrap_or_default());
                part(&[entry.reply.is_some().into()]);
                part(entry.reasoning.as_deref().unwrap_or_default().as_bytes());
            }
        }
        RequestPrompt::Tokens(ids) => {
            part(b"tokens");
            part(&digest_of_ids(ids));
        }
    }
    part(&(request.sample as u64).to_le_bytes());
    part(&(request.max_tokens.unwrap_or(0) as u64).to_le_bytes());
    let AskedSampling { temperature, top_p } = request.sampling;
    for asked in [temperature, top_p] {
        part(&asked.map(f32::to_le_bytes).unwrap_or_default());
        part(&[asked.is_some().into()]);
    }
    request.stops.iter().for_each(|stop| part(stop.as_bytes()));
    *hasher.finalize().as_bytes()
}
