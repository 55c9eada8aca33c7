//! Builds the row of a repair task: R2E-Gym's columns, and one more for what is not in an image.

use super::issue::{self, Failure};
use super::{Mutant, TaskGenerator};
use crate::patch::{self, LineKind};
use crate::r2e::{ExecutionResult, FileDiff, ParsedCommit, R2eRow, RepairColumns};
use crate::task_file::TaskFile;
use orchestrate_types::TestTimeout;

/// A mutant that some tests detect.
pub(super) struct DetectedMutant<'a> {
    /// The repository with the fault.
    pub(super) tree: Vec<TaskFile>,
    /// Content of the changed file without the fault.
    pub(super) solved: String,
    /// Content of the changed file with the fault.
    pub(super) faulty: String,
    pub(super) failures: Vec<Failure>,
    /// Test log of `tree`.
    pub(super) log: &'a [u8],
}

/// Builds the row of `mutant`, which changes the file `path`.
pub(super) fn build(
    generator: &TaskGenerator,
    path: &str,
    mutant: &Mutant,
    detected: DetectedMutant<'_>,
) -> R2eRow {
    let DetectedMutant { mut tree, solved, faulty, failures, log } = detected;
    let name = generator.repository.name.clone();
    let gold = patch::file_diff(path, Some(&faulty), Some(&solved));
    let added = |line: &&patch::HunkLine| line.kind == LineKind::Added;
    let solution: Vec<String> = gold
        .hunks
        .iter()
        .flat_map(|hunk| hunk.lines.iter().filter(added))
        .map(|line| line.text.trim().to_owned())
        .collect();
    let issue = issue::write(&name, &failures, &solution);
    // The failing tests would reveal where the fault is. The grader gets their files as hidden
    // files.
    let failing_files: Vec<&str> =
        failures.iter().filter_map(|failure| failure.test.split("::").next()).collect();
    tree.retain(|file| !failing_files.contains(&file.path.as_str()));
    let hidden = generator.hidden_files();
    let command = generator.test_command();

    let mut hasher = blake3::Hasher::new();
    for file in &generator.repository.files {
        for part in [&file.path, &file.content] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
    for part in [path, &faulty, &command, &issue] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let commit_hash: String = hasher.finalize().to_hex().chars().take(40).collect();
    let lines = gold.hunks.iter().flat_map(|hunk| &hunk.lines);
    let changed = lines.filter(|line| line.kind != LineKind::Context).count();
    R2eRow {
        repo_name: name.clone(),
        docker_image: generator.image.clone(),
        commit_hash: commit_hash.clone(),
        parsed_commit_content: ParsedCommit {
            file_diffs: vec![FileDiff::of(&gold, &faulty, &solved)],
            old_commit_hash: format!("{commit_hash}^"),
            new_commit_hash: commit_hash.clone(),
            commit_message: format!("repair {} in {}", mutant.fault.name(), mutant.function),
            commit_date: String::new(),
        },
        execution_result_content: ExecutionResult {
            repo_name: name,
            new_commit_hash: commit_hash,
            test_file_names: hidden.iter().map(|file| file.path.clone()).collect(),
            test_file_codes: hidden.into_iter().map(|file| file.content).collect(),
            new_commit_res_stdout: String::new(),
            old_commit_res_stdout: String::from_utf8_lossy(log).into_owned(),
        },
        modified_files: vec![path.to_owned()],
        relevant_files: vec![path.to_owned()],
        num_non_test_files: 1,
        num_non_test_func_methods: 1,
        num_non_test_lines: i64::try_from(changed).unwrap_or(i64::MAX),
        problem_statement: format!("[ISSUE]\n{issue}\n[/ISSUE]"),
        expected_output_json: generator.expected.clone(),
        micro: None,
        repair: Some(RepairColumns {
            family: mutant.fault.name().to_owned(),
            agent_files: tree,
            test_command: command,
            test_timeout_s: TestTimeout::nearest(generator.timeout),
        }),
    }
}
