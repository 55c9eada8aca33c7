//! The row of a made task: R2E-Gym's columns, and one more for what is in no image.

use super::{Bench, Failure, Mutant, issue};
use crate::patch::{self, LineKind};
use crate::r2e::{ExecutionResult, FileDiff, ParsedCommit, R2eRow};
use crate::task::TaskFile;
use serde::{Deserialize, Serialize};

/// What a made row says beyond R2E-Gym's columns, as its files are in no image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairColumns {
    /// The fault, see [`super::Fault`].
    pub family: String,
    /// Files the agent finds: the repository with the fault, without the tests that see it.
    pub agent_files: Vec<TaskFile>,
    /// Runs the hidden tests in the repository's folder.
    pub test_command: String,
    /// Longest time for it, in seconds.
    pub test_timeout_s: u64,
}

/// A mutant that some tests see.
pub(super) struct Broken<'a> {
    pub(super) tree: Vec<TaskFile>,
    pub(super) solved: String,
    pub(super) faulty: String,
    pub(super) failures: Vec<Failure>,
    pub(super) log: &'a [u8],
}

pub(super) fn of(bench: &Bench, path: &str, mutant: &Mutant, broken: Broken<'_>) -> R2eRow {
    let Broken { mut tree, solved, faulty, failures, log } = broken;
    let name = bench.repository.name.clone();
    let gold = patch::file_diff(path, Some(&faulty), Some(&solved));
    let added = |line: &&patch::HunkLine| line.kind == LineKind::Added;
    let solution: Vec<String> = gold
        .hunks
        .iter()
        .flat_map(|hunk| hunk.lines.iter().filter(added))
        .map(|line| line.text.trim().to_owned())
        .collect();
    let issue = issue::write(&name, &failures, &solution);
    // What fails would show the way: these files come back for the grader.
    let seen_in: Vec<&str> =
        failures.iter().filter_map(|failure| failure.test.split("::").next()).collect();
    tree.retain(|file| !seen_in.contains(&file.path.as_str()));
    let hidden = bench.hidden_files();
    let command = bench.test_command();

    let mut hasher = blake3::Hasher::new();
    for file in &bench.repository.files {
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
        docker_image: bench.image.clone(),
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
        expected_output_json: bench.expected.clone(),
        micro: None,
        repair: Some(RepairColumns {
            family: mutant.fault.name().to_owned(),
            agent_files: tree,
            test_command: command,
            test_timeout_s: bench.timeout.as_secs(),
        }),
    }
}
