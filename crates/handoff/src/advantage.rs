//! Group-relative advantages over trusted rewards.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Added to the standard deviation before dividing by it.
const STD_EPSILON: f64 = 1e-6;
/// Rewards of a group that differ by no more than this are equal. Rewards are between 0 and 1, so
/// that is more than rounding in 32-bit numbers leaves of a sum or a mean, and less than any grader
/// means: dividing by the standard deviation would turn such differences into advantages of order 1.
const EQUAL_REWARDS: f64 = 1e-6;

/// How rewards of one group become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageNorm {
    /// (reward − mean) / (unbiased standard deviation + 1e-6).
    Std,
    /// (reward − mean) / (population standard deviation + 1e-6).
    PopulationStd,
    /// reward − mean (Dr. GRPO).
    None,
    /// reward − mean of the other members (leave one out).
    Rloo,
}

impl AdvantageNorm {
    /// All variants, in order of declaration.
    pub const ALL: [Self; 4] = [Self::Std, Self::PopulationStd, Self::None, Self::Rloo];
}

/// Whether a group has a training signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSignal {
    /// Trusted rewards differ.
    Usable,
    /// All trusted rewards are equal up to rounding (1e-6): every advantage is 0.
    Degenerate,
    /// Fewer than two members have a trusted reward: there is no baseline.
    TooFewTrusted,
}

/// Advantages of one group, by member.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupAdvantages {
    /// Per member; `None` for a member without a trusted reward, and for all of them under
    /// [`GroupSignal::TooFewTrusted`]. Such members are not trained on.
    pub values: Vec<Option<f64>>,
    /// Whether dynamic sampling keeps the group.
    pub signal: GroupSignal,
}

/// Computes advantages over the members with a trusted reward. The other members get none and do not
/// count in the baseline. `rewards` has one entry per *rollout*: the samples of a forked rollout share
/// its entry, so that a fork does not count twice. A reward that is not finite is not trusted.
pub fn group_advantages(rewards: &[Option<f64>], norm: AdvantageNorm) -> GroupAdvantages {
    let trusted: Vec<f64> =
        rewards.iter().flatten().copied().filter(|reward| reward.is_finite()).collect();
    if trusted.len() < 2 {
        let values = vec![None; rewards.len()];
        return GroupAdvantages { values, signal: GroupSignal::TooFewTrusted };
    }
    let count = trusted.len() as f64;
    let mean = trusted.iter().sum::<f64>() / count;
    let low = trusted.iter().copied().fold(f64::INFINITY, f64::min);
    let high = trusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let differ = high - low > EQUAL_REWARDS;
    let squares: f64 = trusted.iter().map(|reward| (reward - mean).powi(2)).sum();
    let scale = match norm {
        AdvantageNorm::Std => 1.0 / ((squares / (count - 1.0)).sqrt() + STD_EPSILON),
        AdvantageNorm::PopulationStd => 1.0 / ((squares / count).sqrt() + STD_EPSILON),
        AdvantageNorm::None => 1.0,
        AdvantageNorm::Rloo => count / (count - 1.0),
    };
    let advantage = |reward: f64| {
        let value = if differ { (reward - mean) * scale } else { 0.0 };
        reward.is_finite().then_some(value)
    };
    GroupAdvantages {
        values: rewards.iter().map(|reward| reward.and_then(advantage)).collect(),
        signal: if differ { GroupSignal::Usable } else { GroupSignal::Degenerate },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_sandbox_is_not_a_reward_of_zero() {
        let group = [Some(1.0), Some(1.0), Some(1.0), None];
        let got = group_advantages(&group, AdvantageNorm::None);
        assert_eq!(got.values, [Some(0.0), Some(0.0), Some(0.0), None]);
        assert_eq!(got.signal, GroupSignal::Degenerate);
    }

    #[test]
    fn an_infrastructure_failure_does_not_move_the_baseline() {
        let with = group_advantages(&[Some(1.0), None, Some(0.0), Some(0.0)], AdvantageNorm::Std);
        let without = group_advantages(&[Some(1.0), Some(0.0), Some(0.0)], AdvantageNorm::Std);
        let trusted: Vec<f64> = with.values.iter().flatten().copied().collect();
        let same: Vec<f64> = without.values.iter().flatten().copied().collect();
        assert_eq!(with.values.iter().position(Option::is_none), Some(1));
        assert!(trusted.iter().zip(&same).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn fewer_than_two_trusted_members_give_no_gradient() {
        for group in [vec![], vec![None; 4], vec![None, Some(1.0)], vec![Some(1.0)]] {
            for norm in AdvantageNorm::ALL {
                let got = group_advantages(&group, norm);
                assert_eq!(got.signal, GroupSignal::TooFewTrusted);
                assert_eq!(got.values, vec![None; group.len()]);
            }
        }
    }

    #[test]
    fn each_group_has_its_own_baseline() {
        // A batch-wide baseline would be 4/7 for all of them.
        let groups: [&[Option<f64>]; 3] = [
            &[Some(1.0), Some(1.0), Some(1.0), Some(0.0)],
            &[Some(1.0), Some(0.0), None],
            &[Some(0.0), None, None],
        ];
        let got = groups.map(|group| group_advantages(group, AdvantageNorm::None));
        assert_eq!(got[0].values, [Some(0.25), Some(0.25), Some(0.25), Some(-0.75)]);
        assert_eq!(got[1].values, [Some(0.5), Some(-0.5), None]);
        assert_eq!(got[2].signal, GroupSignal::TooFewTrusted);
    }

    #[test]
    fn non_finite_reward_is_not_trusted() {
        let got = group_advantages(&[Some(f64::NAN), Some(1.0), Some(0.0)], AdvantageNorm::None);
        assert_eq!(got.values, [None, Some(0.5), Some(-0.5)]);
        let got = group_advantages(&[Some(f64::INFINITY), Some(1.0)], AdvantageNorm::None);
        assert_eq!(got.signal, GroupSignal::TooFewTrusted);
    }

    #[test]
    fn equal_rewards_without_exact_binary_form_are_degenerate() {
        let got = group_advantages(&[Some(0.1); 7], AdvantageNorm::Std);
        assert_eq!(got.signal, GroupSignal::Degenerate);
        assert_eq!(got.values, [Some(0.0); 7]);
    }

    #[test]
    fn rewards_that_differ_only_by_rounding_are_equal() {
        let single = f64::from(0.1_f32);
        for rewards in [
            [0.1 + 0.2, 0.3, 0.3],
            [1.0, 1.0 - f64::EPSILON, 1.0],
            [single, 0.1, single * 3.0 / 3.0],
            [0.5, 0.5 + 9e-7, 0.5],
        ] {
            for norm in AdvantageNorm::ALL {
                let got = group_advantages(&rewards.map(Some), norm);
                assert_eq!(got.signal, GroupSignal::Degenerate, "{rewards:?}");
                assert_eq!(got.values, [Some(0.0); 3], "{rewards:?}");
            }
        }
        let got = group_advantages(&[Some(0.5), Some(0.500_002)], AdvantageNorm::None);
        assert_eq!(got.signal, GroupSignal::Usable);
    }
}
