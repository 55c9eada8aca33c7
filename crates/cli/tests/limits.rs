//! Inputs without end, runs that cannot start, and settings that training cannot have.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use orchestrate_store::JOURNAL_FILE;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

/// Runs a command in the project's root; returns its exit code and standard error.
fn run(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_orchestrate"))
        .args(args)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn logs_and_runs_without_end_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let rows = path(temp.path(), "rows.json");
    let row = serde_json::json!({
        "instance_id": "a-1", "repo": "pallets/flask", "version": "2.0", "base_commit": "c0",
        "problem_statement": "p", "test_patch": "t", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [],
    });
    std::fs::write(&rows, row.to_string()).unwrap();
    let sparse = path(temp.path(), "sparse");
    std::fs::File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    for log in ["/dev/zero", &sparse] {
        let (code, error) = run(&["grade", "--tasks", &rows, "--instance", "a-1", "--log", log]);
        assert_eq!(code, Some(3), "{error}");
        assert!(error.contains("regular file of at most"), "{error}");
    }
    let bomb = path(temp.path(), "runs.jsonl.zst");
    let mut packed = zstd::Encoder::new(std::fs::File::create(&bomb).unwrap(), 1).unwrap();
    let zeros = vec![b' '; 1 << 20];
    for _ in 0..600 {
        packed.write_all(&zeros).unwrap();
    }
    packed.finish().unwrap();
    assert!(std::fs::metadata(&bomb).unwrap().len() < 1 << 20);
    let (code, error) = run(&["compare", "--runs", &bomb]);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.contains("more than 536870912 bytes"), "{error}");
}

#[test]
fn forecast_reports_what_would_stop_the_run_at_its_start() {
    let temp = tempfile::tempdir().unwrap();
    let missing = format!("tasks.file={}", path(temp.path(), "no-rows"));
    let (code, error) = run(&["run", "--dry-run", "--set", &missing, "--set", "run.eval_every=0"]);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.contains("no-rows"), "{error}");
    std::fs::write(temp.path().join(JOURNAL_FILE), "x").unwrap();
    let (code, error) = run(&["run", "--dry-run", "--run-dir", temp.path().to_str().unwrap()]);
    assert_eq!(code, Some(6), "{error}");
    assert!(error.contains("already exists"), "{error}");
    let (code, error) = run(&[
        "run",
        "--run-dir",
        temp.path().to_str().unwrap(),
        "--resume",
        "--set",
        "run.seed=1",
    ]);
    assert_eq!(code, Some(2), "{error}");
}

#[test]
fn truncated_sampling_and_absurd_numbers_are_refused_for_training() {
    let (code, error) = run(&["run", "--dry-run", "--set", "rollout.top_p=0.9"]);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.contains("rollout.top_p = 0.9: must be 1.0 for a run"), "{error}");
    assert_eq!(run(&["config", "check", "--set", "rollout.top_p=0.9"]).0, Some(0));
    for (set, part) in [
        ("algorithm.learning_rate=1e39", "must be from 0 to 100"),
        ("rollout.episode_timeout=9223372036854775807", "at most ten years"),
        ("rollout.episode_timeout=90000h", "at most ten years"),
        ("rollout.group_size=99999999999999999999", "must be from 1 to 65535"),
    ] {
        let (code, error) = run(&["config", "check", "--set", set]);
        assert_eq!(code, Some(3), "{set}: {error}");
        assert!(error.contains(part), "{set}: {error}");
    }
}
