//! The sections `[handoff]` and `[trainer]`.

use orchestrate_types::{ConfigProblem, HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

struct Problems(Vec<ConfigProblem>);

impl Problems {
    fn require<T: Display>(&mut self, holds: bool, key: &str, value: T, remedy: &str) {
        if !holds {
            self.0.push(ConfigProblem::new(key, value, remedy));
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
