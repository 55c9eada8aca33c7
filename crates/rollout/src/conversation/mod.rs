//! The conversation of an agent that brings its own loop and sends whole histories.
//!
//! [`Conversation::sample`] takes a request, in messages or in tokens ([`ReplyRequest`]), and returns a sampled
//! reply. The request is placed in a [`Tree`] of branches; each branch is a [`Sequence`]. A request that
//! continues a branch keeps the tokens that were sampled, and only its new messages are tokenised
//! (`prompt.rs`); one that departs from all branches begins another, whose cause is counted. From a request
//! to its reply: `begin.rs`, `generation.rs`, `pending.rs`.
//!
//! The invariants: every sampled token carries loss in exactly one branch, whatever the agent does with
//! its history; and a request that is repeated after a broken connection gets the same reply.

mod begin;
mod finished;
mod generation;
mod live;
mod pending;
mod prompt;
mod replay;
mod request;
mod tokens;
mod tool_set;
mod tree;
mod unanswered;

use crate::api::TurnLog;
use crate::chat::ChatModel;
use crate::machine::EpisodeLimits;
use crate::offload;
use crate::sequence::{EpisodeContext, Sequence};
use crate::turn_journal::{ConversationRecord, TurnJournal};
use finished::hand_over;
pub(crate) use finished::{EndOnDrop, FinishedConversation};
use orchestrate_gateway::{Receipt, TextSink};
use orchestrate_types::{Attribution, GroupId, Limit};
pub(crate) use pending::Answered;
use pending::{Asking, Begun, PendingReplies};
use prompt::Located;
use request::digest_of_ids;
pub(crate) use request::{ReplyError, ReplyRequest, RequestPrompt};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tool_set::{ToolSet, ToolSets};
use tree::Tree;
pub use tree::{ForkCause, Recognition};
pub(crate) use tree::{HistoryMessage, call_id};
pub(crate) use unanswered::Unanswered;

/// One agent's conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    context: EpisodeContext,
    limits: EpisodeLimits,
    state: Mutex<State>,
    tools: ToolSets,
    /// The error that answered the last request, if it was one. It has a lock of its own, because the
    /// state's may be held for long.
    unanswered: Mutex<Option<Unanswered>>,
    /// Whether the engine failed, once the conversation has ended.
    ended: watch::Sender<Option<bool>>,
    /// Where requests and replies are recorded, if they are.
    journal: OnceLock<TurnJournal>,
}

#[derive(Debug)]
struct State {
    tree: Tree<Sequence>,
    replies: PendingReplies,
    /// Number of generations that have begun for each prompt, by its digest.
    prompts: HashMap<[u8; 32], u32>,
    /// Number of the next generation, which none of the attempt has had.
    next_number: u32,
    /// Number of generations that count towards `max_turns`: one that found the engine's context full does
    /// not.
    turns_used: u32,
    turns: Vec<TurnLog>,
    forks: BTreeMap<ForkCause, u64>,
    recognised: BTreeMap<Recognition, u64>,
    generate_s: f64,
    /// The limit of the episode at which the last reply ended, if it reached one.
    reached: Option<Limit>,
    /// The generations that run.
    generating: JoinSet<()>,
    end: Option<End>,
}

/// Why no more requests are answered.
#[derive(Debug, Clone)]
enum End {
    Closed,
    Limit(Limit),
    Stopped,
    Failed(String),
}

/// Why an attempt is broken whose agent did not ask again for a reply that it got a part of.
const BROKEN_STREAM: &str =
    "a reply was cut off because an engine call failed, and the agent did not ask for it again";

/// How long a request waits for the end of the connection of an earlier one with the same content to be noticed,
/// and the pause between two looks. Several samples that a client asks for at the same time begin that much later.
const SETTLING_TIME: Duration = Duration::from_millis(50);
const SETTLING_PAUSE: Duration = Duration::from_millis(2);

/// Runs work on an agent's bytes away from the event loop.
async fn offloaded<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReplyError> + Send + 'static,
) -> Result<T, ReplyError> {
    offload::run(work).await.map_err(|error| ReplyError::Failed(error.to_string()))?
}

impl Conversation {
    pub(crate) fn new(context: EpisodeContext, limits: EpisodeLimits) -> Self {
        let state = State {
            tree: Tree::new(),
            replies: PendingReplies::default(),
            prompts: HashMap::new(),
            next_number: 0,
            turns_used: 0,
            turns: Vec::new(),
            forks: BTreeMap::new(),
            recognised: BTreeMap::new(),
            generate_s: 0.0,
            reached: None,
            generating: JoinSet::new(),
            end: None,
        };
        Self {
            context,
            limits,
            state: Mutex::new(state),
            tools: ToolSets::default(),
            unanswered: Mutex::default(),
            ended: watch::Sender::new(None),
            journal: OnceLock::new(),
        }
    }

    /// Records everything from now on.
    pub(crate) fn record_in(&self, journal: TurnJournal) {
        // Called at most once.
        let _ = self.journal.set(journal);
    }

    /// Records what happens. If that fails, no more requests are answered: a reply that is not recorded
    /// would be lost with this process.
    fn record(
        &self,
        state: &mut State,
        record: impl FnOnce() -> ConversationRecord,
    ) -> Result<(), ReplyError> {
        let Some(journal) = self.journal.get() else { return Ok(()) };
        journal.append(&record()).or_else(|error| {
            state.end.get_or_insert(End::Failed(error.to_string()));
            self.check_open(state)
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn chat(&self) -> &ChatModel {
        &self.context.chat
    }

    /// Whether an agent decides how its replies are sampled: in evaluations, which train nothing.
    pub(crate) fn honours_sampling(&self) -> bool {
        matches!(self.context.request.attempt.episode.group, GroupId::Eval { .. })
    }

    /// Longest sequence in tokens.
    pub(crate) fn max_sequence_tokens(&self) -> usize {
        self.limits.max_sequence_tokens
    }

    /// Prompt tokens of a request, as if it were sampled now.
    pub(crate) async fn count(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
    ) -> Result<usize, ReplyError> {
        let (this, request) = (Arc::clone(self), Arc::clone(request));
        offloaded(move || {
            let tools = this.tools_of(&request.prompt);
            let state = this.state();
            let located = state.locate(&request.prompt, &tools);
            let prompt = this.prompt_at(&state.tree, located, &request.prompt)?;
            Ok(prompt.len())
        })
        .await
    }

    /// Samples a reply. Sampling continues if the caller is dropped; a request with the same content then
    /// gets that reply.
    pub(crate) async fn sample(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
    ) -> Result<Answered, ReplyError> {
        self.sample_live(request, None).await
    }

    /// Like [`Self::sample`]. `text` is shown the reply while it is sampled.
    pub(crate) async fn sample_live(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
        text: Option<TextSink>,
    ) -> Result<Answered, ReplyError> {
        // Dropped with this future, at any time.
        let (receipt, delivery) = Receipt::new();
        let mut asking = Asking { delivery, text, is_settled: false };
        let waiting = loop {
            let begun = match self.begin_here(request, asking) {
                Ok(begun) => begun?,
                Err(asking) => {
                    let (this, request) = (Arc::clone(self), Arc::clone(request));
                    offloaded(move || this.begin(&request, asking)).await?
                }
            };
            match begun {
                Begun::Waiting(waiting) => break waiting,
                Begun::Unsettled { content, asking: again } => {
                    self.settle(content).await;
                    asking = again;
                }
            }
        };
        let reply = waiting.await?;
        self.note(None);
        Ok(Answered { reply, receipt })
    }

    /// Waits until the replies to requests with this content are known to be owed or not, or for
    /// [`SETTLING_TIME`].
    async fn settle(&self, content: [u8; 32]) {
        let end = Instant::now() + SETTLING_TIME;
        let is_settled = |replies: &PendingReplies| {
            replies.find(content, false).is_some() || !replies.may_be_owed(content)
        };
        while Instant::now() < end && !is_settled(&self.state().replies) {
            sleep(SETTLING_PAUSE).await;
        }
    }

    /// Notes how the last request was answered: with a reply, or with this error.
    pub(crate) fn note(&self, unanswered: Option<Unanswered>) {
        let mut last = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(journal) = self.journal.get().filter(|_| *last != unanswered) {
            // If that fails, so does the next record, which ends the conversation.
            if let Err(error) = journal.append(&ConversationRecord::Noted(unanswered.clone())) {
                tracing::warn!(%error, "an answer was not recorded");
            }
        }
        *last = unanswered;
    }

    fn check_open(&self, state: &mut State) -> Result<(), ReplyError> {
        if state.end.is_none() {
            if self.context.stop.is_cancelled() {
                state.end = Some(End::Stopped);
            } else if self.context.remaining().is_zero() {
                state.end = Some(End::Limit(Limit::EpisodeTime));
            } else if state.turns_used >= self.limits.max_turns {
                state.end = Some(End::Limit(Limit::Turns));
            }
        }
        if let Some(end) = &state.end {
            self.ended.send_replace(Some(matches!(end, End::Failed(_))));
        }
        match &state.end {
            None => Ok(()),
            Some(End::Closed) => Err(ReplyError::Ended("the episode has ended".to_owned())),
            Some(End::Stopped) => Err(ReplyError::Ended("the run is stopping".to_owned())),
            Some(End::Limit(Limit::Turns)) => Err(ReplyError::Ended(format!(
                "all {} generations of this episode are used (rollout.max_turns)",
                self.limits.max_turns
            ))),
            Some(End::Limit(_)) => Err(ReplyError::Ended(
                "the episode's time is up (rollout.episode_timeout)".to_owned(),
            )),
            Some(End::Failed(error)) => Err(ReplyError::Failed(error.clone())),
        }
    }

    /// Waits until no more requests are answered; whether the engine failed, so that nothing that the
    /// agent does counts any more.
    pub(crate) async fn ended(&self) -> bool {
        let mut ended = self.ended.subscribe();
        // The sender is this conversation's own.
        ended.wait_for(Option::is_some).await.is_ok_and(|failed| *failed == Some(true))
    }

    /// Ends the conversation: later requests are refused. Generations that still run are not part of it.
    pub(crate) fn finish(&self) -> FinishedConversation {
        let mut state = self.state();
        let end = state.end.replace(End::Closed);
        if let Some(journal) = self.journal.get() {
            journal.close();
        }
        let has_broken_stream = state.replies.has_broken_stream();
        // Before generations are aborted: one that is dropped without an answer reports a failure.
        state.replies.close();
        state.generating.abort_all();
        let mut branches = std::mem::replace(&mut state.tree, Tree::new()).branches;
        hand_over(&mut branches);
        let mut finished = FinishedConversation {
            turns: std::mem::take(&mut state.turns),
            forks: std::mem::take(&mut state.forks),
            recognised: std::mem::take(&mut state.recognised),
            generate_s: state.generate_s,
            ..FinishedConversation::default()
        };
        // The agent went on after every error but the last one.
        let last = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (end, last) {
            (Some(End::Limit(limit)), _) => finished.limit = Some(limit),
            (Some(End::Failed(error)), _) => finished.failure = Some(error),
            (Some(End::Stopped), _) => finished.stopped = true,
            (Some(End::Closed) | None, Some(last)) => match last.code.attribution() {
                Some(Attribution::Policy) => finished.limit = last.limit(),
                Some(Attribution::Environment) => finished.refusal = Some(last.message),
                Some(Attribution::Infrastructure) => finished.failure = Some(last.message),
                None => {}
            },
            (Some(End::Closed) | None, None) => finished.limit = state.reached,
        }
        if has_broken_stream {
            // What the agent did after the error is not the policy's result.
            finished.failure.get_or_insert_with(|| BROKEN_STREAM.to_owned());
        }
        for branch in branches {
            let sequence = branch.sequence.finish();
            finished.branches.extend(sequence.branch);
            finished.routing_problem = finished.routing_problem.or(sequence.routing_problem);
            finished.rows += sequence.rows;
            finished.counters += sequence.counters;
        }
        finished
    }
}

impl State {
    /// Where a request belongs.
    fn locate<'a>(&self, prompt: &RequestPrompt, tools: &'a ToolSet) -> Located<'a> {
        let point = match prompt {
            RequestPrompt::Messages { messages, .. } => self.tree.locate(&tools.digest, messages),
            RequestPrompt::Tokens(ids) => {
                let was_answered = self.prompts.contains_key(&digest_of_ids(ids));
                self.tree.locate_tokens(ids, was_answered)
            }
        };
        Located { point, tools }
    }
}

#[cfg(test)]
mod live_tests;
#[cfg(test)]
mod replay_tests;
#[cfg(test)]
mod tests;
