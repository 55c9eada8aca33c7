//! The turns of a built-in scaffold: performs the commands of [`TurnMachine`], which are to sample a turn
//! and to act on it, and feeds it the resulting events.
//!
//! The invariant: no engine call is running while a tool runs.

mod act;

use crate::api::TurnLog;
use crate::attempt::Attempt;
use crate::conversation::FinishedConversation;
use crate::dialogue::Dialogue;
use crate::editor::Editor;
use crate::failure::{failed, stopped};
use crate::machine::{EpisodeLimits, TurnCommand, TurnEvent, TurnMachine};
use crate::sequence::{FinishedSequence, GenerationId, NoReply, Sequence, TurnPart};
use crate::tool_server::{ToolServers, ToolSessions};
use orchestrate_sandbox::Sandbox;
use orchestrate_types::{Limit, Outcome, Stage};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// The turns of an attempt.
#[derive(Debug)]
struct Turns<'a> {
    attempt: &'a mut Attempt,
    sequence: Sequence,
    log: Vec<TurnLog>,
    editor: Editor,
    servers: ToolSessions,
}

impl Attempt {
    /// Lets the policy act in the sandbox by the scaffold of the settings, with the tools of `servers` in
    /// addition. Returns the limit that ended it; `None` if it submitted.
    ///
    /// # Errors
    /// The outcome of an episode that ended before there was anything to grade.
    pub(crate) async fn run_scaffold(
        &mut self,
        servers: &Arc<ToolServers>,
        limits: EpisodeLimits,
        sandbox: &mut dyn Sandbox,
    ) -> Result<Option<Limit>, Outcome> {
        // First, because their tools are part of the prompt.
        let servers = servers.open().await;
        let servers = servers.map_err(|error| failed(Stage::Setup, error.with_causes()))?;
        let sequence = Sequence::new(&self.context, 0);
        let (log, editor) = (Vec::new(), Editor::default());
        let mut turns = Turns { attempt: self, sequence, log, editor, servers };
        let end = turns.play(limits, sandbox).await;
        turns.finish().await;
        end
    }
}

impl Turns<'_> {
    async fn play(
        &mut self,
        limits: EpisodeLimits,
        sandbox: &mut dyn Sandbox,
    ) -> Result<Option<Limit>, Outcome> {
        let (mut machine, mut command) = TurnMachine::start(limits, self.render_prompt()?);
        loop {
            let event = match command {
                TurnCommand::Generate { turn, resumed, max_new_tokens } => {
                    self.generate(turn, resumed, max_new_tokens).await?
                }
                TurnCommand::Act => self.act(sandbox).await?,
                TurnCommand::Grade { truncated_by } => return Ok(truncated_by),
                TurnCommand::Finish(outcome) => return Err(outcome),
            };
            command = machine.step(event).map_err(|error| {
                tracing::error!(%error, "the machine of the turns rejected an event");
                failed(Stage::Record, error)
            })?;
        }
    }

    /// Closes the sessions with tool servers, and hands the tokens and turns to the attempt.
    async fn finish(self) {
        self.servers.close().await;
        let FinishedSequence { branch, routing_problem, rows, counters } = self.sequence.finish();
        self.attempt.finished = FinishedConversation {
            branches: branch.into_iter().collect(),
            routing_problem,
            rows,
            counters,
            turns: self.log,
            ..FinishedConversation::default()
        };
    }

    /// Renders the opening prompt, and returns its length in tokens.
    fn render_prompt(&mut self) -> Result<usize, Outcome> {
        let context = &self.attempt.context;
        let messages = context.settings.opening(&context.request.task);
        if context.engine.takes_messages() {
            let messages = context.chat.without_control_tokens(&messages);
            self.sequence.dialogue = Some(Dialogue::open(&messages, &context.chat.options.tools));
        }
        let ids = context.chat.prompt(&messages).map_err(|error| failed(Stage::Setup, error))?;
        self.sequence.buffer.add_pending(&ids);
        Ok(ids.len())
    }

    /// Samples one turn, or continues one that was aborted.
    async fn generate(
        &mut self,
        turn: u32,
        resumed: bool,
        max_new_tokens: usize,
    ) -> Result<TurnEvent, Outcome> {
        if !resumed {
            self.attempt.turn_span = tracing::info_span!("turn", turn);
        }
        let span = tracing::info_span!(
            parent: &self.attempt.turn_span,
            "generate",
            policy_version = self.sequence.version().0,
            engine = tracing::field::Empty,
        );
        self.sample(turn, resumed, max_new_tokens).instrument(span).await
    }

    async fn sample(
        &mut self,
        turn: u32,
        resumed: bool,
        max_new_tokens: usize,
    ) -> Result<TurnEvent, Outcome> {
        let id = GenerationId { turn, number: turn, repetition: 0 };
        let part = TurnPart { max_new_tokens, resumed };
        let fork = self.sequence.buffer.fork();
        let started = Instant::now();
        let sampled = self.sequence.sample(&self.attempt.context, id, part).await;
        let elapsed = started.elapsed();
        self.attempt.timings.generate_s += elapsed.as_secs_f64();
        let sampled = match sampled {
            Ok(sampled) => sampled,
            Err(NoReply::Stopped) => return Err(stopped()),
            Err(NoReply::TimeUp) => return Ok(TurnEvent::TimeUp),
            Err(NoReply::ContextFull(error)) => return Ok(TurnEvent::ContextFull { error }),
            Err(NoReply::Failed(error)) => return Err(failed(Stage::Generate, error)),
        };
        if sampled.tokens > 0 {
            if let Some(last) = self.log.last_mut() {
                last.fork = fork.or(last.fork);
            }
            let (chat, buffer) = (&self.attempt.context.chat, &self.sequence.buffer);
            let text = sampled.message_text.map_or_else(|| chat.decode(buffer.last_turn()), Ok);
            let text = text.map_err(|error| failed(Stage::Generate, error))?;
            self.log_turn(text, elapsed, sampled.resumed);
        }
        Ok(TurnEvent::Generated {
            finish: sampled.finish,
            sampled: sampled.tokens,
            total_tokens: self.sequence.buffer.prompt_len(),
        })
    }

    fn log_turn(&mut self, text: String, elapsed: Duration, resumed: bool) {
        let generate_ms = millis(elapsed);
        match self.log.last_mut() {
            Some(turn) if resumed => {
                turn.text = text;
                turn.generate_ms += generate_ms;
            }
            Some(_) | None => self.log.push(TurnLog {
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
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
