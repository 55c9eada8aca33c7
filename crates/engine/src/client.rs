//! One inference server over HTTP, whatever its dialect: permits, deadlines and limits, and the rule
//! that nothing is sampled from unknown weights.

use crate::api::{Engine, EngineInfo};
use crate::capability::Severity;
use crate::chat::ChatServerOptions;
use crate::dialect::{Capabilities, Dialect, GenerateOptions};
use crate::error::{EngineError, EngineErrorKind, ErrorDetail};
use crate::frames::new_tokens;
use crate::generation::{Reply, VersionSpan};
use crate::http::{Server, send, send_streaming};
use crate::reply::{CheckedReply, ExpectedReply};
use crate::request::{GenerateRequest, Prompt, TokenPrompt};
use async_trait::async_trait;
use backon::{ConstantBuilder, Retryable};
use bytes::Bytes;
use camino::Utf8Path;
use orchestrate_settings::TlsClientPem;
use orchestrate_types::{ModelShape, PolicyVersion};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Larger replies are checked outside the async threads.
const INLINE_BYTES: usize = 256 << 10;
/// Pause between two probes of a server that is starting.
const START_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How to reach one server.
#[derive(Clone)]
pub struct ClientOptions {
    /// Base URL, e.g. `http://127.0.0.1:30000`.
    pub url: String,
    /// API key, sent as a bearer token.
    pub api_key: Option<String>,
    /// Authorities that sign the server's certificate, and the client's own certificate.
    pub tls: TlsClientPem,
    /// Shape of the model that it serves. Replies are checked against it.
    pub shape: ModelShape,
    /// Maximum number of concurrent generations, at least 1.
    pub max_in_flight: usize,
    /// Whether a server without routed experts is refused.
    pub require_routed_experts: bool,
    /// Maximum time of one weight update.
    pub sync_timeout: Duration,
    /// Name of the model, for servers that require it in requests.
    pub served_model: Option<String>,
    /// How requests to a chat server differ from the common form.
    pub chat: ChatServerOptions,
}

impl std::fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientOptions")
            .field("url", &self.url)
            .field("api_key", &self.api_key.as_ref().map(|_| "(not shown)"))
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

/// Which weights the server has, as far as this client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    /// Not synced by this client. Whatever version the server reports is trusted.
    NotSynced,
    /// The last sync succeeded with this version.
    Synced(PolicyVersion),
    /// A sync failed halfway, or the server reverted to other weights: nothing may be sampled.
    Unknown,
}

/// The client of one server with dialect `D`.
#[derive(Debug)]
pub struct Client<D> {
    server: Server,
    shape: Arc<ModelShape>,
    permits: Semaphore,
    require_routed_experts: bool,
    sync_timeout: Duration,
    /// Whether the server was started for priorities. Otherwise it refuses them.
    priorities: AtomicBool,
    /// Whether it can stream replies. Unknown before the first probe, when nothing is streamed.
    streams: AtomicBool,
    /// Number of data-parallel ranks behind the address.
    ranks: AtomicUsize,
    /// Maximum sequence length in tokens: the smaller of the model's and the server's.
    context: AtomicUsize,
    weights: Mutex<Weights>,
    syncing: tokio::sync::Mutex<()>,
    dialect: PhantomData<fn() -> D>,
}

impl<D: Dialect> Client<D> {
    /// A client, which connects on the first call. Proxy settings of the environment are ignored.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unsupported`] if the URL or the API key is invalid, or the HTTP client
    /// cannot be set up.
    pub fn new(options: ClientOptions) -> Result<Self, EngineError> {
        Ok(Self {
            server: Server::new(&options.url, options.api_key.as_deref(), &options.tls)?,
            context: AtomicUsize::new(options.shape.context),
            shape: Arc::new(options.shape),
            permits: Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            require_routed_experts: options.require_routed_experts,
            sync_timeout: options.sync_timeout,
            priorities: AtomicBool::new(false),
            streams: AtomicBool::new(false),
            ranks: AtomicUsize::new(1),
            weights: Mutex::new(Weights::NotSynced),
            syncing: tokio::sync::Mutex::new(()),
            dialect: PhantomData,
        })
    }

    /// A client of a server that answers. Waits up to `start_timeout` for a server that is starting.
    ///
    /// # Errors
    /// Those of [`Engine::info`]; after the timeout the last one.
    pub async fn connect(
        options: ClientOptions,
        start_timeout: Duration,
    ) -> Result<(Self, EngineInfo), EngineError> {
        let client = Self::new(options)?;
        let info = wait_for_start(&client, start_timeout).await?;
        Ok((client, info))
    }

    /// Asks what the server is, and remembers what requests depend on.
    pub(crate) async fn query_capabilities(&self) -> Result<Capabilities, EngineError> {
        let found = D::capabilities(&self.server, &self.shape).await?;
        self.priorities.store(found.priorities, Ordering::Relaxed);
        self.streams.store(D::STREAMS && !found.streams_increments, Ordering::Relaxed);
        self.ranks.store(found.ranks.max(1), Ordering::Relaxed);
        let context = found.info.context.unwrap_or(usize::MAX).min(self.shape.context);
        self.context.store(context, Ordering::Relaxed);
        Ok(found)
    }

    /// Base URL, which names the worker in replies.
    pub(crate) fn url(&self) -> &str {
        self.server.base()
    }

    pub(crate) fn model(&self) -> &ModelShape {
        &self.shape
    }

    /// Maximum sequence length in tokens.
    pub(crate) fn context(&self) -> usize {
        self.context.load(Ordering::Relaxed)
    }

    fn weights(&self) -> Weights {
        *self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_weights(&self, weights: Weights) {
        *self.weights.lock().unwrap_or_else(PoisonError::into_inner) = weights;
    }

    /// Refuses tokens of weights that this client did not sync: a server that restarted serves its
    /// first checkpoint again.
    fn check_versions(
        &self,
        spans: &[VersionSpan],
        before: Weights,
    ) -> Result<(), EngineErrorKind> {
        let Weights::Synced(lowest) = before else { return Ok(()) };
        let highest = match self.weights() {
            Weights::Synced(now) => now.max(lowest),
            // A sync is running: what was sampled before it has the previous version.
            Weights::NotSynced | Weights::Unknown => lowest,
        };
        let outside = spans.iter().find(|span| span.version < lowest || span.version > highest);
        outside.map_or(Ok(()), |span| {
            self.set_weights(Weights::Unknown);
            Err(EngineErrorKind::unsupported(format!(
                "it serves policy version {}, but {lowest} was synced; sync its weights again",
                span.version
            )))
        })
    }

    /// Refuses requests that would harm the server, or that it would refuse. Returns the number of
    /// tokens to sample: servers differ in whether they refuse or shorten longer requests.
    fn check_request(
        &self,
        request: &GenerateRequest,
        prompt: &TokenPrompt,
    ) -> Result<usize, EngineErrorKind> {
        let tokens = prompt.ids.len();
        let context = self.context();
        let room = context.saturating_sub(tokens);
        if tokens == 0 {
            return Err(EngineErrorKind::refused(400, "a prompt without tokens"));
        }
        if room == 0 {
            let message = format!("the prompt has {tokens} tokens, and the context {context}");
            return Err(EngineErrorKind::ContextFull(message));
        }
        // With some backends an id outside the vocabulary crashes the whole server.
        if let Some(id) = prompt.ids.iter().find(|&&id| id as usize >= self.shape.vocab) {
            let message = format!("prompt token {id} is outside the vocabulary");
            return Err(EngineErrorKind::refused(400, message));
        }
        let start = prompt.routed_experts_start.unwrap_or(0);
        if start > tokens {
            let message = format!("rows from position {start} of a prompt of {tokens} tokens");
            return Err(EngineErrorKind::refused(400, message));
        }
        Ok(request.sampling.max_new_tokens.min(room))
    }

    /// Samples one turn, and also returns which optional fields the reply had.
    pub(crate) async fn sample(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<CheckedReply, EngineErrorKind> {
        let prompt = match &request.prompt {
            Prompt::Tokens(prompt) => prompt,
            Prompt::Messages(_) => {
                return Err(EngineErrorKind::unsupported("prompts must be tokens, not messages"));
            }
        };
        let max_new_tokens = self.check_request(request, prompt)?;
        // The semaphore is never closed, so this is never an error.
        let permit = self.permits.acquire().await;
        let before = self.weights();
        let serving = match before {
            Weights::NotSynced => PolicyVersion(0),
            Weights::Synced(version) => version,
            Weights::Unknown => {
                let message = "its weights are unknown after a failed update; sync them again";
                return Err(EngineErrorKind::unsupported(message));
            }
        };
        let send_priority = self.priorities.load(Ordering::Relaxed);
        let listener = request.listener.as_deref();
        let streamed = listener.filter(|_| self.streams.load(Ordering::Relaxed));
        let options =
            GenerateOptions { max_new_tokens, send_priority, rank, stream: streamed.is_some() };
        let body = D::body(request, prompt, &options);
        let mut post = self.server.sampling_request(D::GENERATE, body, &request.session);
        if let (Some(header), Some(rank)) = (D::RANK_HEADER, rank) {
            post = post.header(header, rank);
        }
        let expected = ExpectedReply {
            request_id: request.request_id.as_str().to_owned(),
            prompt_tokens: prompt.ids.len(),
            max_new_tokens,
            routed_experts_start: prompt.routed_experts_start,
            shape: Arc::clone(&self.shape),
            serving,
        };
        if let Some(listener) = listener {
            listener.begin();
        }
        let body = match streamed {
            None => send(post, request.deadline, expected.body_limit()).await,
            Some(listener) => {
                let mut known = 0;
                let progress = |frame: &[u8]| {
                    let new = new_tokens(frame, known);
                    known += new.len();
                    listener.sampled(&new);
                };
                send_streaming(post, request.deadline, expected.body_limit(), progress).await
            }
        };
        if matches!(body, Err(EngineErrorKind::TimedOut(_))) {
            // The closed connection aborts the request, too, but only when the server notices.
            if let Err(error) = D::abort(&self.server, &request.request_id).await {
                tracing::debug!(request_id = %request.request_id, %error, "abort failed");
            }
        }
        drop(permit);
        let mut checked = Self::check_reply(body?, expected).await?;
        self.check_versions(checked.generation.versions(), before)?;
        self.url().clone_into(&mut checked.generation.worker);
        Ok(checked)
    }

    async fn check_reply(
        body: Bytes,
        expected: ExpectedReply,
    ) -> Result<CheckedReply, EngineErrorKind> {
        if body.len() <= INLINE_BYTES {
            return D::read(&body, &expected);
        }
        tokio::task::spawn_blocking(move || D::read(&body, &expected)).await.unwrap_or_else(
            |error| {
                let detail = ErrorDetail::caused_by("checking it failed", error);
                Err(EngineErrorKind::InvalidReply(detail))
            },
        )
    }
}

/// Waits up to `timeout` for a server that is starting.
pub(crate) async fn wait_for_start(
    engine: &impl Engine,
    timeout: Duration,
) -> Result<EngineInfo, EngineError> {
    let started = tokio::time::Instant::now();
    let may_be_starting = |error: &EngineError| {
        let transient = match &error.kind {
            EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
            EngineErrorKind::Refused { status, .. } => matches!(status, 429 | 502 | 503 | 504),
            EngineErrorKind::ContextFull(_)
            | EngineErrorKind::InvalidReply(_)
            | EngineErrorKind::GenerationFailed(_)
            | EngineErrorKind::Unsupported(_) => false,
        };
        transient && started.elapsed() < timeout
    };
    let backoff = ConstantBuilder::default().with_delay(START_POLL_INTERVAL).without_max_times();
    (|| engine.info()).retry(backoff).when(may_be_starting).await
}

#[async_trait]
impl<D: Dialect> Engine for Client<D> {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let Capabilities { info, findings, .. } = self.query_capabilities().await?;
        let refusal = findings.into_iter().find(|finding| finding.severity == Severity::Refusal);
        match refusal.filter(|_| self.require_routed_experts) {
            Some(finding) => {
                let kind = EngineErrorKind::unsupported(finding.to_string());
                Err(self.server.error("probe", kind))
            }
            None => Ok(info),
        }
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn data_parallel_ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed)
    }

    fn worker_of(&self, _session: &str) -> Option<String> {
        Some(self.url().to_owned())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Reply, EngineError> {
        match self.sample(request, rank).await {
            Ok(checked) => Ok(Reply::Tokens(checked.generation)),
            Err(kind) => Err(self.server.error(D::GENERATE, kind)),
        }
    }

    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let _one_at_a_time = self.syncing.lock().await;
        self.set_weights(Weights::Unknown);
        // Running requests are aborted. Their callers resume them under the new weights.
        D::pause(&self.server, self.sync_timeout).await?;
        let name = version.to_string();
        let loaded = D::load(&self.server, checkpoint, &name, self.sync_timeout).await;
        // Resumed even after a failure, because a paused server would hold every later call. This
        // client still refuses to sample until a sync succeeds.
        let resumed = D::resume(&self.server).await;
        loaded?;
        resumed?;
        self.set_weights(Weights::Synced(version));
        Ok(())
    }
}
