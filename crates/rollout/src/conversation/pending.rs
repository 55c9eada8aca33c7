//! Replies by the content of their request, so that a request whose reply was lost on the way gets the
//! same one again.
//!
//! A reply is owed until a client has got it: while its request still runs and no client waits for it, or
//! when it was sent into a connection that broke. A request with the same content takes it over. Once a
//! client has shown that it has the reply, the same content asks for another sample: it has continued the
//! reply, used the connection again, or closed it with everything read. So it does while the connection
//! is open, because clients that sample several times do so in parallel. The end of a connection may be
//! noticed after a request that its client sent later on another one, so such a request waits for a moment
//! before it is another sample ([`PendingReplies::may_be_owed`]).

use super::ReplyError;
use super::live::LiveText;
use crate::api::Message;
use orchestrate_engine::Finish;
use orchestrate_gateway::{Delivery, Receipt, TextSink};
use orchestrate_routing::RoutingMask;
use orchestrate_types::TokenId;
use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// A sampled reply.
#[derive(Debug)]
pub(crate) struct SampledReply {
    /// Text and tool calls.
    pub(crate) message: Message,
    /// Thinking, if there was any.
    pub(crate) reasoning: Option<String>,
    /// Why there are no calls, although the text looks like some.
    pub(crate) unread: Option<String>,
    /// Why sampling stopped: `Stop` or `Length`.
    pub(crate) finish: Finish,
    /// The stop string that ended it, which is not part of the message.
    pub(crate) stop_string: Option<String>,
    /// Number of this reply among all of the attempt, from 0.
    pub(crate) number: u32,
    /// Tokens of the prompt, and how many of them the engine had cached.
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens that the engine took from its prefix cache.
    pub(crate) cached_tokens: usize,
    /// Sampled token ids, `[N]`.
    pub(crate) token_ids: Vec<TokenId>,
    /// Their log-probabilities, `[N]`, in nats.
    pub(crate) logprobs: Vec<f32>,
    /// Routing rows of the branch up to this reply, `[P + N − 1, moe layers, top_k]`, for a request in
    /// tokens.
    pub(crate) rows: Option<RoutingMask>,
    /// Whether a client was shown a text that this does not continue, because an engine call failed: it
    /// has seen an error.
    pub(super) contradicts_shown: bool,
}

pub(super) type Answer = Result<Arc<SampledReply>, ReplyError>;

/// A reply for one client.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) reply: Arc<SampledReply>,
    /// Notified once the client has the whole reply.
    pub(crate) receipt: Receipt,
}

/// A future of an answer.
pub(super) type Waiting = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// A request that is being answered, or was.
#[derive(Debug)]
pub(super) struct PendingReply {
    answer: watch::Sender<Option<Answer>>,
    /// Whether each client that asked for it has got it, from its request on.
    deliveries: Mutex<Vec<Delivery>>,
    /// The text so far, if the request that began it reads it as a stream.
    pub(super) live: Option<Arc<LiveText>>,
}

/// A client that asks for a reply.
pub(super) struct Asking {
    pub(super) delivery: Delivery,
    /// If it reads the reply as a stream.
    pub(super) text: Option<TextSink>,
    /// Whether the ends of other clients' connections have had the time to be noticed.
    pub(super) is_settled: bool,
}

/// How a request begins.
pub(super) enum Begun {
    Waiting(Waiting),
    /// It may be owed the reply to an earlier request with this content, which is not known yet: it asks again.
    Unsettled {
        content: [u8; 32],
        asking: Asking,
    },
}

impl PendingReply {
    /// Gives the answer to everyone who waits or comes later.
    pub(super) fn answer(&self, answer: Answer) {
        self.answer.send_replace(Some(answer));
        if let Some(live) = &self.live {
            live.end();
        }
    }

    /// The answer, if there is one.
    pub(super) fn answered(&self) -> Option<Answer> {
        self.answer.borrow().clone()
    }

    /// A future of the answer.
    pub(super) fn wait(&self, delivery: Delivery) -> Waiting {
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
        let mut answer = self.answer.subscribe();
        Box::pin(async move {
            let answered = answer.wait_for(Option::is_some).await.map(|answer| answer.clone());
            let gone = || Err(ReplyError::Ended("the episode has ended".to_owned()));
            answered.ok().flatten().unwrap_or_else(gone)
        })
    }

    /// Whether no client has got the whole reply, and none waits for it or is getting it.
    fn is_owed(&self) -> bool {
        let mut deliveries = self.deliveries.lock().unwrap_or_else(PoisonError::into_inner);
        deliveries.iter_mut().all(|delivery| delivery.now() == Some(false))
    }

    /// Whether no client is known to have got the whole reply.
    fn is_undelivered(&self) -> bool {
        let mut deliveries = self.deliveries.lock().unwrap_or_else(PoisonError::into_inner);
        deliveries.iter_mut().all(|delivery| delivery.now() != Some(true))
    }

    /// Whether the whole reply was sent to a client, or may still be.
    fn was_sent(&self) -> bool {
        let mut deliveries = self.deliveries.lock().unwrap_or_else(PoisonError::into_inner);
        deliveries.iter_mut().any(|delivery| delivery.was_sent() || delivery.now() != Some(false))
    }
}

/// Answers a request with an error if nothing else has answered it when this is dropped.
pub(super) struct AnswerOnDrop(pub(super) Arc<PendingReply>);

impl Drop for AnswerOnDrop {
    fn drop(&mut self) {
        if self.0.answer.borrow().is_none() {
            self.0.answer(Err(ReplyError::Failed("sampling ended unexpectedly".to_owned())));
        }
    }
}

/// The requests of a conversation by content.
#[derive(Debug, Default)]
pub(super) struct PendingReplies {
    by_content: HashMap<[u8; 32], Vec<Arc<PendingReply>>>,
    /// Numbers of the replies that a request has continued.
    continued: HashSet<u32>,
}

impl PendingReplies {
    /// The latest answer that a request with this content is owed.
    pub(super) fn find(&self, content: [u8; 32], repeats: bool) -> Option<Arc<PendingReply>> {
        let pending = self.by_content.get(&content)?;
        let is_owed = |pending: &&Arc<PendingReply>| match &*pending.answer.borrow() {
            None => repeats || pending.is_owed(),
            Some(Ok(reply)) => {
                repeats || (pending.is_owed() && !self.continued.contains(&reply.number))
            }
            Some(Err(_)) => false,
        };
        pending.iter().rev().find(is_owed).cloned()
    }

    /// Whether a request with this content may be owed a reply once the end of another client's connection is
    /// noticed: that of a client that waits for the reply, or was sent it.
    pub(super) fn may_be_owed(&self, content: [u8; 32]) -> bool {
        let may_be_owed = |pending: &Arc<PendingReply>| match &*pending.answer.borrow() {
            None => true,
            Some(Ok(reply)) => pending.is_undelivered() && !self.continued.contains(&reply.number),
            Some(Err(_)) => false,
        };
        self.by_content.get(&content).is_some_and(|pending| pending.iter().any(may_be_owed))
    }

    /// Whether an agent saw a stream end with an error because an engine call failed, and has not got the
    /// reply since.
    pub(super) fn has_broken_stream(&self) -> bool {
        self.by_content.values().flatten().any(|pending| match &*pending.answer.borrow() {
            Some(Ok(reply)) => reply.contradicts_shown && !pending.was_sent(),
            Some(Err(_)) | None => false,
        })
    }

    /// Notes that a client has the reply with this number: its request continues it.
    pub(super) fn mark_continued(&mut self, number: u32) {
        self.continued.insert(number);
    }

    /// Tells everyone who still waits that nothing is coming.
    pub(super) fn close(&mut self) {
        for pending in self.by_content.drain().flat_map(|(_, pending)| pending) {
            if pending.answer.borrow().is_none() {
                pending.answer(Err(ReplyError::Ended("the episode has ended".to_owned())));
            }
        }
    }

    /// Notes a request that will be answered.
    pub(super) fn open(
        &mut self,
        content: [u8; 32],
        live: Option<Arc<LiveText>>,
    ) -> Arc<PendingReply> {
        let (answer, deliveries) = (watch::Sender::new(None), Mutex::default());
        let pending = Arc::new(PendingReply { answer, deliveries, live });
        self.by_content.entry(content).or_default().push(Arc::clone(&pending));
        pending
    }
}
