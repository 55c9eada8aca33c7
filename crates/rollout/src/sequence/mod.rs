//! A sequence: one sequence of tokens that grows by text of the environment and by sampled replies, which
//! `sampling.rs` gets from the engine.
//!
//! A built-in scaffold has one sequence per attempt; an agent that talks to the gateway has one for each
//! branch of its conversation. Both sample here, so tokens, rows and records are made in one way.

mod sampling;

use crate::api::{EpisodeBranch, EpisodeRequest, RowCounts};
use crate::buffer::TokenBuffer;
use crate::chat::ChatModel;
use crate::config::RolloutSettings;
use crate::dialogue::Dialogue;
use crate::prefill::{PrefillLeader, PrefillLeaders};
use crate::rows::{EpisodeRows, RowSharing};
use orchestrate_engine::{Engine, TokenListener};
use orchestrate_gateway::AskedSampling;
use orchestrate_routing::{MixedRows, RoutingMask};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
pub(crate) use sampling::{AcceptedCall, GenerationId, NoReply, Sampled, TurnPart};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// What all sequences of an attempt share.
#[derive(Debug, Clone)]
pub(crate) struct EpisodeContext {
    pub(crate) request: EpisodeRequest,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) chat: Arc<ChatModel>,
    pub(crate) settings: Arc<RolloutSettings>,
    pub(crate) sharing: RowSharing,
    pub(crate) leaders: PrefillLeaders,
    pub(crate) stop: CancellationToken,
    /// End of the agent's time; `None` before it has started.
    pub(crate) deadline: Option<Instant>,
    /// Number of times that the attempt was continued after its process was killed.
    pub(crate) restarts: u32,
}

impl EpisodeContext {
    /// Starts the time limit of the agent.
    pub(crate) fn start_clock(&mut self, time: Duration) {
        self.deadline = Some(Instant::now() + time);
    }

    /// The agent's remaining time.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()))
    }

    fn shape(&self) -> Arc<ModelShape> {
        Arc::new(self.engine.shape().clone())
    }
}

/// One sequence of tokens under construction.
#[derive(Debug)]
pub(crate) struct Sequence {
    session: Arc<Session>,
    /// If this sequence is the first of its group to sample: held until its first reply is stored.
    leading: Option<PrefillLeader>,
    pub(crate) buffer: TokenBuffer,
    /// The conversation in messages, for an engine that takes messages. The buffer then has the
    /// tokens of our own tokenizer, for its length only: none of them is trained on.
    pub(crate) dialogue: Option<Dialogue>,
    rows: Option<EpisodeRows>,
    routing_problem: Option<String>,
    version: PolicyVersion,
    /// Number of calls for the current generation. Part of the request id, so that none is used twice.
    tries: u32,
    /// Strings that end a reply: it is cut after the token that completes the first of them.
    pub(crate) stops: Arc<[String]>,
    /// The temperature and top-p that the agent asked for, where that decides.
    pub(crate) agent_sampling: AskedSampling,
    /// Who is told of tokens while they are sampled.
    pub(crate) listener: Option<Arc<dyn TokenListener>>,
    /// The calls of the generation, if they are recorded.
    pub(crate) recorded: Option<Vec<AcceptedCall>>,
    /// Calls of an earlier process, which take the place of those to the engine.
    pub(crate) replayed: Option<VecDeque<AcceptedCall>>,
    /// Whether the last stored reply was aborted, so that the next reply continues its turn.
    turn_is_open: bool,
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

/// Prompt tokens of a sequence, summed over its generations.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) prompt: u64,
    pub(crate) cached: u64,
    pub(crate) cacheable: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        let Self { prompt, cached, cacheable } = other;
        self.prompt += prompt;
        self.cached += cached;
        self.cacheable += cacheable;
    }
}

/// A finished sequence.
#[derive(Debug)]
pub(crate) struct FinishedSequence {
    /// Its tokens and rows; `None` without a reply.
    pub(crate) branch: Option<EpisodeBranch>,
    /// Why its routing mask is missing.
    pub(crate) routing_problem: Option<String>,
    pub(crate) rows: RowCounts,
    pub(crate) counters: Counters,
}

impl Sequence {
    /// An empty sequence. `branch` is its number in the attempt, from 0.
    pub(crate) fn new(context: &EpisodeContext, branch: usize) -> Self {
        let EpisodeRequest { run, want_routing, policy_version, .. } = context.request;
        let (mut rows, mut routing_problem) = (None, None);
        if want_routing {
            match EpisodeRows::new(context.shape(), run.to_string(), context.sharing.clone()) {
                Ok(new) => rows = Some(new),
                Err(error) => routing_problem = Some(error.to_string()),
            }
        }
        Self { rows, ..Self::without_rows(context, branch, routing_problem, policy_version) }
    }

    /// A sequence without tokens and rows.
    fn without_rows(
        context: &EpisodeContext,
        branch: usize,
        routing_problem: Option<String>,
        version: PolicyVersion,
    ) -> Self {
        Self {
            session: Arc::new(Session::new(context, branch)),
            leading: None,
            buffer: TokenBuffer::default(),
            dialogue: None,
            rows: None,
            routing_problem,
            version,
            tries: 0,
            stops: Arc::default(),
            agent_sampling: AskedSampling::default(),
            listener: None,
            recorded: None,
            replayed: None,
            turn_is_open: false,
            counters: Counters::default(),
        }
    }

    /// A sequence that starts with the first `tokens` tokens of this one, which are the end of a reply or 0,
    /// and with their rows. Their loss stays with this sequence.
    pub(crate) fn branch(&self, context: &EpisodeContext, branch: usize, tokens: usize) -> Self {
        let buffer = self.buffer.branch(tokens);
        Self {
            buffer,
            rows: self.rows.as_ref().map(|rows| rows.branch(tokens, self.version)),
            ..self.empty(context, branch)
        }
    }

    /// A sequence without tokens, which has the rows of its first `common` tokens from this one.
    pub(crate) fn sibling(&self, context: &EpisodeContext, branch: usize, common: usize) -> Self {
        let rows = self.rows.as_ref().map(|rows| rows.branch(common, self.version));
        Self { rows, ..self.empty(context, branch) }
    }

    /// A sequence without tokens and rows, at the policy version of this one.
    fn empty(&self, context: &EpisodeContext, branch: usize) -> Self {
        Self::without_rows(context, branch, self.routing_problem.clone(), self.version)
    }

    /// A copy to sample with. If sampling is dropped half-way, this sequence is as it was.
    pub(crate) fn copy(&self) -> Self {
        Self {
            session: Arc::clone(&self.session),
            leading: None,
            buffer: self.buffer.clone(),
            dialogue: self.dialogue.clone(),
            rows: self.rows.clone(),
            routing_problem: self.routing_problem.clone(),
            version: self.version,
            tries: self.tries,
            stops: Arc::clone(&self.stops),
            agent_sampling: self.agent_sampling,
            listener: None,
            recorded: None,
            replayed: None,
            turn_is_open: self.turn_is_open,
            counters: self.counters,
        }
    }

    /// Whether the rows of `parent` are this sequence's first ones, and have not been fetched again since
    /// this sequence branched from it.
    pub(crate) fn has_rows_of(&self, parent: &Self) -> bool {
        match (&self.rows, &parent.rows) {
            (Some(rows), Some(parent)) => rows.begin_with(parent),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }

    /// Appends text of the environment.
    pub(crate) fn extend(&mut self, tokens: &[TokenId]) {
        self.buffer.add_pending(tokens);
    }

    /// Routing rows of all tokens so far, which end with a reply. No rows are copied.
    pub(crate) fn rows_so_far(&self) -> Option<RoutingMask> {
        self.rows.clone()?.finish(self.buffer.len()).ok()
    }

    /// The policy version that sampled last.
    pub(crate) fn version(&self) -> PolicyVersion {
        self.version
    }

    /// Leaves tokens out of the next prompt where the chat template drops the thinking of the last turn.
    pub(crate) fn fork_last_turn(&mut self, chat: &ChatModel) {
        let role = chat.options.scaffold.observation_role();
        let (header, thinking) = chat.dropped_tokens(self.buffer.last_turn(), &chat.input, role);
        self.buffer.fork_last_turn(header, thinking);
        if let (Some(fork), Some(rows)) = (self.buffer.fork(), &mut self.rows) {
            rows.fork(fork.at);
        }
    }

    /// Ends the sequence. A routing mask that does not cover all tokens is left out, with the reason.
    pub(crate) fn finish(mut self) -> FinishedSequence {
        let mut routing_problem = self.routing_problem.take();
        let row_counts = self.rows.as_ref().map(|rows| rows.counts).unwrap_or_default();
        if let Some(rows) = self.rows.take_if(|rows| !rows.mixed_tokens().is_empty()) {
            self.rows = match rows.mixed_policy() {
                MixedRows::Keep => Some(rows),
                MixedRows::Mask => {
                    let mixed: Vec<Range<usize>> = rows.mixed_tokens();
                    for range in mixed {
                        self.buffer.exclude(range);
                    }
                    Some(rows)
                }
                MixedRows::Drop => {
                    let count = row_counts.mixed;
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
        FinishedSequence {
            branch: trajectory.map(|trajectory| EpisodeBranch { trajectory, routing }),
            routing_problem,
            rows: row_counts,
            counters: self.counters,
        }
    }
}

impl Session {
    fn new(context: &EpisodeContext, branch: usize) -> Self {
        let EpisodeRequest { run, attempt, .. } = context.request;
        let name = match branch {
            0 => format!("{}-{attempt}", run.short()),
            branch => format!("{}-{attempt}-b{branch}", run.short()),
        };
        Self { engine: Arc::clone(&context.engine), name }
    }
}
