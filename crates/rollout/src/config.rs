//! The `[rollout]` section.

use crate::api::Message;
use crate::chat::ChatOptions;
use crate::machine::EpisodeLimits;
use crate::prefix::History;
use crate::scaffold::{Prompts, Scaffold};
use orchestrate_tasks::Task;
use orchestrate_types::{ConfigProblem, HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How episodes are rolled out. Every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    /// Episodes per task that are compared for the advantage. Default 8.
    pub group_size: Option<u32>,
    /// Groups with a gradient per global step. Default 16.
    pub groups_per_step: Option<u32>,
    /// Groups rolled out per global step at most, when dynamic sampling drops some. Default: four
    /// times `groups_per_step`.
    pub max_groups_per_step: Option<u32>,
    /// Episodes under way at the same time. Default 32.
    pub max_in_flight: Option<u32>,
    /// Physical tries of an episode whose infrastructure fails. Default 3.
    pub max_attempts: Option<u16>,
    /// Generations per episode. Default 40.
    pub max_turns: Option<u32>,
    /// Tokens of prompt, responses and observations together. Default 65536; the model's context
    /// is a limit as well.
    pub max_sequence_tokens: Option<usize>,
    /// Tokens of one response. Default 8192.
    pub max_response_tokens: Option<usize>,
    /// Time for one command of the agent. Default "90s".
    pub command_timeout: Option<HumanDuration>,
    /// Time for one reply of the engine. Default "10m".
    pub generate_timeout: Option<HumanDuration>,
    /// Time from the opened sandbox to the end of the last turn; grading is not part of it.
    /// Default "90m".
    pub episode_timeout: Option<HumanDuration>,
    /// Longest time a group's members wait for the first reply to the first of them, after which
    /// their common prompt is cached; "0s" has all of them ask at once. Default "60s".
    pub follow_wait: Option<HumanDuration>,
    /// Sampling temperature of training episodes. Default 1.0, the policy itself.
    pub temperature: Option<f32>,
    /// Nucleus mass kept, 0 < `top_p` ≤ 1. Default 1.0, the policy itself.
    pub top_p: Option<f32>,
    /// Characters of one observation; longer ones lose their middle. Default 10000.
    pub observation_chars: Option<usize>,
    /// In which form the policy acts: `tools` (native tool calls), `r2e-xml` (R2E-Gym's functions) or
    /// `mini` (bash blocks, as mini-swe-agent has them). Default `tools`.
    pub scaffold: Option<Scaffold>,
    /// What a prompt has of earlier turns where the chat template drops their thinking: all that was
    /// `sampled`, or what the `template` leaves. Then every turn that had thinking forks the
    /// conversation, and only what was sampled behind the last fork can be trained on. Default
    /// `sampled`.
    pub history: Option<History>,
    /// Text of the system message before the task; `{workdir}` is the repository's folder. Default:
    /// the scaffold's own, which `tools` has not.
    pub system_prompt: Option<String>,
    /// Text of the task's message, with `{problem_statement}` and `{workdir}`. Default: the
    /// scaffold's own, which for `tools` is the problem statement alone.
    pub task_prompt: Option<String>,
    /// Whether the chat template is given the tools' JSON schemas. Default true; false for models
    /// trained on the scaffold, which know them.
    pub show_tools: Option<bool>,
    /// Whether an agent finds its repository without its history, which may hold the solution:
    /// with one commit, the tree as it is given. Default true.
    pub hide_history: Option<bool>,
}

/// The checked section, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutPlan {
    /// Episodes per group, at least 1.
    pub group_size: u32,
    /// Groups per global step, at least 1.
    pub groups_per_step: u32,
    /// Most groups per global step, at least `groups_per_step`.
    pub max_groups_per_step: u32,
    /// Episodes under way at the same time, at least 1.
    pub max_in_flight: u32,
    /// Tries of an episode, at least 1.
    pub max_attempts: u16,
    /// Generations per episode, at least 1.
    pub max_turns: u32,
    /// Tokens per episode.
    pub max_sequence_tokens: usize,
    /// Tokens per response.
    pub max_response_tokens: usize,
    /// Time for one command.
    pub command_timeout: HumanDuration,
    /// Time for one reply.
    pub generate_timeout: HumanDuration,
    /// Time for one episode, without grading.
    pub episode_timeout: HumanDuration,
    /// Longest wait for a group's first reply.
    pub follow_wait: HumanDuration,
    /// Temperature, > 0.
    pub temperature: f32,
    /// Nucleus mass, 0 < `top_p` ≤ 1.
    pub top_p: f32,
    /// Characters per observation.
    pub observation_chars: usize,
    /// Form of actions.
    pub scaffold: Scaffold,
    /// What prompts have of earlier turns.
    pub history: History,
    /// System message, in place of the scaffold's.
    pub system_prompt: Option<String>,
    /// Task's message, in place of the scaffold's.
    pub task_prompt: Option<String>,
    /// Whether templates are given the tools' schemas.
    pub show_tools: bool,
    /// Whether repositories are given without their history.
    pub hide_history: bool,
}

impl RolloutConfig {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// All problems of the section at once.
    pub fn check(&self) -> Result<RolloutPlan, Vec<ConfigProblem>> {
        let groups_per_step = self.groups_per_step.unwrap_or(16);
        let plan = RolloutPlan {
            group_size: self.group_size.unwrap_or(8),
            groups_per_step,
            max_groups_per_step: self
                .max_groups_per_step
                .unwrap_or_else(|| groups_per_step.saturating_mul(4)),
            max_in_flight: self.max_in_flight.unwrap_or(32),
            max_attempts: self.max_attempts.unwrap_or(3),
            max_turns: self.max_turns.unwrap_or(40),
            max_sequence_tokens: self.max_sequence_tokens.unwrap_or(65_536),
            max_response_tokens: self.max_response_tokens.unwrap_or(8192),
            command_timeout: self.command_timeout.unwrap_or(HumanDuration::secs(90)),
            generate_timeout: self.generate_timeout.unwrap_or(HumanDuration::secs(600)),
            episode_timeout: self.episode_timeout.unwrap_or(HumanDuration::secs(5400)),
            follow_wait: self.follow_wait.unwrap_or(HumanDuration::secs(60)),
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            observation_chars: self.observation_chars.unwrap_or(10_000),
            scaffold: self.scaffold.unwrap_or_default(),
            history: self.history.unwrap_or_default(),
            system_prompt: self.system_prompt.clone(),
            task_prompt: self.task_prompt.clone(),
            show_tools: self.show_tools.unwrap_or(true),
            hide_history: self.hide_history.unwrap_or(true),
        };
        let problems = plan.problems();
        if problems.is_empty() { Ok(plan) } else { Err(problems) }
    }
}

impl RolloutPlan {
    /// Limits for the episode machine; `context` is the longest sequence of the model.
    pub fn limits(&self, context: usize) -> EpisodeLimits {
        EpisodeLimits {
            max_turns: self.max_turns,
            max_sequence_tokens: self.max_sequence_tokens.min(context),
            max_response_tokens: self.max_response_tokens,
        }
    }

    /// What the chat model of a run is for.
    pub fn chat_options(&self) -> ChatOptions {
        let tools = if self.show_tools { self.scaffold.tool_schemas() } else { Vec::new() };
        ChatOptions { tools, scaffold: self.scaffold, history: self.history }
    }

    /// The opening messages of a task.
    pub fn opening(&self, task: &Task) -> Vec<Message> {
        let prompts =
            Prompts { system: self.system_prompt.as_deref(), task: self.task_prompt.as_deref() };
        self.scaffold.opening(prompts, task, self.max_turns)
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        let counts = [
            ("group_size", u64::from(self.group_size)),
            ("groups_per_step", u64::from(self.groups_per_step)),
            ("max_in_flight", u64::from(self.max_in_flight)),
            ("max_attempts", u64::from(self.max_attempts)),
            ("max_turns", u64::from(self.max_turns)),
            ("max_sequence_tokens", self.max_sequence_tokens as u64),
            ("max_response_tokens", self.max_response_tokens as u64),
        ];
        let mut problems: Vec<ConfigProblem> = counts
            .into_iter()
            .filter(|(_, value)| *value == 0)
            .map(|(key, value)| problem(key, value, "use at least 1"))
            .collect();
        if self.max_groups_per_step < self.groups_per_step {
            let remedy = format!("use at least groups_per_step, {}", self.groups_per_step);
            problems.push(problem("max_groups_per_step", self.max_groups_per_step, &remedy));
        }
        if self.observation_chars < 100 {
            problems.push(problem("observation_chars", self.observation_chars, "use at least 100"));
        }
        if !(self.temperature > 0.0 && self.temperature <= 10.0) {
            let remedy = "use a number above 0, at most 10; 1.0 samples the policy itself";
            problems.push(problem("temperature", self.temperature, remedy));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let remedy = "use a number above 0, at most 1; 1.0 keeps every token";
            problems.push(problem("top_p", self.top_p, remedy));
        }
        if let Some(words) = &self.task_prompt
            && !words.contains("{problem_statement}")
        {
            let remedy = "name the place of the issue by {problem_statement}";
            problems.push(problem("task_prompt", words, remedy));
        }
        let times = [
            ("command_timeout", self.command_timeout),
            ("generate_timeout", self.generate_timeout),
            ("episode_timeout", self.episode_timeout),
        ];
        for (key, time) in times {
            if time.0 < Duration::from_millis(100) {
                problems.push(problem(key, time, "use at least \"100ms\""));
            }
        }
        if self.command_timeout > self.episode_timeout {
            let remedy = format!("use at most episode_timeout, \"{}\"", self.episode_timeout);
            problems.push(problem("command_timeout", self.command_timeout, &remedy));
        }
        problems
    }
}

fn problem(key: &str, value: impl std::fmt::Display, remedy: &str) -> ConfigProblem {
    ConfigProblem::new(format!("rollout.{key}"), value, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_a_whole_plan() {
        let plan = RolloutConfig::default().check().unwrap();
        assert_eq!((plan.group_size, plan.max_groups_per_step), (8, 64));
        assert_eq!(plan.limits(4096).max_sequence_tokens, 4096);
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let config = RolloutConfig {
            group_size: Some(0),
            groups_per_step: Some(4),
            max_groups_per_step: Some(3),
            temperature: Some(0.0),
            top_p: Some(f32::NAN),
            task_prompt: Some("fix it".to_owned()),
            command_timeout: Some(HumanDuration::secs(20)),
            episode_timeout: Some(HumanDuration::secs(10)),
            ..RolloutConfig::default()
        };
        let problems = config.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        let expected = [
            "group_size",
            "max_groups_per_step",
            "temperature",
            "top_p",
            "task_prompt",
            "command_timeout",
        ];
        assert_eq!(keys, expected.map(|key| format!("rollout.{key}")));
    }

    #[test]
    fn unknown_keys_are_refused() {
        let json = serde_json::json!({"group_sise": 4});
        let error = serde_json::from_value::<RolloutConfig>(json).unwrap_err();
        assert!(error.to_string().contains("group_sise"));
    }
}
