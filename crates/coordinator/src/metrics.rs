//! The line of a global step in `metrics.jsonl`, computed from the journal and the trainer's result.

use crate::error::RunError;
use crate::groups::{SealedGroup, SealedMember};
use crate::lag::LagSummary;
use orchestrate_handoff::protocol::{Disagreement, Mismatch, StepMetrics, StepResult};
use orchestrate_metrics::{BrokenByStage, SCHEMA_VERSION, SandboxHost, StepLine, is_solved};
use orchestrate_sandbox::HostUsage;
use orchestrate_store::{AttemptState, EpisodeState, GroupRow, GroupState, Reader, StepRow};
use orchestrate_types::{Outcome, PolicyVersion, Stage, now};
use std::collections::BTreeMap;
use std::time::Duration;

/// Wall time that this coordinator spent on a step. Time that an earlier start spent on it is not
/// included.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepTimes {
    pub(crate) rollout: Duration,
    pub(crate) train: Duration,
    pub(crate) sync: Duration,
    /// Delay of the event loop over the whole step.
    pub(crate) lag: LagSummary,
}

/// The line of a step; `result` is `None` for a skipped one. `hosts` are its sandboxes' hosts as they
/// are at its end.
pub(crate) async fn step_line(
    reader: &Reader,
    row: &StepRow,
    result: Option<&StepResult>,
    times: &StepTimes,
    hosts: &[HostUsage],
) -> Result<StepLine, RunError> {
    let groups = reader.groups_of_step(row.step).await?;
    let mut members: Vec<SealedMember> = Vec::new();
    let mut broken_episodes = 0;
    for group in &groups {
        let sealed = SealedGroup::load(reader, group.id, group.size).await?;
        members.extend(sealed.members.into_iter().flatten());
        let episodes = reader.episodes_of_group(group.id).await?;
        let given_up = episodes.iter().filter(|e| e.state == EpisodeState::Quarantined);
        broken_episodes += given_up.count() as u64;
    }
    let broken_attempts = reader.attempts_of_step(row.step, AttemptState::Broken).await?;
    let by_stage = if broken_attempts > 0 {
        broken_by_stage(reader, &groups).await?
    } else {
        BrokenByStage::default()
    };
    let count = |state| Some(groups.iter().filter(|g| g.state == state).count() as u64);
    let staleness = trained_staleness(&groups, &members, row.base_version);
    let line = StepLine {
        schema_version: SCHEMA_VERSION,
        time: Some(now()),
        global_step: row.step,
        policy_version: result.map_or(row.base_version, |r| r.policy_version),
        groups_kept: count(GroupState::Kept),
        groups_dropped: count(GroupState::Dropped),
        broken_episodes: Some(broken_episodes),
        broken_attempts: Some(broken_attempts),
        broken_attempts_by_stage: Some(by_stage),
        staleness_mean: mean(staleness.iter().map(|&versions| versions as f64)),
        staleness_max: staleness.iter().max().copied(),
        sandbox_hosts: Some(hosts.iter().map(sandbox_host).collect()),
        ..StepLine::default()
    };
    let line = with_training(line, result.map(|result| &result.metrics));
    Ok(with_times(with_episodes(line, &members), &members, times))
}

/// Counts the broken attempts of these groups by the stage at which they broke.
async fn broken_by_stage(reader: &Reader, groups: &[GroupRow]) -> Result<BrokenByStage, RunError> {
    let mut counts = BrokenByStage::default();
    for group in groups {
        for episode in reader.episodes_of_group(group.id).await? {
            let attempts = reader.attempts(episode.id).await?;
            for attempt in attempts.iter().filter(|row| row.state == AttemptState::Broken) {
                let Some(Outcome::Broken { stage, .. }) = &attempt.outcome else { continue };
                *match stage {
                    Stage::Setup => &mut counts.setup,
                    Stage::Generate => &mut counts.generate,
                    Stage::Exec => &mut counts.exec,
                    Stage::Collect => &mut counts.collect,
                    Stage::Grade => &mut counts.grade,
                    Stage::Record => &mut counts.record,
                } += 1;
            }
        }
    }
    Ok(counts)
}

/// Fills in the metrics that come from episodes. Rewards are those of all sampled groups: those of kept
/// groups alone are biased towards the middle.
fn with_episodes(line: StepLine, members: &[SealedMember]) -> StepLine {
    let rewards: Vec<f64> = members.iter().filter_map(|m| m.outcome.trusted_reward()).collect();
    let truncated = members.iter().filter(|m| is_truncated(&m.outcome)).count();
    let sum = |of: fn(&SealedMember) -> u64| members.iter().map(of).sum::<u64>();
    let prompt = sum(|m| m.summary.prompt_tokens);
    StepLine {
        reward_mean: mean(rewards.iter().copied()),
        solve_rate: mean(rewards.iter().map(|&reward| f64::from(u8::from(is_solved(reward))))),
        episodes: Some(members.len() as u64),
        truncated_episodes: Some(truncated as u64),
        suspicious: Some(suspicious(members)),
        forks: Some(forks(members)).filter(|forks| !forks.is_empty()),
        recognised_requests: Some(recognised(members)).filter(|requests| !requests.is_empty()),
        overridden_fields: Some(overridden_fields(members)).filter(|fields| !fields.is_empty()),
        worker_metrics: Some(worker_metrics(members)).filter(|means| !means.is_empty()),
        unread_turns: Some(sum(|m| m.summary.unread_turns)).filter(|turns| *turns > 0),
        turns_mean: mean(members.iter().map(|m| m.summary.turns as f64)),
        response_tokens_mean: mean(members.iter().map(|m| m.summary.response_tokens as f64)),
        routing_bytes_wire: Some(sum(|m| m.summary.routing_wire_bytes)),
        routing_bytes_held: Some(sum(|m| m.summary.routing_bytes)),
        routing_rows_reused: Some(sum(|m| m.summary.routing_rows_reused)),
        routing_rows_mixed: Some(sum(|m| m.summary.routing_rows_mixed)),
        routing_drift: Some(sum(|m| m.summary.routing_drift)),
        routing_missing: Some(sum(|m| u64::from(m.summary.routing_missing))),
        prefix_cache_hit_rate: share(sum(|m| m.summary.cached_tokens), prompt),
        prefix_cache_hit_rate_possible: share(sum(|m| m.summary.cacheable_tokens), prompt),
        ..line
    }
}

/// Episodes by finding; only findings that occur.
fn suspicious(members: &[SealedMember]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for finding in members.iter().flat_map(|member| &member.summary.suspicious) {
        *counts.entry(finding.name().to_owned()).or_default() += 1;
    }
    counts
}

/// Means of the metrics that external workers returned, by name.
fn worker_metrics(members: &[SealedMember]) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for (name, value) in members.iter().flat_map(|member| &member.summary.metrics) {
        let (sum, count) = sums.entry(name.clone()).or_default();
        *sum += value;
        *count += 1.0;
    }
    let means = sums.into_iter().map(|(name, (sum, count))| (name, sum / count));
    // A sum of very large numbers may overflow, and JSON cannot represent infinity.
    means.filter(|(_, mean)| mean.is_finite()).collect()
}

/// Branches by cause; only causes that occur.
fn forks(members: &[SealedMember]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (cause, number) in members.iter().flat_map(|member| &member.summary.forks) {
        *counts.entry(cause.name().to_owned()).or_default() += number;
    }
    counts
}

/// Requests by the rules that recognised them; only rules that applied.
fn recognised(members: &[SealedMember]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (rule, number) in members.iter().flat_map(|member| &member.summary.recognised_requests) {
        *counts.entry(rule.name().to_owned()).or_default() += number;
    }
    counts
}

/// Requests with an overridden field, by field; only fields that occur.
fn overridden_fields(members: &[SealedMember]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (field, number) in members.iter().flat_map(|member| &member.summary.overridden_fields) {
        *counts.entry(field.clone()).or_default() += number;
    }
    counts
}

fn with_times(line: StepLine, members: &[SealedMember], times: &StepTimes) -> StepLine {
    let in_sandbox = |m: &SealedMember| {
        let t = m.summary.timings;
        t.setup_s + t.exec_s + t.grade_s
    };
    let written: u64 = members.iter().map(|m| m.summary.response_tokens).sum();
    let rollout = times.rollout.as_secs_f64();
    StepLine {
        time_rollout_s: Some(rollout),
        time_train_s: Some(times.train.as_secs_f64()),
        time_sync_s: Some(times.sync.as_secs_f64()),
        loop_lag_p99_ms: Some(times.lag.p99.as_secs_f64() * 1e3),
        loop_lag_max_ms: Some(times.lag.max.as_secs_f64() * 1e3),
        // Of all episodes together. They overlap, so it may exceed the wall time.
        time_sandbox_s: Some(members.iter().map(in_sandbox).sum()),
        tokens_per_s: (rollout > 0.0).then(|| written as f64 / rollout),
        ..line
    }
}

/// Fills in the trainer's measurements. The patterns name every field, so that a measurement added to
/// the protocol must be handled here.
fn with_training(line: StepLine, metrics: Option<&StepMetrics>) -> StepLine {
    let Some(metrics) = metrics else { return line };
    let StepMetrics {
        loss,
        grad_norm,
        router_grad_norm,
        entropy,
        clip_fraction,
        learning_rate,
        ratio,
        rollout_ratio,
        kl_reference,
        router_shift,
        predictor_loss,
        value,
        expert_load_entropy,
        expert_load,
        route_drift,
        mismatch,
        mismatch_no_replay,
        disagreement,
        routing_missing,
        routing_missing_fraction,
        loss_tokens,
        tokens,
        // The coordinator's own time includes the hand-off.
        seconds: _,
    } = metrics.clone();
    let line = StepLine {
        entropy: Some(entropy),
        grad_norm: Some(grad_norm),
        loss: Some(loss),
        clip_fraction: Some(clip_fraction),
        router_grad_norm: Some(router_grad_norm),
        learning_rate: Some(learning_rate),
        ratio: Some(ratio),
        rollout_ratio: Some(rollout_ratio),
        kl_reference,
        router_shift,
        predictor_loss,
        value,
        expert_load_entropy: Some(expert_load_entropy),
        expert_load: Some(expert_load),
        route_drift,
        loss_tokens: Some(loss_tokens),
        train_tokens: Some(tokens),
        routing_missing_pairs: Some(routing_missing),
        routing_missing_fraction: Some(routing_missing_fraction),
        ..line
    };
    let line = with_mismatch(line, mismatch);
    let line = mismatch_no_replay.into_iter().fold(line, with_mismatch_no_replay);
    disagreement.into_iter().fold(line, with_disagreement)
}

fn with_mismatch(line: StepLine, mismatch: Mismatch) -> StepLine {
    let Mismatch {
        kl_k3,
        mean_abs_logprob_diff,
        mean_abs_prob_diff,
        extreme_token_fraction,
        token_histogram,
        sequence_histogram,
        probability_grid,
    } = mismatch;
    StepLine {
        kl_train_infer: Some(kl_k3),
        logprob_diff_mean: Some(mean_abs_logprob_diff),
        prob_diff_mean: Some(mean_abs_prob_diff),
        extreme_token_fraction: Some(extreme_token_fraction.into()),
        logprob_diff_histogram: Some(token_histogram),
        sequence_logprob_diff_histogram: Some(sequence_histogram),
        probability_grid: Some(probability_grid),
        ..line
    }
}

fn with_mismatch_no_replay(line: StepLine, mismatch: Mismatch) -> StepLine {
    let Mismatch {
        kl_k3,
        mean_abs_logprob_diff,
        mean_abs_prob_diff,
        extreme_token_fraction,
        token_histogram,
        sequence_histogram,
        probability_grid,
    } = mismatch;
    StepLine {
        kl_train_infer_no_replay: Some(kl_k3),
        logprob_diff_mean_no_replay: Some(mean_abs_logprob_diff),
        prob_diff_mean_no_replay: Some(mean_abs_prob_diff),
        extreme_token_fraction_no_replay: Some(extreme_token_fraction.into()),
        logprob_diff_histogram_no_replay: Some(token_histogram),
        sequence_logprob_diff_histogram_no_replay: Some(sequence_histogram),
        probability_grid_no_replay: Some(probability_grid),
        ..line
    }
}

fn with_disagreement(line: StepLine, disagreement: Disagreement) -> StepLine {
    let Disagreement {
        router,
        token,
        sequence_mean,
        sequence_mean_experts,
        histogram,
        by_layer,
        token_histogram,
        sequence_histogram,
    } = disagreement;
    StepLine {
        router_disagreement: Some(router),
        token_disagreement: Some(token),
        sequence_disagreement_mean: Some(sequence_mean),
        sequence_disagreement_experts: Some(sequence_mean_experts),
        router_disagreement_histogram: Some(histogram),
        router_disagreement_by_layer: Some(by_layer),
        token_disagreement_histogram: Some(token_histogram),
        sequence_disagreement_histogram: Some(sequence_histogram),
        ..line
    }
}

fn sandbox_host(host: &HostUsage) -> SandboxHost {
    let HostUsage { host, in_service, taken_out, capacity, open, idle, started } = host.clone();
    SandboxHost { host, in_service, taken_out, capacity, open, idle, started }
}

/// Staleness of each episode in a kept group: policy versions between its oldest token and `base`.
fn trained_staleness(
    groups: &[GroupRow],
    members: &[SealedMember],
    base: PolicyVersion,
) -> Vec<u64> {
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

/// `None` without values.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), v| (sum + v, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// `None` if the whole is 0.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
