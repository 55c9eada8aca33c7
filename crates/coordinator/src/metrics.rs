//! One global step as one line of `metrics.jsonl`, computed from the journal.

use crate::error::RunError;
use crate::groups::{SealedGroup, SealedMember};
use crate::lag::LagSummary;
use orchestrate_handoff::protocol::{Mismatch, StepMetrics, StepResult};
use orchestrate_metrics::is_solved;
use orchestrate_sandbox::HostUsage;
use orchestrate_store::{AttemptState, EpisodeState, GroupRow, GroupState, Reader, StepRow};
use orchestrate_types::{Outcome, PolicyVersion};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Wall time a step spent, by this coordinator: what an earlier one did is not in it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepTimes {
    pub(crate) rollout: Duration,
    pub(crate) train: Duration,
    pub(crate) sync: Duration,
    /// How late the event loop was, over the whole step.
    pub(crate) lag: LagSummary,
}

/// The line of a step. Values that do not exist (a skipped step has no loss) are null. The hosts of
/// its sandboxes are as they are now, at its end.
pub(crate) async fn step_line(
    reader: &Reader,
    row: &StepRow,
    result: Option<&StepResult>,
    times: &StepTimes,
    hosts: &[HostUsage],
) -> Result<Value, RunError> {
    let groups = reader.groups_of_step(row.step).await?;
    let mut members: Vec<SealedMember> = Vec::new();
    let mut given_up = 0;
    for group in &groups {
        let sealed = SealedGroup::load(reader, group.id, group.size).await?;
        members.extend(sealed.members.into_iter().flatten());
        let episodes = reader.group_of(group.id).await?;
        given_up += episodes.iter().filter(|e| e.state == EpisodeState::Quarantined).count();
    }
    let count = |state| groups.iter().filter(|g| g.state == state).count();
    let mut line = Map::new();
    let mut put = |key: &str, value: Value| line.insert(key.to_owned(), value);
    put("global_step", json!(row.step));
    put("policy_version", json!(result.map_or(row.base_version, |r| r.policy_version)));

    // Rewards of every sampled group: the kept ones alone would be biased towards the middle.
    let rewards: Vec<f64> = members.iter().filter_map(|m| m.outcome.trusted_reward()).collect();
    put("reward_mean", mean(rewards.iter().copied()));
    put("solve_rate", mean(rewards.iter().map(|&r| f64::from(u8::from(is_solved(r))))));
    put("groups_kept", json!(count(GroupState::Kept)));
    put("groups_dropped", json!(count(GroupState::Dropped)));
    put("episodes", json!(members.len()));
    put("broken_episodes", json!(given_up));
    put("broken_attempts", json!(reader.attempts_of_step(row.step, AttemptState::Broken).await?));
    let truncated = members.iter().filter(|m| is_truncated(&m.outcome)).count();
    put("truncated_episodes", json!(truncated));
    let ages = trained_ages(&groups, &members, row.base_version);
    put("staleness_mean", mean(ages.iter().map(|&age| age as f64)));
    put("staleness_max", json!(ages.iter().max()));
    put("turns_mean", mean(members.iter().map(|m| m.summary.turns as f64)));
    let responses = members.iter().map(|m| m.summary.response_tokens as f64);
    put("response_tokens_mean", mean(responses));

    put_trainer(&mut put, result.map(|r| &r.metrics));

    let sum = |of: fn(&SealedMember) -> u64| members.iter().map(of).sum::<u64>();
    put("routing_bytes_wire", json!(sum(|m| m.summary.routing_wire_bytes)));
    put("routing_bytes_held", json!(sum(|m| m.summary.routing_bytes)));
    put("routing_rows_reused", json!(sum(|m| m.summary.routing_rows_reused)));
    put("routing_rows_mixed", json!(sum(|m| m.summary.routing_rows_mixed)));
    put("routing_drift", json!(sum(|m| m.summary.routing_drift)));
    put("routing_missing", json!(sum(|m| u64::from(m.summary.routing_missing))));
    let prompt = sum(|m| m.summary.prompt_tokens);
    put("prefix_cache_hit_rate", share(sum(|m| m.summary.cached_tokens), prompt));
    put("prefix_cache_hit_rate_possible", share(sum(|m| m.summary.cacheable_tokens), prompt));

    let sandbox = |m: &SealedMember| {
        let t = m.summary.timings;
        t.setup_s + t.exec_s + t.grade_s
    };
    put("time_rollout_s", json!(times.rollout.as_secs_f64()));
    put("time_train_s", json!(times.train.as_secs_f64()));
    put("time_sync_s", json!(times.sync.as_secs_f64()));
    put("loop_lag_p99_ms", json!(times.lag.p99.as_secs_f64() * 1e3));
    put("loop_lag_max_ms", json!(times.lag.max.as_secs_f64() * 1e3));
    // Of all episodes together; they overlap, so it may exceed the wall time.
    put("time_sandbox_s", json!(members.iter().map(sandbox).sum::<f64>()));
    put("sandbox_hosts", json!(hosts));
    let tokens = sum(|m| m.summary.response_tokens) as f64;
    let seconds = times.rollout.as_secs_f64();
    put("tokens_per_s", if seconds > 0.0 { json!(tokens / seconds) } else { Value::Null });
    Ok(Value::Object(line))
}

fn put_trainer(put: &mut impl FnMut(&str, Value) -> Option<Value>, metrics: Option<&StepMetrics>) {
    let of = |pick: fn(&StepMetrics) -> Value| metrics.map_or(Value::Null, pick);
    put("entropy", of(|m| json!(m.entropy)));
    put("grad_norm", of(|m| json!(m.grad_norm)));
    put("loss", of(|m| json!(m.loss)));
    put("clip_fraction", of(|m| json!(m.clip_fraction)));
    put("router_grad_norm", of(|m| json!(m.router_grad_norm)));
    put("learning_rate", of(|m| json!(m.learning_rate)));
    put("ratio", of(|m| json!(m.ratio)));
    put("rollout_ratio", of(|m| json!(m.rollout_ratio)));
    put("kl_reference", of(|m| json!(m.kl_reference)));
    put("router_shift", of(|m| json!(m.router_shift)));
    put("predictor_loss", of(|m| json!(m.predictor_loss)));
    put("value", of(|m| json!(m.value)));
    put("expert_load_entropy", of(|m| json!(m.expert_load_entropy)));
    put("expert_load", of(|m| json!(m.expert_load)));
    put("route_drift", of(|m| json!(m.route_drift)));
    put("loss_tokens", of(|m| json!(m.loss_tokens)));
    put("train_tokens", of(|m| json!(m.tokens)));
    put("routing_missing_pairs", of(|m| json!(m.routing_missing)));
    put("routing_missing_fraction", of(|m| json!(m.routing_missing_fraction)));
    let mismatches = [
        ("", metrics.map(|m| &m.mismatch)),
        ("_no_replay", metrics.and_then(|m| m.mismatch_no_replay.as_ref())),
    ];
    for (suffix, mismatch) in mismatches {
        let of = |pick: fn(&Mismatch) -> Value| mismatch.map_or(Value::Null, pick);
        put(&format!("kl_train_infer{suffix}"), of(|m| json!(m.kl_k3)));
        put(&format!("logprob_diff_mean{suffix}"), of(|m| json!(m.mean_abs_logprob_diff)));
        put(&format!("prob_diff_mean{suffix}"), of(|m| json!(m.mean_abs_prob_diff)));
        put(&format!("extreme_token_fraction{suffix}"), of(|m| json!(m.extreme_token_fraction)));
        put(&format!("logprob_diff_histogram{suffix}"), of(|m| json!(m.token_histogram)));
        let of_sequences = of(|m| json!(m.sequence_histogram));
        put(&format!("sequence_logprob_diff_histogram{suffix}"), of_sequences);
        put(&format!("probability_grid{suffix}"), of(|m| json!(m.probability_grid)));
    }
    let disagreement = metrics.and_then(|m| m.disagreement.as_ref());
    put("router_disagreement", json!(disagreement.map(|d| d.router)));
    put("token_disagreement", json!(disagreement.map(|d| d.token)));
    put("sequence_disagreement_mean", json!(disagreement.map(|d| d.sequence_mean)));
    let experts = disagreement.map(|d| d.sequence_mean_experts);
    put("sequence_disagreement_experts", json!(experts));
    put("router_disagreement_histogram", json!(disagreement.map(|d| &d.histogram)));
    put("router_disagreement_by_layer", json!(disagreement.map(|d| &d.by_layer)));
    put("token_disagreement_histogram", json!(disagreement.map(|d| &d.token_histogram)));
    put("sequence_disagreement_histogram", json!(disagreement.map(|d| &d.sequence_histogram)));
}

/// By how many policy versions the oldest token of each episode in a kept group is behind `base`.
fn trained_ages(groups: &[GroupRow], members: &[SealedMember], base: PolicyVersion) -> Vec<u64> {
    let kept = |member: &&SealedMember| {
        let group = groups.iter().find(|group| group.id == member.row.id.episode.group);
        group.is_some_and(|group| group.state == GroupState::Kept)
    };
    let oldest = members.iter().filter(kept).filter_map(|member| member.summary.oldest_version);
    oldest.map(|version| base.0.saturating_sub(version.0)).collect()
}

fn is_truncated(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Truncated { .. } => true,
        Outcome::Scored { .. } | Outcome::Aborted { .. } | Outcome::Broken { .. } => false,
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Value {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), v| (sum + v, count + 1));
    if count == 0 { Value::Null } else { json!(sum / f64::from(count)) }
}

fn share(part: u64, whole: u64) -> Value {
    if whole == 0 { Value::Null } else { json!(part as f64 / whole as f64) }
}
