//! State of one attempt of a built-in scaffold, and the two steps that it repeats: sample a turn, act
//! on it.

mod act;

use crate::api::{EpisodeReport, EpisodeRequest, Timings, TurnLog};
use crate::conversation::FinishedConversation;
use crate::editor::Editor;
use crate::failure::failed;
use crate::machine::EpisodeEvent;
use crate::runner::EpisodeRunner;
use crate::sequence::{
    EpisodeContext, FinishedSequence, GenerationId, NoReply, Sequence, TurnPart,
};
use crate::tool_server::ToolSessions;
use orchestrate_tasks::Verdict;
use orchestrate_types::{Outcome, Stage};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

/// A running attempt.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) context: EpisodeContext,
    pub(crate) sequence: Sequence,
    /// The conversation of an agent with its own loop, which then has all tokens and turns.
    pub(crate) finished: Option<FinishedConversation>,
    turns: Vec<TurnLog>,
    editor: Editor,
    pub(crate) servers: ToolSessions,
    /// Of the turn that was sampled last; none before the first.
    pub(crate) turn_span: Span,
    pub(crate) patch: String,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) timings: Timings,
}

impl Attempt {
    pub(crate) fn new(
        runner: &EpisodeRunner,
        request: EpisodeRequest,
        stop: &CancellationToken,
    ) -> Self {
        let context = runner.context(request, stop);
        let sequence = Sequence::new(&context, 0);
        Self {
            context,
            sequence,
            finished: None,
            turns: Vec::new(),
            editor: Editor::default(),
            servers: ToolSessions::default(),
            turn_span: Span::current(),
            patch: String::new(),
            verdict: None,
            metrics: BTreeMap::new(),
            timings: Timings::default(),
        }
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
            policy_version = self.sequence.version().0,
            engine = tracing::field::Empty,
        );
        self.sample(turn, resumed, max_new_tokens).instrument(span).await
    }

    async fn sample(&mut self, turn: u32, resumed: bool, max_new_tokens: usize) -> EpisodeEvent {
        let id = GenerationId { turn, number: turn, repetition: 0 };
        let part = TurnPart { max_new_tokens, resumed };
        let fork = self.sequence.buffer.fork();
        let started = Instant::now();
        let sampled = self.sequence.sample(&self.context, id, part).await;
        let elapsed = started.elapsed();
        self.timings.generate_s += elapsed.as_secs_f64();
        let sampled = match sampled {
            Ok(sampled) => sampled,
            Err(NoReply::Stopped) => return EpisodeEvent::StopRequested,
            Err(NoReply::TimeUp) => return EpisodeEvent::TimeUp,
            Err(NoReply::ContextFull(error)) => return EpisodeEvent::ContextFull { error },
            Err(NoReply::Failed(error)) => return failed(Stage::Generate, error),
        };
        if sampled.tokens > 0 {
            if let Some(last) = self.turns.last_mut() {
                last.fork = fork.or(last.fork);
            }
            let (chat, buffer) = (&self.context.chat, &self.sequence.buffer);
            match sampled.message_text.map_or_else(|| chat.decode(buffer.last_turn()), Ok) {
                Ok(text) => self.log_turn(text, elapsed, sampled.resumed),
                Err(error) => return failed(Stage::Generate, error),
            }
        }
        EpisodeEvent::Generated {
            finish: sampled.finish,
            sampled: sampled.tokens,
            total_tokens: self.sequence.buffer.prompt_len(),
        }
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
                unread: None,
                observation: String::new(),
                generate_ms,
                exec_ms: 0,
                fork: None,
                overridden: Vec::new(),
            }),
        }
    }

    /// The report of the attempt.
    pub(crate) fn report(self, outcome: Outcome) -> EpisodeReport {
        let finished = self.finished.unwrap_or_else(|| {
            let FinishedSequence { branch, routing_problem, rows, counters } =
                self.sequence.finish();
            FinishedConversation {
                branches: branch.into_iter().collect(),
                routing_problem,
                rows,
                counters,
                turns: self.turns,
                ..FinishedConversation::default()
            }
        });
        let FinishedConversation {
            branches,
            routing_problem,
            rows,
            counters,
            turns,
            forks,
            recognised,
            ..
        } = finished;
        EpisodeReport {
            attempt: self.context.request.attempt,
            outcome,
            branches,
            forks,
            recognised,
            routing_problem,
            turns,
            patch: self.patch,
            verdict: self.verdict,
            metrics: self.metrics,
            routing_drift: rows.drift,
            routing_wire_bytes: rows.wire_bytes,
            routing_rows_reused: rows.reused,
            routing_rows_shared: rows.shared,
            routing_rows_mixed: rows.mixed,
            prompt_tokens: counters.prompt,
            cached_tokens: counters.cached,
            cacheable_tokens: counters.cacheable,
            timings: self.timings,
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
