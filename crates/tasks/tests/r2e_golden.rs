//! Rewards, parsed logs and rebuilt gold patches of real R2E-Gym rows.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::{TaskFile, TestStatus, grade, grade_log, patch};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::process::Command;

#[derive(Deserialize)]
struct Entry {
    row: R2eRow,
    computed: Computed,
}

#[derive(Deserialize)]
struct Computed {
    reward_new_log: f64,
    reward_old_log: f64,
    n_expected: usize,
    parsed_new: BTreeMap<String, TestStatus>,
    parsed_old: BTreeMap<String, TestStatus>,
}

fn entries() -> Vec<Entry> {
    let Some(rows) = orchestrate_e2e::skip::data("data/swe/r2e/rows.jsonl.gz") else {
        return Vec::new();
    };
    let text = Command::new("gzip").arg("-dc").arg(rows).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn real_logs_get_their_official_rewards_and_maps() {
    for Entry { row, computed } in entries() {
        let task = row.to_task().unwrap();
        assert_eq!(task.expected.len(), computed.n_expected);
        let result = &row.execution_result_content;
        let new = grade(&result.new_commit_res_stdout, &task.expected);
        let old = grade(&result.old_commit_res_stdout, &task.expected);
        for (verdict, reward) in [(&new, computed.reward_new_log), (&old, computed.reward_old_log)]
        {
            assert!((verdict.official_reward - reward).abs() < 1e-9, "{}", task.id);
            assert!((verdict.reward - reward).abs() < 1e-9, "{}: {:?}", task.id, verdict.differing);
        }
        let streamed = grade_log(result.new_commit_res_stdout.as_bytes(), &task.expected).unwrap();
        assert_eq!(streamed, new);
        assert_eq!(new.statuses, computed.parsed_new, "{}", task.id);
        assert_eq!(old.statuses, computed.parsed_old, "{}", task.id);
    }
}

#[test]
fn unittest_runners_get_a_package() {
    let runners = ["tornado_unittest_runner.py", "unittest_custom_runner.py"];
    for (other, marker) in [(runners[0], true), (runners[1], true), ("conftest.py", false)] {
        let row: R2eRow = serde_json::from_value(serde_json::json!({
            "repo_name": "tornado", "docker_image": "i", "commit_hash": "c",
            "parsed_commit_content": {"file_diffs": []},
            "execution_result_content":
                {"test_file_names": ["test_1.py", other], "test_file_codes": ["x", "y"]},
            "problem_statement": "It breaks.", "expected_output_json": {"a": "PASSED"},
        }))
        .unwrap();
        let task = row.to_task().unwrap();
        let paths: Vec<_> = task.hidden_files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths.contains(&"r2e_tests/__init__.py"), marker, "{other}: {paths:?}");
        assert_eq!(task.test_command.ends_with(other), marker, "{}", task.test_command);
    }
}

#[test]
fn rebuilt_gold_patches_turn_the_old_files_into_the_new_ones() {
    for Entry { row, .. } in entries() {
        let task = row.to_task().unwrap();
        let commit = &row.parsed_commit_content;
        let changed = patch::parse(&task.gold_patch).unwrap();
        let paths: Vec<_> = changed.iter().map(patch::FilePatch::path).collect();
        assert!(
            row.relevant_files.iter().all(|file| paths.contains(&file.as_str())),
            "{}",
            task.id
        );
        let gold =
            commit.file_diffs.iter().filter(|file| paths.contains(&file.header.file.path.as_str()));
        let side = |text: fn(&orchestrate_tasks::r2e::FileDiff) -> &String| -> Vec<TaskFile> {
            let file = |diff: &orchestrate_tasks::r2e::FileDiff| TaskFile {
                path: diff.header.file.path.clone(),
                content: text(diff).clone(),
            };
            let mut tree: Vec<_> =
                gold.clone().map(file).filter(|file| !file.content.is_empty()).collect();
            tree.sort_by(|a, b| a.path.cmp(&b.path));
            tree
        };
        let (old, new) = (side(|diff| &diff.old_file_content), side(|diff| &diff.new_file_content));
        assert_eq!(patch::apply(&old, &task.gold_patch).unwrap(), new, "{}", task.id);
    }
}

/// Checks every file of the commit, not only those of the gold patch.
#[test]
fn git_applies_every_rebuilt_diff_exactly() {
    let mut applied = 0;
    for Entry { row, .. } in entries() {
        for diff in &row.parsed_commit_content.file_diffs {
            if diff.hunks.is_empty() {
                continue;
            }
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join(&diff.header.file.path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            if diff.minus_file.as_ref().is_some_and(|old| old.path != "/dev/null") {
                std::fs::write(&file, &diff.old_file_content).unwrap();
            }
            std::fs::write(folder.path().join("patch"), diff.patch()).unwrap();
            let git = Command::new("git")
                .args(["apply", "--whitespace=nowarn", "patch"])
                .current_dir(folder.path())
                .output()
                .unwrap();
            assert!(git.status.success(), "{}", String::from_utf8_lossy(&git.stderr));
            let found = std::fs::read_to_string(&file).unwrap_or_default();
            assert_eq!(found, diff.new_file_content, "{}", row.id());
            applied += 1;
        }
    }
    assert!(applied == 0 || applied > 20, "{applied}");
}

#[test]
fn real_rows_are_unchanged_by_writing_and_reading() {
    for Entry { row, .. } in entries() {
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<R2eRow>(&text).unwrap(), row);
        assert!(row.to_task().unwrap().test_command.contains("r2e_tests"));
        assert!(!row.to_task().unwrap().problem_statement.contains("[ISSUE]"));
    }
}
