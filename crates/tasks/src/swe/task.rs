//! Converts a row to a task, and a report to a verdict.

use super::{Report, SweFamily, SweRow};
use crate::r2e::WORKDIR;
use crate::task::{Origin, Split, Task, TestStatus, Verdict};
use orchestrate_types::{TaskId, TestTimeout};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time limit of an evaluation script in the harness.
const TEST_TIMEOUT: Duration = Duration::from_mins(30);

impl SweRow {
    /// Converts the row to a task.
    pub fn to_task(&self) -> Task {
        let tests = self.fail_to_pass.iter().chain(&self.pass_to_pass);
        let family = self.family();
        Task {
            // Of a row that was read, this is the id itself.
            id: TaskId::made_of(&self.instance_id),
            environment: family.name().to_owned(),
            family: self.repo.clone(),
            split: match family {
                SweFamily::SweBench => Split::HeldOut,
                _ => Split::Train,
            },
            problem_statement: self.problem_statement.clone(),
            image: self.image(),
            workdir: WORKDIR.to_owned(),
            agent_files: Vec::new(),
            hidden_files: Vec::new(),
            test_command: "/bin/bash /eval.sh".to_owned(),
            test_timeout: self.test_timeout_s.map_or(TEST_TIMEOUT, TestTimeout::get),
            expected: tests.map(|test| (test.clone(), TestStatus::Passed)).collect(),
            gold_patch: self.gold_patch(),
            origin: Origin::SweBench(Box::new(self.clone())),
        }
    }

    /// Converts the harness's report to a verdict; without a report, no test passed.
    pub fn verdict(&self, report: Option<Report>) -> Verdict {
        let outcomes = report.as_ref().and_then(|report| report.tests_status.as_ref());
        let lists = || outcomes.into_iter().flat_map(|o| [&o.fail_to_pass, &o.pass_to_pass]);
        let passed = lists().flat_map(|list| &list.success).map(|test| (test, TestStatus::Passed));
        let failed = lists().flat_map(|list| &list.failure).map(|test| (test, TestStatus::Failed));
        let statuses: BTreeMap<String, TestStatus> =
            passed.chain(failed).map(|(test, status)| (test.clone(), status)).collect();
        let wanted = self.fail_to_pass.iter().chain(&self.pass_to_pass);
        let did_not_pass = |test: &&String| statuses.get(*test) != Some(&TestStatus::Passed);
        let differing = wanted.filter(did_not_pass).cloned().collect();
        let reward = f64::from(u8::from(report.as_ref().is_some_and(|report| report.resolved)));
        Verdict {
            reward,
            official_reward: reward,
            statuses,
            differing,
            report,
            suspicious: Vec::new(),
        }
    }
}
