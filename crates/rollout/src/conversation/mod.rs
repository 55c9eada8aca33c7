//! The conversation of an agent that brings its own loop and sends whole histories.
//!
//! [`Conversation::sample`] takes a request in messages and returns a sampled reply. The request is
//! placed in a [`Tree`] of branches; each branch is a [`Line`]. What continues a branch keeps the tokens
//! that were sampled, and only what is new is tokenised; what departs from all branches begins
//! another one, whose cause is counted.
//!
//! The invariants: every sampled token carries loss in exactly one branch, whatever the agent does with
//! its history; and a request that is repeated after a broken connection gets the same reply.

mod reply;
mod served;
mod tokens;
mod tree;

use crate::api::{EpisodeBranch, Message, RowCounts, TurnLog};
use crate::chat::{ChatError, ChatErrorKind, ChatModel};
use crate::line::{Calls, Counters, GenerationId, Line, NoReply, Sampled};
use crate::machine::{EpisodeLimits, MAX_ABORTS_PER_TURN};
use crate::offload;
use crate::prefix::History;
use crate::template::tools_value;
use orchestrate_engine::Finish;
use orchestrate_types::{Limit, TokenId};
use reply::ReplyParts;
pub use served::SampledReply;
use served::{Client, Receipts, Served};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokens::IN_TOKENS;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;
use tree::{Branch, Place, Step, Tree};
pub use tree::{ForkCause, Said};

/// Bytes of text that one token stands for at most, on the average of a whole prompt.
const BYTES_PER_TOKEN: usize = 32;

/// What a request wants continued: always the whole history, without the reply.
#[derive(Debug, Clone)]
pub enum Past {
    /// Messages, which the chat template renders.
    Messages {
        /// Oldest first.
        said: Vec<Arc<Said>>,
        /// JSON schemas of the tools that the agent offers, in the form that chat templates read.
        tools: Arc<Vec<serde_json::Value>>,
    },
    /// The prompt in token ids, `[P]`, of a client that renders it itself.
    Tokens(Arc<[TokenId]>),
}

impl Past {
    /// The messages; none of a prompt in tokens.
    fn said(&self) -> &[Arc<Said>] {
        match self {
            Self::Messages { said, .. } => said,
            Self::Tokens(_) => &[],
        }
    }

    fn tools(&self) -> Arc<Vec<serde_json::Value>> {
        match self {
            Self::Messages { tools, .. } => Arc::clone(tools),
            Self::Tokens(_) => Arc::default(),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Messages { said, .. } => said.is_empty(),
            Self::Tokens(ids) => ids.is_empty(),
        }
    }
}

/// A request for a reply.
#[derive(Debug, Clone)]
pub struct Ask {
    /// What the reply continues.
    pub past: Past,
    /// Maximum number of tokens that the agent asks for.
    pub max_tokens: Option<usize>,
    /// Strings that end the reply; none is empty.
    pub stops: Arc<[String]>,
    /// Number of this sample among those that one request asks for.
    pub sample: usize,
    /// Whether the agent says that it repeats a request whose reply it did not get.
    pub repeats: bool,
}

/// Why there is no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AskError {
    /// The request cannot be rendered as a prompt.
    #[error("{0}")]
    Refused(String),
    /// The prompt leaves no room for a reply.
    #[error("the prompt has {prompt} tokens, but at most {limit} are possible")]
    TooLong {
        /// Its length in tokens.
        prompt: usize,
        /// Longest sequence in tokens.
        limit: usize,
    },
    /// The episode has no generations or time left, or has ended.
    #[error("{0}")]
    Ended(String),
    /// The engine failed. The attempt is broken.
    #[error("{0}")]
    Failed(String),
}

/// One agent's conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    calls: Calls,
    limits: EpisodeLimits,
    state: Mutex<State>,
    /// Whether the engine failed, once the conversation has ended.
    ended: watch::Sender<Option<bool>>,
}

#[derive(Debug)]
struct State {
    tree: Tree<Line>,
    receipts: Receipts,
    /// Number of generations that have begun for each prompt, by its digest.
    prompts: HashMap<[u8; 32], u32>,
    generations: u32,
    turns: Vec<TurnLog>,
    forks: BTreeMap<ForkCause, u64>,
    generate_s: f64,
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

/// What a conversation ended with.
#[derive(Debug, Default)]
pub(crate) struct FinishedConversation {
    pub(crate) branches: Vec<EpisodeBranch>,
    pub(crate) routing_problem: Option<String>,
    pub(crate) rows: RowCounts,
    pub(crate) counters: Counters,
    pub(crate) turns: Vec<TurnLog>,
    pub(crate) forks: BTreeMap<ForkCause, u64>,
    pub(crate) generate_s: f64,
    /// The limit that ended it.
    pub(crate) limit: Option<Limit>,
    /// The engine's failure, which breaks the attempt.
    pub(crate) failure: Option<String>,
    /// Whether the run stops.
    pub(crate) stopped: bool,
}

/// A generation that is about to run.
struct Planned {
    branch: usize,
    line: Line,
    /// Tokens of the prompt that are new on the line.
    tail: Vec<TokenId>,
    id: GenerationId,
    room: usize,
}

/// A generation that has run.
struct Generated {
    branch: usize,
    line: Line,
    id: GenerationId,
    elapsed: Duration,
    /// Why it ended, and tokens of its prompt: all of them, and those that the engine had cached.
    sampled: Result<(Finish, usize, usize), NoReply>,
    /// The tools of its request.
    tools: Arc<Vec<serde_json::Value>>,
}

/// Runs work on an agent's bytes away from the event loop.
async fn offloaded<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, AskError> + Send + 'static,
) -> Result<T, AskError> {
    offload::run(work).await.map_err(|error| AskError::Ended(error.to_string()))?
}

impl Conversation {
    pub(crate) fn new(calls: Calls, limits: EpisodeLimits) -> Self {
        let state = State {
            tree: Tree::new(),
            receipts: Receipts::default(),
            prompts: HashMap::new(),
            generations: 0,
            turns: Vec::new(),
            forks: BTreeMap::new(),
            generate_s: 0.0,
            generating: JoinSet::new(),
            end: None,
        };
        Self { calls, limits, state: Mutex::new(state), ended: watch::Sender::new(None) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn chat(&self) -> &ChatModel {
        &self.calls.chat
    }

    /// Longest sequence in tokens.
    pub(crate) fn context(&self) -> usize {
        self.limits.max_sequence_tokens
    }

    /// Prompt tokens of a request, as if it were sampled now.
    pub(crate) async fn count(self: &Arc<Self>, ask: &Arc<Ask>) -> Result<usize, AskError> {
        let (this, ask) = (Arc::clone(self), Arc::clone(ask));
        offloaded(move || {
            let state = this.state();
            let place = state.locate(&ask.past).0;
            let (head, tail) = this.prompt_at(&state.tree, place, &ask.past)?;
            Ok(head + tail.len())
        })
        .await
    }

    /// Samples a reply. Sampling continues if the caller is dropped; a request with the same content then
    /// gets that reply.
    pub(crate) async fn sample(
        self: &Arc<Self>,
        ask: &Arc<Ask>,
    ) -> Result<Arc<SampledReply>, AskError> {
        let (this, ask) = (Arc::clone(self), Arc::clone(ask));
        // Dropped with this future, at any time.
        let client = Arc::new(Client);
        let asking = Arc::downgrade(&client);
        let waiting = offloaded(move || this.begin(&ask, &asking)).await?;
        let answer = waiting.await;
        drop(client);
        answer
    }

    /// Begins to sample, or finds the reply that the request is owed. Tokenizes what is new.
    fn begin(
        self: &Arc<Self>,
        ask: &Ask,
        client: &Weak<Client>,
    ) -> Result<impl Future<Output = Result<Arc<SampledReply>, AskError>> + use<>, AskError> {
        let digest = digest_of(ask);
        let mut state = self.state();
        if client.strong_count() == 0 {
            return Err(AskError::Ended("the client is gone".to_owned()));
        }
        if let Some(served) = state.receipts.find(digest, ask.repeats) {
            return Ok(served.wait(client));
        }
        let planned = self.plan(&mut state, ask)?;
        let served = state.receipts.open(digest);
        let waiting = served.wait(client);
        let (this, past) = (Arc::clone(self), ask.past.clone());
        let run = async move { this.run(planned, past, served).await };
        while state.generating.try_join_next().is_some() {}
        state.generating.spawn(run.in_current_span());
        Ok(waiting)
    }

    /// Finds the place of a request and prepares its line.
    fn plan(&self, state: &mut State, ask: &Ask) -> Result<Planned, AskError> {
        self.check_open(state)?;
        if ask.past.is_empty() {
            return Err(AskError::Refused("the request has no history".to_owned()));
        }
        if !ask.past.tools().is_empty() && !self.calls.chat.reads_tool_calls() {
            return Err(AskError::Refused(ChatErrorKind::UnknownToolFormat.to_string()));
        }
        let (place, tools) = state.locate(&ask.past);
        let (head, tail) = self.prompt_at(&state.tree, place, &ask.past)?;
        let prompt = head + tail.len();
        let room = self.limits.max_sequence_tokens.saturating_sub(prompt);
        if room == 0 {
            return Err(AskError::TooLong { prompt, limit: self.limits.max_sequence_tokens });
        }
        let known = place.steps(&state.tree);
        let (branch, forked) = self.branch_at(state, place, tools, &tail);
        for cause in place.cause().into_iter().chain(forked) {
            *state.forks.entry(cause).or_default() += 1;
        }
        let Some(target) = state.tree.branches.get_mut(branch) else {
            return Err(AskError::Refused("the branch is gone".to_owned()));
        };
        let new = ask.past.said().iter().skip(known).cloned();
        target.steps.extend(new.map(Step::Given));
        target.is_busy = true;
        let turn = target.steps.iter().filter(|step| matches!(step, Step::Reply { .. })).count();
        let mut line = target.line.copy();
        line.extend(&tail);
        line.stops = Arc::clone(&ask.stops);
        let repetition = {
            let digest = digest_of_ids(&line.buffer.prompt_for_turn());
            let count = state.prompts.entry(digest).or_default();
            let repetition = *count;
            *count += 1;
            repetition
        };
        let ordinal = state.generations;
        state.generations += 1;
        let longest = room.min(self.limits.max_response_tokens);
        let room = ask.max_tokens.map_or(longest, |wanted| wanted.max(1).min(longest));
        let turn = u32::try_from(turn).unwrap_or(u32::MAX);
        let id = GenerationId { turn, ordinal, repetition, max_new_tokens: room };
        Ok(Planned { branch, line, tail, id, room })
    }

    fn check_open(&self, state: &mut State) -> Result<(), AskError> {
        if state.end.is_none() {
            if self.calls.stop.is_cancelled() {
                state.end = Some(End::Stopped);
            } else if self.calls.remaining().is_zero() {
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
            Some(End::Closed) => Err(AskError::Ended("the episode has ended".to_owned())),
            Some(End::Stopped) => Err(AskError::Ended("the run is stopping".to_owned())),
            Some(End::Limit(Limit::Turns)) => Err(AskError::Ended(format!(
                "all {} generations of this episode are used (rollout.max_turns)",
                self.limits.max_turns
            ))),
            Some(End::Limit(_)) => Err(AskError::Ended(
                "the episode's time is up (rollout.episode_timeout)".to_owned(),
            )),
            Some(End::Failed(error)) => Err(AskError::Failed(error.clone())),
        }
    }

    /// The prompt of a request at a place: number of tokens that the branch has, and those that follow.
    fn prompt_at(
        &self,
        tree: &Tree<Line>,
        place: Place,
        past: &Past,
    ) -> Result<(usize, Vec<TokenId>), AskError> {
        let (said, tools) = match past {
            Past::Messages { said, tools } => (said, tools_value(tools)),
            Past::Tokens(ids) => return self.tokens_at(tree, place, ids),
        };
        let limit = self.limits.max_sequence_tokens;
        let new = || said.iter().skip(place.steps(tree));
        let bytes: usize = new().map(|said| said.bytes()).sum();
        if bytes / BYTES_PER_TOKEN > limit {
            // Certainly too long, so it is not tokenized.
            return Err(AskError::TooLong { prompt: bytes / BYTES_PER_TOKEN, limit });
        }
        let new: Vec<Message> = new().map(|said| self.rendered(said)).collect();
        let refused = |error: ChatError| AskError::Refused(error.to_string());
        let chat = &self.calls.chat;
        let (branch, tokens) = match place {
            Place::Root { .. } => {
                return Ok((0, chat.prompt_with(&new, &tools).map_err(refused)?.to_vec()));
            }
            Place::Tip { branch } => (branch, None),
            Place::Fork { branch, tokens, .. } => (branch, Some(tokens)),
        };
        let Some(branch) = tree.branches.get(branch) else { return Ok((0, Vec::new())) };
        let ids = branch.line.buffer.ids();
        let head = tokens.unwrap_or(ids.len());
        let last = head.checked_sub(1).and_then(|last| ids.get(last)).copied();
        Ok((head, chat.delta_with(&new, last, &tools).map_err(refused)?))
    }

    /// The prompt of a request in tokens at a place.
    fn tokens_at(
        &self,
        tree: &Tree<Line>,
        place: Place,
        prompt: &[TokenId],
    ) -> Result<(usize, Vec<TokenId>), AskError> {
        let vocabulary = self.calls.engine.shape().vocab;
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocabulary) {
            let problem =
                format!("token id {id} is not below {vocabulary}, the model's vocabulary");
            return Err(AskError::Refused(problem));
        }
        let head = match place {
            Place::Root { .. } => 0,
            Place::Fork { tokens, .. } => tokens,
            Place::Tip { branch } => {
                tree.branches.get(branch).map_or(0, |branch| branch.line.buffer.len())
            }
        };
        Ok((head, prompt.get(head..).unwrap_or_default().to_vec()))
    }

    /// A message as the template shows it. An agent's text cannot hold control tokens, even in replies
    /// that it made up.
    fn rendered(&self, said: &Said) -> Message {
        let mut message = said.message.clone();
        if message.role == "assistant" {
            message.content = self.calls.chat.break_control_texts(&message.content);
            if let Some(thinking) = &said.reasoning {
                let thinking = self.calls.chat.break_control_texts(thinking);
                message.content = format!("<think>\n{thinking}\n</think>\n\n{}", message.content);
            }
        }
        message
    }

    /// The branch for a place, begun if necessary, without the messages and tokens that are new.
    fn branch_at(
        &self,
        state: &mut State,
        place: Place,
        tools: [u8; 32],
        tail: &[TokenId],
    ) -> (usize, Option<ForkCause>) {
        let number = state.tree.branches.len();
        let (parent, steps, tokens) = match place {
            Place::Tip { branch } => match self.dropped_thinking(state, branch, number) {
                Some(forked) => {
                    state.tree.branches.push(forked);
                    return (number, Some(ForkCause::Thinking));
                }
                None => return (branch, None),
            },
            Place::Fork { branch, steps, tokens, .. } => (branch, steps, tokens),
            Place::Root { .. } => {
                let line = self.root_line(&state.tree, number, tail);
                let branch =
                    Branch { tools, steps: Vec::new(), is_busy: false, parent: None, line };
                state.tree.branches.push(branch);
                return (number, None);
            }
        };
        if let Some(from) = state.tree.branches.get(parent) {
            let branch = Branch {
                tools,
                steps: from.steps.get(..steps).unwrap_or_default().to_vec(),
                is_busy: false,
                parent: Some((parent, tokens)),
                line: from.line.branch(&self.calls, number, tokens),
            };
            state.tree.branches.push(branch);
        }
        (number, None)
    }

    /// A line for a conversation without a common reply. Rows of tokens that it has in common with another
    /// branch are shared.
    fn root_line(&self, tree: &Tree<Line>, number: usize, prompt: &[TokenId]) -> Line {
        let common =
            |line: &Line| line.buffer.ids().iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let lines = tree.branches.iter().map(|branch| &branch.line);
        match lines.map(|line| (common(line), line)).max_by_key(|(common, _)| *common) {
            Some((common, line)) => line.sibling(&self.calls, number, common),
            None => Line::new(&self.calls, number),
        }
    }

    /// If the chat template leaves out the thinking of a branch's last reply: a branch without it.
    fn dropped_thinking(
        &self,
        state: &State,
        branch: usize,
        number: usize,
    ) -> Option<Branch<Line>> {
        let chat = &self.calls.chat;
        if chat.options.history != History::Template {
            return None;
        }
        let from = state.tree.branches.get(branch).filter(|from| from.tools != IN_TOKENS)?;
        let buffer = &from.line.buffer;
        let turn = buffer.last_turn();
        let (header, thinking) = chat.dropped_tokens(turn);
        if header + thinking == 0 {
            return None;
        }
        let end = buffer.len();
        let at = end.checked_sub(turn.len() + header)?;
        let kept = turn.get(thinking..).unwrap_or_default();
        let mut line = from.line.branch(&self.calls, number, at);
        line.extend(kept);
        let mut steps = from.steps.clone();
        if let Some(Step::Reply { end, .. }) = steps.last_mut() {
            *end = at + kept.len();
        }
        Some(Branch { tools: from.tools, steps, is_busy: false, parent: Some((branch, at)), line })
    }

    /// Samples one reply, with all of its continuations after aborts, and stores it.
    async fn run(self: Arc<Self>, planned: Planned, past: Past, served: Arc<Served>) {
        let Planned { branch, mut line, tail, id, room } = planned;
        let prompt_tokens = line.buffer.prompt_len();
        let started = Instant::now();
        let result = self.generate(&mut line, id, room).await;
        let elapsed = started.elapsed();
        let sampled = result.map(|(finish, cached_tokens)| (finish, prompt_tokens, cached_tokens));
        let reply = Arc::clone(&served);
        let stored = offload::run(move || {
            let asked = self.observation(&past, &tail);
            let tools = past.tools();
            self.store(Generated { branch, line, id, elapsed, sampled, tools }, asked, &served);
        });
        if let Err(error) = stored.await {
            reply.answer(Err(AskError::Failed(error.to_string())));
        }
    }

    /// Stores a generation in its branch and answers its request.
    fn store(&self, generated: Generated, asked: String, served: &Served) {
        let Generated { branch, line, id, elapsed, sampled, tools } = generated;
        let mut state = self.state();
        state.generate_s += elapsed.as_secs_f64();
        let Some(target) = state.tree.branches.get_mut(branch) else {
            // The conversation was ended meanwhile.
            served.answer(Err(AskError::Ended("the episode has ended".to_owned())));
            return;
        };
        target.is_busy = false;
        let reply = sampled.and_then(|(finish, prompt_tokens, cached_tokens)| {
            let ids = line.buffer.last_turn().to_vec();
            let text = self.calls.chat.decode(&ids).map_err(|e| NoReply::Failed(e.to_string()))?;
            // The agent gets what is before the stop string; the branch keeps all that was sampled.
            let stopped = first_stop(&text, &line.stops);
            let said = stopped.map_or(text.as_str(), |(before, _)| before);
            let parts = ReplyParts::parse(self.calls.chat.tool_format(), &tools, said);
            let stop_string = stopped.map(|(_, stop)| stop.to_owned());
            let reply = SampledReply {
                message: parts.message(),
                reasoning: parts.reasoning,
                finish,
                stop_string,
                number: id.ordinal,
                prompt_tokens,
                cached_tokens,
                token_ids: ids,
                logprobs: line.buffer.last_logprobs(),
                rows: if target.tools == IN_TOKENS { line.rows_so_far() } else { None },
                deliveries: Mutex::default(),
            };
            Ok((text, reply))
        });
        match reply {
            Ok((text, reply)) => {
                let end = line.buffer.len();
                target.steps.push(Step::Reply { message: Arc::new(reply.message.clone()), end });
                target.line = line;
                state.log(text, &reply, asked, elapsed);
                served.answer(Ok(Arc::new(reply)));
            }
            Err(no_reply) => {
                // The messages stay with the next request that has them.
                while matches!(target.steps.last(), Some(Step::Given(_))) {
                    target.steps.pop();
                }
                let end = match no_reply {
                    NoReply::Stopped => End::Stopped,
                    NoReply::TimeUp => End::Limit(Limit::EpisodeTime),
                    NoReply::Failed(error) => End::Failed(error),
                };
                state.end.get_or_insert(end);
                let error = self.check_open(&mut state).err();
                let error =
                    error.unwrap_or_else(|| AskError::Ended("the episode has ended".into()));
                served.answer(Err(error));
            }
        }
    }

    /// What the agent added since its last reply, as text.
    fn observation(&self, past: &Past, tail: &[TokenId]) -> String {
        match past {
            Past::Messages { said, .. } => {
                let new = said.iter().rev().take_while(|said| said.message.role != "assistant");
                let mut new: Vec<&str> = new.map(|said| said.message.content.as_str()).collect();
                new.reverse();
                new.join("\n")
            }
            Past::Tokens(_) => self.calls.chat.decode(tail).unwrap_or_default(),
        }
    }

    async fn generate(
        &self,
        line: &mut Line,
        mut id: GenerationId,
        room: usize,
    ) -> Result<(Finish, usize), NoReply> {
        let (mut sampled, mut cached) = (0, 0);
        for aborts in 0..=MAX_ABORTS_PER_TURN {
            id.max_new_tokens = room.saturating_sub(sampled);
            let reply: Sampled = line.sample(&self.calls, id, aborts > 0).await?;
            sampled += reply.tokens;
            cached += reply.cached_tokens;
            match reply.finish {
                Finish::Abort if sampled < room => {}
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
        state.generating.abort_all();
        state.receipts.close();
        let mut branches = std::mem::replace(&mut state.tree, Tree::new()).branches;
        hand_over(&mut branches);
        let mut finished = FinishedConversation {
            turns: std::mem::take(&mut state.turns),
            forks: std::mem::take(&mut state.forks),
            generate_s: state.generate_s,
            ..FinishedConversation::default()
        };
        match end {
            Some(End::Limit(limit)) => finished.limit = Some(limit),
            Some(End::Failed(error)) => finished.failure = Some(error),
            Some(End::Stopped) => finished.stopped = true,
            Some(End::Closed) | None => {}
        }
        for branch in branches {
            let line = branch.line.finish();
            finished.branches.extend(line.branch);
            finished.routing_problem = finished.routing_problem.or(line.routing_problem);
            finished.rows += line.rows;
            finished.counters += line.counters;
        }
        finished
    }
}

/// Ends a conversation when it is dropped, if that was not done before: an attempt that is given up must
/// not leave generations behind, which would wait for an engine that may be gone.
#[derive(Debug)]
pub(crate) struct EndOnDrop(pub(crate) Arc<Conversation>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Lets a branch that ends where another one forked from it be part of that one, and drops branches
/// without a reply of their own.
fn hand_over(branches: &mut Vec<Branch<Line>>) {
    let mut is_whole = vec![false; branches.len()];
    for index in 0..branches.len() {
        let (before, after) = branches.split_at_mut(index + 1);
        let Some(parent) = before.last() else { continue };
        let end = parent.line.buffer.len();
        let heir = after
            .iter_mut()
            .find(|child| child.parent == Some((index, end)) && child.line.buffer.len() > end);
        if let (Some(heir), Some(part)) = (heir, is_whole.get_mut(index)) {
            heir.line.buffer.take_over(&parent.line.buffer);
            *part = true;
        }
    }
    let mut part_of_another = is_whole.into_iter();
    branches.retain(|branch| {
        let is_part = part_of_another.next().unwrap_or(false);
        !is_part && branch.line.buffer.has_own_reply()
    });
}

impl State {
    /// Where a request belongs, and the digest of its tools.
    fn locate(&self, past: &Past) -> (Place, [u8; 32]) {
        match past {
            Past::Messages { said, tools } => {
                let text = serde_json::to_vec(&**tools).unwrap_or_default();
                let digest = *blake3::hash(&text).as_bytes();
                (self.tree.locate(&digest, said), digest)
            }
            Past::Tokens(ids) => {
                let was_answered = self.prompts.contains_key(&digest_of_ids(ids));
                (self.tree.locate_tokens(ids, was_answered), IN_TOKENS)
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
            observation: String::new(),
            generate_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            exec_ms: 0,
            fork: None,
        });
    }
}

/// The text before the first stop string, and that string.
fn first_stop<'a>(text: &'a str, stops: &'a [String]) -> Option<(&'a str, &'a str)> {
    let found = stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
    let (at, stop) = found.min_by_key(|(at, _)| *at)?;
    Some((text.get(..at)?, stop))
}

/// Digest of a prompt, `[P]`.
fn digest_of_ids(ids: &[TokenId]) -> [u8; 32] {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    *blake3::hash(&bytes).as_bytes()
}

/// Digest of everything that makes two requests the same.
fn digest_of(ask: &Ask) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    match &ask.past {
        Past::Messages { said, tools } => {
            part(&serde_json::to_vec(&**tools).unwrap_or_default());
            for said in said {
                part(&serde_json::to_vec(&said.message).unwrap_or_default());
            }
        }
        Past::Tokens(ids) => {
            part(b"tokens");
            part(&digest_of_ids(ids));
        }
    }
    part(&(ask.sample as u64).to_le_bytes());
    part(&(ask.max_tokens.unwrap_or(0) as u64).to_le_bytes());
    ask.stops.iter().for_each(|stop| part(stop.as_bytes()));
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests;
