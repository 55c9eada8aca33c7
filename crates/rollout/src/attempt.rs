//! State of one attempt, and the two steps that it repeats: sample a turn, act on it.

mod act;

use crate::api::{EpisodeReport, EpisodeRequest, Timings, TurnLog};
use crate::buffer::TokenBuffer;
use crate::dialogue::{Dialogue, TurnText};
use crate::editor::Editor;
use crate::machine::EpisodeEvent;
use crate::prefill::{PrefillKey, PrefillLeader, PrefillRole};
use crate::rows::{EpisodeRows, RowsRefused};
use crate::runner::{EpisodeRunner, failed};
use orchestrate_engine::{
    Engine, Finish, GenerateRequest, Generation, MessageReply, Prompt, Reply, SampledTokens,
    Sampling, SessionOpening, TokenPrompt, VersionSpan,
};
use orchestrate_routing::MixedRows;
use orchestrate_tasks::Verdict;
use orchestrate_types::{ModelShape, Outcome, PolicyVersion, RequestId, Retry, Stage, TokenId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

/// Maximum number of engine calls for one generation. With the pauses between them an engine may be
/// unreachable for about a minute, long enough for a restart.
const MAX_TRIES: u32 = 8;

/// Maximum number of these calls that may end with a late or invalid reply.
const MAX_REPLY_TRIES: u32 = 3;

/// Maximum number of these calls that may end with routing rows that do not join the ones so far.
const MAX_ROUTING_TRIES: u32 = 2;

/// Maximum pause between two calls. Pauses double up to it.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The engine's reply is in a different form than the prompt.
const MESSAGE_MISMATCH: &str = "a message in reply to tokens, or tokens in reply to a message";

/// A running attempt.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    runner: &'a EpisodeRunner,
    stop: &'a CancellationToken,
    session: Session,
    /// If this attempt is the first of its group: held until its first reply is stored.
    leading: Option<PrefillLeader>,
    pub(crate) request: EpisodeRequest,
    pub(crate) buffer: TokenBuffer,
    /// The conversation in messages, for an engine that takes messages. The buffer then has the
    /// tokens of our own tokenizer, for its length only: none of them is trained on.
    pub(crate) dialogue: Option<Dialogue>,
    rows: Option<EpisodeRows>,
    routing_problem: Option<String>,
    version: PolicyVersion,
    deadline: Option<Instant>,
    turns: Vec<TurnLog>,
    editor: Editor,
    /// Number of calls in the current turn. Part of the request id, so that no id is used twice.
    tries: u32,
    /// Whether the last stored reply was aborted, so that the next reply continues its turn.
    turn_is_open: bool,
    /// Of the turn that was sampled last; none before the first.
    pub(crate) turn_span: Span,
    pub(crate) patch: String,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) timings: Timings,
    counters: Counters,
}

/// The conversation's name at the engine. Dropping it closes the session.
#[derive(Debug)]
struct Session {
    engine: Arc<dyn Engine>,
    name: String,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.close_session(&self.name);
    }
}

#[derive(Debug, Default)]
struct Counters {
    prompt: u64,
    cached: u64,
    cacheable: u64,
}

/// Why there is no reply.
enum NoReply {
    /// The episode stops or its time is up.
    Event(EpisodeEvent),
    /// No tries are left, or the error cannot be retried.
    Failed(String),
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(
        runner: &'a EpisodeRunner,
        request: EpisodeRequest,
        stop: &'a CancellationToken,
        shape: Arc<ModelShape>,
    ) -> Self {
        let (mut rows, mut routing_problem) = (None, None);
        if request.want_routing {
            match EpisodeRows::new(shape, request.run.to_string(), runner.rows.clone()) {
                Ok(new) => rows = Some(new),
                Err(error) => routing_problem = Some(error.to_string()),
            }
        }
        Self {
            runner,
            stop,
            version: request.policy_version,
            session: Session {
                engine: Arc::clone(&runner.engine),
                name: format!("{}-{}", request.run.short(), request.attempt),
            },
            leading: None,
            request,
            buffer: TokenBuffer::default(),
            dialogue: None,
            rows,
            routing_problem,
            deadline: None,
            turns: Vec::new(),
            editor: Editor::default(),
            tries: 0,
            turn_is_open: false,
            turn_span: Span::current(),
            patch: String::new(),
            verdict: None,
            timings: Timings::default(),
            counters: Counters::default(),
        }
    }

    /// Starts the time limit of the agent.
    pub(crate) fn start_clock(&mut self, time: Duration) {
        self.deadline = Some(Instant::now() + time);
    }

    fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()))
    }

    /// Samples one turn, or continues one that was aborted.
    pub(crate) async fn generate(
        &mut self,
        turn: u32,
        resumed: bool,
        max_new_tokens: usize,
    ) -> EpisodeEvent {
        if !resumed {
            self.turn_span = tracing::info_span!("turn", turn);
        }
        let span = tracing::info_span!(
            parent: &self.turn_span,
            "generate",
            policy_version = self.version.0,
            engine = tracing::field::Empty,
        );
        self.sample(turn, resumed, max_new_tokens).instrument(span).await
    }

    async fn sample(&mut self, turn: u32, resumed: bool, max_new_tokens: usize) -> EpisodeEvent {
        if let (true, Some(problem)) = (self.request.want_routing, &self.routing_problem) {
            return failed(Stage::Generate, problem);
        }
        if self.stop.is_cancelled() {
            return EpisodeEvent::StopRequested;
        }
        if !resumed {
            self.tries = 0;
        }
        let started = Instant::now();
        let reply = self.try_generate(turn, max_new_tokens).await;
        let elapsed = started.elapsed();
        self.timings.generate_s += elapsed.as_secs_f64();
        let reply = match reply {
            Ok(reply) => reply,
            Err(NoReply::Event(event)) => return event,
            Err(NoReply::Failed(error)) => return failed(Stage::Generate, error),
        };
        let (generation, message_text) = match reply {
            Reply::Tokens(generation) => (generation, None),
            Reply::Message(reply) => match self.record_message(reply) {
                Ok((generation, text)) => (generation, Some(text)),
                Err(event) => return event,
            },
        };
        let finish = generation.finish().clone();
        let sampled = generation.output_ids().len();
        if sampled == 0 {
            // Aborted before its first token, or without room for one: nothing is stored.
            return EpisodeEvent::Generated {
                finish,
                sampled,
                total_tokens: self.buffer.prompt_len(),
            };
        }
        let resumed = self.turn_is_open;
        Span::current().record("engine", generation.worker.as_str());
        self.count(&generation, turn, resumed);
        if let Some(last) = self.turns.last_mut() {
            last.fork = self.buffer.fork().or(last.fork);
        }
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
            self.buffer.exclude(end - sampled..end);
        }
        match message_text.map_or_else(|| self.runner.chat.decode(self.buffer.last_turn()), Ok) {
            Ok(text) => self.log_turn(text, elapsed, resumed),
            Err(error) => return failed(Stage::Generate, error),
        }
        EpisodeEvent::Generated { finish, sampled, total_tokens: self.buffer.prompt_len() }
    }

    async fn try_generate(&mut self, turn: u32, max_new_tokens: usize) -> Result<Reply, NoReply> {
        let Some(deadline) = self.deadline else {
            return Err(NoReply::Failed("the episode's time limit was not started".to_owned()));
        };
        let prompt_tokens = self.buffer.prompt_len();
        if self.buffer.is_empty() && self.tries == 0 {
            let prompt = self.buffer.prompt_for_turn();
            self.open_session(&prompt).await;
        }
        let (mut tries, mut pauses, mut routing_failures) = (0, 0, 0);
        loop {
            if self.stop.is_cancelled() {
                return Err(NoReply::Event(EpisodeEvent::StopRequested));
            }
            if self.remaining().is_zero() {
                return Err(NoReply::Event(EpisodeEvent::TimeUp));
            }
            let prompt = self.buffer.prompt_for_turn();
            let request = self.engine_request(turn, max_new_tokens, prompt);
            self.tries += 1;
            tries += 1;
            // The request has a deadline, too; this one is for an engine that ignores it.
            let Ok(result) = timeout_at(deadline, self.runner.engine.generate(request)).await
            else {
                return Err(NoReply::Event(EpisodeEvent::TimeUp));
            };
            let (error, retry) = match result {
                Ok(mut reply) => match self.accept(&mut reply, prompt_tokens) {
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
                Err(error) => (error.to_string(), error.retry()),
            };
            let is_last = tries >= MAX_TRIES || tries - pauses >= MAX_REPLY_TRIES;
            if is_last || self.routing_problem.is_some() {
                return Err(NoReply::Failed(format!("{error} (after {tries} tries)")));
            }
            tracing::debug!(error, turn, tries, "generation failed, retrying");
            match retry {
                Retry::Never => return Err(NoReply::Failed(error)),
                Retry::Now => {}
                Retry::After(time) => {
                    let time = time.saturating_mul(1 << pauses).min(MAX_PAUSE);
                    pauses += 1;
                    tokio::select! {
                        biased;
                        () = self.stop.cancelled() => {}
                        () = tokio::time::sleep(time.min(self.remaining())) => {}
                    }
                }
            }
        }
    }

    /// Adds a message to the conversation. Returns the tokens that our own tokenizer makes of it, and
    /// the whole turn as text.
    fn record_message(
        &mut self,
        reply: MessageReply,
    ) -> Result<(Generation, String), EpisodeEvent> {
        let Some(dialogue) = &mut self.dialogue else {
            return Err(failed(Stage::Generate, MESSAGE_MISMATCH));
        };
        let chat = &self.runner.chat;
        let TurnText { text, kept } = dialogue.push_turn(reply.message);
        let mut output_ids = chat.encode(&kept).map_err(|error| failed(Stage::Generate, error))?;
        if reply.finish == Finish::Stop {
            output_ids.push(chat.end_of_turn());
        }
        let end = output_ids.len();
        let span = VersionSpan { version: self.version, start: 0, end };
        let sampled = SampledTokens {
            logprobs: vec![0.0; end],
            versions: if end == 0 { Vec::new() } else { vec![span] },
            output_ids,
        };
        let mut generation = Generation::new(sampled, reply.finish, usize::MAX)
            .map_err(|error| failed(Stage::Generate, error))?;
        generation.cached_tokens = reply.cached_tokens;
        generation.worker = reply.worker;
        Ok((generation, text))
    }

    /// Before the first call: opens the session, waits for the first attempt of the group or becomes
    /// it, and takes the rows that are cached for this prompt.
    async fn open_session(&mut self, prompt: &[TokenId]) {
        let EpisodeRequest { run, attempt, .. } = self.request;
        let engine = &self.runner.engine;
        let group = attempt.episode.group;
        engine.open_session(&SessionOpening {
            session: &self.session.name,
            group: Some(&format!("{}-{group}", run.short())),
            prompt_tokens: prompt.len(),
        });
        let worker = engine.worker_of(&self.session.name);
        let key = PrefillKey { group, version: self.version, worker };
        let patience = self.runner.plan.follow_wait.0.min(self.remaining());
        let part = tokio::select! {
            biased;
            () = self.stop.cancelled() => PrefillRole::Alone,
            part = self.runner.prefill_leaders.join(key, patience) => part,
        };
        match part {
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

    fn engine_request(
        &self,
        turn: u32,
        max_new_tokens: usize,
        ids: Arc<Vec<TokenId>>,
    ) -> GenerateRequest {
        let EpisodeRequest { run, attempt, seed, temperature, .. } = self.request;
        let plan = &self.runner.plan;
        let sampling = Sampling {
            temperature,
            top_p: plan.top_p,
            max_new_tokens,
            stop_token_ids: self.runner.chat.stop_token_ids().to_vec(),
            seed: call_seed(seed, turn, ids.len()),
        };
        let prompt = match &self.dialogue {
            Some(dialogue) => Prompt::Messages(dialogue.prompt(ids.len())),
            None => Prompt::Tokens(TokenPrompt {
                ids,
                routed_experts_start: self.rows.as_ref().map(EpisodeRows::next_start),
                cache_namespace: self.version,
            }),
        };
        GenerateRequest {
            request_id: RequestId::new(run, attempt, turn, self.tries),
            session: self.session.name.clone(),
            prompt,
            sampling,
            priority: i32::try_from(turn).unwrap_or(i32::MAX),
            deadline: plan.generate_timeout.0.min(self.remaining()),
        }
    }

    /// Takes the rows of a reply to a prompt of `prompt` tokens, whose tokens the engine has checked.
    /// A refused reply leaves no trace.
    fn accept(&mut self, reply: &mut Reply, prompt: usize) -> Result<(), Refusal> {
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
        let Some(rows) = &mut self.rows else { return Ok(()) };
        rows.accept(generation, prompt, self.version).map_err(|refused| match refused {
            refused @ RowsRefused::StaleSeed => Refusal::Reply(refused.to_string()),
            refused @ (RowsRefused::Missing
            | RowsRefused::WrongEnd { .. }
            | RowsRefused::Routing(_)) => Refusal::Routing(refused.to_string()),
        })
    }

    /// Counts prompt tokens: those sent, those that the engine had in its prefix cache, and those that a
    /// perfect cache would have had. The last are the tokens of the turn before, or at the first turn
    /// the whole prompt unless this episode is the group's first to send it; the last token is always
    /// computed. A prefix that other tasks share may be cached, too, so hits are a lower bound.
    fn count(&mut self, generation: &Generation, turn: u32, resumed: bool) {
        let prompt = self.buffer.prompt_len();
        let seen_before = if resumed {
            0
        } else if turn > 0 {
            self.buffer.common_len()
        } else if self.leading.is_some() {
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

    fn log_turn(&mut self, text: String, elapsed: Duration, resumed: bool) {
        let generate_ms = millis(elapsed);
        match self.turns.last_mut() {
            Some(turn) if resumed => {
                turn.text = text;
                turn.generate_ms += generate_ms;
            }
            Some(_) | None => self.turns.push(TurnLog {
                text,
                actions: Vec::new(),
                observation: String::new(),
                generate_ms,
                exec_ms: 0,
                fork: None,
            }),
        }
    }

    /// The report. A routing mask that does not cover the whole trajectory is left out, with the
    /// reason.
    pub(crate) fn report(mut self, outcome: Outcome) -> EpisodeReport {
        let mut routing_problem = self.routing_problem.take();
        let routing_rows = self.rows.as_ref().map(|rows| rows.counts).unwrap_or_default();
        if let Some(rows) = self.rows.take_if(|rows| !rows.mixed_tokens().is_empty()) {
            self.rows = match rows.mixed_policy() {
                MixedRows::Keep => Some(rows),
                MixedRows::Mask => {
                    rows.mixed_tokens().into_iter().for_each(|range| self.buffer.exclude(range));
                    Some(rows)
                }
                MixedRows::Drop => {
                    let count = routing_rows.mixed;
                    routing_problem =
                        Some(format!("{count} rows are mixed (routing.mixed = drop)"));
                    None
                }
            };
        }
        let trajectory = self.buffer.into_trajectory().unwrap_or_else(|error| {
            routing_problem = Some(error.to_string());
            None
        });
        let mut routing = None;
        if let (Some(rows), Some(trajectory)) = (self.rows, &trajectory) {
            match rows.finish(trajectory.len()) {
                Ok(mask) => routing = Some(mask),
                Err(error) => routing_problem = routing_problem.or(Some(error.to_string())),
            }
        }
        let Counters { prompt, cached, cacheable } = self.counters;
        EpisodeReport {
            attempt: self.request.attempt,
            outcome,
            trajectory,
            routing,
            routing_problem,
            turns: self.turns,
            patch: self.patch,
            verdict: self.verdict,
            routing_drift: routing_rows.drift,
            routing_wire_bytes: routing_rows.wire_bytes,
            routing_rows_reused: routing_rows.reused,
            routing_rows_shared: routing_rows.shared,
            routing_rows_mixed: routing_rows.mixed,
            prompt_tokens: prompt,
            cached_tokens: cached,
            cacheable_tokens: cacheable,
            timings: self.timings,
        }
    }
}

/// Why a reply is refused.
enum Refusal {
    /// The reply as a whole.
    Reply(String),
    /// Its routing rows.
    Routing(String),
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Seed of one call (`SplitMix64` of the arguments): the same for every try of the same part of the
/// same turn, and different for all others.
fn call_seed(episode: u64, turn: u32, prompt_tokens: usize) -> u64 {
    let mix = |value: u64| {
        let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    };
    mix(mix(mix(episode) ^ u64::from(turn)) ^ prompt_tokens as u64)
}
