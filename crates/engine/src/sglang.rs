//! SGLang's native routes, which the embedded engine serves, too.

use crate::http::{excerpt, exchange, unreachable};
use crate::reply::{Expected, check_reply, parse_version};
use crate::{
    Engine, EngineError, EngineErrorKind, EngineInfo, GenerateRequest, Generation, VersionSpan,
};
use async_trait::async_trait;
use backon::{ConstantBuilder, Retryable};
use bytes::Bytes;
use camino::Utf8Path;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, TokenId};
use reqwest::header::HeaderValue;
use reqwest::{Method, RequestBuilder};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Questions about the engine, and aborts.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Shorter than the 5 s after which the server closes idle connections, so that no request is
/// sent on one that is being closed.
const POOL_IDLE: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Most bytes of an answer that is no generation; `/server_info` has about 40 KB.
const INFO_LIMIT: usize = 8 << 20;
/// Replies beyond this are checked off the async threads.
const INLINE_BYTES: usize = 256 << 10;
/// Pause between two looks at a server that is starting.
const START_POLL: Duration = Duration::from_millis(500);
/// MoE backends that hide the chosen experts and report zeros.
const BLIND_BACKENDS: [&str; 3] = ["flashinfer_trtllm", "flashinfer_mxfp4", "triton_kernel"];

/// How to reach one server.
#[derive(Clone)]
pub struct SglangOptions {
    /// Base URL, e.g. `http://127.0.0.1:30000`.
    pub url: String,
    /// API key, sent as bearer token.
    pub api_key: Option<String>,
    /// Shape of the model it serves; replies are checked against it.
    pub shape: ModelShape,
    /// Most generations under way at once, at least 1.
    pub max_in_flight: usize,
    /// Whether a server without routed experts is unfit.
    pub require_routed_experts: bool,
    /// Longest time one weight update may take.
    pub sync_timeout: Duration,
}

impl std::fmt::Debug for SglangOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SglangOptions")
            .field("url", &self.url)
            .field("api_key", &self.api_key.as_ref().map(|_| "(not shown)"))
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

/// Which weights this client knows the server to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serving {
    /// Not synced by this client; any numbered version is taken at its word.
    Untouched,
    /// The last sync succeeded with this version.
    Synced(PolicyVersion),
    /// An update failed half-way, or the server went back: nothing may be sampled.
    Unknown,
}

/// One SGLang server.
#[derive(Debug)]
pub struct SglangClient {
    base: String,
    api_key: Option<HeaderValue>,
    http: reqwest::Client,
    shape: Arc<ModelShape>,
    permits: Semaphore,
    require_routed_experts: bool,
    sync_timeout: Duration,
    /// The server refuses priorities unless it was started with them.
    priorities: AtomicBool,
    serving: Mutex<Serving>,
    syncing: tokio::sync::Mutex<()>,
}

#[derive(Serialize)]
struct GenerateBody<'a> {
    rid: &'a str,
    input_ids: &'a [TokenId],
    sampling_params: SamplingParams<'a>,
    return_logprob: bool,
    logprob_start_len: i32,
    return_routed_experts: bool,
    // The server refuses an explicit null here.
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts_start_len: Option<usize>,
    session_id: &'a str,
    extra_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    stream: bool,
}

/// Explicit wherever the server would otherwise take the model's own defaults.
#[derive(Serialize)]
struct SamplingParams<'a> {
    max_new_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: i32,
    min_p: f32,
    #[serde(skip_serializing_if = "<[TokenId]>::is_empty")]
    stop_token_ids: &'a [TokenId],
    skip_special_tokens: bool,
    sampling_seed: u64,
}

#[derive(Deserialize)]
struct ServerInfo {
    engine: Option<String>,
    version: Option<String>,
    model_path: Option<String>,
    context_length: Option<usize>,
    page_size: Option<usize>,
    pp_size: Option<usize>,
    #[serde(default)]
    enable_return_routed_experts: bool,
    #[serde(default)]
    enable_priority_scheduling: bool,
    #[serde(default)]
    enable_hierarchical_cache: bool,
    moe_runner_backend: Option<String>,
}

#[derive(Deserialize)]
struct ModelInfo {
    model_path: Option<String>,
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct UpdateReply {
    success: bool,
    #[serde(default)]
    message: String,
}

impl SglangClient {
    /// A client; connects on the first call. Proxies of the environment are ignored.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unfit`] when the HTTP client or the API key cannot be used.
    pub fn new(options: SglangOptions) -> Result<Self, EngineError> {
        let base = options.url.trim_end_matches('/').to_owned();
        let unfit = |words: String| EngineError {
            engine: base.clone(),
            call: "connect",
            kind: EngineErrorKind::Unfit(words),
        };
        let api_key = options
            .api_key
            .map(|key| {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                    .map_err(|_| unfit("its API key cannot be sent in a header".to_owned()))?;
                value.set_sensitive(true);
                Ok::<_, EngineError>(value)
            })
            .transpose()?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE)
            .tcp_keepalive(KEEP_ALIVE)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| unfit(unreachable(error).to_string()))?;
        Ok(Self {
            base,
            api_key,
            http,
            shape: Arc::new(options.shape),
            permits: Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            require_routed_experts: options.require_routed_experts,
            sync_timeout: options.sync_timeout,
            priorities: AtomicBool::new(false),
            serving: Mutex::new(Serving::Untouched),
            syncing: tokio::sync::Mutex::new(()),
        })
    }

    /// A client of a server that answers: waits at most `patience` for one that is starting.
    ///
    /// # Errors
    /// As [`Engine::info`], the last one when patience ends.
    pub async fn connect(
        options: SglangOptions,
        patience: Duration,
    ) -> Result<(Self, EngineInfo), EngineError> {
        let client = Self::new(options)?;
        let begun = tokio::time::Instant::now();
        let starting = |error: &EngineError| {
            let may_come = match &error.kind {
                EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
                EngineErrorKind::Refused { status, .. } => *status == 503,
                EngineErrorKind::InvalidReply(_) | EngineErrorKind::Unfit(_) => false,
            };
            may_come && begun.elapsed() < patience
        };
        let backoff = ConstantBuilder::default().with_delay(START_POLL).without_max_times();
        let info = (|| client.info()).retry(backoff).when(starting).await?;
        Ok((client, info))
    }

    fn error(&self, call: &'static str, kind: EngineErrorKind) -> EngineError {
        EngineError { engine: self.base.clone(), call, kind }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.api_key {
            Some(key) => request.header(reqwest::header::AUTHORIZATION, key),
            None => request,
        }
    }

    async fn ask<T: serde::de::DeserializeOwned>(
        &self,
        call: &'static str,
        path: &str,
    ) -> Result<T, EngineError> {
        let body = exchange(self.request(Method::GET, path), CALL_TIMEOUT, INFO_LIMIT).await;
        let body = body.map_err(|kind| self.error(call, kind))?;
        serde_json::from_slice(&body).map_err(|error| {
            let words = format!("{error}; it begins `{}`", excerpt(&body));
            self.error(call, EngineErrorKind::InvalidReply(words))
        })
    }

    async fn tell(
        &self,
        call: &'static str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<Bytes, EngineError> {
        let request = self.request(Method::POST, call).json(body);
        exchange(request, timeout, INFO_LIMIT).await.map_err(|kind| self.error(call, kind))
    }

    fn serving(&self) -> Serving {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_serving(&self, serving: Serving) {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = serving;
    }

    /// Refuses tokens of weights this client did not put there: a server that restarted serves
    /// its first checkpoint again.
    fn check_versions(
        &self,
        spans: &[VersionSpan],
        before: Serving,
    ) -> Result<(), EngineErrorKind> {
        let Serving::Synced(lowest) = before else { return Ok(()) };
        let highest = match self.serving() {
            Serving::Synced(now) => now.max(lowest),
            // A sync is under way: what was sampled before it is still of the version before.
            Serving::Untouched | Serving::Unknown => lowest,
        };
        let strange = spans.iter().find(|span| span.version < lowest || span.version > highest);
        strange.map_or(Ok(()), |span| {
            self.set_serving(Serving::Unknown);
            Err(EngineErrorKind::Unfit(format!(
                "it serves policy version {}, synced was {lowest}: sync its weights again",
                span.version
            )))
        })
    }

    fn check_fitness(&self, info: &ServerInfo) -> Result<(), EngineErrorKind> {
        if !self.require_routed_experts {
            return Ok(());
        }
        let blind = info.moe_runner_backend.as_deref();
        let fault = if !info.enable_return_routed_experts {
            "it does not return routed experts: start it with --enable-return-routed-experts"
        } else if info.pp_size.is_some_and(|stages| stages > 1) {
            "pipeline stages report zeros for each other's layers: start it with --pp-size 1"
        } else if info.enable_hierarchical_cache {
            "KV loaded back by the hierarchical cache has stale routed experts: start it without \
             --enable-hierarchical-cache"
        } else if blind.is_some_and(|backend| BLIND_BACKENDS.contains(&backend)) {
            "its MoE kernel hides the chosen experts: start it with --moe-runner-backend triton"
        } else {
            return Ok(());
        };
        Err(EngineErrorKind::Unfit(fault.to_owned()))
    }

    async fn update(&self, checkpoint: &Utf8Path, word: &str) -> Result<(), EngineError> {
        let update = "/update_weights_from_disk";
        let body = serde_json::json!({
            "model_path": checkpoint.as_str(),
            "weight_version": word,
            "flush_cache": true,
        });
        let body = self.tell(update, &body, self.sync_timeout).await?;
        let reply: UpdateReply = serde_json::from_slice(&body).map_err(|error| {
            self.error(update, EngineErrorKind::InvalidReply(error.to_string()))
        })?;
        if !reply.success {
            let words = format!("the update failed: {}", reply.message);
            return Err(self.error(update, EngineErrorKind::InvalidReply(words)));
        }
        let info: ModelInfo = self.ask("/model_info", "/model_info").await?;
        if info.weight_version.as_deref() == Some(word) {
            return Ok(());
        }
        let found = info.weight_version.unwrap_or_default();
        let words = format!("it names its weights `{found}` after an update to `{word}`");
        Err(self.error("/model_info", EngineErrorKind::InvalidReply(words)))
    }

    async fn checked(
        &self,
        body: Bytes,
        expected: Expected,
    ) -> Result<Generation, EngineErrorKind> {
        if body.len() <= INLINE_BYTES {
            return check_reply(&body, &expected);
        }
        tokio::task::spawn_blocking(move || check_reply(&body, &expected)).await.unwrap_or_else(
            |error| Err(EngineErrorKind::InvalidReply(format!("checking it failed: {error}"))),
        )
    }
}

#[async_trait]
impl Engine for SglangClient {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let server: ServerInfo = self.ask("/server_info", "/server_info").await?;
        let model: ModelInfo = self.ask("/model_info", "/model_info").await?;
        self.check_fitness(&server).map_err(|kind| self.error("/server_info", kind))?;
        self.priorities.store(server.enable_priority_scheduling, Ordering::Relaxed);
        let name = server.engine.as_deref().unwrap_or("sglang");
        Ok(EngineInfo {
            engine: format!("{name} {}", server.version.as_deref().unwrap_or("?")),
            model_path: model.model_path.or(server.model_path).unwrap_or_default(),
            routed_experts: server.enable_return_routed_experts,
            policy_version: model.weight_version.as_deref().and_then(parse_version),
            context: server.context_length,
            page_size: server.page_size.unwrap_or(1).max(1),
        })
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn worker_of(&self, _session: &str) -> Option<String> {
        Some(self.base.clone())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let call = "/generate";
        let prompt = request.token_ids.len();
        // A closed semaphore cannot be: it is never closed.
        let permit = self.permits.acquire().await;
        let before = self.serving();
        if before == Serving::Unknown {
            let words = "its weights are unknown since a failed update: sync them again";
            return Err(self.error(call, EngineErrorKind::Unfit(words.to_owned())));
        }
        // Longer requests are refused by the server, not clamped.
        let room = self.shape.context.saturating_sub(prompt);
        let max_new_tokens = request.sampling.max_new_tokens.min(room);
        if prompt == 0 || room == 0 {
            let message =
                format!("a prompt of {prompt} tokens in a context of {}", self.shape.context);
            return Err(self.error(call, EngineErrorKind::Refused { status: 400, message }));
        }
        // An id beyond the vocabulary takes the whole server down with some backends.
        if let Some(id) = request.token_ids.iter().find(|&&id| id as usize >= self.shape.vocab) {
            let message = format!("prompt token {id} is not in the vocabulary");
            return Err(self.error(call, EngineErrorKind::Refused { status: 400, message }));
        }
        let sampling = &request.sampling;
        let body = GenerateBody {
            rid: request.request_id.as_str(),
            input_ids: &request.token_ids,
            sampling_params: SamplingParams {
                max_new_tokens,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: -1,
                min_p: 0.0,
                stop_token_ids: &sampling.stop_token_ids,
                skip_special_tokens: false,
                // The server takes a signed 64-bit number.
                sampling_seed: sampling.seed >> 1,
            },
            return_logprob: true,
            logprob_start_len: -1,
            return_routed_experts: request.routed_experts_start.is_some(),
            routed_experts_start_len: request.routed_experts_start,
            session_id: &request.session,
            extra_key: format!("w{}", request.cache_namespace),
            priority: self.priorities.load(Ordering::Relaxed).then_some(request.priority),
            stream: false,
        };
        let mut post = self.request(Method::POST, call).json(&body);
        if let Ok(session) = HeaderValue::from_str(&request.session) {
            post = post.header("x-smg-routing-key", &session).header("x-session-id", session);
        }
        let expected = Expected {
            request_id: request.request_id.as_str().to_owned(),
            prompt_tokens: prompt,
            max_new_tokens,
            routed_experts_start: request.routed_experts_start,
            shape: Arc::clone(&self.shape),
        };
        let answer = exchange(post, request.deadline, expected.body_limit()).await;
        if matches!(answer, Err(EngineErrorKind::TimedOut(_))) {
            // The closed connection aborts it, too, but only when the server looks.
            if let Err(error) = self.abort(&request.request_id).await {
                tracing::debug!(request_id = %request.request_id, %error, "cannot abort");
            }
        }
        drop(permit);
        let body = answer.map_err(|kind| self.error(call, kind))?;
        let mut generation =
            self.checked(body, expected).await.map_err(|kind| self.error(call, kind))?;
        self.check_versions(&generation.versions, before).map_err(|kind| self.error(call, kind))?;
        generation.worker.clone_from(&self.base);
        Ok(generation)
    }

    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let _one_at_a_time = self.syncing.lock().await;
        self.set_serving(Serving::Unknown);
        // A clean cut: what runs is aborted and resumed by its caller under the new weights.
        let pause = serde_json::json!({"mode": "abort"});
        self.tell("/pause_generation", &pause, self.sync_timeout).await?;
        let updated = self.update(checkpoint, &version.to_string()).await;
        // Also after a failure: a paused server would hold every later call, and none of ours
        // gets through until a sync succeeds.
        let resumed = self.tell("/continue_generation", &serde_json::json!({}), CALL_TIMEOUT).await;
        updated?;
        resumed?;
        self.set_serving(Serving::Synced(version));
        Ok(())
    }

    async fn abort(&self, request_id: &RequestId) -> Result<(), EngineError> {
        let body = serde_json::json!({"rid": request_id.as_str()});
        self.tell("/abort_request", &body, CALL_TIMEOUT).await.map(|_| ())
    }
}
