//! Generations of a conversation: each samples one turn on its branch, and stores it there.

use super::live::LiveText;
use super::pending::{AnswerOnDrop, PendingReply, SampledReply};
use super::replay::record_of;
use super::request::{ReplyError, RequestPrompt};
use super::tree::{IN_TOKENS, Reply, Segment};
use super::{Conversation, End, State};
use crate::api::TurnLog;
use crate::machine::MAX_ABORTS_PER_TURN;
use crate::offload;
use crate::reply::{ReplyParts, first_stop};
use crate::sequence::{GenerationId, NoReply, Sampled, Sequence, TurnPart};
use orchestrate_engine::{Finish, TokenListener};
use orchestrate_types::{Limit, TokenId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Longest reply that is decoded on a thread of the event loop, with the new part of its prompt, in
/// tokens.
const TOKENS_HERE: usize = 4096;

/// Maximum size of the routing rows that are recorded there, in bytes.
const RECORD_BYTES_HERE: usize = 256 << 10;

/// A generation that is about to run.
pub(super) struct PlannedGeneration {
    pub(super) branch: usize,
    pub(super) sequence: Sequence,
    /// Tokens of the prompt that are new on the sequence.
    pub(super) new_tokens: Vec<TokenId>,
    pub(super) id: GenerationId,
    pub(super) budget: TokenBudget,
    /// The reply's text for clients that read it as a stream.
    pub(super) live: Option<Arc<LiveText>>,
    /// Fields of the request that something else decides.
    pub(super) overridden: Arc<[String]>,
}

/// How many tokens a generation may sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenBudget {
    pub(super) max_new_tokens: usize,
    /// The limit of the episode that this is; `None` if the agent asked for fewer tokens.
    pub(super) limit: Option<Limit>,
}

/// A turn as it was sampled, after the last of its engine calls.
#[derive(Debug)]
pub(super) struct SampledTurn {
    /// Why it ended: `Stop` or `Length`.
    pub(super) finish: Finish,
    pub(super) prompt_tokens: usize,
    /// How many of them the engine had cached.
    pub(super) cached_tokens: usize,
}

/// A generation that has run.
pub(super) struct FinishedGeneration {
    pub(super) branch: usize,
    pub(super) sequence: Sequence,
    pub(super) id: GenerationId,
    pub(super) limit: Option<Limit>,
    pub(super) elapsed: Duration,
    pub(super) sampled: Result<SampledTurn, NoReply>,
    /// The tools of its request.
    pub(super) tools: Arc<Vec<serde_json::Value>>,
    pub(super) overridden: Arc<[String]>,
    /// Whether a client of an earlier process was shown a text that the reply does not continue.
    pub(super) contradicted_earlier: bool,
}

impl Conversation {
    /// Samples one reply, with all of its continuations after aborts, and stores it.
    pub(super) async fn run(
        self: Arc<Self>,
        planned: PlannedGeneration,
        prompt: RequestPrompt,
        pending: Arc<PendingReply>,
    ) {
        let PlannedGeneration { branch, mut sequence, new_tokens, id, budget, live, overridden } =
            planned;
        // A panic must not leave the client waiting.
        let _answered = AnswerOnDrop(Arc::clone(&pending));
        let started = Instant::now();
        sequence.listener = live.clone().map(|live| live as Arc<dyn TokenListener>);
        let sampled =
            self.generate(&mut sequence, id, budget.max_new_tokens, live.as_deref()).await;
        sequence.listener = None;
        let elapsed = started.elapsed();
        let tools = prompt.tools();
        let generated = FinishedGeneration {
            branch,
            sequence,
            id,
            limit: budget.limit,
            elapsed,
            sampled,
            tools,
            overridden,
            contradicted_earlier: false,
        };
        let Err(generated) = self.store_here(generated, &prompt, &new_tokens, &pending) else {
            return;
        };
        let reply = Arc::clone(&pending);
        let stored = offload::run(move || {
            let observation = self.observation(&prompt, &new_tokens);
            self.store(&mut self.state(), *generated, observation, &pending);
        });
        if let Err(error) = stored.await {
            reply.answer(Err(ReplyError::Failed(error.to_string())));
        }
    }

    /// Samples one turn, with all of its continuations after aborts.
    pub(super) async fn generate(
        &self,
        sequence: &mut Sequence,
        id: GenerationId,
        max_new_tokens: usize,
        live: Option<&LiveText>,
    ) -> Result<SampledTurn, NoReply> {
        let prompt_tokens = sequence.buffer.prompt_len();
        let (mut sampled, mut cached_tokens) = (0, 0);
        for aborts in 0..=MAX_ABORTS_PER_TURN {
            let left = max_new_tokens.saturating_sub(sampled);
            let part = TurnPart { max_new_tokens: left, resumed: aborts > 0 };
            let reply: Sampled = sequence.sample(&self.context, id, part).await?;
            sampled += reply.tokens;
            cached_tokens += reply.cached_tokens;
            let ended = |finish| Ok(SampledTurn { finish, prompt_tokens, cached_tokens });
            match reply.finish {
                Finish::Abort if sampled < max_new_tokens => {
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
                Finish::Stop => return ended(Finish::Stop),
                Finish::Length | Finish::Abort => return ended(Finish::Length),
            }
        }
        let turn = id.turn;
        Err(NoReply::Failed(format!("turn {turn} was aborted {} times", MAX_ABORTS_PER_TURN + 1)))
    }

    /// Stores a generation on this thread if that is a matter of microseconds; otherwise gives it back.
    fn store_here(
        &self,
        generated: FinishedGeneration,
        prompt: &RequestPrompt,
        new_tokens: &[TokenId],
        pending: &PendingReply,
    ) -> Result<(), Box<FinishedGeneration>> {
        let tokens = new_tokens.len() + generated.sequence.buffer.last_turn().len();
        let recorded = generated.sequence.recorded.iter().flatten();
        let rows = recorded.filter_map(|call| call.generation.routed_experts.as_ref());
        let bytes: usize = rows.map(|rows| rows.rows() * rows.row_bytes()).sum();
        match self.state.try_lock() {
            Ok(mut state) if tokens <= TOKENS_HERE && bytes <= RECORD_BYTES_HERE => {
                self.store(&mut state, generated, self.observation(prompt, new_tokens), pending);
                Ok(())
            }
            Ok(_) | Err(_) => Err(Box::new(generated)),
        }
    }

    /// Reads the reply that was sampled last on a sequence, with its whole text.
    fn read_reply(
        &self,
        sequence: &Sequence,
        tools: &[serde_json::Value],
        sampled: SampledTurn,
        live: Option<&LiveText>,
    ) -> Result<(String, SampledReply), NoReply> {
        let SampledTurn { finish, prompt_tokens, cached_tokens } = sampled;
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
            contradicts_shown: live
                .is_some_and(|live| live.has_shown_other(thinking, &message.content)),
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
        };
        Ok((text, reply))
    }

    /// What the agent added since its last reply, as text.
    pub(super) fn observation(&self, prompt: &RequestPrompt, new_tokens: &[TokenId]) -> String {
        match prompt {
            RequestPrompt::Messages { messages, .. } => {
                let new =
                    messages.iter().rev().take_while(|entry| entry.message.role != "assistant");
                let mut new: Vec<&str> = new.map(|entry| entry.message.content.as_str()).collect();
                new.reverse();
                new.join("\n")
            }
            RequestPrompt::Tokens(_) => self.context.chat.decode(new_tokens).unwrap_or_default(),
        }
    }

    /// Stores a generation in its branch and answers its request.
    pub(super) fn store(
        &self,
        state: &mut State,
        generated: FinishedGeneration,
        observation: String,
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
            contradicted_earlier,
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
            reply.number = id.number;
            reply.contradicts_shown |= contradicted_earlier;
            reply.rows = if is_in_tokens { sequence.rows_so_far() } else { None };
            Ok((text, reply))
        });
        let calls = sequence.recorded.take().unwrap_or_default();
        let contradicts = reply.as_ref().map(|(_, reply)| reply.contradicts_shown);
        let record = record_of(id.number, elapsed, calls, contradicts);
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
                    drops_thinking: false,
                });
                target.sequence = sequence;
                state.reached = limit.filter(|_| reply.finish == Finish::Length);
                state.log(text, &reply, observation, elapsed);
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
                        state.turns_used -= 1;
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
}

impl State {
    /// Logs a turn. What the agent added since the turn before is that one's observation.
    fn log(&mut self, text: String, reply: &SampledReply, observation: String, elapsed: Duration) {
        if let Some(before) = self.turns.last_mut() {
            before.observation = observation;
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
