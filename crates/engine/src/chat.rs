//! The OpenAI-compatible chat API, for evaluation only.
//!
//! Chat servers take messages, which they turn into tokens with their own template. They hide token
//! ids, log-probabilities and routed experts, so their replies can be evaluated but never trained on.

mod finish;
mod options;
mod probe;
pub(crate) mod reply;

use crate::api::{Engine, EngineInfo};
use crate::capability::{ProbeReport, Worker};
use crate::client::ClientOptions;
use crate::error::{EngineError, EngineErrorKind, ErrorDetail, Refusal};
use crate::generation::{MessageReply, Reply};
use crate::http::{ModelList, Server, send};
use crate::message::ChatMessage;
use crate::probe::BusyCalls;
use crate::reply::truncated;
use crate::request::{GenerateRequest, MessagePrompt, Prompt, Sampling};
use async_trait::async_trait;
use camino::Utf8Path;
pub use options::{ChatServerOptions, TokenLimitField};
use orchestrate_types::{ModelShape, PolicyVersion};
use reply::{model_of, read};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Semaphore;

const COMPLETIONS: &str = "/v1/chat/completions";
const MODELS: &str = "/v1/models";
/// Maximum size of one reply in bytes, far more than a turn has.
const REPLY_LIMIT: usize = 16 << 20;
/// The only policy version of a chat server: its weights cannot be updated.
const VERSION: PolicyVersion = PolicyVersion(0);
/// Tokens that a server's template may add to a prompt, whose length is only known by our own.
const TEMPLATE_TOKENS: usize = 64;

/// The client of one OpenAI-compatible chat server.
#[derive(Debug)]
pub struct ChatClient {
    server: Server,
    /// Name of the model in requests.
    model: String,
    shape: ModelShape,
    /// Maximum sequence length in tokens, as reported or set; `usize::MAX` if unknown.
    context: AtomicUsize,
    /// The first other name that a reply has had.
    answered_as: OnceLock<String>,
    permits: Semaphore,
    options: ChatServerOptions,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Messages<'a>,
    #[serde(skip_serializing_if = "<[Value]>::is_empty")]
    tools: &'a [Value],
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

/// Messages as they are sent: with the thinking of the model's turns, or without.
struct Messages<'a> {
    messages: &'a [ChatMessage],
    with_thinking: bool,
}

#[derive(Serialize)]
struct SentMessage<'a> {
    #[serde(flatten)]
    message: &'a ChatMessage,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
}

impl Serialize for Messages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.messages.iter().map(|message| {
            let thinking = message.thinking.as_ref().filter(|_| self.with_thinking);
            SentMessage {
                message,
                reasoning: thinking.and_then(|thinking| thinking.reasoning.as_deref()),
                reasoning_content: thinking
                    .and_then(|thinking| thinking.reasoning_content.as_deref()),
            }
        }))
    }
}

/// What one request asks for.
struct Wanted<'a> {
    messages: &'a [ChatMessage],
    tools: &'a [Value],
    sampling: &'a Sampling,
    max_tokens: usize,
}

/// The shape of a model behind the chat API: no experts, and no limits known.
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
    /// A client, which connects on the first call. The URL may end in `/v1`.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unsupported`] without the model's name, or if the URL or the API key is
    /// invalid.
    pub fn new(options: ClientOptions) -> Result<Self, EngineError> {
        let base = options.url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let server = Server::new(base, options.api_key.as_deref(), &options.tls)?;
        let model = options.served_model.ok_or_else(|| {
            let message = "chat requests must name a model; set engine.served_model";
            server.error("connect", EngineErrorKind::unsupported(message))
        })?;
        Ok(Self {
            server,
            model,
            shape: unknown_shape(),
            context: AtomicUsize::new(options.chat.context.unwrap_or(usize::MAX)),
            answered_as: OnceLock::new(),
            permits: Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            options: options.chat,
        })
    }

    /// Notes the model that a reply is of, if it is the first with another name than was asked for. Many servers
    /// answer an alias with the name of the model behind it.
    fn note_model(&self, reply: &[u8]) -> Option<&str> {
        let other = model_of(reply).filter(|name| *name != self.model)?;
        self.answered_as.set(other).ok()?;
        self.answered_as.get().map(String::as_str)
    }

    /// The body of a request to a server with these options.
    fn body(
        &self,
        wanted: &Wanted<'_>,
        options: &ChatServerOptions,
    ) -> Result<String, EngineErrorKind> {
        let Wanted { messages, tools, sampling, max_tokens } = *wanted;
        let is_field = |field| (options.token_limit_field == field).then_some(max_tokens);
        let body = Body {
            model: &self.model,
            messages: Messages { messages, with_thinking: options.send_thinking },
            tools,
            temperature: options.send_sampling.then_some(sampling.temperature),
            top_p: options.send_sampling.then_some(sampling.top_p),
            max_tokens: is_field(TokenLimitField::MaxTokens),
            max_completion_tokens: is_field(TokenLimitField::MaxCompletionTokens),
            // Some servers read a signed number of 32 bits.
            seed: options.send_seed.then_some(sampling.seed >> 33),
        };
        serde_json::to_string(&body).map_err(|error| {
            let detail = ErrorDetail::caused_by("cannot serialise the request", error);
            EngineErrorKind::Unsupported(detail)
        })
    }

    /// The server's message, if it refused a request because the prompt and `max_tokens` tokens are longer
    /// than the context: a code says so, or the server sent none and the known lengths come to that.
    ///
    /// # Errors
    /// Any other error.
    fn too_long(
        &self,
        error: EngineErrorKind,
        prompt: &MessagePrompt,
        max_tokens: usize,
    ) -> Result<String, EngineErrorKind> {
        match error {
            EngineErrorKind::Refused { message, meaning: Refusal::TooLong, .. } => Ok(message),
            EngineErrorKind::Refused { status: status @ (400 | 413 | 422), message, .. } => {
                let context = self.context.load(Ordering::Relaxed);
                // The server may make more of what it has not counted yet.
                let unsure = prompt.uncounted_tokens() / 4 + TEMPLATE_TOKENS;
                if prompt.known_tokens() + unsure + max_tokens > context {
                    return Ok(message);
                }
                if context < usize::MAX {
                    return Err(EngineErrorKind::refused(status, message));
                }
                let remedy = "if the conversation is longer than the model's context, set \
                              engine.context to the context's length in tokens";
                Err(EngineErrorKind::refused(status, format!("{message} ({remedy})")))
            }
            error => Err(error),
        }
    }

    async fn complete(&self, request: &GenerateRequest) -> Result<MessageReply, EngineErrorKind> {
        let prompt = match &request.prompt {
            Prompt::Messages(prompt) => prompt,
            Prompt::Tokens(_) => {
                return Err(EngineErrorKind::unsupported("prompts must be messages, not tokens"));
            }
        };
        // The semaphore is never closed, so this is never an error.
        let _permit = self.permits.acquire().await;
        let room = self.context.load(Ordering::Relaxed).saturating_sub(prompt.known_tokens());
        let mut max_tokens = request.sampling.max_new_tokens.min(room).max(1);
        let (finish, message, usage) = loop {
            let wanted = Wanted {
                messages: &prompt.messages,
                tools: &prompt.tools,
                sampling: &request.sampling,
                max_tokens,
            };
            let body = self.body(&wanted, &self.options)?;
            let post = self.server.sampling_request(COMPLETIONS, body, &request.session);
            match send(post, request.deadline, REPLY_LIMIT).await {
                Ok(body) => {
                    if let Some(other) = self.note_model(&body) {
                        tracing::warn!(
                            url = self.server.base(),
                            asked = self.model,
                            answered = truncated(other),
                            "replies of the chat server name another model than was asked for; unless that is the \
                             same model, correct engine.served_model"
                        );
                    }
                    break read(&body, prompt.messages.len())?;
                }
                Err(error) => {
                    let message = self.too_long(error, prompt, max_tokens)?;
                    if max_tokens == 1 {
                        return Err(EngineErrorKind::ContextFull(message));
                    }
                    // The server counts the prompt with its own tokenizer and template, together
                    // with the tokens to sample: fewer of them may fit.
                    max_tokens = max_tokens.div_ceil(4);
                }
            }
        };
        Ok(MessageReply {
            message,
            finish,
            prompt_tokens: usage.prompt,
            cached_tokens: usage.cached.min(prompt.estimated_tokens),
            worker: self.server.base().to_owned(),
        })
    }
}

#[async_trait]
impl Engine for ChatClient {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let served: Option<ModelList> = self.server.get_json_if_supported(MODELS).await?;
        let mut context = None;
        // Without a list of models the first request shows whether the model exists.
        if let Some(ModelList { data }) = served {
            let Some(model) = data.iter().find(|model| model.id == self.model) else {
                let all: Vec<&str> = data.iter().take(8).map(|model| model.id.as_str()).collect();
                let message = format!(
                    "it does not serve `{}`; set engine.served_model to one of: {}",
                    self.model,
                    truncated(&all.join(", "))
                );
                return Err(self.server.error(MODELS, EngineErrorKind::unsupported(message)));
            };
            context = model.max_model_len;
        }
        let context = context.into_iter().chain(self.options.context).min();
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
        Some(self.server.base().to_owned())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        _rank: Option<usize>,
    ) -> Result<Reply, EngineError> {
        match self.complete(request).await {
            Ok(reply) => Ok(Reply::Message(reply)),
            Err(kind) => Err(self.server.error(COMPLETIONS, kind)),
        }
    }

    /// The server's own weights are version 0. It cannot load any others.
    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        if version == VERSION {
            return Ok(());
        }
        let message = "the weights of a chat server cannot be updated";
        Err(self.server.error("sync", EngineErrorKind::unsupported(message)))
    }
}

#[async_trait]
impl Worker for ChatClient {
    /// Has a conversation of two turns, with the prompt, the tools and the fields of a run's requests: it shows
    /// whether the model exists, the API key is accepted, and everything that a run sends is.
    async fn probe(&self) -> Result<ProbeReport, EngineError> {
        let mut busy = BusyCalls::default();
        let info = loop {
            match self.info().await {
                Err(error) => busy.wait_after(error).await?,
                Ok(info) => break info,
            }
        };
        let (facts, findings) =
            self.converse().await.map_err(|kind| self.server.error(COMPLETIONS, kind))?;
        Ok(ProbeReport { info, facts, findings })
    }
}
