//! Training runs of SWE-bench tests through the reporter.
//!
//! The harness's script is run in two parts: what prepares the tree, and then the tests, whose results
//! the reporter collects. The invariant: the nonce exists only after the first part has ended.

use super::tests_run::{TestRun, run_reported};
use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::reporter::{self, TestCommand, TestPlan};
use orchestrate_tasks::{Task, TestStatus};
use std::fmt::Write as _;

/// The interpreter of SWE-bench's images, and the path that activating its environment gives.
const PYTHON: &str = "/opt/miniconda3/envs/testbed/bin/python";
const PATH: &str = "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:\
    /usr/sbin:/usr/bin:/sbin:/bin";
const START: &str = ": '>>>>> Start Test Output'\n";

/// A script of the harness in two parts.
#[derive(Debug)]
pub(super) struct SplitScript {
    /// Prepares the tree: installs it and applies the test patch.
    pub(super) setup: String,
    /// Runs the tests without the reporter, if it cannot start.
    pub(super) tests: String,
    command: TestCommand,
}

impl SplitScript {
    /// Splits the script; `None` if one pytest command does not run all its tests.
    pub(super) fn of(script: &str) -> Option<Self> {
        let (setup, tests) = script.split_once(START)?;
        let (line, rest) = tests.split_once('\n')?;
        let arguments = line.strip_prefix("pytest ")?;
        if !rest.starts_with("SWEBENCH_TEST_EXIT_CODE=") {
            return None;
        }
        let mut command = TestCommand::parse(&format!("python -m pytest {arguments}"))?;
        PYTHON.clone_into(&mut command.python);
        command.env.insert("PATH".to_owned(), PATH.to_owned());
        command.env.insert("PIP_RETRIES".to_owned(), "0".to_owned());
        let activate = "source /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed";
        let tests = format!("#!/bin/bash\n{activate}\nset -uxo pipefail\n{START}{tests}");
        Some(Self { setup: setup.to_owned(), tests, command })
    }

    /// Runs the tests in the prepared tree; `None` if the reporter cannot start in this image.
    pub(super) async fn run(
        &self,
        sandbox: &mut dyn Sandbox,
        task: &Task,
        touched: &[String],
        tracing: &[String],
        folder: &str,
    ) -> Result<Option<TestRun>, SandboxError> {
        let is_path = |argument: &&String| !argument.starts_with('-');
        let hidden = self.command.arguments.iter().filter(is_path);
        let plan = TestPlan {
            touched: touched.to_vec(),
            tracing: tracing.to_vec(),
            hidden: hidden.map(|path| path.split("::").next().unwrap_or(path).to_owned()).collect(),
            unset: ["PAGER", "GIT_PAGER", "LANG"].map(ToOwned::to_owned).to_vec(),
        };
        let files = reporter::files(task, &self.command, &plan, folder)
            .map_err(|error| refused(sandbox, "plan", error.to_string()))?;
        let files: Vec<FileEntry> = files.iter().map(file_entry).collect();
        sandbox.write_files(&files).await?;
        run_reported(sandbox, task, &self.command, folder).await
    }
}

/// The log that the harness would read for these results.
pub(super) fn log_of(results: &[(String, TestStatus)]) -> String {
    let mut log = format!("+ {START}");
    for (test, status) in results {
        let word = match status {
            TestStatus::Passed => "PASSED",
            TestStatus::Failed => "FAILED",
            TestStatus::Error => "ERROR",
        };
        // An id is one line, so it cannot contain another result.
        let test = test.replace(['\n', '\r'], " ");
        let _ = writeln!(log, "{word} {test}");
    }
    log.push_str("+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n");
    log
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_with_one_pytest_command_are_split() {
        let script = "#!/bin/bash\nsetup\n: '>>>>> Start Test Output'\npytest -rA tests/test_a.py\n\
            SWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n";
        let split = SplitScript::of(script).unwrap();
        assert_eq!(split.setup, "#!/bin/bash\nsetup\n");
        assert_eq!(split.command.arguments, ["-rA", "tests/test_a.py"]);
        assert!(split.tests.contains("pytest -rA tests/test_a.py\nSWEBENCH_TEST_EXIT_CODE=$?"));
        for other in ["./tests/runtests.py x", "pytest -rA a; pytest b", "tox -epy39"] {
            let script = script.replace("pytest -rA tests/test_a.py", other);
            assert!(SplitScript::of(&script).is_none(), "{other}");
        }
    }

    #[test]
    fn results_are_written_as_a_log_with_one_line_each() {
        let results = [
            ("tests/test_a.py::test_x".to_owned(), TestStatus::Passed),
            ("a\nPASSED b".to_owned(), TestStatus::Failed),
        ];
        let log = log_of(&results);
        assert!(log.contains("\nPASSED tests/test_a.py::test_x\nFAILED a PASSED b\n"), "{log}");
    }
}
