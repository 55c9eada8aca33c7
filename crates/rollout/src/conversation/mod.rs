//! The conversation of an agent that brings its own loop and sends whole histories.
//!
//! [`Conversation::sample`] takes a request, in messages or in tokens ([`Ask`]), and returns a sampled
//! reply. The request is placed in a [`Tree`] of branches; each branch is a [`Line`]. A request that
//! continues a branch keeps the tokens that were sampled, and only its new messages are tokenised
//! (`prompt.rs`); one that departs from all branches begins another, whose cause is counted.
//!
//! The invariants: every sampled token carries loss in exactly one branch, whatever the agent does with
//! its history; and a request that is repeated after a broken connection gets the same reply.

mod ask;
mod finished;
mod prompt;
mod reply;
mod served;
mod tokens;
mod tree;

use crate::api::TurnLog;
use crate::chat::{ChatErrorKind, ChatModel};
use crate::line::{Calls, GenerationId, Line, NoReply, Sampled};
use crate::machine::{EpisodeLimits, MAX_ABORTS_PER_TURN};
use crate::offload;
pub(crate) use ask::{Ask, AskError, Past};
use ask::{digest_of, digest_of_ids};
use finished::hand_over;
pub(crate) use finished::{EndOnDrop, FinishedConversation};
use orchestrate_engine::Finish;
use orchestrate_types::{Limit, TokenId};
use reply::{ReplyParts, first_stop};
pub(crate) use served::SampledReply;
use served::{Client, Receipts, Served};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokens::IN_TOKENS;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;
pub use tree::ForkCause;
pub(crate) use tree::Said;
use tree::{Place, Step, Tree};

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

#[cfg(test)]
mod tests;
