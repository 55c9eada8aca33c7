//! Warns when training looks like it collapses. Thresholds watch reward, extreme tokens and
//! gradient norm, because the KL alone can stay flat while a run dies.

use serde_json::Value;
use std::collections::VecDeque;

/// Steps looked back over.
const WINDOW: usize = 20;
/// Steps a reward or extreme-token symptom must last.
const REWARD_PATIENCE: u32 = 10;
const EXTREME_PATIENCE: u32 = 5;
const GRADIENT_PATIENCE: u32 = 3;

/// Watches the lines of `metrics.jsonl` in order.
#[derive(Debug, Default)]
pub(crate) struct Monitor {
    rewards: VecDeque<f64>,
    best_reward: f64,
    gradients: VecDeque<f64>,
    kls: VecDeque<f64>,
    low_reward: u32,
    extreme: u32,
    steep: u32,
}

impl Monitor {
    /// Takes the next line; returns what a person should know about it.
    pub(crate) fn observe(&mut self, line: &Value) -> Vec<String> {
        let Some(step) = line.get("global_step").filter(|_| line.get("loss").is_some()) else {
            return Vec::new();
        };
        let number = |key: &str| line.get(key).and_then(Value::as_f64);
        let mut warnings = Vec::new();
        if let Some(reward) = number("reward_mean") {
            push(&mut self.rewards, reward, 5);
            if self.rewards.len() == 5 {
                let mean = self.rewards.iter().sum::<f64>() / 5.0;
                self.best_reward = self.best_reward.max(mean);
                count(&mut self.low_reward, mean < 0.5 * self.best_reward);
                if self.low_reward == REWARD_PATIENCE {
                    warnings.push(format!(
                        "step {step}: for {REWARD_PATIENCE} steps the mean reward is below half \
                         of its best ({:.3})",
                        self.best_reward
                    ));
                }
            }
        }
        let extreme = line
            .get("extreme_token_fraction")
            .and_then(|f| f.get("2"))
            .and_then(Value::as_f64)
            .unwrap_or(0.0);
        count(&mut self.extreme, extreme > 0.1);
        if self.extreme == EXTREME_PATIENCE {
            warnings.push(format!(
                "step {step}: for {EXTREME_PATIENCE} steps more than 10 % of tokens are twice as \
                 (un)likely in the trainer as in the engine"
            ));
        } else if extreme > 0.01 && self.extreme == 0 {
            warnings.push(format!(
                "step {step}: {:.1} % of tokens are twice as (un)likely in the trainer",
                extreme * 100.0
            ));
        }
        let kl = number("kl_train_infer").unwrap_or(0.0);
        if kl > 1e-2 {
            warnings.push(format!("step {step}: train-inference KL is {kl:.2e}, above 1e-2"));
        }
        if let Some(gradient) = number("grad_norm") {
            let steep = self.gradients.len() == WINDOW
                && gradient > 10.0 * median(&self.gradients)
                && kl > 10.0 * median(&self.kls);
            count(&mut self.steep, steep);
            if self.steep == GRADIENT_PATIENCE {
                warnings.push(format!(
                    "step {step}: gradient norm {gradient:.2e} and KL {kl:.2e} are both above ten \
                     times their median for {GRADIENT_PATIENCE} steps"
                ));
            }
            if !steep {
                push(&mut self.gradients, gradient, WINDOW);
                push(&mut self.kls, kl, WINDOW);
            }
        }
        warnings
    }
}

fn push(window: &mut VecDeque<f64>, value: f64, length: usize) {
    if window.len() == length {
        window.pop_front();
    }
    window.push_back(value);
}

fn count(counter: &mut u32, holds: bool) {
    *counter = if holds { *counter + 1 } else { 0 };
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
        json!({"global_step": step, "loss": 0.1, "reward_mean": reward, "grad_norm": gradient,
               "kl_train_infer": kl, "extreme_token_fraction": {"2": extreme}})
    }

    #[test]
    fn a_healthy_run_is_quiet() {
        let mut monitor = Monitor::default();
        for step in 0..60 {
            let reward = 0.3 + f64::from(step) * 0.01;
            assert!(monitor.observe(&line(step, reward, 1e-4, 0.5, 1e-3)).is_empty());
        }
        assert!(monitor.observe(&json!({"global_step": 60, "eval_tasks": 3})).is_empty());
    }

    #[test]
    fn each_symptom_is_told_once_it_lasts() {
        let mut monitor = Monitor::default();
        let mut said = Vec::new();
        for step in 0..40 {
            let bad = step >= 25;
            let (reward, extreme) = if bad { (0.0, 0.2) } else { (0.8, 0.0) };
            let (gradient, kl) = if bad { (50.0, 0.5) } else { (0.5, 1e-3) };
            said.extend(monitor.observe(&line(step, reward, extreme, gradient, kl)));
        }
        for part in ["mean reward is below", "more than 10 %", "gradient norm", "KL is"] {
            assert!(said.iter().any(|s| s.contains(part)), "{part}: {said:?}");
        }
    }
}
