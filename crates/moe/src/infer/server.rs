//! The HTTP side: SGLang's routes over one engine thread.

use super::body::Bounds;
use super::control::{
    abort, flush_cache, health, loads, metrics, model_info, models, pause, ready, resume,
    server_info, update_weight_version, update_weights,
};
use super::generate::{generate, health_generate};
use super::loaded::Loaded;
use super::matrix::WeightFormat;
use super::request::{Command, Status};
use super::scheduler::{Limits, Scheduler};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use camino::Utf8PathBuf;
use serde::Deserialize;
use serde_json::json;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokenizers::Tokenizer;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Commands under way to the engine thread. It empties the queue at every step; requests beyond
/// this wait in their own tasks.
const COMMAND_QUEUE: usize = 1024;

/// How to serve a model.
#[derive(Clone)]
pub struct EngineOptions {
    /// Checkpoint folder in the Hugging Face layout.
    pub model_path: Utf8PathBuf,
    /// How weights are held.
    pub weight_format: WeightFormat,
    /// Name of the weights served first.
    pub weight_version: String,
    /// Sequences per batch.
    pub max_running: usize,
    /// Sequences that may wait; beyond that the answer is 503.
    pub max_queued: usize,
    /// Token positions the KV pool holds, for running sequences and the prefix cache together.
    pub cache_tokens: usize,
    /// Longest sequence (prompt and output); `None` = what the model and the pool allow.
    pub context_length: Option<usize>,
    /// Prompt tokens run per step, beside the decoding sequences.
    pub chunked_prefill: usize,
    /// Seed of requests without `sampling_seed`.
    pub random_seed: u64,
    /// Required as `Authorization: Bearer …` on every route but the health checks.
    pub api_key: Option<String>,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
}

impl EngineOptions {
    /// Usual settings for a model folder.
    pub fn new(model_path: impl Into<Utf8PathBuf>) -> Self {
        Self {
            model_path: model_path.into(),
            weight_format: WeightFormat::default(),
            weight_version: "default".into(),
            max_running: 32,
            max_queued: 4096,
            cache_tokens: 65_536,
            context_length: None,
            chunked_prefill: 512,
            random_seed: 0,
            api_key: None,
            max_body_bytes: 64 << 20,
        }
    }
}

impl std::fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineOptions")
            .field("model_path", &self.model_path)
            .field("weight_format", &self.weight_format)
            .field("weight_version", &self.weight_version)
            .field("max_running", &self.max_running)
            .field("cache_tokens", &self.cache_tokens)
            .field("context_length", &self.context_length)
            .field("api_key", &self.api_key.as_ref().map(|_| "…"))
            .finish_non_exhaustive()
    }
}

/// Why the engine ended, or never began.
#[derive(Debug, thiserror::Error)]
pub enum EngineServeError {
    /// The model cannot be served.
    #[error("load the model")]
    Model(#[from] crate::CheckpointError),
    /// `tokenizer.json` is damaged.
    #[error("read {path}: {problem}")]
    Tokenizer {
        /// The file.
        path: Utf8PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// An option has no sensible meaning.
    #[error("engine option `{option}`: {problem}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What is wrong, and what to do.
        problem: &'static str,
    },
    /// The listener failed.
    #[error("serve http")]
    Http(#[source] std::io::Error),
    /// The engine thread panicked.
    #[error("the engine thread died: {0}")]
    Died(String),
}

/// Shared by all handlers.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) commands: mpsc::Sender<Command>,
    status: Arc<Mutex<Status>>,
    /// Ids of requests without an answer yet.
    live: Mutex<HashSet<String>>,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) options: EngineOptions,
    pub(super) architectures: Vec<String>,
    pub(crate) vocab: usize,
    pub(super) context: usize,
    pub(super) pool_tokens: usize,
    pub(crate) rids: std::sync::atomic::AtomicU64,
}

impl Engine {
    /// A copy of the engine's state.
    pub(crate) fn status(&self) -> Status {
        lock(&self.status).clone()
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, HashSet<String>> {
        lock(&self.live)
    }

    pub(crate) fn bounds(&self) -> Bounds<'_> {
        let tokenizer = self.tokenizer.as_deref();
        Bounds { vocab: self.vocab, context: self.context, tokenizer }
    }

    /// Sends a command and waits for its answer.
    pub(super) async fn ask<T>(
        &self,
        make: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(make(reply)).await.map_err(|_| Failure::Stopped)?;
        answer.await.map_err(|_| Failure::Stopped)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Holders only copy values in and out, so a poisoned lock still guards a whole value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error reply.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A body that is not JSON.
    Malformed(String),
    /// A field of the wrong type, or an unknown sampling key.
    Gate(String),
    /// A value that cannot be served.
    Invalid(String),
    /// Too many are waiting.
    QueueFull,
    /// The engine thread has ended.
    Stopped,
    /// The reply could not be written as JSON.
    Internal(String),
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, message) = (self.status(), self.message());
        let code = status.as_u16();
        let coded = |kind: &str| {
            json!({
                "object": "error", "message": message, "type": kind, "param": null, "code": code
            })
        };
        let body = match &self {
            Self::Malformed(_) => coded("Bad Request"),
            Self::Gate(message) => json!({ "error": message }),
            Self::Invalid(message) => json!({ "error": { "message": message } }),
            Self::QueueFull | Self::Stopped => coded("503"),
            Self::Internal(_) => coded("InternalServerError"),
        };
        (status, Json(body)).into_response()
    }
}

impl Failure {
    /// HTTP status of the reply.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) | Self::Gate(_) | Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::QueueFull | Self::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The words inside the reply.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Malformed(m) | Self::Gate(m) | Self::Invalid(m) | Self::Internal(m) => m,
            Self::QueueFull => "The request queue is full.",
            Self::Stopped => "The engine is shutting down.",
        }
    }
}

/// Parses a JSON body, telling broken JSON from wrong fields as SGLang does.
pub(crate) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|e| match e.classify() {
        serde_json::error::Category::Data => Failure::Gate(e.to_string()),
        serde_json::error::Category::Syntax
        | serde_json::error::Category::Eof
        | serde_json::error::Category::Io => {
            Failure::Malformed(format!("1 validation error:\n  JSON decode error: {e}"))
        }
    })
}

/// Serves a model on `listener` until `cancel` fires; running requests are then aborted and
/// answered with what they have. The model runs on a thread of its own.
///
/// # Errors
/// If the model folder cannot be loaded, an option is senseless, the listener fails, or the engine
/// thread panics.
pub async fn serve_engine(
    options: EngineOptions,
    listener: TcpListener,
    cancel: CancellationToken,
) -> Result<(), EngineServeError> {
    check_options(&options)?;
    let mut threads = JoinSet::new();
    let (path, format) = (options.model_path.clone(), options.weight_format);
    threads.spawn_blocking(move || Loaded::read(&path, format));
    let loaded = match threads.join_next().await {
        Some(Ok(loaded)) => loaded?,
        Some(Err(e)) => return Err(EngineServeError::Died(e.to_string())),
        None => return Err(EngineServeError::Died("no loader".into())),
    };
    let tokenizer = read_tokenizer(&options)?;
    let (engine, scheduler, inbox) = assemble(options, loaded, tokenizer);
    let mut threads = JoinSet::new();
    threads.spawn_blocking(move || scheduler.run(inbox));

    let stop = CancellationToken::new();
    let app = router(Arc::clone(&engine));
    // Replies are small; waiting to fill a segment would only delay them.
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).ok();
    });
    let server = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let mut server = std::pin::pin!(server.into_future());
    // `cancelled` and `join_next` lose nothing when dropped; the server is polled again below.
    let died = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        ended = threads.join_next() => ended,
        served = &mut server => return served.map_err(EngineServeError::Http),
    };
    stop.cancel();
    // A closed channel means the thread has ended already.
    engine.commands.send(Command::Stop).await.ok();
    drop(engine);
    server.await.map_err(EngineServeError::Http)?;
    match died.or(threads.join_next().await) {
        Some(Err(e)) => Err(EngineServeError::Died(e.to_string())),
        Some(Ok(())) | None => Ok(()),
    }
}

fn check_options(options: &EngineOptions) -> Result<(), EngineServeError> {
    let positive = "must be at least 1";
    for (option, value) in [
        ("max_running", options.max_running),
        ("max_queued", options.max_queued),
        ("cache_tokens", options.cache_tokens),
        ("chunked_prefill", options.chunked_prefill),
        ("context_length", options.context_length.unwrap_or(1)),
    ] {
        if value == 0 {
            return Err(EngineServeError::Option { option, problem: positive });
        }
    }
    if options.api_key.as_deref() == Some("") {
        let problem = "is empty: leave it out to serve without a key";
        return Err(EngineServeError::Option { option: "api_key", problem });
    }
    if u32::try_from(options.cache_tokens).is_err() {
        let problem = "must fit 32 bits";
        return Err(EngineServeError::Option { option: "cache_tokens", problem });
    }
    Ok(())
}

fn read_tokenizer(options: &EngineOptions) -> Result<Option<Arc<Tokenizer>>, EngineServeError> {
    let path = options.model_path.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    let read = Tokenizer::from_file(&path);
    let problem = |e: tokenizers::Error| EngineServeError::Tokenizer {
        path: path.clone(),
        problem: e.to_string(),
    };
    Ok(Some(Arc::new(read.map_err(problem)?)))
}

fn assemble(
    options: EngineOptions,
    loaded: Loaded,
    tokenizer: Option<Arc<Tokenizer>>,
) -> (Arc<Engine>, Scheduler, mpsc::Receiver<Command>) {
    let config = loaded.model.config().clone();
    let pool = u32::try_from(options.cache_tokens).unwrap_or(u32::MAX);
    // One sequence of full length must always fit into the pool.
    let context = config
        .max_position_embeddings
        .min(options.context_length.unwrap_or(usize::MAX))
        .min(pool as usize);
    let limits = Limits {
        max_running: options.max_running,
        max_queued: options.max_queued,
        chunked_prefill: options.chunked_prefill,
        cache_tokens: pool,
        random_seed: options.random_seed,
    };
    let (commands, inbox) = mpsc::channel(COMMAND_QUEUE);
    let status = Arc::new(Mutex::new(Status::default()));
    let scheduler = Scheduler::new(
        loaded,
        options.weight_format,
        limits,
        tokenizer.clone(),
        (options.model_path.to_string(), options.weight_version.clone()),
        Arc::clone(&status),
    );
    let engine = Engine {
        commands,
        status,
        live: Mutex::new(HashSet::new()),
        tokenizer,
        architectures: config.architectures,
        vocab: config.vocab_size,
        context,
        pool_tokens: pool as usize,
        rids: std::sync::atomic::AtomicU64::new(0),
        options,
    };
    (Arc::new(engine), scheduler, inbox)
}

fn router(engine: Arc<Engine>) -> Router {
    let limit = DefaultBodyLimit::max(engine.options.max_body_bytes);
    Router::new()
        .route("/generate", post(generate).put(generate))
        .route("/flush_cache", get(flush_cache).post(flush_cache))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/abort_request", post(abort))
        .route("/update_weights_from_disk", post(update_weights))
        .route("/update_weight_version", post(update_weight_version))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/models", get(models))
        .route("/v1/loads", get(loads))
        .route("/metrics", get(metrics))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&engine), authorize))
        .route("/health", get(health))
        .route("/health_generate", get(health_generate))
        .route("/ready", get(ready))
        .route("/ping", get(health))
        .fallback(async || detail(StatusCode::NOT_FOUND, "Not Found"))
        .method_not_allowed_fallback(async || {
            detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(limit)
        .with_state(engine)
}

fn detail(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "detail": text }))).into_response()
}

async fn authorize(
    State(engine): State<Arc<Engine>>,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let authorized = engine.options.api_key.as_ref().is_none_or(|key| {
        let sent = headers.get(header::AUTHORIZATION).map_or(&b""[..], |v| v.as_bytes());
        // Digests are compared in constant time.
        blake3::hash(sent) == blake3::hash(format!("Bearer {key}").as_bytes())
    });
    if authorized || request.method() == Method::OPTIONS {
        next.run(request).await
    } else {
        (StatusCode::UNAUTHORIZED, Json(json!({ "error": "Unauthorized" }))).into_response()
    }
}

#[cfg(test)]
mod tests;
