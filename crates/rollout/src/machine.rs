//! The life of one episode as a pure state machine: an event goes in, the next command comes out.
//!
//! [`EpisodeMachine::step`] does no I/O and awaits nothing. [`crate::EpisodeRunner`] performs each
//! command and feeds the machine the event that it produced, so every rule about when an episode
//! samples, acts, is graded or ends is in this one table:
//!
//! | phase | event | next phase | command |
//! |---|---|---|---|
//! | `Created` | `SandboxOpened` | `SandboxReady` | `RenderPrompt` |
//! | `Created`, agent with its own loop | `SandboxOpened` | `AgentRunning` | `RunAgent` |
//! | `AgentRunning`, offered to workers | `Returned` | `Ended` `Scored`, or `Truncated` if a limit was reached | `Finish` |
//! | `AgentRunning` | `AgentEnded` | `Grading`, truncated if a limit ended it | `Grade` |
//! | `SandboxReady` | `PromptRendered`, room left | `Generating` turn 0 | `Generate` |
//! | `SandboxReady` | `PromptRendered`, no room | `Ended` `Broken{Setup}` | `Finish` |
//! | `Generating` | `Generated`, stop | `Acting` | `Act` |
//! | `Generating` | `Generated`, length | `Grading` truncated by `ResponseTokens` or `SequenceTokens` | `Grade` |
//! | `Generating` | `Generated`, abort, room left | `Generating`, same turn | `Generate`, resumed |
//! | `Generating` | `Generated`, abort, no room | `Grading` truncated | `Grade` |
//! | `Generating` | `Generated`, aborted too often | `Ended` `Broken{Generate}` | `Finish` |
//! | `Generating` | `ContextFull`, something was sampled | `Grading` truncated by `SequenceTokens` | `Grade` |
//! | `Generating` | `ContextFull`, nothing was sampled | `Ended` `Broken{Setup}` | `Finish` |
//! | `Acting` | `Acted`, submitted | `Grading` | `Grade` |
//! | `Acting` | `Acted`, no turns left | `Grading` truncated by `Turns` | `Grade` |
//! | `Acting` | `Acted`, no room | `Grading` truncated by `SequenceTokens` | `Grade` |
//! | `Acting` | `Acted` | `Generating`, next turn | `Generate` |
//! | `Generating`, `Acting` | `TimeUp` | `Grading` truncated by `EpisodeTime` | `Grade` |
//! | `Created`, `SandboxReady`, `Generating`, `Acting`, `AgentRunning` | `StopRequested` | `Ended` `Aborted{Shutdown}` | `Finish` |
//! | `Grading` | `Graded` | `Ended` `Scored` or `Truncated` | `Finish` |
//! | `Grading`, `AgentRunning` | `Graded`, `Returned`, reward not from 0 to 1 | `Ended` `Broken{Grade}` | `Finish` |
//! | `Acting`, `AgentRunning`, `Grading` | `SandboxDamaged` | `Ended` `Truncated{SandboxDamage}`, reward 0 | `Finish` |
//! | `Grading` | `ChangeTooLarge` | `Ended` `Truncated{ChangeSize}`, reward 0 | `Finish` |
//! | all but `Ended` | `Failed` | `Ended` `Broken` | `Finish` |
//!
//! The invariant: any other pair of phase and event is an [`IllegalTransition`] and changes
//! nothing, so `Ended` is final and a `Generate` command always leaves room for at least one token.
//!
//! A stop request does not interrupt grading: the verdict is near, and without it the whole episode
//! would be wasted.

use orchestrate_engine::Finish;
use orchestrate_types::{AbortCause, Limit, Outcome, Stage};

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

/// The phase an episode is in.
#[derive(Debug, Clone, PartialEq)]
pub enum EpisodePhase {
    /// Nothing exists yet.
    Created,
    /// The sandbox is open and filled.
    SandboxReady,
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
    /// An agent with its own loop is running, and samples through the gateway.
    AgentRunning,
    /// The agent's change is being collected and graded.
    Grading {
        /// The limit that ended the episode; `None` if the policy submitted.
        truncated_by: Option<Limit>,
    },
    /// The episode is over, with this outcome.
    Ended(Outcome),
}

/// The result of a command, or another event since then.
#[derive(Debug, Clone, PartialEq)]
pub enum EpisodeEvent {
    /// The agent's sandbox is open and filled, and its tree is known.
    SandboxOpened,
    /// The first prompt was rendered.
    PromptRendered {
        /// Its length in tokens.
        tokens: usize,
    },
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
    /// The agent with its own loop has ended.
    AgentEnded {
        /// The limit that ended it; `None` if it ended by itself.
        truncated_by: Option<Limit>,
    },
    /// An external worker returned the episode.
    Returned {
        /// Its reward, 0.0 to 1.0.
        reward: f64,
        /// The limit that the episode reached, if it reached one.
        truncated_by: Option<Limit>,
    },
    /// The grader gave its verdict.
    Graded {
        /// The reward, 0.0 to 1.0.
        reward: f64,
    },
    /// The agent's change is too large for a grader, so nothing is graded.
    ChangeTooLarge,
    /// The policy's commands, or the tests of its change, made a sandbox unusable, so nothing is
    /// graded.
    SandboxDamaged {
        /// What is damaged, for a person.
        what: String,
    },
    /// The episode's time is used up.
    TimeUp,
    /// The run is shutting down.
    StopRequested,
    /// The infrastructure failed, and retrying did not help.
    Failed {
        /// The stage that failed.
        stage: Stage,
        /// The error, for a person.
        error: String,
    },
}

/// The next action of the runner.
#[derive(Debug, Clone, PartialEq)]
pub enum EpisodeCommand {
    /// Open and fill the agent's sandbox.
    OpenSandbox,
    /// Render the first prompt.
    RenderPrompt,
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
    /// Run the agent with its own loop until it ends.
    RunAgent,
    /// Offer the episode to external workers, and wait for its return.
    Offer,
    /// Collect the agent's change, close its sandbox and grade the change.
    Grade,
    /// Close what is open and report this outcome.
    Finish(Outcome),
}

/// An event that is not allowed in the current phase: a bug in this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("event {event:?} is not allowed in phase {phase:?}")]
pub struct IllegalTransition {
    phase: EpisodePhase,
    event: EpisodeEvent,
}

/// The state machine of one episode; the module has its table.
#[derive(Debug, Clone)]
pub struct EpisodeMachine {
    limits: EpisodeLimits,
    has_agent: bool,
    phase: EpisodePhase,
}

impl EpisodeMachine {
    /// A machine in `Created`, and its first command, [`EpisodeCommand::OpenSandbox`].
    pub fn new(limits: EpisodeLimits) -> (Self, EpisodeCommand) {
        let machine = Self { limits, has_agent: false, phase: EpisodePhase::Created };
        (machine, EpisodeCommand::OpenSandbox)
    }

    /// Like [`Self::new`], for an agent that brings its own loop.
    pub fn with_agent(limits: EpisodeLimits) -> (Self, EpisodeCommand) {
        let machine = Self { limits, has_agent: true, phase: EpisodePhase::Created };
        (machine, EpisodeCommand::OpenSandbox)
    }

    /// The machine of an episode that an external worker runs and grades. It starts in
    /// `AgentRunning`, with the command [`EpisodeCommand::Offer`].
    pub fn external(limits: EpisodeLimits) -> (Self, EpisodeCommand) {
        let machine = Self { limits, has_agent: true, phase: EpisodePhase::AgentRunning };
        (machine, EpisodeCommand::Offer)
    }

    /// The current phase.
    pub fn phase(&self) -> &EpisodePhase {
        &self.phase
    }

    /// Takes one event and returns the next command.
    ///
    /// # Errors
    /// [`IllegalTransition`] for an event that the current phase does not allow; the phase does not
    /// change.
    #[expect(clippy::too_many_lines, reason = "one arm per transition")]
    pub fn step(&mut self, event: EpisodeEvent) -> Result<EpisodeCommand, IllegalTransition> {
        let (next, command) = match (&self.phase, &event) {
            (EpisodePhase::Created, EpisodeEvent::SandboxOpened) if self.has_agent => {
                (EpisodePhase::AgentRunning, EpisodeCommand::RunAgent)
            }
            (EpisodePhase::AgentRunning, EpisodeEvent::AgentEnded { truncated_by }) => {
                grade(*truncated_by)
            }
            (EpisodePhase::Created, EpisodeEvent::SandboxOpened) => {
                (EpisodePhase::SandboxReady, EpisodeCommand::RenderPrompt)
            }
            (EpisodePhase::SandboxReady, EpisodeEvent::PromptRendered { tokens }) => {
                if *tokens >= self.limits.max_sequence_tokens {
                    let limit = self.limits.max_sequence_tokens;
                    end(unsuitable_prompt(&format!(
                        "it has {tokens} tokens, and the limit {limit}"
                    )))
                } else {
                    self.generate(0, *tokens)
                }
            }
            (
                EpisodePhase::Generating { turn, sampled: before, aborts },
                EpisodeEvent::Generated { finish, sampled, total_tokens },
            ) => self.generated(finish, *turn, before + sampled, *aborts, *total_tokens),
            // Nothing that the policy did can be the reason.
            (
                EpisodePhase::Generating { turn: 0, sampled: 0, .. },
                EpisodeEvent::ContextFull { error },
            ) => end(unsuitable_prompt(error)),
            (EpisodePhase::Generating { .. }, EpisodeEvent::ContextFull { .. }) => {
                grade(Some(Limit::SequenceTokens))
            }
            (
                EpisodePhase::Acting { turn },
                EpisodeEvent::Acted { submitted, next_prompt_tokens },
            ) => {
                if *submitted {
                    grade(None)
                } else if turn + 1 >= self.limits.max_turns {
                    grade(Some(Limit::Turns))
                } else {
                    self.generate(turn + 1, *next_prompt_tokens)
                }
            }
            (
                EpisodePhase::Generating { .. } | EpisodePhase::Acting { .. },
                EpisodeEvent::TimeUp,
            ) => grade(Some(Limit::EpisodeTime)),
            (
                EpisodePhase::Created
                | EpisodePhase::SandboxReady
                | EpisodePhase::Generating { .. }
                | EpisodePhase::Acting { .. }
                | EpisodePhase::AgentRunning,
                EpisodeEvent::StopRequested,
            ) => end(Outcome::Aborted { by: AbortCause::Shutdown }),
            // Such a reward would be trained on as if it meant something.
            (
                EpisodePhase::AgentRunning | EpisodePhase::Grading { .. },
                EpisodeEvent::Returned { reward, .. } | EpisodeEvent::Graded { reward },
            ) if !(0.0..=1.0).contains(reward) => end(Outcome::Broken {
                stage: Stage::Grade,
                error: format!("the reward is {reward}, which is not from 0 to 1"),
            }),
            (EpisodePhase::AgentRunning, EpisodeEvent::Returned { reward, truncated_by })
            | (EpisodePhase::Grading { truncated_by }, EpisodeEvent::Graded { reward }) => {
                end(match *truncated_by {
                    None => Outcome::Scored { reward: *reward },
                    Some(limit) => Outcome::Truncated { limit, reward: *reward },
                })
            }
            // This decides the reward, whatever limit ended the episode.
            (EpisodePhase::Grading { .. }, EpisodeEvent::ChangeTooLarge) => {
                end(Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 })
            }
            (
                EpisodePhase::Acting { .. }
                | EpisodePhase::AgentRunning
                | EpisodePhase::Grading { .. },
                EpisodeEvent::SandboxDamaged { what },
            ) => {
                tracing::warn!(what, "the policy's commands damaged a sandbox");
                end(Outcome::Truncated { limit: Limit::SandboxDamage, reward: 0.0 })
            }
            (
                EpisodePhase::Created
                | EpisodePhase::SandboxReady
                | EpisodePhase::Generating { .. }
                | EpisodePhase::Acting { .. }
                | EpisodePhase::AgentRunning
                | EpisodePhase::Grading { .. },
                EpisodeEvent::Failed { stage, error },
            ) => end(Outcome::Broken { stage: *stage, error: error.clone() }),
            (
                EpisodePhase::Created
                | EpisodePhase::SandboxReady
                | EpisodePhase::Generating { .. }
                | EpisodePhase::Acting { .. }
                | EpisodePhase::AgentRunning
                | EpisodePhase::Grading { .. }
                | EpisodePhase::Ended(_),
                EpisodeEvent::SandboxOpened
                | EpisodeEvent::PromptRendered { .. }
                | EpisodeEvent::Generated { .. }
                | EpisodeEvent::ContextFull { .. }
                | EpisodeEvent::Acted { .. }
                | EpisodeEvent::AgentEnded { .. }
                | EpisodeEvent::Returned { .. }
                | EpisodeEvent::Graded { .. }
                | EpisodeEvent::ChangeTooLarge
                | EpisodeEvent::SandboxDamaged { .. }
                | EpisodeEvent::TimeUp
                | EpisodeEvent::StopRequested
                | EpisodeEvent::Failed { .. },
            ) => return Err(IllegalTransition { phase: self.phase.clone(), event }),
        };
        self.phase = next;
        Ok(command)
    }

    fn generate(&self, turn: u32, prompt_tokens: usize) -> (EpisodePhase, EpisodeCommand) {
        let room = self.limits.max_sequence_tokens.saturating_sub(prompt_tokens);
        if room == 0 {
            return grade(Some(Limit::SequenceTokens));
        }
        let max_new_tokens = room.min(self.limits.max_response_tokens);
        (
            EpisodePhase::Generating { turn, sampled: 0, aborts: 0 },
            EpisodeCommand::Generate { turn, resumed: false, max_new_tokens },
        )
    }

    fn generated(
        &self,
        finish: &Finish,
        turn: u32,
        sampled: usize,
        aborts: u32,
        total_tokens: usize,
    ) -> (EpisodePhase, EpisodeCommand) {
        let room = self.limits.max_sequence_tokens.saturating_sub(total_tokens);
        let response_room = self.limits.max_response_tokens.saturating_sub(sampled);
        let limit = if room == 0 { Limit::SequenceTokens } else { Limit::ResponseTokens };
        match finish {
            Finish::Stop => (EpisodePhase::Acting { turn }, EpisodeCommand::Act),
            Finish::Length => grade(Some(limit)),
            Finish::Abort if room.min(response_room) == 0 => grade(Some(limit)),
            Finish::Abort if aborts >= MAX_ABORTS_PER_TURN => end(Outcome::Broken {
                stage: Stage::Generate,
                error: format!("turn {turn} was aborted {} times", aborts + 1),
            }),
            Finish::Abort => (
                EpisodePhase::Generating { turn, sampled, aborts: aborts + 1 },
                EpisodeCommand::Generate {
                    turn,
                    resumed: true,
                    max_new_tokens: room.min(response_room),
                },
            ),
        }
    }
}

fn grade(truncated_by: Option<Limit>) -> (EpisodePhase, EpisodeCommand) {
    (EpisodePhase::Grading { truncated_by }, EpisodeCommand::Grade)
}

/// The outcome of an episode whose prompt leaves no room for the first reply: the task's, or the
/// settings' fault.
fn unsuitable_prompt(why: &str) -> Outcome {
    let remedy = "shorten it, or raise rollout.max_sequence_tokens or the engine's context";
    let error = format!("the task's prompt leaves no room for a reply ({why}); {remedy}");
    Outcome::Broken { stage: Stage::Setup, error }
}

fn end(outcome: Outcome) -> (EpisodePhase, EpisodeCommand) {
    (EpisodePhase::Ended(outcome.clone()), EpisodeCommand::Finish(outcome))
}

#[cfg(test)]
mod tests;
