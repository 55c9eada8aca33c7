//! What an episode is asked and what it reports.

use crate::buffer::Fork;
use orchestrate_routing::RoutingMask;
use orchestrate_tasks::{Task, Verdict};
use orchestrate_types::{AttemptId, Outcome, PolicyVersion, RunId, Trajectory};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// One attempt to make.
#[derive(Debug, Clone)]
pub struct EpisodeRequest {
    /// The run it belongs to.
    pub run: RunId,
    /// The coordinator's epoch.
    pub epoch: i64,
    /// Which attempt.
    pub attempt: AttemptId,
    /// The problem.
    pub task: Arc<Task>,
    /// Weights that are live when it starts.
    pub policy_version: PolicyVersion,
    /// Seed of every random choice of this episode. Depends on run seed and episode, not on the
    /// attempt, so that a retry repeats it.
    pub seed: u64,
    /// Sampling temperature.
    pub temperature: f32,
    /// Whether routing rows are collected (training), or not (evaluation).
    pub want_routing: bool,
}

/// One message of a conversation, as the chat template sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Text; for `assistant` what stands before the tool calls.
    #[serde(default)]
    pub content: String,
    /// Calls of an assistant message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Action>,
}

/// A native tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Action {
    /// `bash`, `edit` or `submit`; of other scaffolds `view` and `search` as well.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: serde_json::Value,
}

/// One turn for a person: what was written and what came back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnLog {
    /// The policy's words, decoded from its tokens.
    pub text: String,
    /// Parsed calls, or why there are none.
    pub actions: Vec<Action>,
    /// What the environment answered.
    pub observation: String,
    /// Milliseconds in the engine.
    pub generate_ms: u64,
    /// Milliseconds in the sandbox.
    pub exec_ms: u64,
    /// Where the next turn left the tokens of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<Fork>,
}

/// Where an episode's time went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Timings {
    /// Opening and filling sandboxes (waiting for a slot included).
    pub setup_s: f64,
    /// Waiting for the engine.
    pub generate_s: f64,
    /// Running the agent's commands.
    pub exec_s: f64,
    /// Grading.
    pub grade_s: f64,
}

/// What happened to the routing rows of an attempt, in rows unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowCounts {
    pub(crate) drift: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) reused: u64,
    pub(crate) shared: u64,
    pub(crate) mixed: u64,
}

/// Everything known about an attempt after its end.
#[derive(Debug, Clone)]
pub struct EpisodeReport {
    /// Which attempt.
    pub attempt: AttemptId,
    /// How it ended.
    pub outcome: Outcome,
    /// Its tokens; absent if it broke before the first turn.
    pub trajectory: Option<Trajectory>,
    /// Its routing rows; absent if not asked for, or not complete (then `routing_problem` says
    /// why, and the trajectory must not be trained on with replay).
    pub routing: Option<RoutingMask>,
    /// Why rows are missing.
    pub routing_problem: Option<String>,
    /// Turn by turn, for people.
    pub turns: Vec<TurnLog>,
    /// Unified diff of the agent's tree against the tree it was given.
    pub patch: String,
    /// The judge's verdict.
    pub verdict: Option<Verdict>,
    /// Rows received again that differ from the row held (kept: the first).
    pub routing_drift: u64,
    /// Bytes of routing payloads on the wire.
    pub routing_wire_bytes: u64,
    /// Rows that were not computed for this episode: taken from the prefix cache of rows, or sent
    /// by the engine from its own.
    pub routing_rows_reused: u64,
    /// Rows held together with other episodes, and counted as held by the first of them.
    pub routing_rows_shared: u64,
    /// Rows that are mixed: weights or KV changed while they were computed.
    pub routing_rows_mixed: u64,
    /// Prompt tokens sent, over all turns.
    pub prompt_tokens: u64,
    /// Of these, answered from the prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens that a perfect prefix cache would have had, at least `cached_tokens`: at later turns
    /// the tokens of the previous request and reply but the last one, at the first turn the prompt but
    /// its last token, unless this episode is the group's first to send it.
    pub cacheable_tokens: u64,
    /// Where the time went.
    pub timings: Timings,
}

/// Runs attempts. The real one is the episode runner; tests of the coordinator script it.
#[async_trait::async_trait]
pub trait Episodes: Send + Sync + std::fmt::Debug {
    /// Runs one attempt to its end. Never fails: what goes wrong is an outcome. When `stop` is
    /// cancelled it ends at the next turn border with `Aborted{Shutdown}`, sandboxes closed.
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport;
}

/// The opening messages of a task: the run's system prompt, if any, and the task's words.
pub fn opening_messages(system_prompt: Option<&str>, problem_statement: &str) -> Vec<Message> {
    let mut messages = Vec::new();
    if let Some(text) = system_prompt {
        messages.push(Message {
            role: "system".to_owned(),
            content: text.to_owned(),
            tool_calls: Vec::new(),
        });
    }
    messages.push(Message {
        role: "user".to_owned(),
        content: problem_statement.to_owned(),
        tool_calls: Vec::new(),
    });
    messages
}
