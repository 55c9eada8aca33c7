//! Decisions about groups. They are pure functions of the sealed episodes, so that a resumed run makes
//! the same decisions.

use crate::error::RunError;
use crate::plan::Plan;
use crate::record::{EpisodeSummary, summary_of};
use orchestrate_handoff::{GroupSignal, TruncatedEpisodes, group_advantages};
use orchestrate_store::{AttemptRow, Reader, StoreError};
use orchestrate_types::{GroupId, Outcome};

/// A sealed attempt with its outcome and its numbers.
#[derive(Debug, Clone)]
pub(crate) struct SealedMember {
    pub(crate) row: AttemptRow,
    pub(crate) outcome: Outcome,
    pub(crate) summary: EpisodeSummary,
}

/// The sealed attempts of a group, by member; `None` where an episode has none.
#[derive(Debug, Clone)]
pub(crate) struct SealedGroup {
    pub(crate) members: Vec<Option<SealedMember>>,
}

/// Whether a complete group is trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    Keep,
    /// Not trained on, with the reason.
    Drop(String),
}

impl SealedGroup {
    pub(crate) async fn load(reader: &Reader, id: GroupId, size: u16) -> Result<Self, RunError> {
        let mut members = vec![None; usize::from(size)];
        for row in reader.sealed_of_group(id).await? {
            let outcome = row.outcome.clone().ok_or_else(|| StoreError::Absent {
                what: format!("the outcome of attempt {}", row.id),
            })?;
            let summary = summary_of(&row)?;
            if let Some(slot) = members.get_mut(usize::from(row.id.episode.member)) {
                *slot = Some(SealedMember { row, outcome, summary });
            }
        }
        Ok(Self { members })
    }

    /// Rewards by member; `None` without a trusted outcome.
    pub(crate) fn rewards(&self) -> Vec<Option<f64>> {
        self.members.iter().map(|m| m.as_ref()?.outcome.trusted_reward()).collect()
    }

    /// Rewards by member, lowered for long episodes (`algorithm.overlong_*`).
    fn shaped_rewards(&self, plan: &Plan) -> Vec<Option<f64>> {
        let cost = |member: &SealedMember| {
            let overlong = plan.algorithm.overlong;
            overlong.map_or(0.0, |o| o.penalty(member.summary.response_tokens))
        };
        let shaped = |m: &Option<SealedMember>| {
            let member = m.as_ref()?;
            Some(member.outcome.trusted_reward()? + cost(member))
        };
        self.members.iter().map(shaped).collect()
    }

    /// The members to train on, with their advantages. The baseline is over every trusted reward, also
    /// of members that are not trained on themselves.
    pub(crate) fn trained(&self, plan: &Plan) -> Vec<(&SealedMember, f64)> {
        let advantages =
            group_advantages(&self.shaped_rewards(plan), plan.algorithm.advantage_norm());
        self.members
            .iter()
            .zip(advantages.values)
            .filter_map(|(member, advantage)| Some((member.as_ref()?, advantage?)))
            .filter(|(member, _)| is_trainable(plan, member))
            .collect()
    }

    /// Whether the group goes into the step's batch (dynamic sampling). The graders' rewards decide: a
    /// group that is all solved or all failed is not kept because its lengths differ.
    pub(crate) fn decide(&self, plan: &Plan) -> Decision {
        let rewards = self.rewards();
        match group_advantages(&rewards, plan.algorithm.advantage_norm()).signal {
            GroupSignal::TooFewTrusted => {
                Decision::Drop("fewer than two episodes have a trusted reward".to_owned())
            }
            GroupSignal::Degenerate => {
                let reward = rewards.iter().flatten().next().copied().unwrap_or_default();
                Decision::Drop(format!("all rewards are {reward}"))
            }
            GroupSignal::Usable => {
                let trained = self.trained(plan);
                if trained.is_empty() {
                    Decision::Drop("none of its episodes may be trained on".to_owned())
                } else if trained.iter().all(|(_, advantage)| *advantage == 0.0) {
                    Decision::Drop(
                        "the penalty for long episodes cancels all advantages".to_owned(),
                    )
                } else {
                    Decision::Keep
                }
            }
        }
    }
}

fn is_trainable(plan: &Plan, member: &SealedMember) -> bool {
    let routed = !plan.needs_routing() || !member.summary.routing_missing;
    let whole = match (&member.outcome, plan.algorithm.truncated) {
        (Outcome::Scored { .. }, _) | (Outcome::Truncated { .. }, TruncatedEpisodes::Train) => true,
        (Outcome::Truncated { .. }, TruncatedEpisodes::Mask)
        | (Outcome::Aborted { .. } | Outcome::Broken { .. }, _) => false,
    };
    routed && whole && member.summary.response_tokens > 0
}

/// How many groups of a step are in which state. Groups are opened one after the other and a dropped one
/// is replaced, so the groups of a finished step are the shortest sequence with enough kept ones, in
/// whatever order episodes end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    /// Kept groups that the step needs.
    pub(crate) wanted: u32,
    /// Groups that may be opened in total.
    pub(crate) at_most: u32,
    pub(crate) filling: u32,
    pub(crate) kept: u32,
    pub(crate) dropped: u32,
}

impl GroupCounts {
    /// Whether another group must be opened now.
    pub(crate) fn may_open(&self) -> bool {
        self.filling + self.kept < self.wanted
            && self.filling + self.kept + self.dropped < self.at_most
    }

    pub(crate) fn opened(&mut self) {
        self.filling += 1;
    }

    pub(crate) fn decided(&mut self, decision: &Decision) {
        self.filling = self.filling.saturating_sub(1);
        match decision {
            Decision::Keep => self.kept += 1,
            Decision::Drop(_) => self.dropped += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prop_opened_groups_do_not_depend_on_the_order_of_their_ends(
            kept in proptest::collection::vec(any::<bool>(), 40),
            order in proptest::collection::vec(0usize..8, 80),
            wanted in 1u32..6,
        ) {
            let mut counts = GroupCounts { wanted, at_most: 20, filling: 0, kept: 0, dropped: 0 };
            let mut open: Vec<usize> = Vec::new();
            let mut next = 0usize;
            let mut picks = order.into_iter();
            loop {
                while counts.may_open() {
                    open.push(next);
                    next += 1;
                    counts.opened();
                    prop_assert!(counts.filling + counts.kept <= wanted);
                }
                if open.is_empty() {
                    break;
                }
                let pick = picks.next().unwrap_or(0) % open.len();
                let seq = open.remove(pick);
                let drop = Decision::Drop(String::new());
                counts.decided(if kept[seq] { &Decision::Keep } else { &drop });
            }
            let expected = (1..=20)
                .find(|&n| kept.iter().take(n).filter(|&&k| k).count() == wanted as usize)
                .unwrap_or(20);
            prop_assert_eq!(next, expected);
        }
    }
}
