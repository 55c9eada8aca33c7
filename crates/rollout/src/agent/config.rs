//! The section `[agent]`: an agent with its own loop, for `rollout.scaffold = "command"`; and the
//! offers to external workers for `rollout.scaffold = "external"`.

use super::egress::is_address;
use super::limits::STRING_BYTES;
use crate::turn_journal::TurnJournals;
use camino::Utf8PathBuf;
use orchestrate_gateway::Offers;
use orchestrate_settings::{Problems, between, setting_types, settings};
use orchestrate_types::{HumanDuration, NOT_SHOWN};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// An agent whose command line is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AgentPreset {
    /// `mini-swe-agent` (from the Python package index): Chat Completions. The folder holds its packages.
    MiniSweAgent,
    /// Codex CLI (npm `@openai/codex`): Responses. The folder holds the binary `codex`.
    Codex,
    /// Claude Code (npm `@anthropic-ai/claude-code`): Messages. The folder holds the binary `claude`.
    ClaudeCode,
    /// Qwen Code (npm `@qwen-code/qwen-code`): Chat Completions. The folder holds `node` and the
    /// package's folder `qwen-code`.
    QwenCode,
    /// opencode (npm `opencode-ai`): Chat Completions. The folder holds the binary `opencode`.
    Opencode,
    /// aider (from the Python package index, `aider-chat`): Chat Completions. The folder holds its packages.
    Aider,
    /// `OpenHands` CLI (from the Python package index, `openhands`): Chat Completions. The folder holds its
    /// packages, and Python 3.12 as `python`.
    Openhands,
}

setting_types!(AgentPreset);

settings! {
    /// An agent with its own loop: a command that runs in the task's sandbox and samples through the
    /// gateway. Used with `rollout.scaffold = "command"`.
    [agent] pub AgentSection -> AgentSettings, check: check_together;

    /// An agent whose command is known; `command` replaces it.
    preset: Option<AgentPreset> = None => "none";
    /// Shell script that runs the agent in the task's folder. Its environment has the task as
    /// `TASK_PROMPT`, the model's name as `MODEL`, the folder of `agent.folder` as `AGENT_DIR`, and
    /// `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`.
    command: Option<String> = None => "that of the preset";
    /// Folder of this machine that becomes `/opt/agent` in the sandbox, as an image layer that is built
    /// once per image.
    folder: Option<Utf8PathBuf> = None => "none";
    /// Additional environment variables, as `NAME=VALUE`. The values are kept in the run's `plan.toml` and shown
    /// nowhere.
    env: Vec<String> = Vec::new();
    /// Port of the container's loopback on which the gateway listens.
    port: u16 = 4180, between(1, 65_535);
    /// Addresses outside the sandbox, as `host:port`, that the agent may connect to, e.g. a package
    /// index or a tool server. The gateway's port is then an HTTPS proxy (`HTTPS_PROXY`). The
    /// policy's commands can reach these addresses, too. Each connection is logged.
    egress: Vec<String> = Vec::new();
    /// Time that an agent has to end by itself after its last generation was refused.
    grace: HumanDuration = HumanDuration::secs(20);
}

/// Offers episodes to external workers (`rollout.scaffold = "external"`).
#[derive(Debug, Clone)]
pub struct ExternalWorkers {
    /// Open offers and leases.
    pub offers: Offers,
    /// Time that a worker has after `rollout.episode_timeout` to return its reward.
    pub grace: Duration,
    /// What was sampled for the episodes under way, on disk.
    pub journals: Arc<TurnJournals>,
}

impl ExternalWorkers {
    /// Offers episodes at `offers`. Requests of workers that hold episodes of an earlier process wait until
    /// these are continued.
    pub fn new(offers: Offers, grace: Duration, journals: TurnJournals) -> Self {
        let unfinished = journals.unfinished();
        offers.expect(unfinished.iter().map(|(_, lease)| lease));
        Self { offers, grace, journals: Arc::new(journals) }
    }
}

/// What the script of the agent's command begins with.
pub(super) const SCRIPT_START: &str = "mkdir -p \"$HOME\"\n";

fn check_together(_: &AgentSection, settings: &AgentSettings, problems: &mut Problems) {
    for address in &settings.egress {
        problems.require(
            is_address(address),
            "egress",
            format!("{address:?}"),
            "must be host:port in lower case, like \"pypi.org:443\"",
        );
    }
    let fits = |text: &str| text.len() <= STRING_BYTES;
    let remedy = "must have at most 128 KiB, the most that Linux passes to a process";
    let command = settings.command.as_deref().unwrap_or_default();
    let with_start = command.len() + SCRIPT_START.len();
    let found = format!("{} bytes", command.len());
    problems.require(with_start <= STRING_BYTES, "command", found, remedy);
    for (index, variable) in settings.env.iter().enumerate() {
        // The value may be a secret, and so may be a text without a name.
        let name = variable.split_once('=').map(|(name, _)| name);
        let (key, shown) = (format!("env[{index}]"), name.unwrap_or(NOT_SHOWN));
        problems.require(fits(variable), &key, format!("{shown:?}"), remedy);
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        problems.require(
            name.is_some_and(is_name),
            &key,
            format!("{shown:?}"),
            "must be NAME=VALUE, with a name of letters, digits and _",
        );
    }
}

impl AgentSettings {
    /// Records variables that are set twice, of which an agent sees one. Not for the plan of a run that has begun.
    pub fn check_repeated_variables(&self, problems: &mut Problems) {
        let mut names = HashSet::new();
        for (index, variable) in self.env.iter().enumerate() {
            let Some((name, _)) = variable.split_once('=') else { continue };
            if !names.insert(name) {
                let remedy = "must not be set again: a variable above has the same name";
                problems.refuse(&format!("env[{index}]"), format!("{name:?}"), remedy);
            }
        }
    }
}

impl AgentPreset {
    /// The preset's shell script.
    fn command(self) -> &'static str {
        match self {
            Self::MiniSweAgent => {
                concat!(include_str!("python.sh"), include_str!("mini-swe-agent.sh"))
            }
            Self::Codex => include_str!("codex.sh"),
            Self::ClaudeCode => include_str!("claude-code.sh"),
            Self::QwenCode => include_str!("qwen-code.sh"),
            Self::Opencode => include_str!("opencode.sh"),
            Self::Aider => concat!(include_str!("python.sh"), include_str!("aider.sh")),
            Self::Openhands => concat!(include_str!("python.sh"), include_str!("openhands.sh")),
        }
    }
}

impl AgentSettings {
    /// The shell script that runs the agent; `None` if neither a command nor a preset is set.
    pub fn script(&self) -> Option<&str> {
        self.command.as_deref().or(self.preset.map(AgentPreset::command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_replaces_that_of_the_preset_and_variables_have_names() {
        let section = AgentSection {
            preset: Some(AgentPreset::Codex),
            env: Some(vec!["A_1=b=c".to_owned()]),
            ..AgentSection::default()
        };
        assert!(section.check().unwrap().script().unwrap().contains("CODEX_HOME"));
        let own = AgentSection { command: Some("run".to_owned()), ..section };
        assert_eq!(own.check().unwrap().script(), Some("run"));
        assert_eq!(AgentSection::default().check().unwrap().script(), None);
        let wrong = AgentSection {
            env: Some(vec!["=x".into(), "a b=canary".into(), "canary".into()]),
            ..own
        };
        let problems = wrong.check().unwrap_err();
        let found = problems.iter().map(ToString::to_string);
        let found: Vec<String> =
            found.map(|text| text.split_once(": ").unwrap().0.to_owned()).collect();
        assert_eq!(
            found,
            ["agent.env[0] = \"\"", "agent.env[1] = \"a b\"", "agent.env[2] = \"(not shown)\""]
        );
        let repeated = ["A=1", "B=2", "A=canary"].map(str::to_owned).to_vec();
        let repeated = AgentSettings { env: repeated, ..AgentSettings::default() };
        let mut problems = Problems::new("agent");
        repeated.check_repeated_variables(&mut problems);
        let found: Vec<String> = problems.into_found().iter().map(ToString::to_string).collect();
        let expected =
            "agent.env[2] = \"A\": must not be set again: a variable above has the same name";
        assert_eq!(found, [expected]);
        let long = "x".repeat(STRING_BYTES + 1);
        let wrong =
            AgentSection { env: Some(vec![format!("A={long}")]), command: Some(long), ..wrong };
        let most = STRING_BYTES - SCRIPT_START.len();
        let longest = AgentSection { command: Some("x".repeat(most)), ..AgentSection::default() };
        assert!(longest.check().is_ok());
        let longer = AgentSection { command: Some("x".repeat(most + 1)), ..longest };
        assert_eq!(longer.check().unwrap_err().len(), 1);
        let problems = wrong.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(keys, ["agent.command", "agent.env[0]"]);
        assert!(problems.iter().all(|problem| problem.to_string().len() < 1000));
    }
}
