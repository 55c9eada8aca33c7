//! The line of a global step.

use crate::extreme::ExtremeTokens;
use crate::metric::metrics_line;
use orchestrate_handoff::protocol::{
    HalfDecades, PolicyRatio, ProbabilityGrid, RolloutRatio, RouterShiftStats, ValueStats,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Use of one Docker host by the sandboxes of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxHost {
    /// Its name, or its URL if it has no name.
    pub host: String,
    /// Whether new sandboxes are opened there.
    pub in_service: bool,
    /// How often it was taken out of service.
    pub taken_out: u64,
    /// Maximum number of containers at the same time.
    pub capacity: usize,
    /// Containers in use at the end of the step, including those being started or removed.
    pub open: usize,
    /// Clean containers that wait for their next use.
    pub idle: usize,
    /// Containers started since the start of the run.
    pub started: u64,
}

/// Broken attempts by the stage at which the infrastructure failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokenByStage {
    /// While the sandbox was opened and filled.
    pub setup: u64,
    /// While the engine sampled.
    pub generate: u64,
    /// While a command ran.
    pub exec: u64,
    /// While the change was collected.
    pub collect: u64,
    /// While the change was graded.
    pub grade: u64,
    /// While the result was recorded.
    pub record: u64,
}

metrics_line! {
    /// The line of a global step in `metrics.jsonl`.
    ///
    /// ρ is the probability of a token in the trainer divided by that in the engine, both at the weights
    /// that sampled it. Metrics with the suffix `_no_replay` are those of a forward pass in which the
    /// trainer's routers choose for themselves; it is made every `diagnostics.no_replay_every` steps.
    StepLine {
        /// Mean reward of the step's episodes that have a trusted outcome, including those of dropped
        /// groups.
        reward_mean: f64, "reward, 0 to 1", healthy: "rises over the run";
        /// Episodes that solved their task, of all episodes with a trusted outcome.
        solve_rate: f64, "share, 0 to 1", healthy: "rises over the run";
        /// Groups that were trained on.
        groups_kept: u64, "groups", healthy: "`rollout.groups_per_step`";
        /// Groups that were sampled and left out, mostly because all their rewards are equal.
        groups_dropped: u64, "groups", healthy: "few; many mean that tasks are too easy or too hard";
        /// Episodes with a trusted outcome, including those of dropped groups.
        episodes: u64, "episodes";
        /// Episodes that failed in every attempt because of the infrastructure.
        broken_episodes: u64, "episodes", healthy: "0";
        /// Attempts that failed because of the infrastructure, including those that were retried.
        broken_attempts: u64, "attempts", healthy: "0 or few";
        /// The same attempts by the stage at which they failed: `setup`, `generate`, `exec`, `collect`,
        /// `grade`, `record`.
        broken_attempts_by_stage: BrokenByStage, "attempts by stage", healthy: "0 or few";
        /// Episodes that were ended by a limit of turns, tokens, time or size.
        truncated_episodes: u64, "episodes", healthy: "few, and falling";
        /// Episodes by what their graders noticed besides the results, for example `tampered`,
        /// `conftest_touched` or `tests_deleted`; only what occurs.
        suspicious: BTreeMap<String, u64>, "episodes by finding", healthy: "few; a rise means that the policy works on the tests instead of the task";
        /// Branches that began in conversations of agents with their own loop, by cause: `tools`, `opening`,
        /// `history`, `repeated`, `thinking`. Absent if none did.
        forks: BTreeMap<String, u64>, "branches by cause", healthy: "as many as the agent compacts its history or starts sub-agents; `history` in every episode means that it edits its history";
        /// Requests of agents that begin no branch, by how they were recognised: `ambiguous` ones continue
        /// one of several replies that what was sent back does not tell apart, `returned` ones repeat a
        /// request whose reply did not arrive, and got it. Absent if there are none.
        recognised_requests: BTreeMap<String, u64>, "requests by rule", healthy: "few; `ambiguous` means that the agent asks for several replies and sends neither their ids nor their thinking back";
        /// Requests of agents with a field that something else decided, by field, for example `temperature`
        /// or `tool_choice`. Absent if there are none.
        overridden_fields: BTreeMap<String, u64>, "requests by field", healthy: "as the agent sends them; `tool_choice` means that it expects calls which are not enforced";
        /// Numbers that external workers returned with their rewards, by name: the mean over the
        /// episodes that have the number. Absent if no episode has one.
        worker_metrics: BTreeMap<String, f64>, "any, by name", healthy: "as the environment defines them";
        /// Staleness of the oldest token of each trained episode, mean.
        staleness_mean: f64, "policy versions, ≥ 0", healthy: "at most `run.max_staleness`";
        /// Staleness of the oldest token of all trained episodes.
        staleness_max: u64, "policy versions", healthy: "at most `run.max_staleness`";
        /// Turns of an episode, mean.
        turns_mean: f64, "turns";
        /// Turns whose text looks like calls that could not be read: a tag is missing, or the calls may be
        /// read in several ways. None of their calls was performed. Absent if there was none.
        unread_turns: u64, "turns", healthy: "few, and falling; many mean that the policy writes calls in another form than its chat template";
        /// Tokens that the policy wrote in an episode, mean.
        response_tokens_mean: f64, "tokens", healthy: "no sudden growth";

        /// Mean entropy of the policy at the loss tokens, at the rollout temperature.
        entropy: f64, "nats per token, ≥ 0", healthy: "falls slowly; a steep rise precedes a collapse";
        /// Global gradient norm before clipping, mean over mini steps.
        grad_norm: f64, "norm, ≥ 0", healthy: "below 10 times its median";
        /// Loss, mean over mini steps.
        loss: f64, "loss";
        /// Loss tokens whose update the policy loss clipped.
        clip_fraction: f64, "share, 0 to 1";
        /// The routers' part of the gradient norm before clipping, mean over mini steps.
        router_grad_norm: f64, "norm, ≥ 0";
        /// Learning rate of the last mini step.
        learning_rate: f64, "learning rate";
        /// Ratio of the updated policy to the one that sampled, over the loss tokens of all mini steps:
        /// `mean`, `max`, and the shares of tokens clipped from above (`clipped_high`) and from below
        /// (`clipped_low`).
        ratio: PolicyRatio, "ratio > 0; shares 0 to 1", healthy: "mean near 1";
        /// ρ over the loss tokens: `mean`, `max`, the effective share of samples
        /// `1 / mean((ρ / mean)²)` (`effective_share`), the mean weight of the importance correction
        /// (`weight_mean`, 1 without one) and the share of tokens that it truncated or left out
        /// (`corrected`).
        rollout_ratio: RolloutRatio, "ratio > 0; shares 0 to 1", healthy: "mean and effective share near 1";
        /// Divergence from the reference policy, mean; null without `algorithm.kl_coefficient`.
        kl_reference: f64, "nats, ≥ 0";
        /// Router-shift weights of the mini steps after the first: `mean`, and the share of tokens at
        /// the lower bound (`floored`); null without `algorithm.router_shift`.
        router_shift: RouterShiftStats, "weight, 0 to 1; share, 0 to 1";
        /// Loss of the router predictor, mean over mini steps; null unless `routing_replay` is `predictive`.
        predictor_loss: f64, "loss, ≥ 0", healthy: "falls";
        /// The value head's `loss`, and the share of the returns' variance that it explains
        /// (`explained_variance`, negative = worse than the mean); null unless the loss is `ppo`.
        value: ValueStats, "loss, ≥ 0; share, ≤ 1", healthy: "explained variance rises";
        /// Entropy of the executed experts' shares, per MoE layer, divided by its maximum.
        expert_load_entropy: Vec<f64>, "per layer, 0 to 1", healthy: "near 1 (all experts equally used)";
        /// Use of the experts from the busiest to the idlest, per MoE layer, in at most 16 groups of
        /// equal size; 1 = even.
        expert_load: Vec<Vec<f64>>, "per layer and group, ≥ 0", healthy: "near 1";
        /// (token, layer) pairs of the last mini step in which the router's own choice of experts differs
        /// from the replayed one; null without replay.
        route_drift: f64, "share, 0 to 1";
        /// Tokens in the loss.
        loss_tokens: u64, "tokens";
        /// Tokens that the trainer processed, including prompts and observations.
        train_tokens: u64, "tokens";
        /// (token, layer) pairs without a routing row, for which the trainer's own choice was executed.
        routing_missing_pairs: u64, "pairs", healthy: "0";
        /// (token, layer) pairs without a routing row, of all pairs that could have one.
        routing_missing_fraction: f64, "share, 0 to 1", healthy: "below 0.001";

        /// Train-inference KL, the k3 estimate: mean of `ρ − 1 − ln ρ`.
        kl_train_infer: f64, "nats, ≥ 0", healthy: "below 0.01";
        /// Mean of `|ln ρ|`.
        logprob_diff_mean: f64, "nats, ≥ 0";
        /// Mean of `|p_train − p_infer|`.
        prob_diff_mean: f64, "probability, 0 to 1", healthy: "below 0.005; above 0.01 points to the engine";
        /// F(τ): loss tokens with `max(ρ, 1/ρ) > τ`, by τ.
        extreme_token_fraction: ExtremeTokens, "share by τ, 0 to 1", healthy: "F(2) below 0.01; above 0.1 the run has collapsed";
        /// Tokens by `|ln ρ|`, in 18 half decades: the first is below 1e-7, the last is 10 and above.
        logprob_diff_histogram: HalfDecades, "tokens";
        /// Sequences by their mean `|ln ρ|`, in the same half decades.
        sequence_logprob_diff_histogram: HalfDecades, "sequences";
        /// Tokens by their probability in the engine and in the trainer: `[engine bin, trainer bin,
        /// tokens]`, bin `b` from `−ln p = (b / 8)²`.
        probability_grid: ProbabilityGrid, "tokens", healthy: "near the diagonal";
        /// As `kl_train_infer`, without replay.
        kl_train_infer_no_replay: f64, "nats, ≥ 0";
        /// As `logprob_diff_mean`, without replay.
        logprob_diff_mean_no_replay: f64, "nats, ≥ 0";
        /// As `prob_diff_mean`, without replay.
        prob_diff_mean_no_replay: f64, "probability, 0 to 1";
        /// As `extreme_token_fraction`, without replay.
        extreme_token_fraction_no_replay: ExtremeTokens, "share by τ, 0 to 1";
        /// As `logprob_diff_histogram`, without replay.
        logprob_diff_histogram_no_replay: HalfDecades, "tokens";
        /// As `sequence_logprob_diff_histogram`, without replay.
        sequence_logprob_diff_histogram_no_replay: HalfDecades, "sequences";
        /// As `probability_grid`, without replay.
        probability_grid_no_replay: ProbabilityGrid, "tokens";

        /// (token, layer) pairs whose expert sets differ between engine and trainer, in a forward pass
        /// without replay.
        router_disagreement: f64, "share, 0 to 1", healthy: "small and steady";
        /// Tokens with at least one layer whose expert sets differ.
        token_disagreement: f64, "share, 0 to 1";
        /// Differing layers per token: mean over a sequence, then over sequences.
        sequence_disagreement_mean: f64, "layers per token, ≥ 0";
        /// Differing experts per token: mean over a sequence, then over sequences.
        sequence_disagreement_experts: f64, "experts per token, ≥ 0";
        /// (token, layer) pairs by how many of their experts differ, 0 to `top_k`.
        router_disagreement_histogram: Vec<f64>, "shares, sum 1";
        /// Tokens whose expert sets differ, per MoE layer.
        router_disagreement_by_layer: Vec<f64>, "share per layer, 0 to 1";
        /// Tokens by how many of their layers differ, 0 to all.
        token_disagreement_histogram: Vec<f64>, "shares, sum 1";
        /// Sequences by the share of their (token, layer) pairs that differ, in 18 half decades.
        sequence_disagreement_histogram: HalfDecades, "sequences";

        /// Routing payloads received.
        routing_bytes_wire: u64, "bytes";
        /// Routing rows held in memory. Rows that several episodes share count once.
        routing_bytes_held: u64, "bytes";
        /// Routing rows that were not computed for their episode, but taken from the cache of rows or
        /// sent by the engine from its own cache.
        routing_rows_reused: u64, "rows";
        /// Routing rows of turns during which the weights or the KV cache changed.
        routing_rows_mixed: u64, "rows", healthy: "0 without `run.max_staleness`";
        /// Routing rows that were received again and differ from those held.
        routing_drift: u64, "rows", healthy: "0";
        /// Episodes whose routing rows are incomplete although they were requested.
        routing_missing: u64, "episodes", healthy: "0";
        /// Prompt tokens that the engine had in its prefix cache.
        prefix_cache_hit_rate: f64, "share, 0 to 1", healthy: "near `prefix_cache_hit_rate_possible`";
        /// Prompt tokens that a perfect prefix cache would have had: the earlier turns of the same
        /// conversation, and the opening prompt if another episode of the group sent it before. Lines
        /// before `schema_version` 1 count the earlier turns only, so hits may exceed it there.
        prefix_cache_hit_rate_possible: f64, "share, 0 to 1";

        /// Wall time of the rollout stage.
        time_rollout_s: f64, "seconds";
        /// Wall time of training.
        time_train_s: f64, "seconds";
        /// Wall time of the weight sync.
        time_sync_s: f64, "seconds";
        /// Delay of the event loop, 99th percentile over its timers.
        loop_lag_p99_ms: f64, "milliseconds", healthy: "low: it delays every episode";
        /// Longest delay of the event loop.
        loop_lag_max_ms: f64, "milliseconds", healthy: "low";
        /// Time that episodes spent in sandboxes, summed over episodes that run at the same time.
        time_sandbox_s: f64, "seconds";
        /// The Docker hosts at the end of the step: the containers of each, and whether it is in service.
        sandbox_hosts: Vec<SandboxHost>, "list", healthy: "all in service";
        /// Tokens that the policy wrote per second of the rollout stage.
        tokens_per_s: f64, "tokens per second";
    }
}

impl StepLine {
    /// Whether it has any measurement of the trainer: false for a skipped step.
    pub fn has_training(&self) -> bool {
        self.loss_tokens.is_some()
            || self.loss.is_some()
            || self.grad_norm.is_some()
            || self.kl_train_infer.is_some()
    }

    /// Share of the step's episodes that were ended by a limit; `None` without episodes.
    pub fn truncated_share(&self) -> Option<f64> {
        let episodes = self.episodes.filter(|&episodes| episodes > 0)?;
        Some(self.truncated_episodes? as f64 / episodes as f64)
    }

    /// Wall time of the step, seconds: rollout, training and weight sync.
    pub fn seconds(&self) -> Option<f64> {
        let (train, sync) = (self.time_train_s.unwrap_or(0.0), self.time_sync_s.unwrap_or(0.0));
        Some(self.time_rollout_s? + train + sync)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_sums_need_their_parts() {
        let line = StepLine {
            episodes: Some(8),
            truncated_episodes: Some(2),
            time_rollout_s: Some(3.0),
            time_train_s: Some(1.5),
            ..StepLine::default()
        };
        assert_eq!(line.truncated_share(), Some(0.25));
        assert_eq!(line.seconds(), Some(4.5));
        let empty = StepLine { episodes: Some(0), ..StepLine::default() };
        assert_eq!((empty.truncated_share(), empty.seconds()), (None, None));
    }
}
