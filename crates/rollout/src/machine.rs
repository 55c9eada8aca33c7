//! The turns of a built-in scaffold as a pure state machine: an event goes in, the next command comes
//! out.
//!
//! [`TurnMachine::step`] does no I/O and awaits nothing. [`crate::turns`] performs each command and feeds
//! the machine the event that it produced, so every rule about when a scaffold samples, acts or ends is in
//! this one table:
//!
//! | phase | event | next phase | command |
//! |---|---|---|---|
//! | none | the opening prompt, room left | `Generating` turn 0 | `Generate` |
//! | none | the opening prompt, no room | `Ended` | `Finish` as `Broken{Setup}` |
//! | `Generating` | `Generated`, stop | `Acting` | `Act` |
//! | `Generating` | `Generated`, length | `Ended` | `Grade`, truncated by `ResponseTokens` or `SequenceTokens` |
//! | `Generating` | `Generated`, abort, room left | `Generating`, same turn | `Generate`, resumed |
//! | `Generating` | `Generated`, abort, no room | `Ended` | `Grade`, truncated |
//! | `Generating` | `Generated`, aborted too often | `Ended` | `Finish` as `Broken{Generate}` |
//! | `Generating` | `ContextFull`, something was sampled | `Ended` | `Grade`, truncated by `SequenceTokens` |
//! | `Generating` | `ContextFull`, nothing was sampled | `Ended` | `Finish` as `Broken{Setup}` |
//! | `Acting` | `Acted`, submitted | `Ended` | `Grade` |
//! | `Acting` | `Acted`, no turns left | `Ended` | `Grade`, truncated by `Turns` |
//! | `Acting` | `Acted`, no room | `Ended` | `Grade`, truncated by `SequenceTokens` |
//! | `Acting` | `Acted` | `Generating`, next turn | `Generate` |
//! | `Generating`, `Acting` | `TimeUp` | `Ended` | `Grade`, truncated by `EpisodeTime` |
//!
//! A failure, and a request to stop, end the episode wherever they occur and are not events.
//!
//! The invariant: any other pair of phase and event is an [`IllegalTransition`] and changes
//! nothing, so `Ended` is final and a `Generate` command always leaves room for at least one token.

use crate::failure::failed;
use orchestrate_engine::Finish;
use orchestrate_types::{Limit, Outcome, Stage};

/// How often one turn may be aborted and resumed. Each weight update during the turn takes one.
pub(crate) const MAX_ABORTS_PER_TURN: u32 = 16;

/// Limits of one episode, in turns and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpisodeLimits {
    /// Maximum number of generations, at least 1.
    pub max_turns: u32,
    /// Maximum number of tokens of prompt, responses and observations together.
    pub max_sequence_tokens: usize,
    /// Maximum number of tokens of one response.
    pub max_response_tokens: usize,
}

/// The phase that the turns are in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TurnPhase {
    /// The engine is sampling a turn.
    Generating {
        /// Turn number, from 0.
        turn: u32,
        /// Tokens that aborted replies have added to this turn.
        sampled: usize,
        /// Number of aborted replies in this turn.
        aborts: u32,
    },
    /// The turn's calls are being performed.
    Acting {
        /// Turn number, from 0.
        turn: u32,
    },
    /// There is no further turn.
    Ended,
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TurnEvent {
    /// A reply was added to the episode's tokens.
    Generated {
        /// Why the engine stopped.
        finish: Finish,
        /// Number of tokens in this reply.
        sampled: usize,
        /// Length of the whole sequence so far, in tokens.
        total_tokens: usize,
    },
    /// The prompt fills the engine's context.
    ContextFull {
        /// The engine's error, for a person.
        error: String,
    },
    /// The turn's calls were performed.
    Acted {
        /// Whether one of them was `submit`.
        submitted: bool,
        /// Length of the next prompt, in tokens.
        next_prompt_tokens: usize,
    },
    /// The episode's time is used up.
    TimeUp,
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TurnCommand {
    /// Sample a turn, or the rest of one.
    Generate {
        /// Turn number, from 0.
        turn: u32,
        /// Whether this continues a turn whose last reply was aborted.
        resumed: bool,
        /// Maximum number of tokens to sample, at least 1.
        max_new_tokens: usize,
    },
    /// Perform the turn's calls.
    Act,
    /// Grade the agent's change.
    Grade {
        /// The limit that ended the turns; `None` if the policy submitted.
        truncated_by: Option<Limit>,
    },
    /// End the episode with this outcome, ungraded.
    Finish(Outcome),
}

/// An event that is not allowed in the current phase: a bug in this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("event {event:?} is not allowed in phase {phase:?}")]
pub(crate) struct IllegalTransition {
    phase: TurnPhase,
    event: TurnEvent,
}

/// The state machine of a scaffold's turns; the module has its table.
#[derive(Debug, Clone)]
pub(crate) struct TurnMachine {
    limits: EpisodeLimits,
    phase: TurnPhase,
}

impl TurnMachine {
    /// The machine after an opening prompt of `prompt_tokens` tokens, and its first command.
    pub(crate) fn start(limits: EpisodeLimits, prompt_tokens: usize) -> (Self, TurnCommand) {
        let limit = limits.max_sequence_tokens;
        let (phase, command) = if prompt_tokens >= limit {
            let why = format!("it has {prompt_tokens} tokens, and the limit {limit}");
            end(unsuitable_prompt(&why))
        } else {
            generate(limits, 0, prompt_tokens)
        };
        (Self { limits, phase }, command)
    }

    /// Takes one event and returns the next command.
    ///
    /// # Errors
    /// [`IllegalTransition`] for an event that the current phase does not allow; the phase does not
    /// change.
    pub(crate) fn step(&mut self, event: TurnEvent) -> Result<TurnCommand, IllegalTransition> {
        let (next, command) = match (&self.phase, &event) {
            (
                TurnPhase::Generating { turn, sampled: before, aborts },
                TurnEvent::Generated { finish, sampled, total_tokens },
            ) => self.generated(finish, *turn, before + sampled, *aborts, *total_tokens),
            // Nothing that the policy did can be the reason.
            (
                TurnPhase::Generating { turn: 0, sampled: 0, .. },
                TurnEvent::ContextFull { error },
            ) => end(unsuitable_prompt(error)),
            (TurnPhase::Generating { .. }, TurnEvent::ContextFull { .. }) => {
                grade(Some(Limit::SequenceTokens))
            }
            (TurnPhase::Acting { turn }, TurnEvent::Acted { submitted, next_prompt_tokens }) => {
                if *submitted {
                    grade(None)
                } else if turn + 1 >= self.limits.max_turns {
                    grade(Some(Limit::Turns))
                } else {
                    generate(self.limits, turn + 1, *next_prompt_tokens)
                }
            }
            (TurnPhase::Generating { .. } | TurnPhase::Acting { .. }, TurnEvent::TimeUp) => {
                grade(Some(Limit::EpisodeTime))
            }
            (TurnPhase::Generating { .. }, TurnEvent::Acted { .. })
            | (
                TurnPhase::Acting { .. },
                TurnEvent::Generated { .. } | TurnEvent::ContextFull { .. },
            )
            | (TurnPhase::Ended, _) => {
                return Err(IllegalTransition { phase: self.phase.clone(), event });
            }
        };
        self.phase = next;
        Ok(command)
    }

    fn generated(
        &self,
        finish: &Finish,
        turn: u32,
        sampled: usize,
        aborts: u32,
        total_tokens: usize,
    ) -> (TurnPhase, TurnCommand) {
        let room = self.limits.max_sequence_tokens.saturating_sub(total_tokens);
        let response_room = self.limits.max_response_tokens.saturating_sub(sampled);
        let limit = if room == 0 { Limit::SequenceTokens } else { Limit::ResponseTokens };
        match finish {
            Finish::Stop => (TurnPhase::Acting { turn }, TurnCommand::Act),
            Finish::Length => grade(Some(limit)),
            Finish::Abort if room.min(response_room) == 0 => grade(Some(limit)),
            Finish::Abort if aborts >= MAX_ABORTS_PER_TURN => end(failed(
                Stage::Generate,
                format!("turn {turn} was aborted {} times", aborts + 1),
            )),
            Finish::Abort => (
                TurnPhase::Generating { turn, sampled, aborts: aborts + 1 },
                TurnCommand::Generate {
                    turn,
                    resumed: true,
                    max_new_tokens: room.min(response_room),
                },
            ),
        }
    }
}

fn generate(limits: EpisodeLimits, turn: u32, prompt_tokens: usize) -> (TurnPhase, TurnCommand) {
    let room = limits.max_sequence_tokens.saturating_sub(prompt_tokens);
    if room == 0 {
        return grade(Some(Limit::SequenceTokens));
    }
    let max_new_tokens = room.min(limits.max_response_tokens);
    (
        TurnPhase::Generating { turn, sampled: 0, aborts: 0 },
        TurnCommand::Generate { turn, resumed: false, max_new_tokens },
    )
}

fn grade(truncated_by: Option<Limit>) -> (TurnPhase, TurnCommand) {
    (TurnPhase::Ended, TurnCommand::Grade { truncated_by })
}

fn end(outcome: Outcome) -> (TurnPhase, TurnCommand) {
    (TurnPhase::Ended, TurnCommand::Finish(outcome))
}

/// The outcome of an episode whose prompt leaves no room for the first reply: the task's, or the
/// settings' fault.
fn unsuitable_prompt(why: &str) -> Outcome {
    let remedy = "shorten it, or raise rollout.max_sequence_tokens or the engine's context";
    let error = format!("the task's prompt leaves no room for a reply ({why}); {remedy}");
    failed(Stage::Setup, error)
}

#[cfg(test)]
mod tests;
