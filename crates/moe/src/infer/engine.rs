//! State and options shared by the HTTP handlers, and the error replies they send.

use super::body::Bounds;
use super::matrix::WeightFormat;
use super::request::{Command, InvalidBody, Status};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use camino::Utf8PathBuf;
use orchestrate_http_server::{AllowedFolders, HttpOptions, HttpSetupError};
use serde::Deserialize;
use serde_json::json;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokenizers::Tokenizer;
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Options of the embedded inference engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// Checkpoint folder in the Hugging Face layout.
    pub model_path: Utf8PathBuf,
    /// In-memory format of the weights.
    pub weight_format: WeightFormat,
    /// Version name of the initial weights.
    pub weight_version: String,
    /// Maximum number of sequences per batch.
    pub max_running: usize,
    /// Maximum number of waiting sequences; further requests get status 503.
    pub max_queued: usize,
    /// Capacity of the KV pool in token positions, shared by running sequences and the prefix
    /// cache.
    pub cache_tokens: usize,
    /// Longest sequence (prompt and output) in tokens; `None` means the limit of model and KV pool.
    pub context_length: Option<usize>,
    /// Maximum number of prompt tokens per step, in addition to one token per decoding sequence.
    pub chunked_prefill: usize,
    /// Base seed for requests without `sampling_seed`.
    pub random_seed: u64,
    /// Maximum number of tokens, over all requests that are not answered yet, of their prompts (each
    /// counted once per sample); further requests get status 503.
    pub max_queued_tokens: usize,
    /// Largest request body, in bytes. All bodies that are being received have at most this size.
    pub max_body_bytes: usize,
    /// Folders that a weight update may load a checkpoint from.
    pub checkpoint_roots: AllowedFolders,
    /// Who may reach the server. The health checks `/health`, `/ping` and `/ready` need no token.
    pub http: HttpOptions,
}

impl EngineOptions {
    /// Default options for a model folder. Weight updates may load from the folder around it.
    pub fn new(model_path: impl Into<Utf8PathBuf>) -> Self {
        let model_path = model_path.into();
        let around = model_path.parent().unwrap_or(&model_path).to_owned();
        Self {
            model_path,
            weight_format: WeightFormat::default(),
            weight_version: "default".into(),
            max_running: 32,
            max_queued: 4096,
            cache_tokens: 65_536,
            context_length: None,
            chunked_prefill: 512,
            random_seed: 0,
            max_queued_tokens: 4 << 20,
            max_body_bytes: 8 << 20,
            checkpoint_roots: AllowedFolders::below([around]),
            http: HttpOptions::default(),
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
            .field("http", &self.http)
            .finish_non_exhaustive()
    }
}

/// Why the engine could not start, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum EngineServeError {
    /// The model folder cannot be loaded.
    #[error("cannot load the model")]
    Model(#[from] crate::CheckpointError),
    /// `tokenizer.json` cannot be read.
    #[error("cannot read tokenizer {path}")]
    Tokenizer {
        /// Path of `tokenizer.json`.
        path: Utf8PathBuf,
        /// Error of the tokenizer library.
        source: tokenizers::Error,
    },
    /// An option has an invalid value.
    #[error("engine option `{option}`: {problem}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The problem, and what to do about it.
        problem: &'static str,
    },
    /// The HTTP server cannot be set up.
    #[error("cannot serve HTTP")]
    Http(#[from] HttpSetupError),
    /// The engine thread panicked.
    #[error("the engine thread panicked: {0}")]
    Panicked(String),
}

/// State shared by all HTTP handlers.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(super) status: Arc<Mutex<Status>>,
    /// Ids of requests that have not been answered yet.
    pub(super) live: Mutex<HashSet<String>>,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) options: EngineOptions,
    pub(super) architectures: Vec<String>,
    pub(crate) vocab: usize,
    pub(super) context: usize,
    pub(super) pool_tokens: usize,
    /// Prompt tokens that requests which are not answered yet may still add.
    pub(super) token_room: Arc<Semaphore>,
    pub(crate) rids: std::sync::atomic::AtomicU64,
}

impl Engine {
    /// Returns a copy of the state that the engine thread last published.
    pub(crate) fn status(&self) -> Status {
        lock(&self.status).clone()
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, HashSet<String>> {
        lock(&self.live)
    }

    pub(crate) fn bounds(&self) -> Bounds<'_> {
        let tokenizer = self.tokenizer.as_deref();
        let sequences = self.options.max_running + self.options.max_queued;
        // One request must leave room for others, and one sequence of full length always fits.
        let tokens = (self.options.max_queued_tokens / 4).max(self.context);
        Bounds { vocab: self.vocab, context: self.context, sequences, tokens, tokenizer }
    }

    /// Sends a command and waits for its answer.
    pub(super) async fn request<T>(
        &self,
        make: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ErrorReply> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(make(reply)).await.map_err(|_| ErrorReply::Stopped)?;
        answer.await.map_err(|_| ErrorReply::Stopped)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Holders only copy values in and out, so a poisoned lock still guards a whole value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error reply, in SGLang's format.
#[derive(Debug)]
pub(crate) enum ErrorReply {
    /// The body is not valid JSON (400).
    Malformed(String),
    /// A field has the wrong type, or a sampling key is unknown (400).
    WrongField(String),
    /// A value is invalid or not supported (400).
    Invalid(InvalidBody),
    /// `max_queued` requests are already waiting (503).
    QueueFull,
    /// The engine thread has ended (503).
    Stopped,
    /// The reply could not be serialised (500).
    Internal(String),
}

impl IntoResponse for ErrorReply {
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
            Self::WrongField(message) => json!({ "error": message }),
            Self::Invalid(error) => json!({ "error": { "message": error.0 } }),
            Self::QueueFull | Self::Stopped => coded("503"),
            Self::Internal(_) => coded("InternalServerError"),
        };
        (status, Json(body)).into_response()
    }
}

impl ErrorReply {
    /// HTTP status code of the reply.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) | Self::WrongField(_) | Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::QueueFull | Self::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Message of the reply.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Malformed(m) | Self::WrongField(m) | Self::Internal(m) => m,
            Self::Invalid(error) => &error.0,
            Self::QueueFull => "The request queue is full.",
            Self::Stopped => "The engine is shutting down.",
        }
    }
}

/// Parses a JSON body. Distinguishes invalid JSON from invalid fields, as SGLang does.
pub(crate) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, ErrorReply> {
    serde_json::from_slice(body).map_err(|e| match e.classify() {
        serde_json::error::Category::Data => ErrorReply::WrongField(e.to_string()),
        serde_json::error::Category::Syntax
        | serde_json::error::Category::Eof
        | serde_json::error::Category::Io => {
            ErrorReply::Malformed(format!("1 validation error:\n  JSON decode error: {e}"))
        }
    })
}
