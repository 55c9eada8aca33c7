//! The request for an attempt, its report, and the messages of a conversation.

use crate::buffer::Fork;
use crate::conversation::{ForkCause, Recognition};
use orchestrate_routing::RoutingMask;
use orchestrate_tasks::{Task, Verdict};
use orchestrate_types::{AttemptId, Outcome, PolicyVersion, RunId, Trajectory};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// A request to run one attempt.
#[derive(Debug, Clone)]
pub struct EpisodeRequest {
    /// The run that the attempt belongs to.
    pub run: RunId,
    /// The coordinator's epoch, counted from 1.
    pub epoch: i64,
    /// The attempt's id.
    pub attempt: AttemptId,
    /// The task to solve.
    pub task: Arc<Task>,
    /// Policy version of the engine when the attempt starts.
    pub policy_version: PolicyVersion,
    /// Seed of every random choice in the episode: of the run's seed, the episode and the number of its attempts that
    /// broke before.
    pub seed: u64,
    /// Sampling temperature, > 0; 1.0 samples the policy itself.
    pub temperature: f32,
    /// Whether to collect routing rows: for training, not for evaluation.
    pub want_routing: bool,
}

/// One message of a conversation, as chat templates read it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text; of an `assistant` message the part before its tool calls.
    #[serde(default)]
    pub content: String,
    /// Tool calls of an `assistant` message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Action>,
    /// What only some chat templates show.
    #[serde(default, flatten)]
    pub extra: MessageExtra,
}

/// The parts of a message that only some chat templates show.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MessageExtra {
    /// Thinking of an `assistant` message, apart from its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Ids of the tool calls, in their order; none, or as many as there are calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub call_ids: Vec<String>,
    /// Id of the call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the user, or of the tool that a `tool` message answers for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A tool call in the form that all scaffolds share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Action {
    /// `bash`, `edit` or `submit`; some scaffolds also have `view` and `search`.
    pub name: String,
    /// The arguments, a JSON object.
    pub arguments: serde_json::Value,
}

/// One turn in readable form: the policy's text and its observations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnLog {
    /// The policy's text, decoded from its tokens.
    pub text: String,
    /// The calls that were performed; empty if the text had no valid call.
    pub actions: Vec<Action>,
    /// Why the calls in the text could not be read, if it looks like some: then none was performed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unread: Option<String>,
    /// Observations of all calls of the turn, joined by line ends.
    pub observation: String,
    /// Time spent waiting for the engine, in milliseconds.
    pub generate_ms: u64,
    /// Time spent in the sandbox, in milliseconds.
    pub exec_ms: u64,
    /// Where the next turn's prompt forked from this turn's tokens, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<Fork>,
    /// Fields of the agent's request that something else decided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overridden: Vec<String>,
}

/// How long each part of an attempt took, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Timings {
    /// Opening and filling the sandbox, including the wait for a free slot.
    pub setup_s: f64,
    /// Waiting for the engine.
    pub generate_s: f64,
    /// Performing the agent's calls.
    pub exec_s: f64,
    /// Collecting and grading the change.
    pub grade_s: f64,
}

/// Counters of an attempt's routing rows, in rows except for `wire_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowCounts {
    pub(crate) drift: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) reused: u64,
    pub(crate) shared: u64,
    pub(crate) mixed: u64,
}

impl std::ops::AddAssign for RowCounts {
    fn add_assign(&mut self, other: Self) {
        let Self { drift, wire_bytes, reused, shared, mixed } = other;
        self.drift += drift;
        self.wire_bytes += wire_bytes;
        self.reused += reused;
        self.shared += shared;
        self.mixed += mixed;
    }
}

/// One branch of an attempt's conversation: a whole sequence from the first token of its prompt on.
///
/// Branches may begin with the same tokens. A sampled token has loss mask 1 in exactly one of them.
#[derive(Debug, Clone)]
pub struct EpisodeBranch {
    /// The tokens.
    pub trajectory: Trajectory,
    /// The routing mask; `None` if it was not requested or is incomplete. In the latter case
    /// `routing_problem` of the report has the reason, and the branch must not be trained on with
    /// replay.
    pub routing: Option<RoutingMask>,
}

/// The result of an attempt.
#[derive(Debug, Clone)]
pub struct EpisodeReport {
    /// The attempt's id.
    pub attempt: AttemptId,
    /// How the attempt ended.
    pub outcome: Outcome,
    /// The branches of the conversation, in the order of their first reply; empty if there was no reply.
    /// An agent that only appends to its conversation has one.
    pub branches: Vec<EpisodeBranch>,
    /// Number of branches that began, by cause, without the first.
    pub forks: BTreeMap<ForkCause, u64>,
    /// Requests of the agent that were recognised by a rule that is counted.
    pub recognised: BTreeMap<Recognition, u64>,
    /// Why a routing mask is missing.
    pub routing_problem: Option<String>,
    /// The turns in readable form.
    pub turns: Vec<TurnLog>,
    /// The agent's change, as a unified diff against the tree that it was given.
    pub patch: String,
    /// The grader's verdict; `None` if nothing was graded.
    pub verdict: Option<Verdict>,
    /// Numbers that an external worker returned with its reward, by name. All are finite.
    pub metrics: BTreeMap<String, f64>,
    /// Rows that a later reply repeated with other experts; the first ones are kept.
    pub routing_drift: u64,
    /// Size of the received routing payloads, in bytes.
    pub routing_wire_bytes: u64,
    /// Rows that were not computed for this episode: they came from our prefix cache of rows, or
    /// from the engine's prefix cache.
    pub routing_rows_reused: u64,
    /// Rows whose memory is shared with an earlier episode.
    pub routing_rows_shared: u64,
    /// Mixed rows: weights or KV changed while they were computed.
    pub routing_rows_mixed: u64,
    /// Prompt tokens sent, summed over all turns.
    pub prompt_tokens: u64,
    /// How many of these the engine took from its prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens that a perfect prefix cache would have had, at least `cached_tokens`: at later turns
    /// the tokens of the previous request and reply but the last one, at the first turn the prompt but
    /// its last token, unless this episode is the group's first to send it.
    pub cacheable_tokens: u64,
    /// How long each part took.
    pub timings: Timings,
}

impl EpisodeReport {
    /// Tokens of the first branch, the only one of a built-in scaffold; `None` if there was no reply.
    pub fn trajectory(&self) -> Option<&Trajectory> {
        self.branches.first().map(|branch| &branch.trajectory)
    }

    /// Routing mask of the first branch.
    pub fn routing(&self) -> Option<&RoutingMask> {
        self.branches.first()?.routing.as_ref()
    }
}

/// Runs attempts. [`crate::EpisodeRunner`] does; tests of the coordinator use a scripted one.
#[async_trait::async_trait]
pub trait Episodes: Send + Sync + std::fmt::Debug {
    /// Runs one attempt to its end, with all of its sandboxes closed. Failures are outcomes, so
    /// this never returns an error. If `stop` is cancelled, the attempt ends with
    /// `Aborted{Shutdown}` after the current turn.
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport;

    /// Called once the outcome of an attempt is in the journal.
    fn recorded(&self, _attempt: AttemptId, _outcome: &Outcome) {}

    /// Attempts that an earlier process of the run began, and that [`Episodes::run`] continues if it is
    /// called for them again. Each is the newest attempt of an open episode.
    fn unfinished(&self) -> Vec<AttemptId> {
        Vec::new()
    }
}

/// The opening messages of a task: the system prompt, if any, and the problem statement.
pub fn opening_messages(system_prompt: Option<&str>, problem_statement: &str) -> Vec<Message> {
    let mut messages = Vec::new();
    if let Some(text) = system_prompt {
        messages.push(Message {
            role: "system".to_owned(),
            content: text.to_owned(),
            ..Message::default()
        });
    }
    messages.push(Message {
        role: "user".to_owned(),
        content: problem_statement.to_owned(),
        ..Message::default()
    });
    messages
}
