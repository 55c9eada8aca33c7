//! Rows of SWE-rebench, which contain the commands that its fork of the harness runs.

use super::parsers::LogParser;
use crate::column::{self, ColumnProblem};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How to run the tests of a row of SWE-rebench. Only the members that the evaluation script uses
/// are kept; the others describe how the image was built.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallConfig {
    /// Shell command to which the test files are appended. A list of commands, as in rows of
    /// SWE-rebench-V2, is read only to be refused with a clear reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_cmd: Option<Commands>,
    /// Shell command that installs the repository again before the tests run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub install: Option<Commands>,
    /// Shell commands that run first in the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_commands: Option<Vec<String>>,
    /// Name of the log parser.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_parser: Option<String>,
    /// Name of the image that a row of SWE-rebench-V2 starts from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_image_name: Option<Value>,
}

/// One shell command, or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Commands {
    /// One command, as in rows of SWE-rebench.
    One(String),
    /// Several commands, as in rows of SWE-rebench-V2.
    Several(Vec<String>),
}

impl InstallConfig {
    /// The one command that runs the tests.
    pub(super) fn test_command(&self) -> Option<&str> {
        match &self.test_cmd {
            Some(Commands::One(command)) => Some(command),
            Some(Commands::Several(_)) | None => None,
        }
    }

    /// The one command that installs the repository; `None` if there is none.
    pub(super) fn install_command(&self) -> Option<&str> {
        match &self.install {
            Some(Commands::One(command)) => Some(command),
            Some(Commands::Several(_)) | None => None,
        }
    }

    /// The log parser, one of the three that the fork knows by name.
    pub(super) fn log_parser(&self) -> Option<LogParser> {
        match self.log_parser.as_deref()? {
            "parse_log_pytest" => Some(LogParser::Pytest),
            "parse_log_pytest_options" => Some(LogParser::PytestOptions),
            "parse_log_pytest_v2" => Some(LogParser::PytestV2),
            _ => None,
        }
    }

    /// The reason why the tests of the row cannot be run as SWE-rebench runs them.
    pub(super) fn problem(&self) -> Option<ColumnProblem> {
        let problem = |reason: &str| Some(ColumnProblem::new("install_config", reason));
        let is_list = |commands: &Option<Commands>| matches!(commands, Some(Commands::Several(_)));
        if self.base_image_name.is_some() || is_list(&self.test_cmd) || is_list(&self.install) {
            return problem(
                "this is a row of SWE-rebench-V2, whose images, commands and log parsers differ; \
                 rows of SWE-rebench are supported",
            );
        }
        let Some(command) = self.test_command().filter(|command| !command.trim().is_empty()) else {
            return problem("it has no `test_cmd`, so its tests cannot be run");
        };
        if self.log_parser().is_none() {
            let named = self.log_parser.as_deref().unwrap_or_default();
            return problem(&format!(
                "no log parser for `{named}`; SWE-rebench has parse_log_pytest, \
                 parse_log_pytest_options and parse_log_pytest_v2"
            ));
        }
        let texts = [Some(command), self.install_command()];
        let commands = self.eval_commands.iter().flatten().map(String::as_str);
        for text in texts.into_iter().flatten().chain(commands) {
            if let Err(problem) = column::text("install_config", text) {
                return Some(problem);
            }
        }
        None
    }
}
