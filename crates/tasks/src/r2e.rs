//! R2E-Gym's rows: read, written, and turned into [`Task`](crate::Task)s.
//!
//! The invariant: the gold patch of a row is always rebuilt from its parsed commit by R2E-Gym's
//! rule (Python files that are not tests). `micro` rows and `repair` rows have the same columns and
//! one more, [`MicroColumns`] or [`RepairColumns`].

mod commit;
mod task;

pub use commit::{FileDiff, FilePath, Header, HunkRecord, IndexLine, LineRecord, ParsedCommit};

pub use crate::column::ColumnProblem;
use crate::task::{Split, TestStatus};
use crate::task_file::TaskFile;
use crate::text::printable;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::TestTimeout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufWriter, Write as _};

/// Folder of the repository in all images.
pub const WORKDIR: &str = "/testbed";
/// Folder of the hidden tests inside [`WORKDIR`].
pub const HIDDEN_FOLDER: &str = "r2e_tests";

/// Number of characters of a refused name that a message repeats.
const NAME_CHARS: usize = 120;

/// One row of an R2E-Gym data set. JSON columns are read as JSON text or as decoded values and
/// written as JSON text; unknown columns are ignored, unless they look like one of
/// [`R2eRow::COLUMNS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct R2eRow {
    /// Short name of the repository, e.g. `aiohttp`.
    pub repo_name: String,
    /// Container image; R2E-Gym has one per row.
    pub docker_image: String,
    /// The commit that solves the task.
    pub commit_hash: String,
    /// The changes of that commit, from which the gold patch is rebuilt.
    #[serde(with = "crate::json_column")]
    pub parsed_commit_content: ParsedCommit,
    /// The hidden tests and their recorded logs.
    #[serde(with = "crate::json_column")]
    pub execution_result_content: ExecutionResult,
    /// Files that the commit changes.
    #[serde(default)]
    pub modified_files: Vec<String>,
    /// Python files that the commit changes and that are not tests.
    #[serde(default)]
    pub relevant_files: Vec<String>,
    /// Number of changed files that are not tests.
    #[serde(default)]
    pub num_non_test_files: i64,
    /// Number of functions and methods changed in those files.
    #[serde(default)]
    pub num_non_test_func_methods: i64,
    /// Number of lines changed in those files.
    #[serde(default)]
    pub num_non_test_lines: i64,
    /// The issue, between `[ISSUE]` and `[/ISSUE]`.
    pub problem_statement: String,
    /// Status that each hidden test must have.
    #[serde(with = "crate::json_column")]
    pub expected_output_json: BTreeMap<String, TestStatus>,
    /// Additional column of `micro` rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro: Option<MicroColumns>,
    /// Additional column of `repair` rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<RepairColumns>,
}

/// Content of the additional column of a `micro` row, whose files are not in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroColumns {
    /// Task id.
    pub id: String,
    /// Bug family.
    pub family: String,
    /// Split that the task belongs to.
    pub split: Split,
    /// Files the agent finds.
    pub agent_files: Vec<TaskFile>,
}

/// Content of the additional column of a `repair` row, whose files are not in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairColumns {
    /// Name of the fault, see [`crate::repair::Fault::name`].
    pub family: String,
    /// Files the agent finds: the repository with the fault, without the test files that detect it.
    pub agent_files: Vec<TaskFile>,
    /// Shell command that runs the hidden tests in the repository's folder.
    pub test_command: String,
    /// Time limit of [`RepairColumns::test_command`], written in seconds.
    #[serde(deserialize_with = "crate::column::time_limit")]
    pub test_timeout_s: TestTimeout,
}

/// Hidden tests of a row, and the logs of its two commits.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExecutionResult {
    /// Short name of the repository.
    #[serde(default)]
    pub repo_name: String,
    /// The commit that solves the task.
    #[serde(default)]
    pub new_commit_hash: String,
    /// Paths of the test files, relative to [`HIDDEN_FOLDER`]; in a `repair` row relative to the
    /// repository.
    pub test_file_names: Vec<String>,
    /// Contents of the test files, in the same order.
    pub test_file_codes: Vec<String>,
    /// Test log of the commit that solves the task.
    #[serde(default)]
    pub new_commit_res_stdout: String,
    /// Test log of the parent of that commit.
    #[serde(default)]
    pub old_commit_res_stdout: String,
}

/// A row that cannot be a task, or a file of rows that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// Writing the file failed.
    #[error("cannot write the file of rows")]
    Io(#[from] std::io::Error),
    /// A row cannot be serialised.
    #[error("cannot write row {line} as JSON")]
    Json {
        /// Line of the file, from 1.
        line: usize,
        /// The serialiser's error.
        source: serde_json::Error,
    },
    /// The numbers of names and contents of the hidden tests differ.
    #[error(
        "row {row}: column `execution_result_content`: {names} `test_file_names` but {codes} \
         `test_file_codes`"
    )]
    Tests {
        /// Id of the row.
        row: String,
        /// Number of names.
        names: usize,
        /// Number of contents.
        codes: usize,
    },
    /// A hidden test would be written outside its folder.
    #[error(
        "row {row}: column `execution_result_content`: `test_file_names` has `{}`, which is not a \
         plain file name inside the repository",
        printable(name, NAME_CHARS)
    )]
    TestName {
        /// Id of the row.
        row: String,
        /// The invalid name.
        name: String,
    },
    /// A column has a value that no task may have.
    #[error("row {row}: {problem}")]
    Column {
        /// Id of the row.
        row: String,
        /// The column and its problem.
        problem: ColumnProblem,
    },
    /// The row expects no test result, so it cannot be graded.
    #[error("row {row}: column `expected_output_json`: it is empty")]
    NothingExpected {
        /// Id of the row.
        row: String,
    },
}

impl R2eRow {
    /// The columns that are read.
    pub const COLUMNS: [&str; 14] = [
        "repo_name",
        "docker_image",
        "commit_hash",
        "parsed_commit_content",
        "execution_result_content",
        "modified_files",
        "relevant_files",
        "num_non_test_files",
        "num_non_test_func_methods",
        "num_non_test_lines",
        "problem_statement",
        "expected_output_json",
        "micro",
        "repair",
    ];

    /// Other names of columns, and names of columns that only other rows have, with the right ones.
    pub(crate) const OTHER_NAMES: [(&str, &str); 2] =
        [("image_name", "docker_image"), ("test_timeout_s", "repair.test_timeout_s")];

    /// The task's id: that of [`R2eRow::micro`], else `REPO__COMMIT`, because rows have no column
    /// for it.
    pub fn id(&self) -> String {
        match &self.micro {
            Some(micro) => micro.id.clone(),
            None => format!("{}__{}", self.repo_name, self.commit_hash),
        }
    }

    /// The issue that the agent reads: the text between `[ISSUE]` and the last `[/ISSUE]`, or the
    /// whole statement if it has no such markers.
    pub fn issue(&self) -> &str {
        let statement = self.problem_statement.as_str();
        let inside =
            statement.split_once("[ISSUE]").and_then(|(_, rest)| rest.rsplit_once("[/ISSUE]"));
        inside.map_or(statement, |(inside, _)| inside).trim()
    }
}

/// Writes rows as JSON lines. The rows are written to a temporary file next to `path`, which is
/// then renamed, so `path` is never incomplete.
///
/// # Errors
/// If the file cannot be written.
pub fn write_rows<R: Serialize>(path: &Utf8Path, rows: &[R]) -> Result<(), RowError> {
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
