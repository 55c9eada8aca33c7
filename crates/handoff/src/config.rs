//! The sections `[algorithm]`, `[handoff]` and `[trainer]`.

use crate::AdvantageNorm;
use crate::protocol::{Hyperparameters, LossAggregation, PolicyLoss, RoutingReplay};
use orchestrate_types::{ConfigProblem, HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

/// What becomes of episodes that a limit cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedEpisodes {
    /// They are trained on with their reward.
    Train,
    /// They count in the group's baseline, but their tokens are not trained on.
    Mask,
}

/// How rewards become an update of the weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AlgorithmSection {
    /// Policy loss. Default: "grpo".
    pub policy_loss: Option<PolicyLoss>,
    /// Lower clip of the probability ratio, 0 to 1. Default: 0.2.
    pub clip_low: Option<f64>,
    /// Upper clip of the probability ratio; above `clip_low` it is Clip-Higher. Default: 0.28.
    pub clip_high: Option<f64>,
    /// Bound of the ratio for negative advantages, above 1; 0 turns it off. Default: 3.
    pub dual_clip: Option<f64>,
    /// How token losses become one number. Default: "token-mean".
    pub aggregation: Option<LossAggregation>,
    /// Constant of "token-sum-norm", in tokens; required there, not used elsewhere.
    pub loss_norm_tokens: Option<f64>,
    /// How rewards of a group become advantages. Default: "std".
    pub advantage_normalisation: Option<AdvantageNorm>,
    /// Whose routes the trainer's forward passes use. Default: "rollout" (R3).
    pub routing_replay: Option<RoutingReplay>,
    /// Optimizer steps that one batch is split into. Default: 1.
    pub mini_steps: Option<u32>,
    /// AdamW learning rate. Default: 1e-6.
    pub learning_rate: Option<f64>,
    /// AdamW decay rates of the first and second moment. Default: [0.9, 0.999].
    pub betas: Option<[f64; 2]>,
    /// AdamW ε. Default: 1e-8.
    pub adam_eps: Option<f64>,
    /// Decoupled weight decay. Default: 0.01.
    pub weight_decay: Option<f64>,
    /// Global L2 norm that gradients are clipped to. Default: 1.
    pub max_grad_norm: Option<f64>,
    /// Most tokens in one forward and backward pass; gradients accumulate. Default: 16384.
    pub micro_batch_tokens: Option<usize>,
    /// What becomes of episodes that a limit cut short. Default: "train".
    pub truncated: Option<TruncatedEpisodes>,
}

/// A checked `[algorithm]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Algorithm {
    /// How rewards of a group become advantages.
    pub advantage: AdvantageNorm,
    /// What becomes of truncated episodes.
    pub truncated: TruncatedEpisodes,
    settings: Hyperparameters,
}

impl Algorithm {
    /// What the trainer is told for one step, for rollouts sampled at `temperature`.
    pub fn hyperparameters(&self, temperature: f64, measure_no_replay: bool) -> Hyperparameters {
        Hyperparameters { temperature, measure_no_replay, ..self.settings.clone() }
    }

    /// Whose routes the trainer uses.
    pub fn routing_replay(&self) -> RoutingReplay {
        self.settings.routing_replay
    }
}

struct Problems(Vec<ConfigProblem>);

impl Problems {
    fn require<T: Display>(&mut self, holds: bool, key: &str, value: T, remedy: &str) {
        if !holds {
            self.0.push(ConfigProblem::new(key, value, remedy));
        }
    }

    fn positive(&mut self, key: &str, value: f64) -> f64 {
        let holds = value.is_finite() && value > 0.0;
        self.require(holds, key, value, "use a number above 0");
        value
    }
}

impl AlgorithmSection {
    /// Fills in defaults and checks every value.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<Algorithm, Vec<ConfigProblem>> {
        let mut problems = Problems(Vec::new());
        let p = &mut problems;
        let clip_low = self.clip_low.unwrap_or(0.2);
        let open = (0.0..1.0).contains(&clip_low) && clip_low > 0.0;
        p.require(open, "algorithm.clip_low", clip_low, "use a number between 0 and 1");
        let clip_high = p.positive("algorithm.clip_high", self.clip_high.unwrap_or(0.28));
        let dual_clip = match self.dual_clip.unwrap_or(3.0) {
            off if off.abs() < f64::EPSILON => None,
            c => {
                let remedy = "use a number above 1, or 0 to turn it off";
                p.require(c.is_finite() && c > 1.0, "algorithm.dual_clip", c, remedy);
                Some(c)
            }
        };
        let aggregation = self.aggregation.unwrap_or(LossAggregation::TokenMean);
        if aggregation == LossAggregation::TokenSumNorm && self.loss_norm_tokens.is_none() {
            p.0.push(ConfigProblem::missing(
                "algorithm.loss_norm_tokens",
                "aggregation \"token-sum-norm\" divides by it: give the longest sequence in tokens",
            ));
        }
        let loss_norm_tokens =
            p.positive("algorithm.loss_norm_tokens", self.loss_norm_tokens.unwrap_or(1.0));
        let mini_steps = self.mini_steps.unwrap_or(1);
        p.require(mini_steps > 0, "algorithm.mini_steps", mini_steps, "use at least 1");
        let [beta1, beta2] = self.betas.unwrap_or([0.9, 0.999]);
        let unit = |beta: f64| (0.0..1.0).contains(&beta);
        let betas = format!("[{beta1}, {beta2}]");
        p.require(
            unit(beta1) && unit(beta2),
            "algorithm.betas",
            betas,
            "use two numbers from 0 to below 1",
        );
        let weight_decay = self.weight_decay.unwrap_or(0.01);
        let holds = weight_decay.is_finite() && weight_decay >= 0.0;
        p.require(holds, "algorithm.weight_decay", weight_decay, "use 0 or a number above");
        let micro_batch_tokens = self.micro_batch_tokens.unwrap_or(16_384);
        p.require(
            micro_batch_tokens > 0,
            "algorithm.micro_batch_tokens",
            micro_batch_tokens,
            "use at least 1; a longer sequence forms a pass of its own",
        );
        let settings = Hyperparameters {
            policy_loss: self.policy_loss.unwrap_or(PolicyLoss::Grpo),
            clip_low,
            clip_high,
            dual_clip,
            aggregation,
            loss_norm_tokens,
            routing_replay: self.routing_replay.unwrap_or(RoutingReplay::Rollout),
            mini_steps,
            micro_batch_tokens,
            learning_rate: p
                .positive("algorithm.learning_rate", self.learning_rate.unwrap_or(1e-6)),
            betas: (beta1, beta2),
            adam_eps: p.positive("algorithm.adam_eps", self.adam_eps.unwrap_or(1e-8)),
            weight_decay,
            max_grad_norm: p.positive("algorithm.max_grad_norm", self.max_grad_norm.unwrap_or(1.0)),
            temperature: 1.0,
            measure_no_replay: false,
        };
        if problems.0.is_empty() {
            Ok(Algorithm {
                advantage: self.advantage_normalisation.unwrap_or(AdvantageNorm::Std),
                truncated: self.truncated.unwrap_or(TruncatedEpisodes::Train),
                settings,
            })
        } else {
            Err(problems.0)
        }
    }
}

/// How batches are written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HandoffSection {
    /// Write routing rows that members of a group have in common once, and a number per token
    /// that says which row it has. Saves space where prompts are long; readers then see a
    /// sequence's rows in two pieces. Default: false.
    pub share_prefix_rows: Option<bool>,
}

/// A checked `[handoff]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffPlan {
    /// Whether equal prefix rows of a group are written once.
    pub share_prefix_rows: bool,
}

impl HandoffSection {
    /// Fills in defaults; no value of this section can be wrong.
    pub fn plan(&self) -> HandoffPlan {
        HandoffPlan { share_prefix_rows: self.share_prefix_rows.unwrap_or(false) }
    }
}

/// Where the trainer is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerSection {
    /// Base URL of a trainer, e.g. `http://127.0.0.1:7070`. Absent: the embedded one.
    pub url: Option<String>,
    /// Name of the environment variable that holds the trainer's bearer token.
    pub token_env: Option<String>,
    /// Longest time one step may take, recompute and checkpoint included. Default: "2h".
    pub step_timeout: Option<HumanDuration>,
}

/// A checked `[trainer]`.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerPlan {
    /// Base URL; `None` = the embedded trainer.
    pub url: Option<String>,
    /// Environment variable of the bearer token.
    pub token_env: Option<String>,
    /// Longest time one step may take.
    pub step_timeout: Duration,
}

impl TrainerSection {
    /// Fills in defaults and checks every value.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<TrainerPlan, Vec<ConfigProblem>> {
        let mut problems = Problems(Vec::new());
        if let Some(url) = &self.url {
            let usable = reqwest::Url::parse(url)
                .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            let remedy = "write a URL like \"http://127.0.0.1:7070\", or leave it out for the \
                          embedded trainer";
            problems.require(usable, "trainer.url", url, remedy);
        }
        if let Some(name) = &self.token_env {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let usable = !name.is_empty() && name.chars().all(word);
            let remedy = "write the name of an environment variable, not the token itself";
            // The value may be a token that was put here by mistake: it is not repeated.
            problems.require(usable, "trainer.token_env", "(not shown)", remedy);
        }
        let step_timeout = self.step_timeout.unwrap_or(HumanDuration::secs(2 * 3600));
        let holds = step_timeout.0 > Duration::ZERO;
        problems.require(holds, "trainer.step_timeout", step_timeout, "use a time above 0");
        if problems.0.is_empty() {
            let (url, token_env) = (self.url.clone(), self.token_env.clone());
            Ok(TrainerPlan { url, token_env, step_timeout: step_timeout.0 })
        } else {
            Err(problems.0)
        }
    }
}

impl TrainerPlan {
    /// The bearer token from the environment; `None` where no variable is named.
    ///
    /// # Errors
    /// A [`ConfigProblem`] when the named variable is not set or empty.
    pub fn token(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.token_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(token) if !token.is_empty() => Ok(Some(token)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "trainer.token_env",
                name,
                format!("set the environment variable {name} to the trainer's token"),
            )),
        }
    }
}
