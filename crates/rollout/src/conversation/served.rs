//! Replies by the content of their request, so that a request whose reply was lost on the way gets the
//! same one again.
//!
//! A reply is owed until a client has got it: while its request still runs and no client waits for it, or
//! when it was sent into a connection that broke. A request with the same content takes it over. Once a
//! client has got it, the same content asks for another sample.

use super::AskError;
use crate::api::Message;
use orchestrate_engine::Finish;
use orchestrate_gateway::Delivery;
use orchestrate_types::TokenId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// A sampled reply.
#[derive(Debug)]
pub struct SampledReply {
    /// Text and tool calls.
    pub message: Message,
    /// Thinking, if there was any.
    pub reasoning: Option<String>,
    /// Why sampling stopped: `Stop` or `Length`.
    pub finish: Finish,
    /// Number of this reply among all of the attempt, from 0.
    pub number: u32,
    /// Tokens of the prompt, and how many of them the engine had cached.
    pub prompt_tokens: usize,
    /// Prompt tokens that the engine took from its prefix cache.
    pub cached_tokens: usize,
    /// Sampled token ids, `[N]`.
    pub token_ids: Vec<TokenId>,
    /// Their log-probabilities, `[N]`, in nats.
    pub logprobs: Vec<f32>,
    /// How it was sent to each client that got it or was to get it.
    pub(super) deliveries: Mutex<Vec<Delivery>>,
}

impl SampledReply {
    /// Notes that the reply is being sent to a client.
    pub(crate) fn sending(&self, delivery: Delivery) {
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
    }

    /// Whether no client has got the whole reply, and none is getting it.
    fn is_owed(&self) -> bool {
        let mut deliveries = self.deliveries.lock().unwrap_or_else(PoisonError::into_inner);
        deliveries.iter_mut().all(|delivery| delivery.now() == Some(false))
    }
}

type Answer = Result<Arc<SampledReply>, AskError>;

/// A request that is being answered, or was.
#[derive(Debug)]
pub(super) struct Served {
    answer: watch::Sender<Option<Answer>>,
    /// Number of clients that wait for it.
    waiting: AtomicUsize,
}

/// Counts a client for as long as it waits.
struct Waiting(Arc<Served>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Served {
    /// Gives the answer to everyone who waits or comes later.
    pub(super) fn answer(&self, answer: Answer) {
        self.answer.send_replace(Some(answer));
    }

    /// A future of the answer. The client counts as waiting from this call on.
    pub(super) fn wait(self: &Arc<Self>) -> impl Future<Output = Answer> + Send + use<> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let waiting = Waiting(Arc::clone(self));
        let mut answer = self.answer.subscribe();
        async move {
            let answered = answer.wait_for(Option::is_some).await.map(|answer| answer.clone());
            drop(waiting);
            let gone = || Err(AskError::Ended("the episode has ended".to_owned()));
            answered.ok().flatten().unwrap_or_else(gone)
        }
    }

    /// Whether a client that sends the request again is owed this answer.
    fn is_owed(&self, repeats: bool) -> bool {
        match &*self.answer.borrow() {
            None => repeats || self.waiting.load(Ordering::Acquire) == 0,
            Some(Ok(reply)) => repeats || reply.is_owed(),
            Some(Err(_)) => false,
        }
    }
}

/// The requests of a conversation by content.
#[derive(Debug, Default)]
pub(super) struct Receipts {
    by_content: HashMap<[u8; 32], Vec<Arc<Served>>>,
}

impl Receipts {
    /// The latest answer that a request with this content is owed.
    pub(super) fn find(&self, content: [u8; 32], repeats: bool) -> Option<Arc<Served>> {
        let served = self.by_content.get(&content)?;
        served.iter().rev().find(|served| served.is_owed(repeats)).cloned()
    }

    /// Tells everyone who still waits that nothing is coming.
    pub(super) fn close(&mut self) {
        for served in self.by_content.drain().flat_map(|(_, served)| served) {
            if served.answer.borrow().is_none() {
                served.answer(Err(AskError::Ended("the episode has ended".to_owned())));
            }
        }
    }

    /// Notes a request that will be answered.
    pub(super) fn open(&mut self, content: [u8; 32]) -> Arc<Served> {
        let served =
            Arc::new(Served { answer: watch::Sender::new(None), waiting: AtomicUsize::new(0) });
        self.by_content.entry(content).or_default().push(Arc::clone(&served));
        served
    }
}
