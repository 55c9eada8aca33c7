//! What passes between the HTTP side and the engine thread.

use super::cache::Namespace;
use super::sampling::Sampling;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// One sequence to generate, already checked.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) rid: String,
    pub(crate) input_ids: Vec<u32>,
    pub(crate) sampling: Sampling,
    /// First prompt position whose log-prob is wanted; `None` = none.
    pub(crate) logprob_start: Option<usize>,
    /// First position whose routing row is wanted; `None` = none.
    pub(crate) routed_start: Option<usize>,
    pub(crate) namespace: Namespace,
    /// Higher runs first.
    pub(crate) priority: i64,
    /// Sampled tokens as they come. Its capacity is the number of tokens that can come, so
    /// sending never waits.
    pub(crate) progress: Option<mpsc::Sender<Progress>>,
    pub(crate) reply: oneshot::Sender<Result<Finished, Refusal>>,
    pub(crate) received: Instant,
}

/// One sampled token.
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
    /// Log-probs of prompt tokens from `logprob_start` on; the first has none.
    pub(crate) input_logprobs: Vec<Option<f32>>,
    pub(crate) finish: Finish,
    pub(crate) cached_tokens: usize,
    /// Expert ids `[rows, layers, top_k]`; absent if not asked for or never computed.
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
    /// A stop token.
    Token(u32),
    /// A stop string.
    Text(String),
    /// A logit was not a number; the sample is worthless.
    NotANumber,
    /// The budget was reached.
    Length(usize),
    /// Cut from outside.
    Aborted(&'static str),
}

/// Output tokens `start..end` were sampled under `version`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) version: Arc<str>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// A job the engine would not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Too many are waiting.
    QueueFull,
}

/// How [`Command::Pause`] treats running requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PauseMode {
    /// They end, with what they have.
    Abort,
    /// They stop where they are and keep their KV.
    InPlace,
    /// They lose their KV and wait; it is computed again when they continue.
    Retract,
}

/// New weights from a folder.
#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) model_path: camino::Utf8PathBuf,
    pub(crate) version: Option<String>,
    pub(crate) abort_all: bool,
    pub(crate) flush: bool,
    pub(crate) reply: oneshot::Sender<UpdateResult>,
}

/// What became of an [`Update`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UpdateResult {
    pub(crate) success: bool,
    pub(crate) message: String,
}

/// Which requests an abort means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Which {
    /// Every one.
    All,
    /// Those whose id starts with this.
    Prefix(String),
}

/// A message to the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Generate(Box<Job>),
    Abort(Which),
    /// Look for requests whose caller is gone.
    Sweep,
    Pause(PauseMode, oneshot::Sender<()>),
    Continue(oneshot::Sender<()>),
    /// `true` if the cache was flushed.
    Flush(oneshot::Sender<bool>),
    Update(Update),
    SetVersion {
        version: String,
        abort_all: bool,
        reply: oneshot::Sender<()>,
    },
    /// Abort everything and end the thread.
    Stop,
}

/// What the engine thread tells the world, refreshed at every step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    pub(crate) model_path: String,
    pub(crate) weight_version: String,
    pub(crate) paused: bool,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Slots held by running requests.
    pub(crate) active_tokens: usize,
    /// Slots held by requests or the prefix cache.
    pub(crate) held_tokens: usize,
    pub(crate) requests_total: u64,
    pub(crate) aborted_total: u64,
    pub(crate) retracted_total: u64,
    pub(crate) prompt_tokens_total: u64,
    pub(crate) cached_tokens_total: u64,
    /// Prompt tokens run through the model.
    pub(crate) prefilled_tokens_total: u64,
    pub(crate) generated_tokens_total: u64,
    /// Sampled tokens per second over the last second of work.
    pub(crate) throughput: f64,
}
