//! Rows of the SWE-bench family.

use super::parsers::LogParser;
use super::spec::{self, spec};
use super::{Harness, Report};
use crate::r2e::WORKDIR;
use crate::task::{Origin, Split, Task, TestStatus, Verdict};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the harness lets an evaluation script run.
const TEST_TIMEOUT: Duration = Duration::from_mins(30);

/// A row of SWE-bench (full, Lite or Verified), in the columns of harness 4 or 5. Columns that no
/// part of this program needs are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweRow {
    /// `OWNER__NAME-NUMBER`.
    pub instance_id: String,
    /// `owner/name`.
    pub repo: String,
    /// Version of the repository, the key into the harness' table.
    #[serde(default)]
    pub version: String,
    /// Commit that the task begins at.
    pub base_commit: String,
    /// What the agent reads.
    pub problem_statement: String,
    /// The solution. Never shown to the agent.
    #[serde(default)]
    pub patch: String,
    /// The hidden tests. Never shown to the agent.
    pub test_patch: String,
    /// Tests that the solution makes pass. Read from a list or from its JSON text.
    #[serde(rename = "FAIL_TO_PASS", with = "crate::json_column")]
    pub fail_to_pass: Vec<String>,
    /// Tests that pass before and after.
    #[serde(rename = "PASS_TO_PASS", with = "crate::json_column")]
    pub pass_to_pass: Vec<String>,
    /// Image, in rows for version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Image, in R2E-Gym's copies of these rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub docker_image: Option<String>,
    /// Evaluation script, in rows for version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_script: Option<String>,
    /// Name of the log parser, in rows for version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_parser: Option<String>,
    /// `pass_and_fail` or `fail_only`, in rows for version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_type: Option<EvalType>,
}

/// What tests a repository's runner reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalType {
    /// All of them.
    PassAndFail,
    /// Those that failed: an absent one passed.
    FailOnly,
}

impl SweRow {
    /// Why the row cannot be a task; `None` if it can.
    pub fn problem(&self) -> Option<String> {
        for (column, text) in [
            ("instance_id", &self.instance_id),
            ("repo", &self.repo),
            ("base_commit", &self.base_commit),
            ("problem_statement", &self.problem_statement),
            ("test_patch", &self.test_patch),
        ] {
            if text.trim().is_empty() {
                return Some(format!("column `{column}` is empty"));
            }
        }
        if self.fail_to_pass.is_empty() {
            return Some("`FAIL_TO_PASS` is empty: doing nothing would solve the task".to_owned());
        }
        if self.log_parser().is_none() {
            let named = self.log_parser.as_deref().unwrap_or(&self.repo);
            return Some(format!("no log parser for `{named}`"));
        }
        if self.eval_script.is_some() {
            return None;
        }
        spec(&self.repo, &self.version).err().map(|error| error.to_string())
    }

    /// The image: the row's own, else the one that SWE-bench publishes for the instance.
    pub fn image(&self) -> String {
        let published = || {
            let id = self.instance_id.to_lowercase().replace("__", "_1776_");
            format!("swebench/sweb.eval.x86_64.{id}:latest")
        };
        self.image.clone().or_else(|| self.docker_image.clone()).unwrap_or_else(published)
    }

    /// Who reads its test logs.
    pub fn log_parser(&self) -> Option<LogParser> {
        match &self.log_parser {
            Some(name) => LogParser::named(name),
            None => spec::parser(&self.repo),
        }
    }

    /// The task of this row.
    pub fn to_task(&self) -> Task {
        let tests = self.fail_to_pass.iter().chain(&self.pass_to_pass);
        Task {
            id: self.instance_id.clone(),
            environment: "swe-bench".to_owned(),
            family: self.repo.clone(),
            split: Split::HeldOut,
            problem_statement: self.problem_statement.clone(),
            image: self.image(),
            workdir: WORKDIR.to_owned(),
            agent_files: Vec::new(),
            hidden_files: Vec::new(),
            test_command: "/bin/bash /eval.sh".to_owned(),
            test_timeout: TEST_TIMEOUT,
            expected: tests.map(|test| (test.clone(), TestStatus::Passed)).collect(),
            gold_patch: self.patch.clone(),
            origin: Origin::SweBench(Box::new(self.clone())),
        }
    }

    /// The harness' report as a verdict; without one nothing passed.
    pub fn verdict(&self, report: Option<Report>) -> Verdict {
        let outcomes = report.as_ref().and_then(|report| report.tests_status.as_ref());
        let lists = || outcomes.into_iter().flat_map(|o| [&o.fail_to_pass, &o.pass_to_pass]);
        let passed = lists().flat_map(|list| &list.success).map(|test| (test, TestStatus::Passed));
        let failed = lists().flat_map(|list| &list.failure).map(|test| (test, TestStatus::Failed));
        let statuses: BTreeMap<String, TestStatus> =
            passed.chain(failed).map(|(test, status)| (test.clone(), status)).collect();
        let wanted = self.fail_to_pass.iter().chain(&self.pass_to_pass);
        let is_missing = |test: &&String| statuses.get(*test) != Some(&TestStatus::Passed);
        let differing = wanted.filter(is_missing).cloned().collect();
        let reward = f64::from(u8::from(report.as_ref().is_some_and(|report| report.resolved)));
        Verdict { reward, official_reward: reward, statuses, differing, report }
    }

    /// What its tests report. Version 4 knows the repositories that report failures only, none of
    /// which it runs here.
    pub(super) fn eval_type(&self, harness: Harness) -> EvalType {
        match harness {
            Harness::V4_1_0 => EvalType::PassAndFail,
            Harness::V5_0_2 => self.eval_type.unwrap_or(EvalType::PassAndFail),
        }
    }
}
