//! Messages between the HTTP handlers and the engine thread.

use super::cache::Namespace;
use super::sampling::Sampling;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// One validated sequence to generate.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) rid: String,
    pub(crate) input_ids: Vec<u32>,
    pub(crate) sampling: Sampling,
    /// First prompt position whose log-prob is requested; `None` means none.
    pub(crate) logprob_start: Option<usize>,
    /// First position whose routing row is requested; `None` means none.
    pub(crate) routed_start: Option<usize>,
    pub(crate) namespace: Namespace,
    /// Requests with higher priority run first.
    pub(crate) priority: i64,
    /// Receives each sampled token. Its capacity is the maximum number of tokens, so sending never
    /// blocks.
    pub(crate) progress: Option<mpsc::Sender<Progress>>,
    pub(crate) reply: oneshot::Sender<Result<Finished, Refusal>>,
    pub(crate) received: Instant,
}

/// One sampled token of a streamed request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    pub(crate) cached_tokens: usize,
}

/// The engine's answer to a [`Job`].
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) output_ids: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
    /// Log-probs of prompt tokens from `logprob_start` on; the first is `None`.
    pub(crate) input_logprobs: Vec<Option<f32>>,
    pub(crate) finish: Finish,
    pub(crate) cached_tokens: usize,
    /// Expert ids `[rows, layers, top_k]`; `None` if not requested or never computed.
    pub(crate) rows: Option<Vec<u16>>,
    pub(crate) spans: Vec<Span>,
    pub(crate) weight_version: Arc<str>,
    pub(crate) retractions: u32,
    pub(crate) queue_seconds: f64,
    pub(crate) first_token_seconds: f64,
}

/// Why a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop token was sampled.
    Token(u32),
    /// A stop string was completed.
    Text(String),
    /// A logit was NaN; the sample is unusable.
    NotANumber,
    /// `max_new_tokens` was reached, after this many tokens.
    Length(usize),
    /// The request was aborted; the message is sent to the client.
    Aborted(&'static str),
}

/// Output tokens `start..end` were sampled with weights `version`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) version: Arc<str>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Why the engine rejected a [`Job`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// `max_queued` requests are already waiting.
    QueueFull,
}

/// A `/generate` body that cannot be served. Holds the message of the 400 reply.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct InvalidBody(pub(super) String);

impl From<String> for InvalidBody {
    fn from(message: String) -> Self {
        Self(message)
    }
}

impl From<&str> for InvalidBody {
    fn from(message: &str) -> Self {
        Self(message.to_owned())
    }
}

/// How [`Command::Pause`] treats running requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PauseMode {
    /// They end with the output so far.
    Abort,
    /// They stop where they are and keep their KV.
    InPlace,
    /// They lose their KV and return to the queue; the KV is recomputed when they continue.
    Retract,
}

/// Request to load new weights from a folder.
#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) model_path: camino::Utf8PathBuf,
    pub(crate) version: Option<String>,
    pub(crate) abort_all: bool,
    pub(crate) flush: bool,
    pub(crate) reply: oneshot::Sender<UpdateResult>,
}

/// Result of an [`Update`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UpdateResult {
    pub(crate) success: bool,
    pub(crate) message: String,
}

/// The requests to abort.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AbortTarget {
    /// All requests.
    All,
    /// Requests whose id starts with this string.
    Prefix(String),
}

/// A message to the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Generate(Box<Job>),
    Abort(AbortTarget),
    /// Drop requests whose caller has disconnected.
    Sweep,
    Pause(PauseMode, oneshot::Sender<()>),
    Continue(oneshot::Sender<()>),
    /// Flush the prefix cache; replies `true` if it was flushed.
    Flush(oneshot::Sender<bool>),
    Update(Update),
    SetVersion {
        version: String,
        abort_all: bool,
        reply: oneshot::Sender<()>,
    },
    /// Abort all requests and end the thread.
    Stop,
}

/// State that the engine thread publishes after every step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    pub(crate) model_path: String,
    pub(crate) weight_version: String,
    pub(crate) paused: bool,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Number of slots held by running requests.
    pub(crate) active_tokens: usize,
    /// Number of slots held by requests or the prefix cache.
    pub(crate) held_tokens: usize,
    pub(crate) requests_total: u64,
    pub(crate) aborted_total: u64,
    pub(crate) retracted_total: u64,
    pub(crate) prompt_tokens_total: u64,
    pub(crate) cached_tokens_total: u64,
    /// Number of prompt tokens run through the model (not cached).
    pub(crate) prefilled_tokens_total: u64,
    pub(crate) generated_tokens_total: u64,
    /// Sampled tokens per second, measured over at least one second of work.
    pub(crate) throughput: f64,
}
