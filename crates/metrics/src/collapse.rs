//! Detects a run that collapses. Pure: lines of `metrics.jsonl` in, findings out.
//!
//! Reward, extreme tokens and gradient norm are watched, because the KL alone can stay flat while a run
//! collapses. A step that lacks a metric that the detection needs is a finding, too, so that no run goes
//! unmonitored without a warning.

use crate::{MetricsLine, StepLine, Threshold};
use serde::{Serialize, Serializer};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;

/// Steps over which medians are taken.
const WINDOW: usize = 20;
/// Steps over which the mean reward is taken.
const REWARD_WINDOW: usize = 5;
/// Steps for which a symptom must last.
const REWARD_PATIENCE: u32 = 10;
const EXTREME_PATIENCE: u32 = 5;
const GRADIENT_PATIENCE: u32 = 3;

/// A symptom of a collapse.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Symptom {
    /// Loss or gradient norm is not finite.
    NotFinite,
    /// The mean reward stays below half of its best.
    LowReward {
        /// Best mean of five steps so far, 0 to 1.
        best: f64,
    },
    /// More than a tenth of the tokens stay twice as likely, or half as likely, in the trainer as in the
    /// engine: F(2) above 0.1.
    ExtremeTokens,
    /// Gradient norm and KL both stay above ten times their medians.
    Gradient,
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite => write!(f, "loss or gradient norm is not finite"),
            Self::LowReward { best } => write!(
                f,
                "the mean reward was below half of its best ({best:.3}) for {REWARD_PATIENCE} steps"
            ),
            Self::ExtremeTokens => write!(
                f,
                "more than 10 % of tokens were twice as (un)likely in the trainer as in the engine \
                 for {EXTREME_PATIENCE} steps"
            ),
            Self::Gradient => write!(
                f,
                "gradient norm and KL were both above ten times their median for \
                 {GRADIENT_PATIENCE} steps"
            ),
        }
    }
}

/// Serialized as the text that is displayed.
impl Serialize for Symptom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A run that has collapsed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Collapse {
    /// First global step at which the symptom was observed.
    pub step: u32,
    /// The symptom that revealed the collapse.
    pub symptom: Symptom,
    /// Version of the weights before that step, to go back to; `None` if it was the first step.
    pub last_good: Option<u64>,
}

/// A result of the collapse detection.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// A message for the user.
    Warning(String),
    /// The run has collapsed.
    Collapse(Collapse),
}

/// The metrics of a line that the detection uses.
#[derive(Debug, Clone, Copy)]
struct Sample {
    step: u32,
    version: u64,
    trained: bool,
    finite: bool,
    reward: Option<f64>,
    extreme: Option<f64>,
    kl: Option<f64>,
    gradient: Option<f64>,
}

impl Sample {
    fn of(line: &StepLine) -> Self {
        // JSON has null for a number that is not finite. In a skipped step all of them are null.
        let finite = |value: Option<f64>| value.filter(|v| v.is_finite());
        let trained = line.loss_tokens.is_some();
        let (loss, gradient) = (finite(line.loss), finite(line.grad_norm));
        Self {
            step: line.global_step,
            version: line.policy_version.0,
            trained,
            finite: !trained || (loss.is_some() && gradient.is_some()),
            reward: finite(line.reward_mean),
            extreme: line.extreme_token_fraction.as_ref().and_then(|f| f.beyond(Threshold::T2)),
            kl: finite(line.kl_train_infer),
            gradient,
        }
    }
}

/// The duration of a symptom, and the step and weights at which it started.
#[derive(Debug, Default)]
struct Lasting {
    steps: u32,
    since: (u32, Option<u64>),
}

impl Lasting {
    /// Counts a step. True once, when the symptom has lasted for `patience` steps.
    fn observe(&mut self, holds: bool, at: (u32, Option<u64>), patience: u32) -> bool {
        if !holds {
            self.steps = 0;
            return false;
        }
        if self.steps == 0 {
            self.since = at;
        }
        self.steps += 1;
        self.steps == patience
    }
}

/// Watches the lines of `metrics.jsonl` in order.
#[derive(Debug, Default)]
pub struct Detector {
    rewards: VecDeque<f64>,
    best_reward: f64,
    gradients: VecDeque<f64>,
    kls: VecDeque<f64>,
    /// Version of the weights that the next step starts from.
    version: Option<u64>,
    low_reward: Lasting,
    extreme: Lasting,
    steep: Lasting,
    not_finite: Lasting,
    /// Metrics that were reported as missing; each is reported once.
    missing: BTreeSet<&'static str>,
}

impl Detector {
    /// Takes the next line; lines of evaluations are ignored. A symptom is reported once, when it has
    /// lasted long enough, and a missing metric is reported once.
    pub fn observe(&mut self, line: &MetricsLine) -> Vec<Finding> {
        let Some(line) = line.step() else { return Vec::new() };
        let sample = Sample::of(line);
        let at = (sample.step, self.version);
        let mut found = self.find_missing(line, sample);
        let mut warn = |text: String| {
            found.push(Finding::Warning(format!("step {}: {text}", sample.step)));
        };
        if let Some(extreme) = sample.extreme.filter(|share| *share > 0.01 && *share <= 0.1) {
            let share = extreme * 100.0;
            warn(format!(
                "{share:.1} % of tokens are twice as (un)likely in the trainer as in the engine"
            ));
        }
        if let Some(kl) = sample.kl.filter(|kl| *kl > 1e-2) {
            warn(format!("train-inference KL is {kl:.2e}, above 1e-2"));
        }
        let mut collapse = |lasting: &Lasting, symptom| {
            let (step, last_good) = lasting.since;
            found.push(Finding::Collapse(Collapse { step, symptom, last_good }));
        };
        if self.not_finite.observe(!sample.finite, at, 1) {
            collapse(&self.not_finite, Symptom::NotFinite);
        }
        if let Some(reward) = sample.reward {
            push(&mut self.rewards, reward, REWARD_WINDOW);
            if self.rewards.len() == REWARD_WINDOW {
                let mean = self.rewards.iter().sum::<f64>() / REWARD_WINDOW as f64;
                self.best_reward = self.best_reward.max(mean);
                let low = mean < 0.5 * self.best_reward;
                if self.low_reward.observe(low, at, REWARD_PATIENCE) {
                    let best = self.best_reward;
                    collapse(&self.low_reward, Symptom::LowReward { best });
                }
            }
        }
        let extreme = sample.extreme.is_some_and(|extreme| extreme > 0.1);
        if sample.trained && self.extreme.observe(extreme, at, EXTREME_PATIENCE) {
            collapse(&self.extreme, Symptom::ExtremeTokens);
        }
        if let (Some(gradient), Some(kl)) = (sample.gradient, sample.kl) {
            let steep = self.gradients.len() == WINDOW
                && gradient > 10.0 * median(&self.gradients)
                && kl > 10.0 * median(&self.kls);
            if self.steep.observe(steep, at, GRADIENT_PATIENCE) {
                collapse(&self.steep, Symptom::Gradient);
            }
            // Steps that are steep must not raise the median that they are compared with.
            if !steep {
                push(&mut self.gradients, gradient, WINDOW);
                push(&mut self.kls, kl, WINDOW);
            }
        }
        self.version = Some(sample.version);
        found
    }

    /// Reports metrics that the line should have but lacks. A step counts as trained if it has new
    /// weights, a kept group or any measurement of the trainer.
    fn find_missing(&mut self, line: &StepLine, sample: Sample) -> Vec<Finding> {
        let updated = self.version.is_some_and(|before| sample.version > before)
            || line.groups_kept.is_some_and(|groups| groups > 0);
        let trained = updated || line.has_training();
        let sampled = line.episodes.is_none_or(|episodes| episodes > 0);
        let needed = [
            ("reward_mean", sampled && sample.reward.is_none()),
            ("loss_tokens", trained && !sample.trained),
            ("kl_train_infer", trained && sample.kl.is_none()),
            ("extreme_token_fraction at 2", trained && sample.extreme.is_none()),
        ];
        let mut found = Vec::new();
        for (name, missing) in needed {
            if missing && self.missing.insert(name) {
                found.push(Finding::Warning(format!(
                    "step {}: no {name} in the metrics line: a collapse that only {name} would show \
                     cannot be detected",
                    sample.step
                )));
            }
        }
        found
    }
}

/// Runs the detection over the lines of a whole run. Returns the collapse that starts first, and all
/// warnings.
pub fn detect_collapse<'a>(
    lines: impl IntoIterator<Item = &'a MetricsLine>,
) -> (Option<Collapse>, Vec<String>) {
    let mut detector = Detector::default();
    let (mut first, mut warnings) = (None::<Collapse>, Vec::new());
    for finding in lines.into_iter().flat_map(|line| detector.observe(line)) {
        match finding {
            Finding::Warning(text) => warnings.push(text),
            Finding::Collapse(collapse) => {
                if first.as_ref().is_none_or(|first| collapse.step < first.step) {
                    first = Some(collapse);
                }
            }
        }
    }
    (first, warnings)
}

fn push(window: &mut VecDeque<f64>, value: f64, length: usize) {
    if window.len() == length {
        window.pop_front();
    }
    window.push_back(value);
}

fn median(values: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EvalLine;
    use orchestrate_types::PolicyVersion;
    use std::collections::BTreeMap;

    fn step(step: u32, reward: f64, extreme: f64, gradient: f64, kl: f64) -> StepLine {
        StepLine {
            global_step: step,
            policy_version: PolicyVersion(u64::from(step)),
            episodes: Some(8),
            groups_kept: Some(1),
            loss: Some(0.1),
            loss_tokens: Some(9),
            reward_mean: Some(reward),
            grad_norm: Some(gradient),
            kl_train_infer: Some(kl),
            extreme_token_fraction: Some(BTreeMap::from([("2".to_owned(), extreme)]).into()),
            ..StepLine::default()
        }
    }

    fn line(at: u32, reward: f64, extreme: f64, gradient: f64, kl: f64) -> MetricsLine {
        step(at, reward, extreme, gradient, kl).into()
    }

    /// The line of a step that had nothing to train on.
    fn skipped(step: u32, version: u64) -> StepLine {
        StepLine {
            global_step: step,
            policy_version: PolicyVersion(version),
            episodes: Some(8),
            groups_kept: Some(0),
            reward_mean: Some(1.0),
            ..StepLine::default()
        }
    }

    fn collapses(found: Vec<Finding>) -> Vec<Collapse> {
        let collapse = |finding| match finding {
            Finding::Collapse(collapse) => Some(collapse),
            Finding::Warning(_) => None,
        };
        found.into_iter().filter_map(collapse).collect()
    }

    fn warnings(found: &[Finding]) -> Vec<&str> {
        found
            .iter()
            .filter_map(|finding| match finding {
                Finding::Warning(text) => Some(text.as_str()),
                Finding::Collapse(_) => None,
            })
            .collect()
    }

    #[test]
    fn healthy_run_has_no_findings() {
        let mut detector = Detector::default();
        for step in 1..60 {
            let reward = 0.3 + f64::from(step) * 0.01;
            assert_eq!(detector.observe(&line(step, reward, 1e-4, 0.5, 1e-3)), []);
        }
        let evaluation = EvalLine { global_step: 60, eval_tasks: Some(3), ..EvalLine::default() };
        assert_eq!(detector.observe(&evaluation.into()), []);
        assert_eq!(detector.observe(&skipped(60, 59).into()), []);
    }

    /// Lines with a symptom, the expected symptom, the step at which it starts, and the step at which it
    /// is reported.
    type SymptomCase = (fn(u32) -> MetricsLine, fn(&Symptom) -> bool, u32, u32);

    #[test]
    fn each_symptom_is_reported_once_with_its_first_step_and_the_weights_before() {
        let healthy = |step| line(step, 0.8, 0.0, 0.5, 1e-3);
        let cases: [SymptomCase; 4] = [
            (
                |s| line(s, 0.0, 0.0, 0.5, 1e-3),
                |s| matches!(s, Symptom::LowReward { best } if (best - 0.8).abs() < 1e-9),
                // The mean of five falls below half with the third step.
                32,
                41,
            ),
            (|s| line(s, 0.8, 0.2, 0.5, 1e-3), |s| matches!(s, Symptom::ExtremeTokens), 30, 34),
            (|s| line(s, 0.8, 0.0, 50.0, 0.5), |s| matches!(s, Symptom::Gradient), 30, 32),
            (
                |s| StepLine { loss: None, ..step(s, 0.8, 0.0, 1.0, 1e-3) }.into(),
                |s| matches!(s, Symptom::NotFinite),
                30,
                30,
            ),
        ];
        for (unhealthy, expected, first, reported_at) in cases {
            let mut detector = Detector::default();
            let mut reported = Vec::new();
            for step in 1..60 {
                let line = if step < 30 { healthy(step) } else { unhealthy(step) };
                for collapse in collapses(detector.observe(&line)) {
                    reported.push((step, collapse));
                }
            }
            let [(step, collapse)] = &reported[..] else { panic!("{reported:?}") };
            assert!(expected(&collapse.symptom), "{collapse:?}");
            assert_eq!((*step, collapse.step), (reported_at, first), "{collapse:?}");
            assert_eq!(collapse.last_good, Some(u64::from(first) - 1));
        }
    }

    #[test]
    fn of_several_symptoms_the_first_to_start_counts() {
        let lines: Vec<MetricsLine> = (1..60)
            .map(|s| match s {
                1..30 => line(s, 0.8, 0.0, 0.5, 1e-3),
                30..34 => line(s, 0.0, 0.0, 0.5, 0.02),
                _ => line(s, 0.0, 0.2, 0.5, 0.02),
            })
            .collect();
        let (collapse, warnings) = detect_collapse(&lines);
        let collapse = collapse.unwrap();
        assert_eq!((collapse.step, warnings.len()), (32, 30));
        assert!(serde_json::to_string(&collapse).unwrap().contains("below half of its best"));
        assert_eq!(detect_collapse(&lines[..30]).0, None);
    }

    #[test]
    fn short_dip_is_not_a_collapse() {
        let mut detector = Detector::default();
        for step in 1..80 {
            let dip = step % 20 < 2;
            let (reward, extreme) = if dip { (0.0, 0.3) } else { (0.8, 0.0) };
            let found = collapses(detector.observe(&line(step, reward, extreme, 0.5, 1e-3)));
            assert_eq!(found, []);
        }
    }

    #[test]
    fn growing_kl_and_share_of_extreme_tokens_are_warned_of() {
        let mut detector = Detector::default();
        let found = detector.observe(&line(1, 0.5, 0.05, 0.5, 0.02));
        let [extreme, kl] = &warnings(&found)[..] else { panic!("{found:?}") };
        assert!(extreme.contains("5.0 %") && kl.contains("above 1e-2"), "{found:?}");
    }

    type Change = fn(&mut StepLine);

    #[test]
    fn step_that_cannot_be_judged_is_reported_once_for_each_missing_metric() {
        let whole = || step(1, 0.8, 0.0, 0.5, 1e-3);
        let cases: [(Change, &str); 5] = [
            (|line| line.reward_mean = None, "no reward_mean"),
            (|line| line.kl_train_infer = None, "no kl_train_infer"),
            (|line| line.extreme_token_fraction = None, "no extreme_token_fraction at 2"),
            (
                |line| {
                    let other = BTreeMap::from([("3".to_owned(), 0.0)]);
                    line.extreme_token_fraction = Some(other.into());
                },
                "no extreme_token_fraction at 2",
            ),
            (|line| *line = StepLine { groups_kept: Some(4), ..skipped(1, 1) }, "no loss_tokens"),
        ];
        for (remove, expected) in cases {
            let mut detector = Detector::default();
            let mut line = whole();
            remove(&mut line);
            let found = detector.observe(&line.clone().into());
            assert!(warnings(&found).iter().any(|text| text.contains(expected)), "{found:?}");
            line.global_step = 2;
            assert_eq!(detector.observe(&line.into()), [], "reported once");
        }
        // New weights without any measurement of the training.
        let mut detector = Detector::default();
        detector.observe(&whole().into());
        let unmeasured = StepLine { groups_kept: None, ..skipped(2, 2) };
        let found = detector.observe(&unmeasured.into());
        assert!(warnings(&found).iter().any(|text| text.contains("no loss_tokens")), "{found:?}");
    }
}
