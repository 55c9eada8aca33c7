//! Rows of the SWE-bench family.

use super::family::SweFamily;
use super::parsers::LogParser;
use super::rebench::InstallConfig;
use super::spec::{self, Spec, SpecError};
use super::{Harness, smith};
use crate::column::{self, ColumnProblem};
use crate::patch;
use orchestrate_types::{ImageName, TaskId, TestTimeout};
use serde::{Deserialize, Serialize};

/// A row of SWE-bench (full, Lite or Verified), with the columns of version 4 or 5 of the harness,
/// or of another data set with such columns ([`SweFamily`]). Columns that are not listed here are
/// ignored, unless they look like one that is ([`SweRow::COLUMNS`]).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweRow {
    /// Id of the instance, `OWNER__NAME-NUMBER`.
    pub instance_id: String,
    /// Repository, `owner/name`.
    pub repo: String,
    /// Version of the repository, by which the harness's table is searched.
    #[serde(default)]
    pub version: String,
    /// Commit that the task starts from. Not used for SWE-smith.
    #[serde(default)]
    pub base_commit: String,
    /// The issue text that the agent reads.
    pub problem_statement: String,
    /// The gold patch; in SWE-smith, the bug, which the gold patch undoes ([`SweRow::gold_patch`]).
    /// Never shown to the agent.
    #[serde(default)]
    pub patch: String,
    /// The patch that adds the hidden tests. Never shown to the agent. Absent in SWE-smith, whose
    /// tests are in the image.
    #[serde(default)]
    pub test_patch: String,
    /// Tests that the gold patch makes pass. Read from a list or from its JSON text.
    #[serde(rename = "FAIL_TO_PASS", with = "crate::json_column")]
    pub fail_to_pass: Vec<String>,
    /// Tests that pass with and without the gold patch.
    #[serde(rename = "PASS_TO_PASS", with = "crate::json_column")]
    pub pass_to_pass: Vec<String>,
    /// Container image, in rows for version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Container image, in R2E-Gym's copies of these rows and in SWE-rebench.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub docker_image: Option<String>,
    /// Container image, in rows made for mini-swe-agent, and in SWE-rebench and SWE-smith.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_name: Option<String>,
    /// Evaluation script, in rows for version 5.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::column::optional"
    )]
    pub eval_script: Option<String>,
    /// Name of the log parser, in rows for version 5; see [`LogParser::named`].
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::column::optional"
    )]
    pub log_parser: Option<String>,
    /// Which tests the runner reports, `pass_and_fail` or `fail_only`, in rows for version 5.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::column::optional"
    )]
    pub eval_type: Option<EvalType>,
    /// Commands of the row's tests, in SWE-rebench. Read from an object or from its JSON text.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::json_column::deserialize"
    )]
    pub install_config: Option<InstallConfig>,
    /// Time limit of the evaluation script, written in seconds, where the harness's own 30 minutes do
    /// not fit the row.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::column::optional_time_limit"
    )]
    pub test_timeout_s: Option<TestTimeout>,
}

/// Which tests a repository's test runner reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalType {
    /// All tests.
    PassAndFail,
    /// Only failed tests, so a test that is not reported has passed.
    FailOnly,
}

impl SweRow {
    /// The columns that are read.
    pub const COLUMNS: [&str; 17] = [
        "instance_id",
        "repo",
        "version",
        "base_commit",
        "problem_statement",
        "patch",
        "test_patch",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "image",
        "docker_image",
        "image_name",
        "eval_script",
        "log_parser",
        "eval_type",
        "install_config",
        "test_timeout_s",
    ];

    /// The data set that the row belongs to, recognised by its columns and its repository.
    pub fn family(&self) -> SweFamily {
        if self.install_config.is_some() {
            SweFamily::SweRebench
        } else if self.repo.starts_with("swesmith/") {
            SweFamily::SweSmith
        } else if self.eval_script.is_none() && spec::is_of_gym(&self.repo) {
            SweFamily::SweGym
        } else {
            SweFamily::SweBench
        }
    }

    /// The reason why the row cannot be a task, whatever the version of the harness; `None` if it can.
    pub fn problem(&self) -> Option<String> {
        let is_smith = self.family() == SweFamily::SweSmith;
        for (column, text) in [
            ("instance_id", &self.instance_id),
            ("repo", &self.repo),
            ("problem_statement", &self.problem_statement),
            ("base_commit", &self.base_commit),
            ("test_patch", &self.test_patch),
        ] {
            let is_needed = !is_smith || !matches!(column, "base_commit" | "test_patch");
            if is_needed && text.trim().is_empty() {
                return Some(format!("column `{column}` is empty"));
            }
        }
        if let Err(problem) = self.check() {
            return Some(problem.to_string());
        }
        if self.fail_to_pass.is_empty() {
            return Some("`FAIL_TO_PASS` is empty: doing nothing would solve the task".to_owned());
        }
        let problem = self.family_problem();
        problem.or_else(|| self.check_image().err().map(|problem| problem.to_string()))
    }

    /// The reason why the row cannot be run as its data set runs it.
    fn family_problem(&self) -> Option<String> {
        match self.family() {
            SweFamily::SweSmith => return self.smith_problem().map(|problem| problem.to_string()),
            SweFamily::SweRebench => {
                let config = self.install_config.as_ref();
                return config.and_then(InstallConfig::problem).map(|problem| problem.to_string());
            }
            SweFamily::SweBench | SweFamily::SweGym => {}
        }
        // If neither version can grade the row, the reason is that of the one that reads more columns.
        let of_version_4 = self.problem_of(Harness::V4_1_0);
        of_version_4.and_then(|_| self.problem_of(Harness::V5_0_2)).map(|p| p.to_string())
    }

    /// The reason why this version of the harness cannot grade the row, which another version can,
    /// with the remedy; `None` if it can.
    pub fn problem_with(&self, harness: Harness) -> Option<String> {
        let problem = self.problem_of(harness)?;
        let other = Harness::ALL.into_iter().find(|&other| self.problem_of(other).is_none());
        let remedy = other.map(|other| {
            let version = other.version();
            format!("; this row needs reward.harness = \"{version}\" (grade: --harness {version})")
        });
        Some(format!("{problem}{}", remedy.unwrap_or_default()))
    }

    /// The reason why this version of the harness cannot run the row's tests or parse their log.
    fn problem_of(&self, harness: Harness) -> Option<ColumnProblem> {
        if !matches!(self.family(), SweFamily::SweBench | SweFamily::SweGym) {
            return None;
        }
        if self.log_parser(harness).is_none() {
            return Some(match (harness, &self.log_parser, &self.eval_script) {
                (Harness::V5_0_2, Some(name), _) => {
                    ColumnProblem::new("log_parser", format!("no log parser for `{name}`"))
                }
                (Harness::V4_1_0, _, Some(_)) => {
                    ColumnProblem::new("repo", SpecError::OwnScript(self.repo.clone()))
                }
                _ => ColumnProblem::new("repo", format!("no log parser for `{}`", self.repo)),
            });
        }
        if self.own_script(harness).is_some() {
            return None;
        }
        self.spec().err().map(|error| ColumnProblem::new("version", error))
    }

    /// Checks the columns one by one.
    fn check(&self) -> Result<(), ColumnProblem> {
        TaskId::new(self.instance_id.as_str())
            .map_err(|error| ColumnProblem::new("instance_id", error))?;
        column::name("repo", &self.repo)?;
        column::name("version", &self.version)?;
        column::revision("base_commit", &self.base_commit)?;
        for (column, text) in [
            ("problem_statement", Some(&self.problem_statement)),
            ("patch", Some(&self.patch)),
            ("test_patch", Some(&self.test_patch)),
            ("eval_script", self.eval_script.as_ref()),
        ] {
            column::text(column, text.map_or("", String::as_str))?;
        }
        column::test_lists([
            ("FAIL_TO_PASS", &self.fail_to_pass),
            ("PASS_TO_PASS", &self.pass_to_pass),
        ])
    }

    /// Checks the image that the row names.
    fn check_image(&self) -> Result<(), ColumnProblem> {
        let named = self.named_images();
        column::same_image(&named)?;
        let column = named.first().map_or("instance_id", |(column, _)| column);
        ImageName::new(self.image()).map(drop).map_err(|error| ColumnProblem::new(column, error))
    }

    /// The images that the row names, by column. One that is empty, as tools write it for a missing
    /// value, is not named. SWE-smith's own name for its image does not say where it is published.
    fn named_images(&self) -> Vec<(&'static str, &str)> {
        let is_smith = self.family() == SweFamily::SweSmith;
        let image_name = self.image_name.as_deref();
        let image_name = image_name.filter(|name| !(is_smith && self.is_smith_name(name)));
        [
            ("image", self.image.as_deref()),
            ("docker_image", self.docker_image.as_deref()),
            ("image_name", image_name),
        ]
        .into_iter()
        .filter_map(|(column, image)| Some((column, image?)))
        .filter(|(_, image)| !image.trim().is_empty())
        .collect()
    }

    /// The container image: the one that the row names (`image`, `docker_image` or `image_name`),
    /// else the one that the data set publishes for the instance.
    pub fn image(&self) -> String {
        let id = |separator| self.instance_id.to_lowercase().replace("__", separator);
        let published = || match self.family() {
            SweFamily::SweBench => format!("swebench/sweb.eval.x86_64.{}:latest", id("_1776_")),
            SweFamily::SweGym => format!("xingyaoww/sweb.eval.x86_64.{}:latest", id("_s_")),
            SweFamily::SweRebench => {
                format!("swerebench/sweb.eval.x86_64.{}:latest", id("_1776_"))
            }
            SweFamily::SweSmith => self.smith_image(),
        };
        self.named_images().first().map_or_else(published, |(_, image)| (*image).to_owned())
    }

    /// The unified diff that solves the task. Empty for a row of SWE-smith whose `patch` cannot be
    /// reversed, which is refused when it is read.
    pub fn gold_patch(&self) -> String {
        match self.family() {
            SweFamily::SweSmith => patch::reversed(&self.patch).unwrap_or_default(),
            _ => self.patch.clone(),
        }
    }

    /// The parser of the row's test logs in this version of SWE-bench's harness: version 5 uses the one
    /// that the row names. Version 4, and every version for a row that names none, uses that of its
    /// repository. `None` if it is unknown. Other data sets' harnesses have one parser for a row.
    pub fn log_parser(&self, harness: Harness) -> Option<LogParser> {
        let family = self.family();
        match (family, harness, &self.log_parser) {
            (SweFamily::SweSmith, ..) => smith::profile(&self.repo).map(|profile| profile.parser),
            (SweFamily::SweRebench, ..) => self.install_config.as_ref()?.log_parser(),
            (SweFamily::SweBench, Harness::V5_0_2, Some(name)) => LogParser::named(name),
            (SweFamily::SweBench | SweFamily::SweGym, ..) => spec::parser(family, &self.repo),
        }
    }

    /// The row's own evaluation script, if this version of the harness reads it.
    pub(super) fn own_script(&self, harness: Harness) -> Option<&str> {
        match harness {
            Harness::V4_1_0 => None,
            Harness::V5_0_2 => self.eval_script.as_deref(),
        }
    }

    /// The table's entry for the row.
    pub(super) fn spec(&self) -> Result<&'static Spec, SpecError> {
        let spec = spec::spec(self.family(), &self.repo, &self.version);
        match (spec, &self.eval_script) {
            (Err(SpecError::Repo(repo)), Some(_)) => Err(SpecError::OwnScript(repo)),
            (spec, _) => spec,
        }
    }

    /// Which tests the runner reports by the rules of `harness`. Version 4 has a fixed list of
    /// repositories that report only failures; none of them is in this crate's table.
    pub(super) fn eval_type(&self, harness: Harness) -> EvalType {
        match harness {
            Harness::V4_1_0 => EvalType::PassAndFail,
            Harness::V5_0_2 => self.eval_type.unwrap_or(EvalType::PassAndFail),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_column_is_listed() {
        let row = SweRow {
            image: Some(String::new()),
            docker_image: Some(String::new()),
            image_name: Some(String::new()),
            eval_script: Some(String::new()),
            log_parser: Some(String::new()),
            eval_type: Some(EvalType::FailOnly),
            install_config: Some(InstallConfig::default()),
            test_timeout_s: Some(TestTimeout::nearest(Duration::MAX)),
            ..SweRow::default()
        };
        let value = serde_json::to_value(row).unwrap();
        let written: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(written, SweRow::COLUMNS);
    }
}
