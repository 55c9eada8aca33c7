//! The seam: what the gateway asks of an episode, and what it is given.

use crate::code::ErrorCode;
use crate::dialect::Dialect;
use crate::fields::Overridden;
use crate::message::{Message, ToolCall};
use crate::problem::{Kind, Problem};
use crate::text::TextSink;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thiserror::Error;
use tokio::sync::oneshot;

/// Highest temperature that decides, as in the run's settings.
const MAX_TEMPERATURE: f32 = 10.0;

/// The conversations of one episode.
#[async_trait]
pub trait Sampler: Send + Sync + Debug {
    /// Name of the served model.
    fn model(&self) -> &str;

    /// Longest sequence, in tokens.
    fn context(&self) -> usize;

    /// Whether replies are sampled as their requests ask ([`AskedSampling`]): in evaluations.
    fn honours_sampling(&self) -> bool {
        false
    }

    /// Whether a request that asks for thinking (`true`) or declines it gets that.
    fn switches_thinking(&self, wanted: bool) -> bool {
        let _ = wanted;
        true
    }

    /// Whether the policy sees the tools of a request.
    fn shows_tools(&self) -> bool {
        true
    }

    /// Samples one reply. A request for `n` replies makes `n` calls at the same time, with
    /// `sample` from 0 to n − 1. The future is dropped when the client goes away.
    ///
    /// `text` is there if the client reads a stream of text. What it is shown must be the beginning of
    /// the reply's thinking and text; a sampler may also show it nothing.
    async fn sample(
        &self,
        request: &Arc<SampleRequest>,
        sample: usize,
        text: Option<TextSink>,
    ) -> Result<Sampled, SampleError>;

    /// A request for a reply was answered with this error instead. That includes requests that never
    /// reach [`Self::sample`], because they cannot be read. Whether it is the end of the episode is not
    /// known yet: the client may send a better request.
    fn unanswered(&self, _code: ErrorCode, _message: &str) {}

    /// Prompt tokens of a request.
    async fn count(&self, request: &SampleRequest) -> Result<usize, SampleError>;

    /// Samples one reply to a tokenised prompt.
    ///
    /// # Errors
    /// [`SampleError::Refused`] by default: an episode must allow its agent to send tokens.
    async fn generate(&self, _: TokenRequest) -> Result<SampledTokens, SampleError> {
        Err(SampleError::Refused("this episode takes messages, not tokens".to_owned()))
    }
}

/// A request with a tokenised prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRequest {
    /// The whole prompt, `[P]`; never empty.
    pub token_ids: Arc<[u32]>,
    /// Maximum number of tokens of the reply; at least 1.
    pub max_tokens: Option<usize>,
    /// Index of the first routing row to return.
    pub rows_from: usize,
    /// How the client asks for the reply to be sampled.
    pub sampling: AskedSampling,
    /// Whether the client's library marks this request as a retry.
    pub repeats: bool,
    /// Fields of the request that something else decides.
    pub overridden: Overridden,
}

/// A sampled reply as tokens.
#[derive(Debug)]
pub struct SampledTokens {
    /// Sampled token ids, `[N]`, including the one that ended the reply.
    pub token_ids: Vec<u32>,
    /// Their log-probabilities, `[N]`, in nats.
    pub logprobs: Vec<f32>,
    /// Why the reply ended: `Stop` or `Length`.
    pub finish: Finish,
    /// Number of prompt tokens served from the cache.
    pub cached: usize,
    /// Routing rows up to the second-to-last token; `None` if the model has no routers.
    pub rows: Option<RoutedExperts>,
    /// Notified once the whole reply was sent to the client.
    pub receipt: Receipt,
}

/// Routing rows as they are sent to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedExperts {
    /// Index of the first row.
    pub start: usize,
    /// Expert ids `[rows, MoE layers, top_k]`, row-major, little-endian, in `dtype`.
    pub bytes: Vec<u8>,
    /// Number of rows, of MoE layers, and top-k.
    pub shape: [usize; 3],
    /// `uint8` or `uint16`.
    pub dtype: &'static str,
}

/// A request in the internal form.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRequest {
    /// How it arrived.
    pub dialect: Dialect,
    /// The history, oldest first; never empty.
    pub messages: Vec<Message>,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may, or must.
    pub tool_choice: ToolChoice,
    /// Maximum number of tokens of the reply; at least 1.
    pub max_tokens: Option<usize>,
    /// Strings that end the reply; none is empty.
    pub stop: Vec<String>,
    /// How the client asks for the reply to be sampled.
    pub sampling: AskedSampling,
    /// Whether the client asks for thinking or declines it, if it says so.
    pub thinking: Option<bool>,
    /// Whether the reply lists every sampled token.
    pub logprobs: bool,
    /// Whether the client's library marks this request as a retry.
    pub repeats: bool,
    /// Fields of the request that something else decides.
    pub overridden: Overridden,
}

/// How a client asks for a reply to be sampled. It decides in evaluations; in training the run's settings do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AskedSampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// The nucleus, above 0 and at most 1.
    pub top_p: Option<f32>,
}

impl AskedSampling {
    /// Checks the values, which is needed only where they decide. `within` is the path of the object that has
    /// them, with a dot at its end.
    pub(crate) fn check(self, within: &str) -> Result<(), Problem> {
        let problem =
            |name, expected: &str| Err(Problem::field(format!("{within}{name}"), expected));
        if self
            .temperature
            .is_some_and(|temperature| !(0.0..=MAX_TEMPERATURE).contains(&temperature))
        {
            return problem("temperature", &format!("must be between 0 and {MAX_TEMPERATURE}"));
        }
        if self.top_p.is_some_and(|top_p| !(top_p > 0.0 && top_p <= 1.0)) {
            return problem("top_p", "must be above 0 and at most 1; 1 keeps every token");
        }
        Ok(())
    }
}

/// A tool that the client offers.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name in calls.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments: always an object.
    pub parameters: Value,
}

/// Whether the reply must call a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must not.
    None,
    /// It must call some tool.
    Required,
    /// It must call this one, which is among the request's tools.
    Named(String),
}

/// A sampled reply.
#[derive(Debug)]
pub struct Sampled {
    /// Number of the reply among all of the episode, which clients send back with its thinking.
    pub number: u32,
    /// Thinking, without its markers.
    pub reasoning: Option<String>,
    /// Text for the user.
    pub content: String,
    /// Calls, in order; ids are unique in the episode.
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish: Finish,
    /// Token counts.
    pub usage: Usage,
    /// Every sampled token, thinking and markers included, if the request asks for them.
    pub tokens: Vec<SampledToken>,
    /// Notified once the whole reply was sent to the client.
    pub receipt: Receipt,
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// It wrote this stop string.
    StopString(String),
    /// A token limit.
    Length,
    /// It called tools.
    ToolCalls,
}

/// Token counts of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt: usize,
    /// Number of prompt tokens served from the cache.
    pub cached: usize,
    /// Sampled tokens, thinking included.
    pub completion: usize,
    /// Sampled tokens of thinking.
    pub reasoning: usize,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// In the tokenizer's vocabulary.
    pub id: u32,
    /// Its text; U+FFFD for a part of a character.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Told that the client has a whole reply. Dropped without that, the reply was not delivered:
/// a client that repeats the request is owed the same tokens.
#[derive(Debug)]
pub struct Receipt {
    sender: Option<oneshot::Sender<()>>,
    was_sent: Arc<AtomicBool>,
}

impl Receipt {
    /// A receipt and the end that waits for it.
    pub fn new() -> (Self, Delivery) {
        let (sender, receiver) = oneshot::channel();
        let was_sent = Arc::new(AtomicBool::new(false));
        let receipt = Self { sender: Some(sender), was_sent: Arc::clone(&was_sent) };
        (receipt, Delivery { receiver, known: None, was_sent })
    }

    /// A receipt that informs no one.
    pub fn ignored() -> Self {
        Self { sender: None, was_sent: Arc::default() }
    }

    /// The last byte was handed to the connection.
    pub fn sent(&mut self) {
        self.was_sent.store(true, Ordering::Release);
    }

    /// The client has the reply.
    pub fn delivered(mut self) {
        self.sent();
        if let Some(sender) = self.sender {
            // Without a receiver no one waits.
            let _ = sender.send(());
        }
    }
}

/// Waits for a [`Receipt`].
#[derive(Debug)]
pub struct Delivery {
    receiver: oneshot::Receiver<()>,
    /// The answer, once it was read.
    known: Option<bool>,
    was_sent: Arc<AtomicBool>,
}

impl Delivery {
    /// Whether the reply was delivered, once that is certain.
    pub async fn wait(self) -> bool {
        match self.known {
            Some(known) => known,
            None => self.receiver.await.is_ok(),
        }
    }

    /// Whether the last byte was handed to the connection, which may have lost it.
    pub fn was_sent(&self) -> bool {
        self.was_sent.load(Ordering::Acquire)
    }

    /// Whether the reply was delivered; `None` while it is being sent, and while the client that it was
    /// sent to keeps its connection open.
    pub fn now(&mut self) -> Option<bool> {
        if self.known.is_none() {
            self.known = match self.receiver.try_recv() {
                Ok(()) => Some(true),
                Err(oneshot::error::TryRecvError::Closed) => Some(false),
                Err(oneshot::error::TryRecvError::Empty) => None,
            };
        }
        self.known
    }
}

/// Why there is no reply. Each has the status and form of the client's dialect.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SampleError {
    /// The request is invalid: status 400.
    #[error("{0}")]
    Refused(String),
    /// The prompt leaves no room for a reply: status 400, in words that make clients compact.
    #[error("the prompt has {prompt} tokens and the model reads at most {context}")]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Longest sequence, in tokens.
        context: usize,
    },
    /// The episode is over: status 400, which clients do not retry.
    #[error("the episode is over: {0}")]
    Ended(String),
    /// A passing failure: status 503 or 529, which clients retry.
    #[error("{0}")]
    Unavailable(String),
    /// Anything else: status 500.
    #[error("{0}")]
    Failed(String),
}

impl From<SampleError> for Problem {
    fn from(error: SampleError) -> Self {
        let kind = match error {
            SampleError::Refused(_) => Kind::Invalid,
            SampleError::TooLong { prompt, context } => Kind::TooLong { prompt, context },
            SampleError::Ended(_) => Kind::Ended,
            SampleError::Unavailable(_) => Kind::Unavailable,
            SampleError::Failed(_) => Kind::Failed,
        };
        Self::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_receipt_that_is_dropped_was_not_delivered() {
        let (receipt, mut delivery) = Receipt::new();
        assert_eq!(delivery.now(), None);
        receipt.delivered();
        assert!(delivery.was_sent());
        assert!(delivery.wait().await);
        let (mut receipt, mut delivery) = Receipt::new();
        assert!(!delivery.was_sent());
        receipt.sent();
        assert_eq!((delivery.now(), delivery.was_sent()), (None, true));
        drop(receipt);
        assert_eq!((delivery.now(), delivery.was_sent()), (Some(false), true));
        assert!(!delivery.wait().await);
    }
}
