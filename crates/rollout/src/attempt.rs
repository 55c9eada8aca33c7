//! What one attempt has gathered so far, and its two repeated steps: sample a turn, act on it.

mod act;

use crate::api::{EpisodeReport, EpisodeRequest, Timings, TurnLog};
use crate::buffer::TokenBuffer;
use crate::chat::ChatError;
use crate::dialogue::{Dialogue, Written};
use crate::editor::Editor;
use crate::leads::{LeadKey, Leading, Part};
use crate::machine::Event;
use crate::rows::{EpisodeRows, RowsRefused};
use crate::runner::{EpisodeRunner, failed};
use orchestrate_engine::{
    Engine, Finish, GenerateRequest, Generation, Sampling, SessionOpening, VersionSpan,
};
use orchestrate_routing::MixedRows;
use orchestrate_tasks::Verdict;
use orchestrate_types::{ModelShape, Outcome, PolicyVersion, RequestId, Retry, Stage, TokenId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

/// Engine calls tried for one generation before the attempt is given up. With the pauses below an
/// engine may be away for about a minute, long enough for a restart.
const GENERATE_TRIES: u32 = 8;

/// Of these, how many may end in a reply that is late or invalid.
const REPLY_TRIES: u32 = 3;

/// Longest pause before another try; pauses double until then.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Of these, how many may end in routing rows that cannot be used.
const ROUTING_TRIES: u32 = 2;

/// A running attempt.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    runner: &'a EpisodeRunner,
    stop: &'a CancellationToken,
    session: Session,
    /// Held until the first reply is stored, where this attempt goes first of its group.
    leading: Option<Leading>,
    pub(crate) request: EpisodeRequest,
    pub(crate) buffer: TokenBuffer,
    /// The conversation in messages, for an engine that takes those. The buffer then holds what our
    /// own tokenizer makes of it, so that it has a length; nothing of that is trained on.
    pub(crate) dialogue: Option<Dialogue>,
    rows: Option<EpisodeRows>,
    routing_problem: Option<String>,
    version: PolicyVersion,
    deadline: Option<Instant>,
    turns: Vec<TurnLog>,
    editor: Editor,
    /// Calls made in the current turn: part of the request id, never used twice.
    tries: u32,
    /// Whether the last stored reply was aborted, so that the next one belongs to its turn.
    turn_is_open: bool,
    /// Of the turn that was sampled last; none before the first.
    pub(crate) turn_span: Span,
    pub(crate) patch: String,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) timings: Timings,
    counters: Counters,
}

/// The conversation's name at the engine, which may forget it when this is dropped.
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

/// Why a generation did not come about.
enum NoReply {
    Event(Event),
    /// No try is left, or none would help.
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
                Ok(begun) => rows = Some(begun),
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

    /// From now on the agent's time runs.
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
    ) -> Event {
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

    async fn sample(&mut self, turn: u32, resumed: bool, max_new_tokens: usize) -> Event {
        if let (true, Some(problem)) = (self.request.want_routing, &self.routing_problem) {
            return failed(Stage::Generate, problem);
        }
        if self.stop.is_cancelled() {
            return Event::StopRequested;
        }
        if !resumed {
            self.tries = 0;
        }
        let started = Instant::now();
        let reply = self.try_generate(turn, max_new_tokens).await;
        let elapsed = started.elapsed();
        self.timings.generate_s += elapsed.as_secs_f64();
        let mut reply = match reply {
            Ok(reply) => reply,
            Err(NoReply::Event(event)) => return event,
            Err(NoReply::Failed(error)) => return failed(Stage::Generate, error),
        };
        let written = match self.hear(&mut reply) {
            Ok(written) => written,
            Err(error) => return failed(Stage::Generate, error),
        };
        if reply.output_ids.is_empty() {
            // Aborted before its first token, or without room for one: nothing is stored.
            return Event::Generated {
                finish: reply.finish,
                sampled: 0,
                total_tokens: self.buffer.prompt_len(),
            };
        }
        let resumed = self.turn_is_open;
        Span::current().record("engine", reply.worker.as_str());
        self.count(&reply, turn, resumed);
        if let Some(last) = self.turns.last_mut() {
            last.fork = self.buffer.fork().or(last.fork);
        }
        self.buffer.push_reply(&reply, resumed, self.version);
        self.turn_is_open = reply.finish == Finish::Abort;
        if let (Some(rows), Some(span)) = (&mut self.rows, reply.versions.first()) {
            rows.offer(self.buffer.ids(), span.version, &reply.worker).await;
        }
        if let Some(leading) = self.leading.take() {
            leading.done();
        }
        if let Some(last) = reply.versions.last() {
            self.version = last.version;
        }
        if written.is_some() {
            let all = self.buffer.len();
            self.buffer.exclude(all - reply.output_ids.len()..all);
        }
        match written.map_or_else(|| self.runner.chat.decode(self.buffer.last_turn()), Ok) {
            Ok(text) => self.log_turn(text, elapsed, resumed),
            Err(error) => return failed(Stage::Generate, error),
        }
        Event::Generated {
            finish: reply.finish,
            sampled: reply.output_ids.len(),
            total_tokens: self.buffer.prompt_len(),
        }
    }

    async fn try_generate(
        &mut self,
        turn: u32,
        max_new_tokens: usize,
    ) -> Result<Generation, NoReply> {
        let Some(deadline) = self.deadline else {
            return Err(NoReply::Failed("the episode's clock was not started".to_owned()));
        };
        let prompt_tokens = self.buffer.prompt_len();
        if self.buffer.is_empty() && self.tries == 0 {
            let prompt = self.buffer.prompt_for_turn();
            self.begin(&prompt).await;
        }
        let (mut tries, mut pauses, mut routing_failures) = (0, 0, 0);
        loop {
            if self.stop.is_cancelled() {
                return Err(NoReply::Event(Event::StopRequested));
            }
            if self.remaining().is_zero() {
                return Err(NoReply::Event(Event::TimeUp));
            }
            let prompt = self.buffer.prompt_for_turn();
            let request = self.engine_request(turn, max_new_tokens, prompt);
            self.tries += 1;
            tries += 1;
            // The engine keeps its own deadline; this one is for an engine that does not.
            let Ok(result) = timeout_at(deadline, self.runner.engine.generate(request)).await
            else {
                return Err(NoReply::Event(Event::TimeUp));
            };
            let (error, retry) = match result {
                Ok(mut reply) => match self.accept(&mut reply, prompt_tokens, max_new_tokens) {
                    Ok(()) => return Ok(reply),
                    Err(Refusal::Reply(problem)) => (problem, Retry::Now),
                    Err(Refusal::Routing(problem)) => {
                        routing_failures += 1;
                        if routing_failures >= ROUTING_TRIES {
                            self.routing_problem = Some(problem.clone());
                        }
                        (problem, Retry::Now)
                    }
                },
                Err(error) => (error.to_string(), error.retry()),
            };
            let is_last = tries >= GENERATE_TRIES || tries - pauses >= REPLY_TRIES;
            if is_last || self.routing_problem.is_some() {
                return Err(NoReply::Failed(format!("{error} (after {tries} tries)")));
            }
            tracing::debug!(error, turn, tries, "generation failed, trying again");
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

    /// Keeps the words of an engine that gives those, and makes tokens of them. Gives the whole turn
    /// as text.
    fn hear(&mut self, reply: &mut Generation) -> Result<Option<String>, ChatError> {
        let (Some(turn), Some(dialogue)) = (reply.turn.take(), &mut self.dialogue) else {
            return Ok(None);
        };
        let chat = &self.runner.chat;
        let Written { text, kept } = dialogue.hear(turn);
        reply.output_ids = chat.encode(&kept)?;
        if reply.finish == Finish::Stop {
            reply.output_ids.push(chat.end_of_turn());
        }
        let end = reply.output_ids.len();
        reply.logprobs = vec![0.0; end];
        reply.versions = vec![VersionSpan { version: self.version, start: 0, end }];
        Ok(Some(text))
    }

    /// Before the first call: finds a place, goes first or waits for who does, and takes the rows
    /// that are there for this prompt.
    async fn begin(&mut self, prompt: &[u32]) {
        let EpisodeRequest { run, attempt, .. } = self.request;
        let engine = &self.runner.engine;
        let group = attempt.episode.group;
        engine.open_session(&SessionOpening {
            session: &self.session.name,
            group: Some(&format!("{}-{group}", run.short())),
            prompt_tokens: prompt.len(),
        });
        let worker = engine.worker_of(&self.session.name);
        let key = LeadKey { group, version: self.version, worker };
        let patience = self.runner.plan.follow_wait.0.min(self.remaining());
        let part = tokio::select! {
            biased;
            () = self.stop.cancelled() => Part::GoesAlone,
            part = self.runner.leads.join(key, patience) => part,
        };
        match part {
            Part::Leads(leading) => self.leading = Some(leading),
            Part::Follows => {}
            Part::GoesAlone => tracing::debug!("did not wait for the group's first reply"),
        }
        if let Some(rows) = &mut self.rows {
            // It may have changed since: a worker can go away while one waits.
            let worker = engine.worker_of(&self.session.name);
            rows.seed(prompt, self.version, worker).await;
        }
    }

    fn engine_request(
        &self,
        turn: u32,
        max_new_tokens: usize,
        token_ids: Arc<Vec<TokenId>>,
    ) -> GenerateRequest {
        let EpisodeRequest { run, attempt, seed, temperature, .. } = self.request;
        let plan = &self.runner.plan;
        GenerateRequest {
            request_id: RequestId::new(run, attempt, turn, self.tries),
            session: self.session.name.clone(),
            sampling: Sampling {
                temperature,
                top_p: plan.top_p,
                max_new_tokens,
                stop_token_ids: self.runner.chat.stop_token_ids().to_vec(),
                seed: call_seed(seed, turn, token_ids.len()),
            },
            token_ids,
            conversation: self.dialogue.as_ref().map(Dialogue::conversation),
            routed_experts_start: self.rows.as_ref().map(EpisodeRows::next_start),
            cache_namespace: self.version,
            priority: i32::try_from(turn).unwrap_or(i32::MAX),
            deadline: plan.generate_timeout.0.min(self.remaining()),
        }
    }

    /// Checks a reply against what was asked, and takes its rows. A refused reply leaves no trace.
    fn accept(
        &mut self,
        reply: &mut Generation,
        prompt: usize,
        max_new_tokens: usize,
    ) -> Result<(), Refusal> {
        match (&self.dialogue, &reply.turn) {
            (None, None) => {}
            (Some(_), Some(_)) => return Ok(()),
            (None, Some(_)) | (Some(_), None) => {
                return Err(Refusal::Reply("words for tokens, or tokens for words".to_owned()));
            }
        }
        let sampled = reply.output_ids.len();
        if reply.logprobs.len() != sampled {
            let found = reply.logprobs.len();
            return Err(Refusal::Reply(format!("{found} log-probs for {sampled} tokens")));
        }
        if sampled > max_new_tokens {
            return Err(Refusal::Reply(format!("{sampled} tokens, {max_new_tokens} asked for")));
        }
        if sampled == 0 && reply.finish != Finish::Abort {
            return Err(Refusal::Reply("no tokens, and not aborted".to_owned()));
        }
        if reply.versions.last().map_or(0, |span| span.end) != sampled {
            return Err(Refusal::Reply(format!("policy versions do not cover {sampled} tokens")));
        }
        let Some(rows) = self.rows.as_mut().filter(|_| sampled > 0) else { return Ok(()) };
        rows.accept(reply, prompt, self.version).map_err(|refused| match refused {
            RowsRefused::Rows(words) => Refusal::Routing(words),
            RowsRefused::Seed => {
                Refusal::Reply("weights changed under rows of the prefix cache".to_owned())
            }
        })
    }

    /// Counts prompt tokens: those sent, those that the engine had in its prefix cache, and those that a
    /// perfect cache would have had. The last are the tokens of the turn before, or at the first turn
    /// the whole prompt unless this episode is the group's first to send it; the last token is always
    /// computed. A prefix that other tasks share may be cached, too, so hits are a lower bound.
    fn count(&mut self, reply: &Generation, turn: u32, resumed: bool) {
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
        let cacheable = seen_before.saturating_sub(1).max(reply.cached_tokens);
        let counters = &mut self.counters;
        counters.prompt += prompt as u64;
        counters.cached += reply.cached_tokens as u64;
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

    /// The report. Routing that does not cover the whole trajectory is left out, with the reason.
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

/// What is wrong with a reply.
enum Refusal {
    Reply(String),
    Routing(String),
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Seed of one call: the same for every try of the same part of the same turn, different for any
/// other (`SplitMix64` of the three).
fn call_seed(episode: u64, turn: u32, prompt_tokens: usize) -> u64 {
    let mix = |value: u64| {
        let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    };
    mix(mix(mix(episode) ^ u64::from(turn)) ^ prompt_tokens as u64)
}
