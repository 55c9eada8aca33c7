//! Servers that take and give words: the OpenAI-compatible chat form, for evaluation only.
//!
//! They hide token ids, log-probabilities and routed experts, and rewrite a conversation into
//! tokens as their own template says. What they answer can be measured, and never trained on.

mod reply;

use crate::http::{Models, Wire, exchange};
use crate::kind::Worker;
use crate::reply::short;
use crate::{
    ClientOptions, Engine, EngineError, EngineErrorKind, EngineInfo, Finding, Finish,
    GenerateRequest, Generation, ProbeReport,
};
use async_trait::async_trait;
use camino::Utf8Path;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId};
use reply::read;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;

const COMPLETIONS: &str = "/v1/chat/completions";
const MODELS: &str = "/v1/models";
/// Most bytes of one reply: far more than a turn has.
const REPLY_LIMIT: usize = 16 << 20;
/// Longest time for a few words: a server that warms up is slow.
const PROBE_DEADLINE: Duration = Duration::from_mins(2);
/// The only version of weights that nobody exchanges.
const VERSION: PolicyVersion = PolicyVersion(0);
/// In the words of different servers, that a conversation is longer than the model's context.
const TOO_LONG: [&str; 4] = ["context length", "context_length", "context window", "context size"];

/// A conversation in messages, in the form of `/v1/chat/completions`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// All messages so far.
    pub messages: Arc<Vec<ChatMessage>>,
    /// JSON schemas of the tools; with them the server answers calls apart from words.
    pub tools: Arc<Vec<Value>>,
}

/// One message.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Its words.
    pub content: String,
    /// Calls of an assistant message.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Of a tool's message: which call it answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// A call that a server found in what the model wrote.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// The server's name for it.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// What is called.
    pub function: CalledFunction,
}

/// What a [`ToolCall`] calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalledFunction {
    /// Name of the tool.
    pub name: String,
    /// A JSON object as the model wrote it, right or wrong.
    pub arguments: String,
}

/// What a chat server says the model wrote in one turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatTurn {
    /// Words before the calls.
    pub content: String,
    /// Its thinking, where the server takes it apart.
    pub reasoning: Option<String>,
    /// Calls, where the server takes them apart.
    pub tool_calls: Vec<ToolCall>,
}

/// The client of one OpenAI-compatible chat server.
#[derive(Debug)]
pub struct ChatClient {
    wire: Wire,
    /// The model's name there.
    model: String,
    shape: ModelShape,
    /// The longest sequence, by the server's word.
    context: AtomicUsize,
    permits: Semaphore,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: &'a [ChatMessage],
    #[serde(skip_serializing_if = "<[Value]>::is_empty")]
    tools: &'a [Value],
    temperature: f32,
    top_p: f32,
    max_tokens: usize,
    seed: u64,
}

/// What is known of a model that is reached by words alone: no experts, and no bounds of ours.
pub fn unknown_shape() -> ModelShape {
    ModelShape {
        hidden_layers: 0,
        moe_layers: Vec::new(),
        experts: 0,
        top_k: 0,
        vocab: usize::MAX,
        context: usize::MAX,
    }
}

impl ChatClient {
    /// A client; connects on the first call. The URL may end in `/v1`, as such URLs often do.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unfit`] without the model's name there, or when the HTTP client or the
    /// API key cannot be used.
    pub fn new(options: ClientOptions) -> Result<Self, EngineError> {
        let base = options.url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let wire = Wire::new(base, options.api_key.as_deref())?;
        let model = options.served_model.ok_or_else(|| {
            let words = "chat servers are asked for a model by name: set engine.served_model";
            wire.error("connect", EngineErrorKind::Unfit(words.to_owned()))
        })?;
        Ok(Self {
            wire,
            model,
            shape: unknown_shape(),
            context: AtomicUsize::new(usize::MAX),
            permits: Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
        })
    }

    fn body(
        &self,
        request: &GenerateRequest,
        conversation: &Conversation,
        max_tokens: usize,
    ) -> Result<String, EngineErrorKind> {
        let sampling = &request.sampling;
        let body = Body {
            model: &self.model,
            messages: &conversation.messages,
            tools: &conversation.tools,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            max_tokens,
            // Servers take it for a signed number.
            seed: sampling.seed >> 1,
        };
        serde_json::to_string(&body).map_err(|error| {
            EngineErrorKind::Unfit(format!("a request cannot be written: {error}"))
        })
    }

    async fn converse(&self, request: &GenerateRequest) -> Result<Generation, EngineErrorKind> {
        let Some(conversation) = &request.conversation else {
            let words = "it takes messages, not token ids";
            return Err(EngineErrorKind::Unfit(words.to_owned()));
        };
        let Ok(_permit) = self.permits.acquire().await else {
            return Err(EngineErrorKind::Unreachable("its client was closed".to_owned()));
        };
        let room = self.context.load(Ordering::Relaxed).saturating_sub(request.token_ids.len());
        let mut max_tokens = request.sampling.max_new_tokens.min(room).max(1);
        let (finish, turn, cached_tokens) = loop {
            let body = self.body(request, conversation, max_tokens)?;
            let post = self.wire.post(COMPLETIONS, body, &request.session);
            match exchange(post, request.deadline, REPLY_LIMIT).await {
                Ok(body) => break read(&body, conversation.messages.len())?,
                Err(EngineErrorKind::Refused { status: 400 | 413 | 422, message, .. })
                    if is_too_long(&message) =>
                {
                    if max_tokens == 1 {
                        // No reply is lost by it: there is no room for one.
                        tracing::debug!(message, "a conversation is as long as the context");
                        break (Finish::Length, ChatTurn::default(), 0);
                    }
                    // The server counts the prompt by its own tokenizer and template, and what may
                    // be sampled with it: less of that may have room.
                    max_tokens = max_tokens.div_ceil(4);
                }
                Err(error) => return Err(error),
            }
        };
        Ok(Generation {
            output_ids: Vec::new(),
            logprobs: Vec::new(),
            finish,
            cached_tokens: cached_tokens.min(request.token_ids.len()),
            routed_experts: None,
            versions: Vec::new(),
            num_retractions: 0,
            routing_wire_bytes: 0,
            worker: self.wire.base().to_owned(),
            turn: Some(turn),
        })
    }
}

fn is_too_long(message: &str) -> bool {
    let message = message.to_lowercase();
    TOO_LONG.iter().any(|words| message.contains(words))
}

#[async_trait]
impl Engine for ChatClient {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let served: Option<Models> = self.wire.ask_if_known(MODELS).await?;
        let mut context = None;
        // Who does not tell what is served finds out by the first request.
        if let Some(Models { data }) = served {
            let Some(model) = data.iter().find(|model| model.id == self.model) else {
                let all: Vec<&str> = data.iter().take(8).map(|model| model.id.as_str()).collect();
                let words = format!(
                    "it does not serve `{}`: set engine.served_model to one of: {}",
                    self.model,
                    short(&all.join(", "))
                );
                return Err(self.wire.error(MODELS, EngineErrorKind::Unfit(words)));
            };
            context = model.max_model_len;
        }
        self.context.store(context.unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(EngineInfo {
            engine: "OpenAI-compatible chat server".to_owned(),
            model_path: self.model.clone(),
            routed_experts: false,
            policy_version: Some(VERSION),
            context,
            page_size: 1,
        })
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn takes_messages(&self) -> bool {
        true
    }

    fn worker_of(&self, _session: &str) -> Option<String> {
        Some(self.wire.base().to_owned())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        _rank: Option<usize>,
    ) -> Result<Generation, EngineError> {
        self.converse(request).await.map_err(|kind| self.wire.error(COMPLETIONS, kind))
    }

    /// Its weights are its own: the ones it has are version 0, and it can be given no others.
    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        if version == VERSION {
            return Ok(());
        }
        let words = "a chat server cannot be given weights".to_owned();
        Err(self.wire.error("sync", EngineErrorKind::Unfit(words)))
    }

    /// A request ends with its connection; there is no other way.
    async fn abort(&self, _request_id: &RequestId) -> Result<(), EngineError> {
        Ok(())
    }
}

#[async_trait]
impl Worker for ChatClient {
    /// Asks for a few words: whether the model is there, and the key is right.
    async fn probe(&self) -> Result<ProbeReport, EngineError> {
        let info = self.info().await?;
        let body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": "Answer with one word."}],
            "max_tokens": 16,
        });
        let post = self.wire.post(COMPLETIONS, body.to_string(), "probe");
        let answer = exchange(post, PROBE_DEADLINE, REPLY_LIMIT).await;
        let findings = match answer.and_then(|body| read(&body, 1).map(drop)) {
            Ok(()) => Vec::new(),
            Err(kind @ (EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_))) => {
                return Err(self.wire.error(COMPLETIONS, kind));
            }
            Err(kind) => {
                let remedy = "see engine.served_model, engine.api_key_env and the server's log";
                vec![Finding::refusal("generation", format!("{COMPLETIONS} {kind}"), remedy)]
            }
        };
        Ok(ProbeReport { info, facts: vec![("use", "evaluation only".to_owned())], findings })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_say_in_different_words_that_a_conversation_is_too_long() {
        for message in [
            "This model's maximum context length is 1024 tokens. However, you requested 1100",
            "Requested token count exceeds the model's maximum context length of 1024 tokens",
            "the request exceeds the available context size. try increasing the context size",
            "context_length_exceeded",
            "prompt is too large for the context window",
        ] {
            assert!(is_too_long(message), "{message}");
        }
        assert!(!is_too_long("max_tokens is too large"));
    }
}
