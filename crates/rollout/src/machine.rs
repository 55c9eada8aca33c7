//! The life of one episode, as a pure machine: facts in, the next command out.
//!
//! | state | event | next state | command |
//! |---|---|---|---|
//! | `Created` | `SandboxOpened` | `SandboxReady` | `RenderPrompt` |
//! | `SandboxReady` | `PromptRendered`, room left | `Generating` turn 0 | `Generate` |
//! | `SandboxReady` | `PromptRendered`, no room | `Grading` cut by `SequenceTokens` | `Grade` |
//! | `Generating` | `Generated`, stop | `Acting` | `Act` |
//! | `Generating` | `Generated`, length | `Grading` cut by `ResponseTokens` or `SequenceTokens` | `Grade` |
//! | `Generating` | `Generated`, abort, room left | `Generating`, same turn | `Generate`, resumed |
//! | `Generating` | `Generated`, abort, no room | `Grading` cut | `Grade` |
//! | `Generating` | `Generated`, abort too often | `Ended` `Broken{Generate}` | `Finish` |
//! | `Acting` | `Acted`, submitted | `Grading` | `Grade` |
//! | `Acting` | `Acted`, turns used up | `Grading` cut by `Turns` | `Grade` |
//! | `Acting` | `Acted`, no room | `Grading` cut by `SequenceTokens` | `Grade` |
//! | `Acting` | `Acted` | `Generating`, next turn | `Generate` |
//! | `Generating`, `Acting` | `TimeUp` | `Grading` cut by `EpisodeTime` | `Grade` |
//! | `Created`, `SandboxReady`, `Generating`, `Acting` | `StopRequested` | `Ended` `Aborted{Shutdown}` | `Finish` |
//! | `Grading` | `Graded` | `Ended` `Scored` or `Truncated` | `Finish` |
//! | `Grading` | `ChangeTooLarge` | `Ended` `Truncated{ChangeSize}`, reward 0 | `Finish` |
//! | all but `Ended` | `Failed` | `Ended` `Broken` | `Finish` |
//!
//! Everything else is an [`IllegalTransition`]. A stop request does not interrupt grading: the
//! verdict is near, and without it the whole episode would have been for nothing.

use orchestrate_engine::Finish;
use orchestrate_types::{AbortCause, Limit, Outcome, Stage};

/// Times one turn may be aborted and resumed; each weight update costs one.
const MAX_ABORTS_PER_TURN: u32 = 16;

/// Limits of an episode, in tokens and turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpisodeLimits {
    /// Generations.
    pub max_turns: u32,
    /// Prompt, responses and observations together.
    pub max_sequence_tokens: usize,
    /// One response.
    pub max_response_tokens: usize,
}

/// Where an episode stands.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Nothing exists yet.
    Created,
    /// The sandbox is open and filled.
    SandboxReady,
    /// The engine samples.
    Generating {
        /// Turn, from 0.
        turn: u32,
        /// Tokens this turn has so far, from replies that were aborted.
        sampled: usize,
        /// Aborted replies of this turn.
        aborts: u32,
    },
    /// The turn's calls are performed.
    Acting {
        /// Turn, from 0.
        turn: u32,
    },
    /// The tree is collected and judged.
    Grading {
        /// The limit that ended the episode, if one did.
        cut: Option<Limit>,
    },
    /// Over.
    Ended(Outcome),
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The agent's sandbox is open, filled, and its tree is known.
    SandboxOpened,
    /// The first prompt has this many tokens.
    PromptRendered {
        /// Prompt tokens.
        tokens: usize,
    },
    /// A reply was stored.
    Generated {
        /// Why it ended.
        finish: Finish,
        /// Tokens in this reply.
        sampled: usize,
        /// All tokens so far.
        total_tokens: usize,
    },
    /// The turn's calls were performed.
    Acted {
        /// Whether one of them was `submit`.
        submitted: bool,
        /// Tokens of the next prompt.
        next_prompt_tokens: usize,
    },
    /// The verifier gave its verdict.
    Graded {
        /// 0.0 to 1.0.
        reward: f64,
    },
    /// What the agent left is more than a grader can be given: nothing is graded.
    ChangeTooLarge,
    /// The episode's time is used up.
    TimeUp,
    /// The run is shutting down.
    StopRequested,
    /// Our own machinery failed, and trying again did not help.
    Failed {
        /// Where.
        stage: Stage,
        /// What happened.
        error: String,
    },
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Open and fill the agent's sandbox.
    OpenSandbox,
    /// Render the first prompt.
    RenderPrompt,
    /// Sample.
    Generate {
        /// Turn, from 0.
        turn: u32,
        /// Whether an aborted reply of this turn goes on.
        resumed: bool,
        /// Most tokens to sample, at least 1.
        max_new_tokens: usize,
    },
    /// Perform the turn's calls.
    Act,
    /// Collect the tree, close the agent's sandbox and judge.
    Grade,
    /// Close what is open and report.
    Finish(Outcome),
}

/// An event that the state does not know. A defect of ours.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("event {event:?} does not fit state {state:?}")]
pub struct IllegalTransition {
    state: State,
    event: Event,
}

/// The machine of one episode.
#[derive(Debug, Clone)]
pub struct EpisodeMachine {
    limits: EpisodeLimits,
    state: State,
}

impl EpisodeMachine {
    /// A machine in `Created`, and its first command, [`Command::OpenSandbox`].
    pub fn new(limits: EpisodeLimits) -> (Self, Command) {
        (Self { limits, state: State::Created }, Command::OpenSandbox)
    }

    /// Where it stands.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes one fact and gives the next command.
    ///
    /// # Errors
    /// [`IllegalTransition`] for an event that the state does not know; the state then stays.
    pub fn step(&mut self, event: Event) -> Result<Command, IllegalTransition> {
        let (next, command) = match (&self.state, &event) {
            (State::Created, Event::SandboxOpened) => (State::SandboxReady, Command::RenderPrompt),
            (State::SandboxReady, Event::PromptRendered { tokens }) => self.generate(0, *tokens),
            (
                State::Generating { turn, sampled: before, aborts },
                Event::Generated { finish, sampled, total_tokens },
            ) => self.generated(finish, *turn, before + sampled, *aborts, *total_tokens),
            (State::Acting { turn }, Event::Acted { submitted, next_prompt_tokens }) => {
                if *submitted {
                    grade(None)
                } else if turn + 1 >= self.limits.max_turns {
                    grade(Some(Limit::Turns))
                } else {
                    self.generate(turn + 1, *next_prompt_tokens)
                }
            }
            (State::Generating { .. } | State::Acting { .. }, Event::TimeUp) => {
                grade(Some(Limit::EpisodeTime))
            }
            (
                State::Created
                | State::SandboxReady
                | State::Generating { .. }
                | State::Acting { .. },
                Event::StopRequested,
            ) => end(Outcome::Aborted { by: AbortCause::Shutdown }),
            (State::Grading { cut }, Event::Graded { reward }) => end(match *cut {
                None => Outcome::Scored { reward: *reward },
                Some(limit) => Outcome::Truncated { limit, reward: *reward },
            }),
            // Whatever else had ended the episode, this decides the reward.
            (State::Grading { .. }, Event::ChangeTooLarge) => {
                end(Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 })
            }
            (
                State::Created
                | State::SandboxReady
                | State::Generating { .. }
                | State::Acting { .. }
                | State::Grading { .. },
                Event::Failed { stage, error },
            ) => end(Outcome::Broken { stage: *stage, error: error.clone() }),
            (
                State::Created
                | State::SandboxReady
                | State::Generating { .. }
                | State::Acting { .. }
                | State::Grading { .. }
                | State::Ended(_),
                Event::SandboxOpened
                | Event::PromptRendered { .. }
                | Event::Generated { .. }
                | Event::Acted { .. }
                | Event::Graded { .. }
                | Event::ChangeTooLarge
                | Event::TimeUp
                | Event::StopRequested
                | Event::Failed { .. },
            ) => return Err(IllegalTransition { state: self.state.clone(), event }),
        };
        self.state = next;
        Ok(command)
    }

    fn generate(&self, turn: u32, prompt_tokens: usize) -> (State, Command) {
        let room = self.limits.max_sequence_tokens.saturating_sub(prompt_tokens);
        if room == 0 {
            return grade(Some(Limit::SequenceTokens));
        }
        let max_new_tokens = room.min(self.limits.max_response_tokens);
        (
            State::Generating { turn, sampled: 0, aborts: 0 },
            Command::Generate { turn, resumed: false, max_new_tokens },
        )
    }

    fn generated(
        &self,
        finish: &Finish,
        turn: u32,
        sampled: usize,
        aborts: u32,
        total_tokens: usize,
    ) -> (State, Command) {
        let room = self.limits.max_sequence_tokens.saturating_sub(total_tokens);
        let response_room = self.limits.max_response_tokens.saturating_sub(sampled);
        // No room for a single token: the engine's context is shorter than the episode's limit.
        let full = room == 0 || sampled == 0;
        let cut = if full { Limit::SequenceTokens } else { Limit::ResponseTokens };
        match finish {
            Finish::Stop => (State::Acting { turn }, Command::Act),
            Finish::Length => grade(Some(cut)),
            Finish::Abort if room.min(response_room) == 0 => grade(Some(cut)),
            Finish::Abort if aborts >= MAX_ABORTS_PER_TURN => end(Outcome::Broken {
                stage: Stage::Generate,
                error: format!("turn {turn} was aborted {} times", aborts + 1),
            }),
            Finish::Abort => (
                State::Generating { turn, sampled, aborts: aborts + 1 },
                Command::Generate { turn, resumed: true, max_new_tokens: room.min(response_room) },
            ),
        }
    }
}

fn grade(cut: Option<Limit>) -> (State, Command) {
    (State::Grading { cut }, Command::Grade)
}

fn end(outcome: Outcome) -> (State, Command) {
    (State::Ended(outcome.clone()), Command::Finish(outcome))
}

#[cfg(test)]
mod tests;
