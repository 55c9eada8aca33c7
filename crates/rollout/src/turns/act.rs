//! The second step of a turn: performs its tool calls, and turns the results into tokens.

use super::{Turns, millis};
use crate::api::{Action, Message};
use crate::chat::message;
use crate::failure::{failed, sandbox_failed};
use crate::machine::TurnEvent;
use crate::scaffold::{Call, Mistake, ToolLimits, WrittenTurn, truncate_middle};
use crate::toolbox::{ToolFailure, Toolbox};
use orchestrate_sandbox::Sandbox;
use orchestrate_types::{Outcome, Stage, TokenId};
use std::sync::Arc;
use tokio::time::Instant;

impl Turns<'_> {
    /// Performs the tool calls of the last turn, and appends their results to the prompt.
    #[tracing::instrument(name = "exec", parent = &self.attempt.turn_span, skip_all)]
    pub(super) async fn act(&mut self, sandbox: &mut dyn Sandbox) -> Result<TurnEvent, Outcome> {
        let started = Instant::now();
        let turn = match &self.sequence.dialogue {
            Some(dialogue) => dialogue.last_turn(),
            None => WrittenTurn {
                text: self.log.last().map_or("", |turn| turn.text.as_str()),
                opens_thinking: self
                    .attempt
                    .context
                    .chat
                    .opens_thinking(self.sequence.buffer.last_prompt()),
                format: self.attempt.context.chat.tool_format(),
                separate: &[],
            },
        };
        let calls = self.attempt.context.settings.scaffold.parse(turn, self.servers.schemas());
        let mut mistakes = calls.iter().filter_map(|call| call.as_ref().err());
        let unread = mistakes.find(|mistake| mistake.is_unread).map(|mistake| mistake.text.clone());
        if let Some(turn) = self.log.last_mut() {
            turn.unread = unread;
        }
        let event = self.perform(sandbox, calls).await;
        self.attempt.timings.exec_s += started.elapsed().as_secs_f64();
        if let Some(turn) = self.log.last_mut() {
            turn.exec_ms = millis(started.elapsed());
        }
        event
    }

    async fn perform(
        &mut self,
        sandbox: &mut dyn Sandbox,
        calls: Vec<Result<(Action, Call), Mistake>>,
    ) -> Result<TurnEvent, Outcome> {
        let settings = Arc::clone(&self.attempt.context.settings);
        let scaffold = settings.scaffold;
        let turns = u32::try_from(self.log.len()).unwrap_or(u32::MAX);
        let turns_left = settings.max_turns.saturating_sub(turns);
        let mut new_messages: Vec<Message> = Vec::new();
        let mut submitted = false;
        for call in calls {
            if self.attempt.context.remaining().is_zero() {
                return Ok(TurnEvent::TimeUp);
            }
            let observation = match call {
                Ok((action, call)) => match self.perform_one(sandbox, action, &call).await {
                    Ok(observation) => observation,
                    Err(ToolFailure::Sandbox(error)) => {
                        return Err(sandbox_failed(Stage::Exec, error));
                    }
                    Err(ToolFailure::Server(error)) => {
                        return Err(failed(Stage::Exec, error.with_causes()));
                    }
                },
                Err(mistake) => Some(truncate_middle(mistake.text, settings.observation_chars)),
            };
            let Some(observation) = observation else {
                submitted = true;
                break;
            };
            let observation = scaffold.message_text(observation, turns_left);
            if let Some(turn) = self.log.last_mut() {
                if !turn.observation.is_empty() {
                    turn.observation.push('\n');
                }
                turn.observation.push_str(&observation);
            }
            new_messages.push(message(scaffold.observation_role(), &observation));
        }
        if !submitted {
            let chat = &self.attempt.context.chat;
            let delta = chat.delta(&new_messages, self.sequence.buffer.last());
            let delta = delta.map_err(|error| failed(Stage::Exec, error))?;
            if let Some(dialogue) = &mut self.sequence.dialogue {
                dialogue.push_observations(&chat.without_control_tokens(&new_messages));
            }
            self.extend_prompt(&delta);
        }
        let next_prompt_tokens = self.sequence.buffer.prompt_len();
        Ok(TurnEvent::Acted { submitted, next_prompt_tokens })
    }

    /// Performs one tool call. Returns what the policy sees of it; `None` if the call submits.
    async fn perform_one(
        &mut self,
        sandbox: &mut dyn Sandbox,
        action: Action,
        call: &Call,
    ) -> Result<Option<String>, ToolFailure> {
        let task = Arc::clone(&self.attempt.context.request.task);
        let settings = Arc::clone(&self.attempt.context.settings);
        let limits = ToolLimits {
            command_timeout: settings.command_timeout.0.min(self.attempt.context.remaining()),
            observation_chars: settings.observation_chars,
        };
        let variables: Vec<(&str, &str)> = task.variables().collect();
        let toolbox = Toolbox {
            scaffold: settings.scaffold,
            workdir: &task.workdir,
            programs: task.programs(),
            variables: &variables,
            limits,
            servers: &self.servers,
        };
        if let Some(turn) = self.log.last_mut() {
            turn.actions.push(action);
        }
        let done = toolbox.perform(sandbox, call, &mut self.editor).await?;
        let observation = settings.scaffold.observation(call, done, limits);
        if observation.is_none()
            && *call != Call::Submit
            && let Some(turn) = self.log.last_mut()
        {
            // In this scaffold a command submits.
            turn.actions.push(Call::Submit.action());
        }
        Ok(observation)
    }

    /// Appends what follows the last turn, and forks if the next prompt leaves some of it out.
    fn extend_prompt(&mut self, delta: &[TokenId]) {
        self.sequence.buffer.add_pending(delta);
        self.sequence.fork_last_turn(&self.attempt.context.chat);
    }
}
