//! `tasks make` on a small repository, with real Docker.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

const IMAGE: &str = "orchestrate/repository:latest";

/// Whether Docker has an image with pytest.
fn can_run() -> bool {
    let pytest = ["run", "--rm", "--network=none", IMAGE, "python3", "-c", "import pytest"];
    if Command::new("docker").args(pytest).output().is_ok_and(|output| output.status.success()) {
        return true;
    }
    let why = format!("no image {IMAGE} with pytest: run scripts/test");
    orchestrate_e2e::skip::skip("docker", &why);
    false
}

fn orchestrate(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orchestrate")).current_dir(folder).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A package, tests in two files, and one test that fails.
fn repository(folder: &Path) {
    for (path, content) in [
        (
            "ranges-1.0/ranges/__init__.py",
            "def clamp(value, low, high):\n    if value < low:\n        return low\n    \
             if value > high:\n        return high\n    return value\n\n\n\
             def span(first, last):\n    return last - first + 1\n\n\n\
             def unseen(value):\n    return value + 1\n",
        ),
        (
            "ranges-1.0/tests/test_clamp.py",
            "from ranges import clamp\nimport pytest\n\n\n\
             @pytest.mark.parametrize('value,want', [(0, 1), (2, 2), (9, 3)])\n\
             def test_clamp_stays_inside(value, want):\n    assert clamp(value, 1, 3) == want\n\n\n\
             def test_always_fails():\n    assert False\n",
        ),
        (
            "ranges-1.0/tests/test_span.py",
            "from ranges import span\n\n\n\
             def test_span_counts_both_ends():\n    assert span(2, 4) == 3\n\n\n\
             def test_of_one():\n    assert span(7, 7) == 1\n",
        ),
        ("ranges-1.0/README.md", "Ranges.\n"),
    ] {
        let path = folder.join(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, content).unwrap();
    }
}

fn rows(file: &Path) -> Vec<Value> {
    let text = fs_err::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn docker_made_tasks_are_verified_complete_and_reproducible() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    repository(at);
    let make = |out: &str, more: &[&str]| {
        let args = ["tasks", "make", "ranges-1.0", "--out", out, "--count", "4", "--seed", "3"];
        let output = orchestrate(at, &[&args, more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    let (summary, said) = make("a.jsonl", &["--jobs", "2"]);
    assert!(summary.contains("4 tasks, each verified twice"), "{summary}");
    assert!(said.contains("1 test left out"), "{said}");
    assert!(!at.join("a.partial.jsonl").exists());

    let made = rows(&at.join("a.jsonl"));
    assert_eq!(made.len(), 4);
    for row in &made {
        let issue = row["problem_statement"].as_str().unwrap();
        assert!(
            issue.contains("clamp") || issue.contains("span") || issue.contains("one"),
            "{issue}"
        );
        let expected: Value =
            serde_json::from_str(row["expected_output_json"].as_str().unwrap()).unwrap();
        assert_eq!(expected.as_object().unwrap().len(), 5, "{expected}");
        // The tests that detect the fault are hidden, and the issue does not contain the solution.
        let given: BTreeSet<&str> = row["repair"]["agent_files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|file| file["path"].as_str().unwrap())
            .collect();
        assert!(given.contains("ranges/__init__.py") && given.contains("README.md"));
        assert!(!(given.contains("tests/test_clamp.py") && given.contains("tests/test_span.py")));
        let commit: Value =
            serde_json::from_str(row["parsed_commit_content"].as_str().unwrap()).unwrap();
        let lines = &commit["file_diffs"][0]["hunks"][0]["line_group"]["all_lines"];
        for line in lines.as_array().unwrap().iter().filter(|line| line["type"] == "added") {
            let line = line["content"].as_str().unwrap().trim();
            assert!(!issue.contains(line), "{issue}");
        }
        assert_eq!(row["repo_name"], "ranges");
    }

    // `tasks verify` loads the file and comes to the same result.
    let verified = orchestrate(at, &["tasks", "verify", "a.jsonl", "--all"]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));

    // The same seed makes the same rows with another number of jobs and with held-out tasks.
    make("b.jsonl", &["--jobs", "1", "--held-out", "0.5"]);
    let mut again = rows(&at.join("b.jsonl"));
    again.extend(rows(&at.join("b.held_out.jsonl")));
    let names = |rows: &[Value]| -> BTreeSet<String> {
        rows.iter().map(|row| row["commit_hash"].to_string()).collect()
    };
    assert_eq!(names(&again), names(&made));

    let taken = orchestrate(at, &["tasks", "make", "ranges-1.0", "--out", "a.jsonl"]);
    assert!(text(&taken.stderr).contains("a.jsonl already exists"), "{}", text(&taken.stderr));
}

#[test]
fn docker_an_interrupted_command_resumes_only_with_the_same_options() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    repository(at);
    let args = ["tasks", "make", "ranges-1.0", "--out", "a.jsonl", "--count", "2"];
    assert!(orchestrate(at, &args).status.success());
    let rows = fs_err::read_to_string(at.join("a.jsonl")).unwrap();

    // A journal whose last line a crash left incomplete.
    fs_err::remove_file(at.join("a.jsonl")).unwrap();
    let again =
        orchestrate(at, &[&args[..], &["--set", "sandbox.docker_host=unix:///nowhere"]].concat());
    assert!(!again.status.success());
    let journal = at.join("a.partial.jsonl");
    let head = fs_err::read_to_string(&journal).unwrap();
    assert_eq!(head.lines().count(), 1, "{head}");
    let marked = r#"{"n":0,"outcome":{"unfit":"a mark of the test"}}"#;
    fs_err::write(&journal, format!("{head}{marked}\n{{\"n\":1,\"outc")).unwrap();
    let other = orchestrate(at, &[&args[..], &["--seed", "9"]].concat());
    assert!(text(&other.stderr).contains("with other options"), "{}", text(&other.stderr));
    let resumed = orchestrate(at, &args);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert!(text(&resumed.stdout).contains("1 a mark of the test"), "{}", text(&resumed.stdout));
    assert!(!rows.is_empty() && !journal.exists());
}

#[test]
fn docker_a_repository_whose_tests_do_not_run_is_reported_with_its_log() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    repository(at);
    fs_err::write(at.join("ranges-1.0/tests/conftest.py"), "import not_in_the_image\n").unwrap();
    let output = orchestrate(at, &["tasks", "make", "ranges-1.0", "--out", "a.jsonl"]);
    let said = text(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("do not run in image") && said.contains("not_in_the_image"), "{said}");
}
