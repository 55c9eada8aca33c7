//! The conversation of an agent that brings its own loop and sends whole histories.
//!
//! [`Conversation::sample`] takes a request, in messages or in tokens ([`ReplyRequest`]), and returns a sampled
//! reply. The request is placed in a [`Tree`] of branches; each branch is a [`Sequence`]. A request that
//! continues a branch keeps the tokens that were sampled, and only its new messages are tokenised
//! (`prompt.rs`); one that departs from all branches begins another, whose cause is counted.
//!
//! The invariants: every sampled token carries loss in exactly one branch, whatever the agent does with
//! its history; and a request that is repeated after a broken connection gets the same reply.

mod begin;
mod finished;
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
use crate::machine::{EpisodeLimits, MAX_ABORTS_PER_TURN};
use crate::offload;
use crate::reply::{ReplyParts, first_stop};
use crate::sequence::{EpisodeContext, GenerationId, NoReply, Sampled, Sequence, TurnPart};
use crate::turn_journal::{ConversationRecord, TurnJournal};
use finished::hand_over;
pub(crate) use finished::{EndOnDrop, FinishedConversation};
use live::LiveText;
use orchestrate_engine::{Finish, TokenListener};
use orchestrate_gateway::TextSink;
use orchestrate_types::{Attribution, GroupId, Limit, TokenId};
pub(crate) use pending::SampledReply;
use pending::{AnswerOnDrop, Asking, Begun, Client, PendingReplies, PendingReply};
use replay::record_of;
use request::digest_of_ids;
pub(crate) use request::{ReplyError, ReplyRequest, RequestPrompt};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tool_set::{ToolSet, ToolSets};
use tree::{BranchPoint, IN_TOKENS, Reply, Segment, Tree};
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
    /// Number of generations that have begun, by which they are told apart.
    begun: u32,
    /// Number of generations that count towards `max_turns`.
    generations: u32,
    turns: Vec<TurnLog>,
    forks: BTreeMap<ForkCause, u64>,
    recognised: BTreeMap<Recognition, u64>,
    generate_s: f64,
    /// The limit that cut the last reply off, if one did.
    cut_by: Option<Limit>,
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

/// A generation that is about to run.
struct PlannedGeneration {
    branch: usize,
    sequence: Sequence,
    /// Tokens of the prompt that are new on the sequence.
    tail: Vec<TokenId>,
    id: GenerationId,
    room: usize,
    /// The limit of the episode that `room` stands for; `None` if the agent asked for fewer tokens.
    limit: Option<Limit>,
    /// The reply's text for clients that read it as a stream.
    live: Option<Arc<LiveText>>,
    /// Fields of the request that something else decides.
    overridden: Arc<[String]>,
}

/// A generation that has run.
struct FinishedGeneration {
    branch: usize,
    sequence: Sequence,
    id: GenerationId,
    limit: Option<Limit>,
    elapsed: Duration,
    /// Why it ended, and tokens of its prompt: all of them, and those that the engine had cached.
    sampled: Result<(Finish, usize, usize), NoReply>,
    /// The tools of its request.
    tools: Arc<Vec<serde_json::Value>>,
    overridden: Arc<[String]>,
    /// Whether a client of an earlier process was shown another text.
    contradicted: bool,
}

/// Why an attempt is broken whose agent did not ask again for a reply that it got a part of.
const CUT_OFF: &str =
    "a reply was cut off because an engine call failed, and the agent did not ask for it again";

/// Longest reply that is decoded on a thread of the event loop, with the new part of its prompt, in
/// tokens.
const TOKENS_HERE: usize = 4096;

/// Maximum size of the routing rows that are recorded there, in bytes.
const RECORD_BYTES_HERE: usize = 256 << 10;

/// Runs work on an agent's bytes away from the event loop.
/// How long a request waits for the end of the connection of an earlier one with the same content to be noticed,
/// and the pause between two looks. Several samples that a client asks for at the same time begin that much later.
const SETTLING_TIME: Duration = Duration::from_millis(50);
const SETTLING_PAUSE: Duration = Duration::from_millis(2);

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
            begun: 0,
            generations: 0,
            turns: Vec::new(),
            forks: BTreeMap::new(),
            recognised: BTreeMap::new(),
            generate_s: 0.0,
            cut_by: None,
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
            let point = state.locate(&request.prompt, &tools);
            let (head, tail) = this.prompt_at(&state.tree, point, &request.prompt, &tools)?;
            Ok(head + tail.len())
        })
        .await
    }

    /// Samples a reply. Sampling continues if the caller is dropped; a request with the same content then
    /// gets that reply.
    pub(crate) async fn sample(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
    ) -> Result<Arc<SampledReply>, ReplyError> {
        self.sample_live(request, None).await
    }

    /// Like [`Self::sample`]. `text` is shown the reply while it is sampled.
    pub(crate) async fn sample_live(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
        text: Option<TextSink>,
    ) -> Result<Arc<SampledReply>, ReplyError> {
        // Dropped with this future, at any time.
        let client = Arc::new(Client);
        let mut asking = Asking { client: Arc::downgrade(&client), text, is_settled: false };
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
        let answer = waiting.await;
        drop(client);
        if answer.is_ok() {
            self.note(None);
        }
        answer
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
            } else if state.generations >= self.limits.max_turns {
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

    /// Samples one reply, with all of its continuations after aborts, and stores it.
    async fn run(
        self: Arc<Self>,
        planned: PlannedGeneration,
        prompt: RequestPrompt,
        pending: Arc<PendingReply>,
    ) {
        let PlannedGeneration { branch, mut sequence, tail, id, room, limit, live, overridden } =
            planned;
        // A panic must not leave the client waiting.
        let _answered = AnswerOnDrop(Arc::clone(&pending));
        let prompt_tokens = sequence.buffer.prompt_len();
        let started = Instant::now();
        sequence.listener = live.clone().map(|live| live as Arc<dyn TokenListener>);
        let result = self.generate(&mut sequence, id, room, live.as_deref()).await;
        sequence.listener = None;
        let elapsed = started.elapsed();
        let sampled = result.map(|(finish, cached_tokens)| (finish, prompt_tokens, cached_tokens));
        let tools = prompt.tools();
        let generated = FinishedGeneration {
            branch,
            sequence,
            id,
            limit,
            elapsed,
            sampled,
            tools,
            overridden,
            contradicted: false,
        };
        let Err(generated) = self.store_here(generated, &prompt, &tail, &pending) else { return };
        let reply = Arc::clone(&pending);
        let stored = offload::run(move || {
            let asked = self.observation(&prompt, &tail);
            self.store(&mut self.state(), *generated, asked, &pending);
        });
        if let Err(error) = stored.await {
            reply.answer(Err(ReplyError::Failed(error.to_string())));
        }
    }

    /// Stores a generation on this thread if that is a matter of microseconds; otherwise gives it back.
    fn store_here(
        &self,
        generated: FinishedGeneration,
        prompt: &RequestPrompt,
        tail: &[TokenId],
        pending: &PendingReply,
    ) -> Result<(), Box<FinishedGeneration>> {
        let tokens = tail.len() + generated.sequence.buffer.last_turn().len();
        let recorded = generated.sequence.recorded.iter().flatten();
        let rows = recorded.filter_map(|call| call.generation.routed_experts.as_ref());
        let bytes: usize = rows.map(|rows| rows.rows() * rows.row_bytes()).sum();
        match self.state.try_lock() {
            Ok(mut state) if tokens <= TOKENS_HERE && bytes <= RECORD_BYTES_HERE => {
                self.store(&mut state, generated, self.observation(prompt, tail), pending);
                Ok(())
            }
            Ok(_) | Err(_) => Err(Box::new(generated)),
        }
    }

    /// Reads the reply that was sampled last on a sequence, with its whole text. `sampled` is why it ended, and the
    /// tokens of its prompt: all of them, and those that the engine had cached.
    fn read_reply(
        &self,
        sequence: &Sequence,
        tools: &[serde_json::Value],
        sampled: (Finish, usize, usize),
        live: Option<&LiveText>,
    ) -> Result<(String, SampledReply), NoReply> {
        let (finish, prompt_tokens, cached_tokens) = sampled;
        let chat = &self.context.chat;
        let token_ids = sequence.buffer.last_turn().to_vec();
        let text = chat.decode(&token_ids).map_err(|error| NoReply::Failed(error.to_string()))?;
        // The agent gets what is before the stop string; the branch keeps all that was sampled.
        let stopped = first_stop(&text, &sequence.stops);
        let shown = stopped.map_or(text.as_str(), |(before, _)| before);
        let thinks = chat.opens_thinking(sequence.buffer.last_prompt());
        let parts = ReplyParts::parse(chat.tool_format(), tools, thinks, shown);
        let message = parts.message();
        let thinking = parts.reasoning.as_deref().unwrap_or_default();
        let reply = SampledReply {
            contradicts: live.is_some_and(|live| live.was_contradicted(thinking, &message.content)),
            unread: parts.unread.as_ref().map(ToString::to_string),
            message,
            reasoning: parts.reasoning,
            finish,
            stop_string: stopped.map(|(_, stop)| stop.to_owned()),
            number: 0,
            prompt_tokens,
            cached_tokens,
            token_ids,
            logprobs: sequence.buffer.last_logprobs(),
            rows: None,
            deliveries: Mutex::default(),
        };
        Ok((text, reply))
    }

    /// Stores a generation in its branch and answers its request.
    fn store(
        &self,
        state: &mut State,
        generated: FinishedGeneration,
        asked: String,
        pending: &PendingReply,
    ) {
        let FinishedGeneration {
            branch,
            mut sequence,
            id,
            limit,
            elapsed,
            sampled,
            tools,
            overridden,
            contradicted,
        } = generated;
        state.generate_s += elapsed.as_secs_f64();
        let Some(target) = state.tree.branches.get_mut(branch) else {
            // The conversation was ended meanwhile.
            pending.answer(Err(ReplyError::Ended("the episode has ended".to_owned())));
            return;
        };
        target.is_busy = false;
        let is_in_tokens = target.tools == IN_TOKENS;
        let reply = sampled.and_then(|sampled| {
            let live = pending.live.as_deref();
            let (text, mut reply) = self.read_reply(&sequence, &tools, sampled, live)?;
            reply.number = id.ordinal;
            reply.contradicts |= contradicted;
            reply.rows = if is_in_tokens { sequence.rows_so_far() } else { None };
            Ok((text, reply))
        });
        let calls = sequence.recorded.take().unwrap_or_default();
        let contradicts = reply.as_ref().map(|(_, reply)| reply.contradicts);
        let record = record_of(id.ordinal, elapsed, calls, contradicts);
        if let Some(Err(error)) = record.map(|record| self.record(state, || record)) {
            pending.answer(Err(error));
            return;
        }
        let Some(target) = state.tree.branches.get_mut(branch) else { return };
        match reply {
            Ok((text, reply)) => {
                let end = sequence.buffer.len();
                let (message, reasoning) = (reply.message.clone(), reply.reasoning.clone());
                let as_shown = Arc::new(Reply { message, reasoning, number: reply.number });
                let tokens = reply.token_ids.len();
                target.segments.push(Segment::Reply {
                    reply: as_shown,
                    end,
                    tokens,
                    is_cut: false,
                });
                target.sequence = sequence;
                state.cut_by = limit.filter(|_| reply.finish == Finish::Length);
                state.log(text, &reply, asked, elapsed);
                if let Some(turn) = state.turns.last_mut() {
                    turn.overridden = overridden.to_vec();
                }
                pending.answer(Ok(Arc::new(reply)));
            }
            Err(no_reply) => {
                // The messages stay with the next request that has them.
                while matches!(target.segments.last(), Some(Segment::Message(_))) {
                    target.segments.pop();
                }
                let end = match no_reply {
                    // As for a prompt that exceeds the episode's own limit, the agent may go on.
                    NoReply::ContextFull(_) => {
                        state.generations -= 1;
                        let prompt = sequence.buffer.prompt_len();
                        let limit = self.limits.max_sequence_tokens.min(prompt);
                        pending.answer(Err(ReplyError::TooLong { prompt, limit }));
                        return;
                    }
                    NoReply::Stopped => End::Stopped,
                    NoReply::TimeUp => End::Limit(Limit::EpisodeTime),
                    NoReply::Failed(error) => End::Failed(error),
                };
                state.end.get_or_insert(end);
                let error = self.check_open(state).err();
                let error =
                    error.unwrap_or_else(|| ReplyError::Ended("the episode has ended".into()));
                pending.answer(Err(error));
            }
        }
    }

    /// What the agent added since its last reply, as text.
    fn observation(&self, prompt: &RequestPrompt, tail: &[TokenId]) -> String {
        match prompt {
            RequestPrompt::Messages { messages, .. } => {
                let new =
                    messages.iter().rev().take_while(|entry| entry.message.role != "assistant");
                let mut new: Vec<&str> = new.map(|entry| entry.message.content.as_str()).collect();
                new.reverse();
                new.join("\n")
            }
            RequestPrompt::Tokens(_) => self.context.chat.decode(tail).unwrap_or_default(),
        }
    }

    async fn generate(
        &self,
        sequence: &mut Sequence,
        id: GenerationId,
        room: usize,
        live: Option<&LiveText>,
    ) -> Result<(Finish, usize), NoReply> {
        let (mut sampled, mut cached) = (0, 0);
        for aborts in 0..=MAX_ABORTS_PER_TURN {
            let max_new_tokens = room.saturating_sub(sampled);
            let part = TurnPart { max_new_tokens, resumed: aborts > 0 };
            let reply: Sampled = sequence.sample(&self.context, id, part).await?;
            sampled += reply.tokens;
            cached += reply.cached_tokens;
            match reply.finish {
                Finish::Abort if sampled < room => {
                    let turn = sequence.buffer.last_turn();
                    let part = turn.len().saturating_sub(reply.tokens);
                    if let (Some(live), Some(part)) = (live, turn.get(part..)) {
                        live.keep(part);
                    }
                }
                // The engine's context may be shorter than the episode's limit.
                Finish::Stop | Finish::Length if sampled == 0 => {
                    return Err(NoReply::Failed("the engine returned no tokens".to_owned()));
                }
                Finish::Stop => return Ok((Finish::Stop, cached)),
                Finish::Length | Finish::Abort => return Ok((Finish::Length, cached)),
            }
        }
        let turn = id.turn;
        Err(NoReply::Failed(format!("turn {turn} was aborted {} times", MAX_ABORTS_PER_TURN + 1)))
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
        let was_cut_off = state.replies.has_cut_off();
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
            (Some(End::Closed) | None, None) => finished.limit = state.cut_by,
        }
        if was_cut_off {
            // What the agent did after the error is not the policy's result.
            finished.failure.get_or_insert_with(|| CUT_OFF.to_owned());
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
    fn locate(&self, prompt: &RequestPrompt, tools: &ToolSet) -> BranchPoint {
        match prompt {
            RequestPrompt::Messages { messages, .. } => self.tree.locate(&tools.digest, messages),
            RequestPrompt::Tokens(ids) => {
                let was_answered = self.prompts.contains_key(&digest_of_ids(ids));
                self.tree.locate_tokens(ids, was_answered)
            }
        }
    }

    /// Logs a turn. What the agent added since the turn before is that one's observation.
    fn log(&mut self, text: String, reply: &SampledReply, asked: String, elapsed: Duration) {
        if let Some(before) = self.turns.last_mut() {
            before.observation = asked;
        }
        self.turns.push(TurnLog {
            text,
            actions: reply.message.tool_calls.clone(),
            unread: reply.unread.clone(),
            observation: String::new(),
            generate_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            exec_ms: 0,
            fork: None,
            overridden: Vec::new(),
        });
    }
}

#[cfg(test)]
mod live_tests;
#[cfg(test)]
mod replay_tests;
#[cfg(test)]
mod tests;
