//! A scripted sampler.

use async_trait::async_trait;
use orchestrate_gateway::{
    Delivery, Finish, Receipt, RoutedExperts, SampleError, SampleRequest, Sampled, SampledToken,
    SampledTokens, Sampler, TextSink, TokenRequest, ToolCall, Usage,
};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// What a [`ScriptedSampler`] does with a request.
#[derive(Clone, Debug)]
pub(crate) enum ScriptedTurn {
    /// Replies.
    Reply(ScriptedReply),
    /// Replies after a time.
    After(Duration, Box<ScriptedTurn>),
    /// Fails.
    Fail(SampleError),
    /// Never replies.
    Hang,
    /// Shows thinking and text to a client that reads a stream.
    Show(&'static str, &'static str, Box<ScriptedTurn>),
    /// Waits for a permit.
    Wait(Arc<Notify>, Box<ScriptedTurn>),
}

/// A reply of a [`ScriptedSampler`].
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptedReply {
    /// Thinking.
    pub(crate) reasoning: Option<&'static str>,
    /// Text.
    pub(crate) content: &'static str,
    /// Names and arguments of calls.
    pub(crate) calls: Vec<(&'static str, String)>,
    /// Why it ended; by default because of the calls, or else by itself.
    pub(crate) finish: Option<Finish>,
}

/// Number of every reply.
const NUMBER: u32 = 7;

/// Maximum number of recorded tokens of a text.
const MAX_TOKENS: usize = 1000;

type Script = dyn Fn(&SampleRequest, usize) -> ScriptedTurn + Send + Sync;

/// Answers requests by a function, and records them. Its model is `policy`, its context 4,096
/// tokens, and every character is a token.
pub(crate) struct ScriptedSampler {
    script: Box<Script>,
    /// Whether it samples as requests ask.
    evaluates: bool,
    requests: Mutex<Vec<Arc<SampleRequest>>>,
    deliveries: Mutex<Vec<Delivery>>,
    calls: AtomicUsize,
    dropped: Arc<AtomicUsize>,
}

impl fmt::Debug for ScriptedSampler {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ScriptedSampler")
            .field("requests", &self.requests)
            .finish_non_exhaustive()
    }
}

impl ScriptedSampler {
    /// A sampler whose replies `script` makes, from the request and the number of the reply.
    pub(crate) fn new(
        script: impl Fn(&SampleRequest, usize) -> ScriptedTurn + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self::evaluated(false, script))
    }

    fn evaluated(
        evaluates: bool,
        script: impl Fn(&SampleRequest, usize) -> ScriptedTurn + Send + Sync + 'static,
    ) -> Self {
        Self {
            script: Box::new(script),
            evaluates,
            requests: Mutex::default(),
            deliveries: Mutex::default(),
            calls: AtomicUsize::new(0),
            dropped: Arc::default(),
        }
    }

    /// A sampler of an evaluation that always writes the same text.
    pub(crate) fn evaluating(content: &'static str) -> Arc<Self> {
        let reply = ScriptedReply { content, ..ScriptedReply::default() };
        Arc::new(Self::evaluated(true, move |_, _| ScriptedTurn::Reply(reply.clone())))
    }

    /// A sampler that always writes the same text.
    pub(crate) fn writing(content: &'static str) -> Arc<Self> {
        let reply = ScriptedReply { content, ..ScriptedReply::default() };
        Self::new(move |_, _| ScriptedTurn::Reply(reply.clone()))
    }

    /// The requests so far.
    pub(crate) fn requests(&self) -> Vec<Arc<SampleRequest>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Which of the replies since the last call were delivered, once all are sent or given up.
    pub(crate) async fn delivered(&self) -> Vec<bool> {
        let deliveries =
            std::mem::take(&mut *self.deliveries.lock().unwrap_or_else(PoisonError::into_inner));
        futures::future::join_all(deliveries.into_iter().map(Delivery::wait)).await
    }

    /// Whether all replies since then were written to their connections.
    pub(crate) fn sent(&self) -> bool {
        let deliveries = self.deliveries.lock().unwrap_or_else(PoisonError::into_inner);
        !deliveries.is_empty() && deliveries.iter().all(Delivery::was_sent)
    }

    /// Requests whose client went away before the reply.
    pub(crate) fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }

    fn reply(&self, request: &SampleRequest, reply: ScriptedReply) -> Sampled {
        let tokens = |text: &str| -> Vec<SampledToken> {
            let token = |text: char| SampledToken {
                id: u32::from(text),
                text: text.to_string(),
                bytes: text.to_string().into_bytes(),
                logprob: -0.5,
            };
            text.chars().take(MAX_TOKENS).map(token).collect()
        };
        let call = |(name, arguments): (&str, String)| ToolCall {
            id: format!("call_{}", self.calls.fetch_add(1, Ordering::SeqCst)),
            name: name.to_owned(),
            arguments,
        };
        let tool_calls: Vec<ToolCall> = reply.calls.into_iter().map(call).collect();
        let natural = if tool_calls.is_empty() { Finish::Stop } else { Finish::ToolCalls };
        let thinking = reply.reasoning.unwrap_or_default();
        let tokens = [tokens(thinking), tokens(reply.content)].concat();
        let (receipt, delivery) = Receipt::new();
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
        Sampled {
            number: NUMBER,
            reasoning: reply.reasoning.map(str::to_owned),
            content: reply.content.to_owned(),
            tool_calls,
            finish: reply.finish.unwrap_or(natural),
            usage: Usage {
                prompt: length(request),
                cached: 0,
                completion: tokens.len(),
                reasoning: thinking.chars().count(),
            },
            tokens,
            receipt,
        }
    }
}

fn length(request: &SampleRequest) -> usize {
    request.messages.iter().map(|message| message.content.chars().count()).sum()
}

#[async_trait]
impl Sampler for ScriptedSampler {
    fn model(&self) -> &'static str {
        "policy"
    }

    fn context(&self) -> usize {
        4096
    }

    fn honours_sampling(&self) -> bool {
        self.evaluates
    }

    async fn sample(
        &self,
        request: &Arc<SampleRequest>,
        sample: usize,
        text: Option<TextSink>,
    ) -> Result<Sampled, SampleError> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(request));
        let mut guard = CountDrop { dropped: Arc::clone(&self.dropped), is_armed: true };
        let mut turn = (self.script)(request, sample);
        let result = loop {
            turn = match turn {
                ScriptedTurn::Reply(reply) => break Ok(self.reply(request, reply)),
                ScriptedTurn::Fail(error) => break Err(error),
                ScriptedTurn::Hang => std::future::pending().await,
                ScriptedTurn::Show(reasoning, content, next) => {
                    if let Some(text) = &text {
                        text.show(length(request), NUMBER, reasoning, content);
                    }
                    *next
                }
                ScriptedTurn::Wait(permit, next) => {
                    permit.notified().await;
                    *next
                }
                ScriptedTurn::After(time, next) => {
                    tokio::time::sleep(time).await;
                    *next
                }
            };
        };
        guard.is_armed = false;
        result
    }

    async fn count(&self, request: &SampleRequest) -> Result<usize, SampleError> {
        Ok(length(request))
    }

    /// Always tokens 8 and 9. Row `t` of two layers is `t` for each.
    async fn generate(&self, request: TokenRequest) -> Result<SampledTokens, SampleError> {
        let (receipt, delivery) = Receipt::new();
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
        let end = request.token_ids.len() + 1;
        let rows = request.rows_from..end;
        let rows = RoutedExperts {
            start: rows.start,
            shape: [rows.len(), 2, 1],
            bytes: rows.flat_map(|row| [u8::try_from(row).unwrap(); 2]).collect(),
            dtype: "uint8",
        };
        Ok(SampledTokens {
            token_ids: vec![8, 9],
            logprobs: vec![-0.5, -0.5],
            finish: Finish::Stop,
            cached: 0,
            rows: Some(rows),
            receipt,
        })
    }
}

/// Counts futures that are dropped before their end.
struct CountDrop {
    dropped: Arc<AtomicUsize>,
    is_armed: bool,
}

impl Drop for CountDrop {
    fn drop(&mut self) {
        if self.is_armed {
            self.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}
