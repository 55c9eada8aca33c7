//! The engine calls that sample a sequence's replies: tries, refused replies, seeds, and what is recorded.

use super::{EpisodeContext, Sequence};
use crate::api::EpisodeRequest;
use crate::chat::ChatModel;
use crate::dialogue::TurnText;
use crate::prefill::{PrefillKey, PrefillRole};
use crate::rows::{EpisodeRows, JoinedRows, RowsRefused};
use orchestrate_engine::{
    CountedPrompt, Finish, GenerateRequest, Generation, MessageReply, Prompt, Reply, SampledTokens,
    Sampling, SessionOpening, TokenPrompt, VersionSpan,
};
use orchestrate_types::{Attribution, RequestId, Retry, TokenId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout_at;
use tracing::Span;

/// Maximum number of engine calls for one generation. With the pauses between them an engine may be
/// unreachable for about a minute, long enough for a restart.
const MAX_TRIES: u32 = 8;

/// Numbers of tries that are set apart for each process of an attempt, so that no request id is used again.
const TRIES_PER_START: u32 = 1000;

/// Maximum number of these calls that may end with a late or invalid reply.
const MAX_REPLY_TRIES: u32 = 3;

/// Maximum number of these calls that may end with routing rows that do not join the ones so far.
const MAX_ROUTING_TRIES: u32 = 2;

/// Maximum pause between two calls. Pauses double up to it.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The engine's reply is in a different form than the prompt.
const MESSAGE_MISMATCH: &str = "a message in reply to tokens, or tokens in reply to a message";

/// Identifies a generation within its attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GenerationId {
    /// Number of replies before it on its sequence. It decides the seed.
    pub(crate) turn: u32,
    /// Number of earlier generations of the attempt, on all sequences: no two share a request id. It is
    /// also the number of the reply.
    pub(crate) number: u32,
    /// Number of earlier generations with the same prompt, which must not repeat their tokens.
    pub(crate) repetition: u32,
}

/// Which part of a turn an engine call samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TurnPart {
    /// Maximum number of tokens to sample.
    pub(crate) max_new_tokens: usize,
    /// Whether it continues a reply that was aborted.
    pub(crate) resumed: bool,
}

/// A reply that was stored.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) finish: Finish,
    /// Number of sampled tokens; 0 if nothing was stored.
    pub(crate) tokens: usize,
    /// Whether it continued an aborted reply.
    pub(crate) resumed: bool,
    /// The reply as text, if the engine returned a message.
    pub(crate) message_text: Option<String>,
    /// How many of the prompt's tokens the engine had cached.
    pub(crate) cached_tokens: usize,
}

/// An engine call whose reply was accepted, with what accepting it depended on. A sequence that gets the same
/// calls again has the same tokens, rows and counters.
#[derive(Debug, Clone)]
pub(crate) struct AcceptedCall {
    /// The reply as it arrived.
    pub(crate) generation: Generation,
    /// What its rows joined.
    pub(crate) joined: JoinedRows,
    /// Whether the sequence was the first of its group to sample.
    pub(crate) was_leading: bool,
}

/// Why there is no reply.
#[derive(Debug)]
pub(crate) enum NoReply {
    /// The run stops.
    Stopped,
    /// The agent's time is up.
    TimeUp,
    /// The prompt fills the engine's context, which may be shorter than the limits of the episode.
    ContextFull(String),
    /// No tries are left, or the error cannot be retried.
    Failed(String),
}

/// Why a reply is refused.
enum Refusal {
    /// The reply as a whole.
    Reply(String),
    /// Its routing rows.
    Routing(String),
}

impl Sequence {
    /// Samples one reply to the sequence's prompt, or continues one that was aborted, and stores it.
    pub(crate) async fn sample(
        &mut self,
        context: &EpisodeContext,
        id: GenerationId,
        part: TurnPart,
    ) -> Result<Sampled, NoReply> {
        if let (true, Some(problem)) = (context.request.want_routing, &self.routing_problem) {
            return Err(NoReply::Failed(problem.clone()));
        }
        if !part.resumed {
            self.tries = 0;
        }
        let (reply, was_leading) = match &mut self.replayed {
            Some(replayed) => {
                let call = replayed.pop_front();
                self.replay(context, call)?
            }
            None if context.stop.is_cancelled() => return Err(NoReply::Stopped),
            None => {
                (self.try_generate(context, id, part.max_new_tokens).await?, self.leading.is_some())
            }
        };
        let (generation, message_text) = match reply {
            Reply::Tokens(generation) => (generation, None),
            Reply::Message(reply) => {
                let (generation, text) = self.record_message(context, reply)?;
                (generation, Some(text))
            }
        };
        let finish = generation.finish().clone();
        let tokens = generation.output_ids().len();
        let cached_tokens = generation.cached_tokens;
        let resumed = self.turn_is_open;
        if tokens == 0 {
            // Aborted before its first token, or without room for one: nothing is stored.
            return Ok(Sampled { finish, tokens, resumed, message_text: None, cached_tokens });
        }
        Span::current().record("engine", generation.worker.as_str());
        self.count(&generation, id.turn, resumed, was_leading);
        self.buffer.push_reply(&generation, resumed, self.version);
        self.turn_is_open = finish == Finish::Abort;
        if let (Some(rows), Some(span)) = (&mut self.rows, generation.versions().first()) {
            rows.offer(self.buffer.ids(), span.version, &generation.worker).await;
        }
        if let Some(leading) = self.leading.take() {
            leading.finish();
        }
        if let Some(last) = generation.versions().last() {
            self.version = last.version;
        }
        if message_text.is_some() {
            let end = self.buffer.len();
            self.buffer.exclude(end - tokens..end);
        }
        Ok(Sampled { finish, tokens, resumed, message_text, cached_tokens })
    }

    async fn try_generate(
        &mut self,
        context: &EpisodeContext,
        id: GenerationId,
        max_new_tokens: usize,
    ) -> Result<Reply, NoReply> {
        let Some(deadline) = context.deadline else {
            return Err(NoReply::Failed("the episode's time limit was not started".to_owned()));
        };
        if self.buffer.is_empty() && self.tries == 0 {
            let prompt = self.buffer.prompt_for_turn();
            self.open_session(context, &prompt).await;
        }
        let (mut tries, mut pauses, mut routing_failures) = (0, 0, 0);
        loop {
            if context.stop.is_cancelled() {
                return Err(NoReply::Stopped);
            }
            if context.remaining().is_zero() {
                return Err(NoReply::TimeUp);
            }
            let prompt = self.buffer.prompt_for_turn();
            let request = self.engine_request(context, id, max_new_tokens, prompt);
            self.tries += 1;
            tries += 1;
            // The request has a deadline, too; this one is for an engine that ignores it.
            let Ok(result) = timeout_at(deadline, context.engine.generate(request)).await else {
                return Err(NoReply::TimeUp);
            };
            let (error, retry) = match result {
                Ok(mut reply) => match self.accept_recorded(&context.chat, &mut reply) {
                    Ok(()) => return Ok(reply),
                    Err(Refusal::Reply(problem)) => (problem, Retry::Now),
                    Err(Refusal::Routing(problem)) => {
                        routing_failures += 1;
                        if routing_failures >= MAX_ROUTING_TRIES {
                            self.routing_problem = Some(problem.clone());
                        }
                        (problem, Retry::Now)
                    }
                },
                Err(error) => match error.kind.attribution() {
                    Attribution::Policy => return Err(NoReply::ContextFull(error.to_string())),
                    Attribution::Environment | Attribution::Infrastructure => {
                        (error.to_string(), error.retry())
                    }
                },
            };
            let is_last = tries >= MAX_TRIES || tries - pauses >= MAX_REPLY_TRIES;
            if is_last || self.routing_problem.is_some() {
                return Err(NoReply::Failed(format!("{error} (after {tries} tries)")));
            }
            tracing::debug!(error, turn = id.turn, tries, "generation failed, retrying");
            match retry {
                Retry::Never => return Err(NoReply::Failed(error)),
                Retry::Now => {}
                Retry::After(time) => {
                    let time = time.saturating_mul(1 << pauses).min(MAX_PAUSE);
                    pauses += 1;
                    tokio::select! {
                        biased;
                        () = context.stop.cancelled() => {}
                        () = tokio::time::sleep(time.min(context.remaining())) => {}
                    }
                }
            }
        }
    }

    /// Before the first call: opens the session, waits for the first attempt of the group or becomes
    /// it, and takes the rows that are cached for this prompt.
    async fn open_session(&mut self, context: &EpisodeContext, prompt: &[TokenId]) {
        let engine = &context.engine;
        let group = context.request.attempt.episode.group;
        self.announce_session(context, prompt);
        let worker = engine.worker_of(&self.session.name);
        let key = PrefillKey { group, version: self.version, worker };
        let patience = context.settings.follow_wait.0.min(context.remaining());
        let role = tokio::select! {
            biased;
            () = context.stop.cancelled() => PrefillRole::Alone,
            role = context.leaders.join(key, patience) => role,
        };
        match role {
            PrefillRole::Leader(leading) => self.leading = Some(leading),
            PrefillRole::Follower => {}
            PrefillRole::Alone => tracing::debug!("not waiting for the group's first reply"),
        }
        if let Some(rows) = &mut self.rows {
            // It may have changed: a worker can go out of service during the wait.
            let worker = engine.worker_of(&self.session.name);
            rows.seed(prompt, self.version, worker).await;
        }
    }

    fn announce_session(&self, context: &EpisodeContext, prompt: &[TokenId]) {
        let EpisodeRequest { run, attempt, .. } = context.request;
        context.engine.open_session(&SessionOpening {
            session: &self.session.name,
            group: Some(&format!("{}-{}", run.short(), attempt.episode.group)),
            prompt_tokens: prompt.len(),
        });
    }

    fn engine_request(
        &self,
        context: &EpisodeContext,
        id: GenerationId,
        max_new_tokens: usize,
        ids: Arc<Vec<TokenId>>,
    ) -> GenerateRequest {
        let EpisodeRequest { run, attempt, seed, temperature, .. } = context.request;
        let GenerationId { turn, number, repetition } = id;
        let sampling = Sampling {
            temperature: self.agent_sampling.temperature.unwrap_or(temperature),
            top_p: self.agent_sampling.top_p.unwrap_or(context.settings.top_p),
            max_new_tokens,
            stop_token_ids: context.chat.stop_token_ids().to_vec(),
            seed: call_seed(seed, turn, ids.len(), repetition),
        };
        let prompt = match &self.dialogue {
            Some(dialogue) => Prompt::Messages(dialogue.prompt(ids.len())),
            None => Prompt::Tokens(TokenPrompt {
                ids,
                routed_experts_start: self.rows.as_ref().map(EpisodeRows::next_start),
                cache_namespace: self.version,
            }),
        };
        let may_be_refused = self.rows.as_ref().is_some_and(EpisodeRows::has_unconfirmed_seed);
        GenerateRequest {
            request_id: RequestId::new(
                run,
                attempt,
                number,
                self.tries + context.restarts * TRIES_PER_START,
            ),
            session: self.session.name.clone(),
            prompt,
            sampling,
            priority: i32::try_from(turn).unwrap_or(i32::MAX),
            deadline: context.settings.generate_timeout.0.min(context.remaining()),
            // A reply that may be refused is shown once it is accepted.
            listener: self.listener.clone().filter(|_| !may_be_refused),
        }
    }

    /// Accepts a reply, and records it if calls are recorded.
    fn accept_recorded(&mut self, chat: &ChatModel, reply: &mut Reply) -> Result<(), Refusal> {
        let call = match &*reply {
            Reply::Tokens(generation) if self.recorded.is_some() => Some(AcceptedCall {
                generation: generation.clone(),
                joined: self.rows.as_ref().map(EpisodeRows::joined).unwrap_or_default(),
                was_leading: self.leading.is_some(),
            }),
            Reply::Tokens(_) | Reply::Message(_) => None,
        };
        self.accept(chat, reply)?;
        if let Some(recorded) = &mut self.recorded {
            recorded.extend(call);
        }
        Ok(())
    }

    /// Takes the rows of a reply, whose tokens the engine has checked. A refused reply leaves no trace.
    fn accept(&mut self, chat: &ChatModel, reply: &mut Reply) -> Result<(), Refusal> {
        let prompt = self.buffer.prompt_len();
        let generation = match (&self.dialogue, reply) {
            (None, Reply::Tokens(generation)) => generation,
            (Some(_), Reply::Message(_)) => return Ok(()),
            (None, Reply::Message(_)) | (Some(_), Reply::Tokens(_)) => {
                return Err(Refusal::Reply(MESSAGE_MISMATCH.to_owned()));
            }
        };
        if generation.output_ids().is_empty() {
            // Without tokens only an abort can be continued.
            return match generation.finish() {
                Finish::Abort => Ok(()),
                Finish::Stop | Finish::Length => {
                    Err(Refusal::Reply("the reply has no tokens, but was not aborted".to_owned()))
                }
            };
        }
        let stored = if self.turn_is_open { self.buffer.last_turn() } else { &[] };
        if let Some(tokens) = stop_at(chat, &self.stops, stored, generation.output_ids()) {
            generation.stop_after(tokens);
        }
        let Some(rows) = &mut self.rows else { return Ok(()) };
        rows.accept(generation, prompt, self.version).map_err(|refused| match refused {
            refused @ RowsRefused::StaleSeed => Refusal::Reply(refused.to_string()),
            refused @ (RowsRefused::Missing
            | RowsRefused::WrongEnd { .. }
            | RowsRefused::Routing(_)) => Refusal::Routing(refused.to_string()),
        })
    }

    /// Takes the reply of a call of an earlier process as if the engine had just sent it.
    fn replay(
        &mut self,
        context: &EpisodeContext,
        call: Option<AcceptedCall>,
    ) -> Result<(Reply, bool), NoReply> {
        let Some(AcceptedCall { generation, joined, was_leading }) = call else {
            return Err(NoReply::Failed("the record has no reply for this call".to_owned()));
        };
        let prompt = self.buffer.prompt_for_turn();
        if self.buffer.is_empty() && self.tries == 0 {
            self.announce_session(context, &prompt);
        }
        self.tries += 1;
        let refused = |error: &dyn std::fmt::Display| {
            NoReply::Failed(format!("the recorded reply does not fit: {error}"))
        };
        if let Some(rows) = &mut self.rows {
            rows.join_again(joined, &prompt, self.version).map_err(|error| refused(&error))?;
        }
        let mut reply = Reply::Tokens(generation);
        self.accept(&context.chat, &mut reply).map_err(|error| match error {
            Refusal::Reply(problem) | Refusal::Routing(problem) => refused(&problem),
        })?;
        Ok((reply, was_leading))
    }

    /// Adds a message to the conversation. Returns the tokens that our own tokenizer makes of it, and
    /// the whole turn as text.
    fn record_message(
        &mut self,
        context: &EpisodeContext,
        reply: MessageReply,
    ) -> Result<(Generation, String), NoReply> {
        let failed = |error: &dyn std::fmt::Display| NoReply::Failed(error.to_string());
        let Some(dialogue) = &mut self.dialogue else {
            return Err(failed(&MESSAGE_MISMATCH));
        };
        if let Some(reported) = reply.prompt_tokens {
            dialogue.count(CountedPrompt { estimated: self.buffer.prompt_len(), reported });
        }
        let TurnText { text, kept } = dialogue.push_turn(reply.message);
        let mut output_ids = context.chat.encode(&kept).map_err(|error| failed(&error))?;
        if reply.finish == Finish::Stop {
            output_ids.push(context.chat.end_of_turn());
        }
        let end = output_ids.len();
        let span = VersionSpan { version: self.version, start: 0, end };
        let sampled = SampledTokens {
            logprobs: vec![0.0; end],
            versions: if end == 0 { Vec::new() } else { vec![span] },
            output_ids,
        };
        let mut generation =
            Generation::new(sampled, reply.finish, usize::MAX).map_err(|error| failed(&error))?;
        generation.cached_tokens = reply.cached_tokens;
        generation.worker = reply.worker;
        Ok((generation, text))
    }

    /// Counts prompt tokens: those sent, those that the engine had in its prefix cache, and those that a
    /// perfect cache would have had. The last are the tokens of the turn before, or at the first turn
    /// the whole prompt unless this episode is the group's first to send it; the last token is always
    /// computed. A prefix that other tasks share may be cached, too, so hits are a lower bound.
    fn count(&mut self, generation: &Generation, turn: u32, resumed: bool, was_leading: bool) {
        let prompt = self.buffer.prompt_len();
        let seen_before = if resumed {
            0
        } else if turn > 0 {
            self.buffer.common_len()
        } else if was_leading {
            0
        } else {
            prompt
        };
        let cacheable = seen_before.saturating_sub(1).max(generation.cached_tokens);
        let counters = &mut self.counters;
        counters.prompt += prompt as u64;
        counters.cached += generation.cached_tokens as u64;
        counters.cacheable += cacheable as u64;
    }
}

/// Number of `new` tokens up to and including the one that completes a stop string, in a turn that
/// consists of `stored` and then `new`. `None` if no stop string occurs.
fn stop_at(
    chat: &ChatModel,
    stops: &[String],
    stored: &[TokenId],
    new: &[TokenId],
) -> Option<usize> {
    let longest = stops.iter().map(String::len).max()?;
    let mut text: Vec<u8> = stored.iter().flat_map(|id| chat.token_bytes(*id)).collect();
    new.iter()
        .position(|id| {
            let from = text.len().saturating_sub(longest - 1);
            text.extend(chat.token_bytes(*id));
            let seen = text.get(from..).unwrap_or_default();
            stops.iter().any(|stop| seen.windows(stop.len()).any(|part| part == stop.as_bytes()))
        })
        .map(|last| last + 1)
}

/// Seed of one call (`SplitMix64` of the arguments): the same for every try of the same part of the
/// same turn, and different for all others.
fn call_seed(episode: u64, turn: u32, prompt_tokens: usize, repetition: u32) -> u64 {
    let mix = |value: u64| {
        let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    };
    let seed = mix(mix(mix(episode) ^ u64::from(turn)) ^ prompt_tokens as u64);
    if repetition == 0 { seed } else { mix(seed ^ u64::from(repetition)) }
}
