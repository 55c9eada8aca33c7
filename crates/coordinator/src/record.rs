//! Records of the journal: episodes, from the report of an attempt to a training sample, and the results
//! of steps.

use crate::error::RunError;
use jiff::Timestamp;
use orchestrate_handoff::protocol::{StepMetrics, StepResult};
use orchestrate_handoff::{BatchSample, BranchWeight, Overlong};
use orchestrate_metrics::SCHEMA_VERSION;
use orchestrate_rollout::{EpisodeBranch, EpisodeReport, ForkCause, Recognition, Timings, TurnLog};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_store::{AttemptRow, EpisodeRecord, RowSpan, StepRow, StoredBranch, StoredRouting};
use orchestrate_tasks::{Finding, Verdict};
use orchestrate_types::{GroupId, ModelShape, Outcome, PolicyVersion, Trajectory, now};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A metrics line as the journal stores it.
pub(crate) fn stored_line(line: &impl Serialize) -> Result<Value, RunError> {
    serde_json::to_value(line).map_err(|e| RunError::stored("metrics line", e))
}

/// The trainer's result of a step as the journal stores it.
#[derive(Debug, Serialize, Deserialize)]
struct StoredResult {
    /// 0 in results stored before it was recorded.
    #[serde(default)]
    schema_version: u32,
    /// When the result arrived, UTC; `None` in results stored before it was recorded.
    time: Option<Timestamp>,
    policy_version: PolicyVersion,
    checkpoint: camino::Utf8PathBuf,
    metrics: StepMetrics,
}

/// A result that has just arrived, to be stored.
pub(crate) fn to_stored_result(result: StepResult) -> Result<Value, RunError> {
    let StepResult { policy_version, checkpoint, metrics } = result;
    let (schema_version, time) = (SCHEMA_VERSION, Some(now()));
    let stored = StoredResult { schema_version, time, policy_version, checkpoint, metrics };
    serde_json::to_value(stored).map_err(|e| RunError::stored("result", e))
}

/// The trainer's result of a trained step.
pub(crate) fn result_of(row: &StepRow) -> Result<StepResult, RunError> {
    let invalid = |detail: String| RunError::stored(format!("result of step {}", row.step), detail);
    let stored: StoredResult = serde_json::from_value(row.result.clone().unwrap_or_default())
        .map_err(|error| invalid(error.to_string()))?;
    if stored.schema_version > SCHEMA_VERSION {
        let found = stored.schema_version;
        return Err(invalid(format!(
            "schema version {found}, but this program reads versions up to {SCHEMA_VERSION}: \
             upgrade it"
        )));
    }
    let StoredResult { policy_version, checkpoint, metrics, .. } = stored;
    Ok(StepResult { policy_version, checkpoint, metrics })
}

/// The part of an attempt that is stored for people to read: the `detail` of its record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpisodeDetail {
    /// Id of the task.
    pub task_id: String,
    /// The log of each turn, in order.
    pub turns: Vec<TurnLog>,
    /// The agent's change as a unified diff; empty if it changed nothing.
    pub patch: String,
    /// The grader's verdict; `None` if the episode was not graded.
    pub verdict: Option<Verdict>,
    /// Why routing rows are missing, if they are.
    pub routing_problem: Option<String>,
}

/// The numbers that metrics are computed from: the `summary` of an attempt's row.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EpisodeSummary {
    /// Tokens of all branches.
    pub tokens: u64,
    /// Tokens of each branch, in order; not stored for a single one, whose number is `tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub branch_tokens: Vec<u64>,
    /// Tokens that the policy wrote.
    pub response_tokens: u64,
    /// Turns.
    pub turns: u64,
    /// Bytes of routing rows held in memory, without those shared with an earlier episode.
    pub routing_bytes: u64,
    /// Whether rows were requested and are incomplete.
    pub routing_missing: bool,
    /// Rows that were received again and differ from those held.
    pub routing_drift: u64,
    /// Bytes of routing payloads received.
    pub routing_wire_bytes: u64,
    /// Rows taken from the cache of rows, or sent by the engine from its own cache.
    pub routing_rows_reused: u64,
    /// Rows of turns during which the weights or the KV cache changed.
    #[serde(default)]
    pub routing_rows_mixed: u64,
    /// Oldest policy version that sampled one of its tokens.
    #[serde(default)]
    pub oldest_version: Option<PolicyVersion>,
    /// Prompt tokens sent, over all turns.
    pub prompt_tokens: u64,
    /// Prompt tokens that were in the engine's prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens that a perfect prefix cache would have had.
    pub cacheable_tokens: u64,
    /// Time spent in each stage.
    pub timings: Timings,
    /// Turns whose text looks like calls that could not be read.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unread_turns: u64,
    /// Branches that began after the first, by cause.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub forks: BTreeMap<ForkCause, u64>,
    /// Requests of the agent by the counted rules that recognised them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub recognised_requests: BTreeMap<Recognition, u64>,
    /// Requests of the agent with a field that something else decided, by field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub overridden_fields: BTreeMap<String, u64>,
    /// Numbers that an external worker returned with its reward, by name. All are finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// What the grader noticed besides the results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suspicious: Vec<Finding>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn to_stored_branch(branch: EpisodeBranch) -> StoredBranch {
    let routing = branch.routing.map(|mask| StoredRouting {
        row_bytes: mask.row_bytes(),
        data: mask.to_vec(),
        versions: mask
            .versions()
            .iter()
            .map(|v| RowSpan { start: v.start, end: v.end, version: v.version })
            .collect(),
    });
    StoredBranch { trajectory: branch.trajectory, routing }
}

fn oldest_version(trajectory: &Trajectory) -> Option<PolicyVersion> {
    let oldest = trajectory.policy_versions().iter().min()?;
    u64::try_from(*oldest).ok().map(PolicyVersion)
}

/// Turns with an overridden field, by field.
fn overridden_fields(turns: &[TurnLog]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for field in turns.iter().flat_map(|turn| &turn.overridden) {
        *counts.entry(field.clone()).or_default() += 1;
    }
    counts
}

/// An attempt's report as it is stored. `want_routing` says whether rows were requested.
pub(crate) fn to_record(
    report: EpisodeReport,
    task_id: &str,
    want_routing: bool,
) -> Result<EpisodeRecord, RunError> {
    // Rows shared with other episodes count for the episode that held them first.
    let masks = || report.branches.iter().filter_map(|branch| branch.routing.as_ref());
    let rows: usize = masks().map(RoutingMask::rows).sum();
    let row_bytes = masks().map(RoutingMask::row_bytes).next().unwrap_or(0);
    let shared = usize::try_from(report.routing_rows_shared).unwrap_or(usize::MAX);
    let bytes = rows.saturating_sub(shared) * row_bytes;
    let trajectories = || report.branches.iter().map(|branch| &branch.trajectory);
    let mut branch_tokens: Vec<u64> = trajectories().map(|t| t.len() as u64).collect();
    let tokens = branch_tokens.iter().sum();
    if branch_tokens.len() == 1 {
        branch_tokens.clear();
    }
    let summary = EpisodeSummary {
        tokens,
        branch_tokens,
        response_tokens: trajectories().map(|t| t.response_tokens() as u64).sum(),
        turns: report.turns.len() as u64,
        unread_turns: report.turns.iter().filter(|turn| turn.unread.is_some()).count() as u64,
        routing_bytes: bytes as u64,
        routing_missing: want_routing
            && (report.branches.is_empty() || masks().count() < report.branches.len()),
        routing_drift: report.routing_drift,
        routing_wire_bytes: report.routing_wire_bytes,
        routing_rows_reused: report.routing_rows_reused,
        routing_rows_mixed: report.routing_rows_mixed,
        oldest_version: trajectories().filter_map(oldest_version).min(),
        prompt_tokens: report.prompt_tokens,
        cached_tokens: report.cached_tokens,
        cacheable_tokens: report.cacheable_tokens,
        timings: report.timings,
        forks: report.forks,
        recognised_requests: report.recognised,
        overridden_fields: overridden_fields(&report.turns),
        metrics: report.metrics,
        suspicious: report.verdict.as_ref().map(|v| v.suspicious.clone()).unwrap_or_default(),
    };
    let detail = EpisodeDetail {
        task_id: task_id.to_owned(),
        turns: report.turns,
        patch: report.patch,
        verdict: report.verdict,
        routing_problem: report.routing_problem,
    };
    let json = |e| RunError::stored(format!("record of attempt {}", report.attempt), e);
    Ok(EpisodeRecord {
        attempt: report.attempt,
        outcome: report.outcome,
        branches: report.branches.into_iter().map(to_stored_branch).collect(),
        detail: serde_json::to_value(detail).map_err(json)?,
        summary: serde_json::to_value(summary).map_err(json)?,
    })
}

/// The report of an attempt that panicked.
pub(crate) fn broken_report(
    attempt: orchestrate_types::AttemptId,
    outcome: Outcome,
) -> EpisodeReport {
    EpisodeReport {
        attempt,
        outcome,
        branches: Vec::new(),
        forks: BTreeMap::new(),
        recognised: BTreeMap::new(),
        routing_problem: None,
        turns: Vec::new(),
        patch: String::new(),
        verdict: None,
        metrics: BTreeMap::new(),
        routing_drift: 0,
        routing_wire_bytes: 0,
        routing_rows_reused: 0,
        routing_rows_shared: 0,
        routing_rows_mixed: 0,
        prompt_tokens: 0,
        cached_tokens: 0,
        cacheable_tokens: 0,
        timings: Timings::default(),
    }
}

impl EpisodeSummary {
    /// Number of tokens of each branch.
    pub(crate) fn tokens_by_branch(&self) -> Vec<u64> {
        if self.branch_tokens.is_empty() { vec![self.tokens] } else { self.branch_tokens.clone() }
    }
}

/// The numbers of a stored attempt, from its row.
pub(crate) fn summary_of(row: &AttemptRow) -> Result<EpisodeSummary, RunError> {
    serde_json::from_value(row.summary.clone())
        .map_err(|e| RunError::stored(format!("summary of attempt {}", row.id), e))
}

/// The branches of a stored episode as training samples, whose advantages come from the episode's
/// `advantage` by `weight`; `overlong` lowers the reward of long episodes. Every routing row is
/// checked again against the model's shape.
pub(crate) fn to_samples(
    record: EpisodeRecord,
    advantage: f64,
    weight: BranchWeight,
    overlong: Option<Overlong>,
    shape: &Arc<ModelShape>,
) -> Result<Vec<BatchSample>, RunError> {
    let episode_id = record.attempt.episode;
    let what = || format!("episode {episode_id}");
    let reward = record
        .outcome
        .trusted_reward()
        .ok_or_else(|| RunError::stored(what(), "no trusted reward"))?;
    let response_tokens: usize =
        record.branches.iter().map(|branch| branch.trajectory.response_tokens()).sum();
    let reward = reward + overlong.map_or(0.0, |o| o.penalty(response_tokens as u64));
    let group = match episode_id.group {
        GroupId::Train { seq } => i64::from(seq),
        GroupId::Eval { .. } => {
            return Err(RunError::stored(what(), "evaluation episodes are not trained on"));
        }
    };
    if record.branches.is_empty() {
        return Err(RunError::stored(what(), "no trajectory"));
    }
    let advantage = weight.advantage(advantage, record.branches.len());
    let sample = |branch: StoredBranch| {
        let routing = branch.routing.map(|rows| {
            let versions = rows
                .versions
                .iter()
                .map(|v| RowVersion { start: v.start, end: v.end, version: v.version })
                .collect();
            RoutingMask::new(shape.clone(), &rows.data, versions)
        });
        Ok(BatchSample {
            episode_id,
            group,
            trajectory: branch.trajectory,
            routing: routing.transpose().map_err(|e| RunError::stored(what(), e))?,
            advantage: to_f32(advantage),
            reward: to_f32(reward),
        })
    };
    record.branches.into_iter().map(sample).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "the hand-off format stores f32")]
fn to_f32(value: f64) -> f32 {
    value as f32
}
