//! One attempt of an episode of any kind: what its actor and its grader leave behind.

use crate::api::{EpisodeReport, Timings};
use crate::conversation::FinishedConversation;
use crate::failure::failed;
use crate::sequence::EpisodeContext;
use orchestrate_tasks::Verdict;
use orchestrate_types::{Limit, Outcome, Stage};
use std::collections::BTreeMap;
use tracing::Span;

/// A running attempt.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) context: EpisodeContext,
    /// All tokens and turns; empty until the actor has ended.
    pub(crate) finished: FinishedConversation,
    /// Of the turn that a scaffold sampled last; the attempt's own before that, and for other actors.
    pub(crate) turn_span: Span,
    pub(crate) patch: String,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) timings: Timings,
}

/// The reward of an episode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rewarded {
    /// The reward, which must be from 0 to 1.
    pub(crate) reward: f64,
    /// The limit that ended the episode; `None` if the policy ended it.
    pub(crate) truncated_by: Option<Limit>,
}

impl Rewarded {
    pub(crate) fn outcome(self) -> Outcome {
        let Self { reward, truncated_by } = self;
        // Such a reward would be trained on as if it meant something.
        if !(0.0..=1.0).contains(&reward) {
            let error = format!("the reward is {reward}, which is not from 0 to 1");
            return failed(Stage::Grade, error);
        }
        match truncated_by {
            None => Outcome::Scored { reward },
            Some(limit) => Outcome::Truncated { limit, reward },
        }
    }
}

impl Attempt {
    pub(crate) fn new(context: EpisodeContext) -> Self {
        Self {
            context,
            finished: FinishedConversation::default(),
            turn_span: Span::current(),
            patch: String::new(),
            verdict: None,
            metrics: BTreeMap::new(),
            timings: Timings::default(),
        }
    }

    /// The report of the attempt.
    pub(crate) fn report(self, outcome: Outcome) -> EpisodeReport {
        let FinishedConversation {
            branches,
            routing_problem,
            rows,
            counters,
            turns,
            forks,
            recognised,
            ..
        } = self.finished;
        EpisodeReport {
            attempt: self.context.request.attempt,
            outcome,
            branches,
            forks,
            recognised,
            routing_problem,
            turns,
            patch: self.patch,
            verdict: self.verdict,
            metrics: self.metrics,
            routing_drift: rows.drift,
            routing_wire_bytes: rows.wire_bytes,
            routing_rows_reused: rows.reused,
            routing_rows_shared: rows.shared,
            routing_rows_mixed: rows.mixed,
            prompt_tokens: counters.prompt,
            cached_tokens: counters.cached,
            cacheable_tokens: counters.cacheable,
            timings: self.timings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reward_is_scored_or_truncated_and_one_out_of_range_breaks_the_episode() {
        for truncated_by in [None, Some(Limit::Turns)] {
            for reward in [0.0, 0.5, 1.0] {
                let expected = match truncated_by {
                    None => Outcome::Scored { reward },
                    Some(limit) => Outcome::Truncated { limit, reward },
                };
                assert_eq!(Rewarded { reward, truncated_by }.outcome(), expected);
            }
            for reward in [37.0, -1.0, 1.000_000_1, f64::NAN, f64::INFINITY] {
                let outcome = Rewarded { reward, truncated_by }.outcome();
                let Outcome::Broken { stage, error } = outcome else { panic!("{reward}") };
                assert_eq!(stage, Stage::Grade);
                assert!(error.contains("not from 0 to 1"), "{error}");
            }
        }
    }
}
