//! Converts a row to a task.

use super::{HIDDEN_FOLDER, R2eRow, RowError, WORKDIR};
use crate::column::{self, ColumnProblem};
use crate::task::{Origin, Split, Task};
use crate::task_file::TaskFile;
use crate::{micro, repair};
use orchestrate_types::{ImageName, RelativePath, TaskId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Names of test runners that discover the other test files of a row with `unittest`.
const UNITTEST_RUNNERS: &[&str] = &["tornado_unittest_runner.py", "unittest_custom_runner.py"];
/// Time limit of a test run in R2E-Gym's own program.
const TEST_TIMEOUT: Duration = Duration::from_mins(5);
/// Time limit of a micro test run, which takes milliseconds; its runner stops a call that hangs
/// after three seconds.
const MICRO_TEST_TIMEOUT: Duration = Duration::from_secs(20);

impl R2eRow {
    /// Converts the row to a task. A task of R2E-Gym has no [`Task::agent_files`], because its tree
    /// is in the image.
    ///
    /// # Errors
    /// If an id, a name, a path or a size is invalid, the hidden tests are incomplete or misnamed, or
    /// no result is expected.
    pub fn to_task(&self) -> Result<Task, RowError> {
        let id = self.check().map_err(|problem| RowError::Column { row: self.id(), problem })?;
        let result = &self.execution_result_content;
        let (names, codes) = (&result.test_file_names, &result.test_file_codes);
        if names.len() != codes.len() {
            return Err(RowError::Tests { row: self.id(), names: names.len(), codes: codes.len() });
        }
        let is_repair = self.repair.is_some();
        let is_invalid = |name: &&String| {
            RelativePath::new(name.as_str()).is_err()
                || !is_repair && (name.contains('/') || name.starts_with('.'))
        };
        if let Some(name) = names.iter().find(is_invalid) {
            return Err(RowError::TestName { row: self.id(), name: name.clone() });
        }
        if self.expected_output_json.is_empty() {
            return Err(RowError::NothingExpected { row: self.id() });
        }
        let mut hidden_files: Vec<TaskFile> = names
            .iter()
            .zip(codes)
            .map(|(name, code)| TaskFile {
                path: if is_repair { name.clone() } else { format!("{HIDDEN_FOLDER}/{name}") },
                content: code.clone(),
            })
            .collect();
        // These runners discover tests with `unittest`, which searches only in packages.
        let package = "__init__.py";
        let runs_unittest = names.iter().any(|name| UNITTEST_RUNNERS.contains(&name.as_str()));
        if !is_repair && runs_unittest && !names.iter().any(|name| name == package) {
            let path = format!("{HIDDEN_FOLDER}/{package}");
            hidden_files.push(TaskFile { path, content: String::new() });
        }
        let mut task = Task {
            id,
            environment: "r2e".to_owned(),
            family: self.repo_name.clone(),
            split: Split::Train,
            problem_statement: self.issue().to_owned(),
            image: self.docker_image.clone(),
            workdir: WORKDIR.to_owned(),
            agent_files: Vec::new(),
            hidden_files,
            test_command: test_command(&self.repo_name, names),
            test_timeout: TEST_TIMEOUT,
            expected: self.expected_output_json.clone(),
            gold_patch: self.parsed_commit_content.gold_patch(),
            origin: Origin::R2e,
        };
        if let Some(micro) = &self.micro {
            "micro".clone_into(&mut task.environment);
            task.family.clone_from(&micro.family);
            task.split = micro.split;
            task.agent_files.clone_from(&micro.agent_files);
            task.test_timeout = MICRO_TEST_TIMEOUT;
            task.origin = Origin::Files;
        }
        if let Some(repair) = &self.repair {
            repair::ENVIRONMENT.clone_into(&mut task.environment);
            task.family.clone_from(&repair.family);
            task.agent_files.clone_from(&repair.agent_files);
            task.test_command.clone_from(&repair.test_command);
            task.test_timeout = repair.test_timeout_s.get();
            task.origin = Origin::Files;
        }
        check_paths(&task).map_err(|problem| RowError::Column { row: self.id(), problem })?;
        Ok(task)
    }

    /// Checks the columns one by one, and returns the id.
    fn check(&self) -> Result<TaskId, ColumnProblem> {
        let id = |column, id: &str| TaskId::new(id).map_err(|e| ColumnProblem::new(column, e));
        column::name("repo_name", &self.repo_name)?;
        let id = if let Some(micro) = &self.micro {
            id("micro.id", &micro.id)?
        } else {
            id("repo_name", &self.repo_name)?;
            id("commit_hash", &self.commit_hash)?;
            id("commit_hash", &self.id())?
        };
        ImageName::new(self.docker_image.as_str())
            .map_err(|error| ColumnProblem::new("docker_image", error))?;
        column::text("problem_statement", &self.problem_statement)?;
        if self.issue().trim().is_empty() {
            return Err(ColumnProblem::new("problem_statement", "it is empty"));
        }
        column::tests("expected_output_json", self.expected_output_json.keys())?;
        let result = &self.execution_result_content;
        column::files("execution_result_content", &result.test_file_codes)?;
        if let Some(micro) = &self.micro {
            column::name("micro.family", &micro.family)?;
            column::files("micro.agent_files", micro.agent_files.iter().map(|file| &file.content))?;
        }
        if let Some(repair) = &self.repair {
            column::name("repair.family", &repair.family)?;
            column::files(
                "repair.agent_files",
                repair.agent_files.iter().map(|file| &file.content),
            )?;
            column::text("repair.test_command", &repair.test_command)?;
        }
        Ok(id)
    }
}

/// Checks that the agent's files and the hidden files can exist in one tree. A hidden file may take the
/// place of an agent's file.
fn check_paths(task: &Task) -> Result<(), ColumnProblem> {
    let column = match task.environment.as_str() {
        repair::ENVIRONMENT => "repair.agent_files",
        _ => "micro.agent_files",
    };
    let own = task.agent_files.iter().map(|file| file.path.as_str());
    let own = column::paths(column, own, &BTreeSet::new())?;
    let hidden = task.hidden_files.iter().map(|file| file.path.as_str());
    column::paths("execution_result_content", hidden, &own)?;
    Ok(())
}

/// The test command of R2E-Gym's images, which depends on the repository and its test runner.
fn test_command(repo_name: &str, names: &[String]) -> String {
    let unittest = UNITTEST_RUNNERS.iter().find(|runner| names.iter().any(|name| name == *runner));
    let pytest = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA";
    if repo_name == "micro" {
        micro::TEST_COMMAND.to_owned()
    } else if let Some(runner) = unittest {
        format!(".venv/bin/python -W ignore {HIDDEN_FOLDER}/{runner}")
    } else if repo_name.starts_with("orange3") {
        let pytest = pytest.replacen(" .venv", " xvfb-run --auto-servernum .venv", 1);
        format!("QT_QPA_PLATFORM=minimal {pytest} {HIDDEN_FOLDER}")
    } else {
        format!("{pytest} {HIDDEN_FOLDER}")
    }
}
