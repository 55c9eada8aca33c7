//! The seam: what the rest of the program asks of an inference engine. No HTTP types here.

use crate::chat::{ChatTurn, Conversation};
use camino::Utf8Path;
use orchestrate_routing::RoutedRows;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, Retry, TokenId};
use std::sync::Arc;
use std::time::Duration;

/// How to sample. Temperature and top-p apply to the distribution the log-probs describe.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Softmax temperature; 0 = greedy.
    pub temperature: f32,
    /// Nucleus mass kept, 1.0 = all.
    pub top_p: f32,
    /// Most tokens to sample in this call.
    pub max_new_tokens: usize,
    /// Tokens that end the turn (kept as the last output token).
    pub stop_token_ids: Vec<TokenId>,
    /// Seed of this call's random stream.
    pub seed: u64,
}

/// One generation: the whole conversation so far, as token ids.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// New for every try.
    pub request_id: RequestId,
    /// The conversation; calls of one session go to the worker that holds its KV cache.
    pub session: String,
    /// All tokens so far, `[P]`; shared with the episode that they grow in, and with a fleet that
    /// keeps them for another worker.
    pub token_ids: Arc<Vec<TokenId>>,
    /// The same conversation in messages, for an engine that takes those; see
    /// [`Engine::takes_messages`].
    pub conversation: Option<Conversation>,
    /// How to sample.
    pub sampling: Sampling,
    /// First absolute position whose routing row is wanted; `None` = no rows at all.
    pub routed_experts_start: Option<usize>,
    /// Name space of the prefix cache: KV of another policy version is never reused.
    pub cache_namespace: PolicyVersion,
    /// Higher runs first; grows with the turn, so that finished work is not kept waiting.
    pub priority: i32,
    /// Longest time this call may take.
    pub deadline: Duration,
}

/// A conversation that is about to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOpening<'a> {
    /// The conversation, as its requests will name it.
    pub session: &'a str,
    /// Conversations of equal group begin with the same prompt.
    pub group: Option<&'a str>,
    /// Tokens of that prompt.
    pub prompt_tokens: usize,
}

/// Why the engine stopped sampling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was sampled.
    Stop,
    /// `max_new_tokens` or the context end was reached.
    Length,
    /// Cut from outside (weight update, operator); tokens so far are valid.
    Abort,
}

/// Output tokens `start..end` of one reply were sampled under `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionSpan {
    /// Policy version.
    pub version: PolicyVersion,
    /// First output token.
    pub start: usize,
    /// One past the last output token.
    pub end: usize,
}

/// A checked reply.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Sampled token ids `[N]`, each below the vocabulary size.
    pub output_ids: Vec<TokenId>,
    /// Log-probability of each sampled token `[N]`, nats, ≤ 0.
    pub logprobs: Vec<f32>,
    /// Why it stopped.
    pub finish: Finish,
    /// Prompt tokens answered from the prefix cache.
    pub cached_tokens: usize,
    /// Rows of positions `start .. P+N-1`, MoE layers only, narrowed; absent if not asked for.
    pub routed_experts: Option<RoutedRows>,
    /// Which policy version sampled which output tokens; covers `0..N`.
    pub versions: Vec<VersionSpan>,
    /// Times the engine dropped this request's KV and prefilled it again.
    pub num_retractions: u32,
    /// Bytes of the routing payload on the wire.
    pub routing_wire_bytes: usize,
    /// Base URL of the worker that answered; its KV cache holds this conversation.
    pub worker: String,
    /// What was written, from an engine that gives words: then there are no ids, log-probabilities
    /// and versions.
    pub turn: Option<ChatTurn>,
}

/// What a probe of an engine found.
#[derive(Debug, Clone)]
pub struct EngineInfo {
    /// Name and version, for people.
    pub engine: String,
    /// Folder or name of the model it serves.
    pub model_path: String,
    /// Whether it returns routed experts.
    pub routed_experts: bool,
    /// Weight version it serves now; `None` if the engine's word for it is not a number.
    pub policy_version: Option<PolicyVersion>,
    /// Longest sequence it accepts, in tokens, where it says so.
    pub context: Option<usize>,
    /// Granularity of its prefix cache, in tokens.
    pub page_size: usize,
}

/// What went wrong with an engine call.
#[derive(Debug, thiserror::Error)]
pub enum EngineErrorKind {
    /// No connection, or it broke.
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    /// No complete answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// It answered with an HTTP error.
    #[error("answered {status}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its own words.
        message: String,
        /// The pause it asks for.
        retry_after: Option<Duration>,
    },
    /// The reply does not hold what it must; nothing of it was used.
    #[error("sent an invalid reply: {0}")]
    InvalidReply(String),
    /// It cannot do what the run needs.
    #[error("is unfit: {0}")]
    Unfit(String),
}

/// An engine error: which engine, doing what, and why.
#[derive(Debug, thiserror::Error)]
#[error("engine {engine} ({call}): {kind}")]
pub struct EngineError {
    /// Base URL.
    pub engine: String,
    /// The route that was called.
    pub call: &'static str,
    /// What happened.
    pub kind: EngineErrorKind,
}

impl EngineErrorKind {
    /// A refusal in `message`'s words, without a pause to keep.
    pub fn refused(status: u16, message: impl Into<String>) -> Self {
        Self::Refused { status, message: message.into(), retry_after: None }
    }
}

impl EngineError {
    /// What the caller may do.
    pub fn retry(&self) -> Retry {
        match &self.kind {
            EngineErrorKind::Unreachable(_) => Retry::After(Duration::from_millis(500)),
            EngineErrorKind::TimedOut(_) | EngineErrorKind::InvalidReply(_) => Retry::Now,
            EngineErrorKind::Refused { status, retry_after, .. } => match status {
                408 | 429 | 500 | 502 | 503 | 504 => {
                    Retry::After(retry_after.unwrap_or(Duration::from_secs(1)))
                }
                _ => Retry::Never,
            },
            EngineErrorKind::Unfit(_) => Retry::Never,
        }
    }
}

/// An inference engine, or a fleet of them.
#[async_trait::async_trait]
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// Asks what the engine is and what it can do.
    async fn info(&self) -> Result<EngineInfo, EngineError>;

    /// Shape of the served model, as rows are checked against it.
    fn shape(&self) -> &ModelShape;

    /// The worker that would answer a conversation's next call, by the name its replies carry;
    /// `None` where that is not known before the call.
    fn worker_of(&self, session: &str) -> Option<String> {
        let _ = session;
        None
    }

    /// A conversation is about to begin: where there is a choice of workers, it is made now, and
    /// [`Engine::worker_of`] knows it. Without this call it is made at the first request.
    fn open_session(&self, opening: &SessionOpening<'_>) {
        let _ = opening;
    }

    /// The conversation is over: nothing of it need be remembered.
    fn close_session(&self, session: &str) {
        let _ = session;
    }

    /// Whether it takes messages and gives words. Such an engine hides tokens, log-probabilities
    /// and routed experts: it can be evaluated, and not trained with.
    fn takes_messages(&self) -> bool {
        false
    }

    /// Data-parallel ranks behind this one address, at least 1; each has a prefix cache of its own.
    fn data_parallel_ranks(&self) -> usize {
        1
    }

    /// As [`Engine::generate`], on one data-parallel rank, below
    /// [`Engine::data_parallel_ranks`]; `None` leaves the choice to the engine.
    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Generation, EngineError> {
        let _ = rank;
        self.generate(request.clone()).await
    }

    /// Samples one turn. Dropping the future aborts the request on the engine.
    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError>;

    /// Loads new weights from a Hugging Face folder and serves them as `version`: pause, update,
    /// flush, check the version, continue. On an error the engine serves no unknown version:
    /// the caller must sync again before it generates.
    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError>;

    /// Aborts all requests of a session that no longer has a caller.
    async fn abort(&self, request_id: &RequestId) -> Result<(), EngineError>;
}
