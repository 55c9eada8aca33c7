//! R2E-Gym's rows: read, written, and turned into [`Task`]s.
//!
//! The invariant: the gold patch of a row is rebuilt from its parsed commit by R2E-Gym's rule
//! (Python files that are not tests), never taken from elsewhere. Rows of the `micro` family and
//! rows made from a repository have the same columns and one more, [`MicroColumns`] or
//! [`RepairColumns`].

mod commit;

pub use commit::{FileDiff, FilePath, Header, HunkRecord, IndexLine, LineRecord, ParsedCommit};

use crate::patch::is_inside;
use crate::repair::{self, RepairColumns};
use crate::task::{Origin, Split, Task, TaskFile, TestStatus};
use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufWriter, Write as _};
use std::time::Duration;

/// Where the repository is in R2E-Gym's images, and in ours.
pub const WORKDIR: &str = "/testbed";
/// Folder of the hidden tests inside [`WORKDIR`].
pub const HIDDEN_FOLDER: &str = "r2e_tests";

/// Runners among a row's test files that find the others with `unittest`.
const UNITTEST_RUNNERS: &[&str] = &["tornado_unittest_runner.py", "unittest_custom_runner.py"];
/// How R2E-Gym's own program limits a test run.
const TEST_TIMEOUT: Duration = Duration::from_mins(5);
/// A micro test run takes milliseconds; a call that hangs is cut after three seconds.
const MICRO_TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// One row of an R2E-Gym data set. JSON columns are read from a text or a decoded object and
/// written as a text; unknown columns are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct R2eRow {
    /// Short name of the repository, e.g. `aiohttp`.
    pub repo_name: String,
    /// Image, one per row.
    pub docker_image: String,
    /// The commit that solves the task.
    pub commit_hash: String,
    /// That commit. Holds the gold patch.
    #[serde(with = "crate::json_column")]
    pub parsed_commit_content: ParsedCommit,
    /// The hidden tests and their recorded logs.
    #[serde(with = "crate::json_column")]
    pub execution_result_content: ExecutionResult,
    /// Files of the commit.
    #[serde(default)]
    pub modified_files: Vec<String>,
    /// Changed Python files that are not tests.
    #[serde(default)]
    pub relevant_files: Vec<String>,
    /// Number of changed files that are not tests.
    #[serde(default)]
    pub num_non_test_files: i64,
    /// Number of functions and methods changed there.
    #[serde(default)]
    pub num_non_test_func_methods: i64,
    /// Number of lines changed there.
    #[serde(default)]
    pub num_non_test_lines: i64,
    /// The issue, between `[ISSUE]` and `[/ISSUE]`.
    pub problem_statement: String,
    /// Status that each hidden test must have.
    #[serde(with = "crate::json_column")]
    pub expected_output_json: BTreeMap<String, TestStatus>,
    /// What only rows of the micro family have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro: Option<MicroColumns>,
    /// What only rows made from a repository have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<RepairColumns>,
}

/// What a micro row says beyond R2E-Gym's columns, as its files are in no image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroColumns {
    /// Task id.
    pub id: String,
    /// Bug family.
    pub family: String,
    /// Part of the family.
    pub split: Split,
    /// Files the agent finds.
    pub agent_files: Vec<TaskFile>,
}

/// Hidden tests of a row, and the logs of its two commits.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExecutionResult {
    /// Repository.
    #[serde(default)]
    pub repo_name: String,
    /// The solving commit.
    #[serde(default)]
    pub new_commit_hash: String,
    /// Test files, relative to [`HIDDEN_FOLDER`]; in a row made from a repository to that.
    pub test_file_names: Vec<String>,
    /// Their contents, in the same order.
    pub test_file_codes: Vec<String>,
    /// Log of the tests on the solving commit.
    #[serde(default)]
    pub new_commit_res_stdout: String,
    /// Log of the tests on its parent.
    #[serde(default)]
    pub old_commit_res_stdout: String,
}

/// A row that is not a task, or a file of rows that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// Reading or writing failed.
    #[error("cannot use the rows file")]
    Io(#[from] std::io::Error),
    /// A row cannot be written.
    #[error("row {line} cannot be written")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// Names and contents of the hidden tests do not pair up.
    #[error("row {row}: {names} test file names but {codes} test file contents")]
    Tests {
        /// Id of the row.
        row: String,
        /// Number of names.
        names: usize,
        /// Number of contents.
        codes: usize,
    },
    /// A hidden test would lie outside its folder.
    #[error("row {row}: test file name `{name}` is not a plain file name inside the repository")]
    TestName {
        /// Id of the row.
        row: String,
        /// The name.
        name: String,
    },
    /// There is nothing to grade by.
    #[error("row {row}: no expected test results")]
    NothingExpected {
        /// Id of the row.
        row: String,
    },
}

impl R2eRow {
    /// Its id: that of the micro task, else `REPO__COMMIT`, as rows have none of their own.
    pub fn id(&self) -> String {
        match &self.micro {
            Some(micro) => micro.id.clone(),
            None => format!("{}__{}", self.repo_name, self.commit_hash),
        }
    }

    /// What the agent reads: what stands between `[ISSUE]` and the last `[/ISSUE]`; all of the
    /// statement if there is no wrapper.
    pub fn issue(&self) -> &str {
        let statement = self.problem_statement.as_str();
        let inside =
            statement.split_once("[ISSUE]").and_then(|(_, rest)| rest.rsplit_once("[/ISSUE]"));
        inside.map_or(statement, |(inside, _)| inside).trim()
    }

    /// The task of this row. Tasks of real repositories have no [`Task::agent_files`]: their tree
    /// is in the image.
    ///
    /// # Errors
    /// If the hidden tests are incomplete or misnamed, or no result is expected.
    pub fn to_task(&self) -> Result<Task, RowError> {
        let result = &self.execution_result_content;
        let (names, codes) = (&result.test_file_names, &result.test_file_codes);
        if names.len() != codes.len() {
            return Err(RowError::Tests { row: self.id(), names: names.len(), codes: codes.len() });
        }
        let is_made = self.repair.is_some();
        let is_wrong = |name: &&String| {
            if is_made { !is_inside(name) } else { name.contains('/') || name.starts_with('.') }
        };
        if let Some(name) = names.iter().find(is_wrong) {
            return Err(RowError::TestName { row: self.id(), name: name.clone() });
        }
        if self.expected_output_json.is_empty() {
            return Err(RowError::NothingExpected { row: self.id() });
        }
        let mut hidden_files: Vec<TaskFile> = names
            .iter()
            .zip(codes)
            .map(|(name, code)| TaskFile {
                path: if is_made { name.clone() } else { format!("{HIDDEN_FOLDER}/{name}") },
                content: code.clone(),
            })
            .collect();
        // These runners look for tests with `unittest`, which enters packages only.
        let package = "__init__.py";
        let runs_unittest = names.iter().any(|name| UNITTEST_RUNNERS.contains(&name.as_str()));
        if !is_made && runs_unittest && !names.iter().any(|name| name == package) {
            let path = format!("{HIDDEN_FOLDER}/{package}");
            hidden_files.push(TaskFile { path, content: String::new() });
        }
        let mut task = Task {
            id: self.id(),
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
            task.test_timeout = Duration::from_secs(repair.test_timeout_s);
            task.origin = Origin::Files;
        }
        Ok(task)
    }
}

/// The command in the images' own test script, by repository and kind of test files.
fn test_command(repo_name: &str, names: &[String]) -> String {
    let unittest = UNITTEST_RUNNERS.iter().find(|runner| names.iter().any(|name| name == *runner));
    let pytest = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA";
    if repo_name == "micro" {
        crate::micro::TEST_COMMAND.to_owned()
    } else if let Some(runner) = unittest {
        format!(".venv/bin/python -W ignore {HIDDEN_FOLDER}/{runner}")
    } else if repo_name.starts_with("orange3") {
        let pytest = pytest.replacen(" .venv", " xvfb-run --auto-servernum .venv", 1);
        format!("QT_QPA_PLATFORM=minimal {pytest} {HIDDEN_FOLDER}")
    } else {
        format!("{pytest} {HIDDEN_FOLDER}")
    }
}

/// Writes rows, one JSON object per line. The file is complete or not there: it is written under
/// a temporary name next to `path` and then renamed.
///
/// # Errors
/// If the file cannot be written.
pub fn write_rows(path: &Utf8Path, rows: &[R2eRow]) -> Result<(), RowError> {
    let partial = Utf8PathBuf::from(format!("{path}.partial"));
    let mut file = BufWriter::new(fs_err::File::create(&partial)?);
    for (n, row) in rows.iter().enumerate() {
        serde_json::to_writer(&mut file, row)
            .map_err(|source| RowError::Json { line: n + 1, source })?;
        file.write_all(b"\n")?;
    }
    let file = file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    file.sync_all()?;
    fs_err::rename(&partial, path)?;
    Ok(())
}
