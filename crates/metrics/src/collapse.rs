//! Notices a run that collapses. Pure: lines of `metrics.jsonl` in, findings out. Reward, extreme
//! tokens and gradient norm are watched, because the KL alone can stay flat while a run dies.

use serde::{Serialize, Serializer};
use serde_json::Value;
use std::collections::VecDeque;
use std::fmt;

/// Steps looked back over.
const WINDOW: usize = 20;
/// Steps a mean reward is taken over.
const REWARD_WINDOW: usize = 5;
/// Steps a symptom must last.
const REWARD_PATIENCE: u32 = 10;
const EXTREME_PATIENCE: u32 = 5;
const GRADIENT_PATIENCE: u32 = 3;

/// What a collapse shows itself by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Symptom {
    /// Loss or gradient is no number.
    NotFinite,
    /// The mean reward stays below half of its best.
    LowReward {
        /// Best mean of five steps so far.
        best: f64,
    },
    /// More than a tenth of the tokens stay twice as (un)likely in the trainer as in the engine.
    ExtremeTokens,
    /// Gradient norm and KL both stay above ten times their medians.
    Gradient,
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite => write!(f, "loss or gradient is not a number"),
            Self::LowReward { best } => write!(
                f,
                "for {REWARD_PATIENCE} steps the mean reward is below half of its best ({best:.3})"
            ),
            Self::ExtremeTokens => write!(
                f,
                "for {EXTREME_PATIENCE} steps more than 10 % of tokens are twice as (un)likely in \
                 the trainer as in the engine"
            ),
            Self::Gradient => write!(
                f,
                "for {GRADIENT_PATIENCE} steps gradient norm and KL are both above ten times their \
                 median"
            ),
        }
    }
}

/// In words.
impl Serialize for Symptom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Training that has collapsed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Collapse {
    /// First global step of the window that shows it.
    pub step: u32,
    /// How it shows.
    pub symptom: Symptom,
    /// Version of the weights before that step, to go back to; `None` if it was the first.
    pub last_good: Option<u64>,
}

/// What a line says about the run's health.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// A person should know.
    Warning(String),
    /// The run is lost from this step on.
    Collapse(Collapse),
}

/// One global step, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    step: u32,
    version: Option<u64>,
    trained: bool,
    finite: bool,
    reward: Option<f64>,
    extreme: f64,
    kl: f64,
    gradient: Option<f64>,
}

impl Sample {
    /// `None` for lines that are no global step.
    fn read(line: &Value) -> Option<Self> {
        let number = |key: &str| line.get(key).and_then(Value::as_f64);
        let whole = |key: &str| line.get(key).and_then(Value::as_u64);
        line.get("loss")?;
        let step = u32::try_from(whole("global_step")?).ok()?;
        let extreme = line.get("extreme_token_fraction").and_then(|f| f.get("2"));
        // A number that is not finite is null in JSON; in a skipped step all of them are.
        let trained = whole("loss_tokens").is_some();
        Some(Self {
            step,
            version: whole("policy_version"),
            trained,
            finite: !trained || (number("loss").is_some() && number("grad_norm").is_some()),
            reward: number("reward_mean"),
            extreme: extreme.and_then(Value::as_f64).unwrap_or(0.0),
            kl: number("kl_train_infer").unwrap_or(0.0),
            gradient: number("grad_norm"),
        })
    }
}

/// A symptom that must last: since when it does.
#[derive(Debug, Default)]
struct Lasting {
    steps: u32,
    since: (u32, Option<u64>),
}

impl Lasting {
    /// Counts; `true` exactly when the patience is used up.
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
    /// Version the next step begins with.
    version: Option<u64>,
    low_reward: Lasting,
    extreme: Lasting,
    steep: Lasting,
    not_finite: Lasting,
}

impl Detector {
    /// Takes the next line. Each symptom is told once, when it has lasted.
    pub fn observe(&mut self, line: &Value) -> Vec<Finding> {
        let Some(sample) = Sample::read(line) else { return Vec::new() };
        let at = (sample.step, self.version);
        let mut found = Vec::new();
        let mut warn = |text: String| {
            found.push(Finding::Warning(format!("step {}: {text}", sample.step)));
        };
        if sample.extreme > 0.01 && sample.extreme <= 0.1 {
            let share = sample.extreme * 100.0;
            warn(format!("{share:.1} % of tokens are twice as (un)likely in the trainer"));
        }
        if sample.kl > 1e-2 {
            warn(format!("train-inference KL is {:.2e}, above 1e-2", sample.kl));
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
        if sample.trained && self.extreme.observe(sample.extreme > 0.1, at, EXTREME_PATIENCE) {
            collapse(&self.extreme, Symptom::ExtremeTokens);
        }
        if let Some(gradient) = sample.gradient {
            let steep = self.gradients.len() == WINDOW
                && gradient > 10.0 * median(&self.gradients)
                && sample.kl > 10.0 * median(&self.kls);
            if self.steep.observe(steep, at, GRADIENT_PATIENCE) {
                collapse(&self.steep, Symptom::Gradient);
            }
            // What is steep must not become the measure of what is.
            if !steep {
                push(&mut self.gradients, gradient, WINDOW);
                push(&mut self.kls, sample.kl, WINDOW);
            }
        }
        self.version = sample.version.or(self.version);
        found
    }
}

/// What lines of a whole run show: the collapse that begins first, and all warnings.
pub fn judge(lines: &[Value]) -> (Option<Collapse>, Vec<String>) {
    let mut detector = Detector::default();
    let (mut first, mut warnings) = (None::<Collapse>, Vec::new());
    for finding in lines.iter().flat_map(|line| detector.observe(line)) {
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
    use serde_json::json;

    fn line(step: u32, reward: f64, extreme: f64, gradient: f64, kl: f64) -> Value {
        json!({"global_step": step, "policy_version": step, "loss": 0.1, "loss_tokens": 9,
               "reward_mean": reward, "grad_norm": gradient, "kl_train_infer": kl,
               "extreme_token_fraction": {"2": extreme}})
    }

    fn collapses(found: Vec<Finding>) -> Vec<Collapse> {
        let collapse = |finding| match finding {
            Finding::Collapse(collapse) => Some(collapse),
            Finding::Warning(_) => None,
        };
        found.into_iter().filter_map(collapse).collect()
    }

    #[test]
    fn a_healthy_run_is_quiet() {
        let mut detector = Detector::default();
        for step in 1..60 {
            let reward = 0.3 + f64::from(step) * 0.01;
            assert!(detector.observe(&line(step, reward, 1e-4, 0.5, 1e-3)).is_empty());
        }
        assert!(detector.observe(&json!({"global_step": 60, "eval_tasks": 3})).is_empty());
        // A skipped step has no loss, and that is no collapse.
        let skipped = json!({"global_step": 61, "policy_version": 59, "loss": null,
                             "grad_norm": null, "loss_tokens": null, "reward_mean": 1.0});
        assert!(detector.observe(&skipped).is_empty());
    }

    /// Lines that show a symptom, which one, since which step, and when it is told.
    type Sick = (fn(u32) -> Value, fn(&Symptom) -> bool, u32, u32);

    #[test]
    fn each_symptom_is_told_once_with_its_first_step_and_the_weights_before() {
        let healthy = |step| line(step, 0.8, 0.0, 0.5, 1e-3);
        let sick: [Sick; 4] = [
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
                |s| {
                    json!({"global_step": s, "policy_version": s, "loss": null, "loss_tokens": 9,
                           "grad_norm": 1.0})
                },
                |s| matches!(s, Symptom::NotFinite),
                30,
                30,
            ),
        ];
        for (sick, expected, first, told_at) in sick {
            let mut detector = Detector::default();
            let mut told = Vec::new();
            for step in 1..60 {
                let line = if step < 30 { healthy(step) } else { sick(step) };
                for collapse in collapses(detector.observe(&line)) {
                    told.push((step, collapse));
                }
            }
            let [(step, collapse)] = &told[..] else { panic!("{told:?}") };
            assert!(expected(&collapse.symptom), "{collapse:?}");
            assert_eq!((*step, collapse.step), (told_at, first), "{collapse:?}");
            assert_eq!(collapse.last_good, Some(u64::from(first) - 1));
        }
    }

    #[test]
    fn of_several_symptoms_the_first_to_begin_counts() {
        let lines: Vec<Value> = (1..60)
            .map(|s| match s {
                1..30 => line(s, 0.8, 0.0, 0.5, 1e-3),
                30..34 => line(s, 0.0, 0.0, 0.5, 0.02),
                _ => line(s, 0.0, 0.2, 0.5, 0.02),
            })
            .collect();
        let (collapse, warnings) = judge(&lines);
        let collapse = collapse.unwrap();
        assert_eq!((collapse.step, warnings.len()), (32, 30));
        assert!(serde_json::to_string(&collapse).unwrap().contains("below half of its best"));
        assert_eq!(judge(&lines[..30]).0, None);
    }

    #[test]
    fn a_short_dip_is_no_collapse() {
        let mut detector = Detector::default();
        for step in 1..80 {
            let dip = step % 20 < 2;
            let (reward, extreme) = if dip { (0.0, 0.3) } else { (0.8, 0.0) };
            let found = collapses(detector.observe(&line(step, reward, extreme, 0.5, 1e-3)));
            assert_eq!(found, []);
        }
    }

    #[test]
    fn a_kl_or_a_share_of_extreme_tokens_that_grows_is_warned_of() {
        let mut detector = Detector::default();
        let found = detector.observe(&line(1, 0.5, 0.05, 0.5, 0.02));
        let said = format!("{found:?}");
        assert!(
            found.len() == 2 && said.contains("5.0 %") && said.contains("above 1e-2"),
            "{said}"
        );
    }
}
