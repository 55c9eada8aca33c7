//! `compare` and `analyze` of the built program on small real runs: interrupted, resumed, reported.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use orchestrate_e2e::{docker_or_skip, orchestrate, run, stderr};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Two variants with two seeds each. Every run takes a few seconds.
const MATRIX: &[&str] = &[
    "configs/compare/mild.toml",
    "--seeds",
    "1,2",
    "--variant",
    "none:algorithm.routing_replay=none",
    "--variant",
    "r3:algorithm.routing_replay=rollout,algorithm.betas=[0.9, 0.95]",
    "--set",
    "run.steps=2",
    "--set",
    "run.eval_every=1",
    "--set",
    "run.eval_tasks=4",
    "--set",
    "run.eval_samples=1",
    "--set",
    "rollout.group_size=4",
    "--set",
    "rollout.groups_per_step=2",
    "--set",
    "rollout.max_groups_per_step=4",
    "--set",
    "rollout.max_in_flight=8",
    "--set",
    "sandbox.max_containers=6",
    "--set",
    "tasks.held_out=50",
    "--set",
    "diagnostics.no_replay_every=1",
];

fn compare(out: &Path, more: &[&str]) -> Command {
    let mut args = vec!["compare"];
    args.extend(MATRIX);
    args.extend(["--out", out.to_str().unwrap()]);
    args.extend(more);
    orchestrate(&args).unwrap()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    // There is no event to wait for, so this polls.
    let (_sender, receiver) = std::sync::mpsc::channel::<()>();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_mins(10), "timed out waiting for {what}");
        let _ = receiver.recv_timeout(Duration::from_millis(50));
    }
}

fn run_id(folder: &Path) -> String {
    let shown = run(&["analyze", folder.to_str().unwrap(), "--json"]).unwrap();
    assert!(shown.status.success(), "{}", stderr(&shown));
    let report: Value = serde_json::from_slice(&shown.stdout).unwrap();
    report["run"].as_str().unwrap().to_owned()
}

#[test]
fn docker_comparison_resumes_where_it_was_killed() {
    if !docker_or_skip("docker_comparison").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let (first, second) = (out.join("none/seed-1"), out.join("r3/seed-1"));
    let mut child = compare(&out, &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the second run", || second.join("metrics.jsonl").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(out.join("report.md").exists(), "there is a report after the first run");
    let runs = [run_id(&first), run_id(&second)];

    let listed = compare(&out, &["--dry-run"]).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    let states: Vec<&str> = ["finished", "resumes", "starts"]
        .into_iter()
        .filter(|state| text.contains(state))
        .collect();
    assert_eq!(states, ["finished", "resumes", "starts"], "{text}");

    let output = compare(&out, &["--json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stderr(&output);
    for line in ["none, seed 1: finished", "r3, seed 1: resumes", "none, seed 2: starts"] {
        assert!(said.contains(line), "no `{line}` in {said}");
    }
    assert_eq!([run_id(&first), run_id(&second)], runs);

    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let stored: Value =
        serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(report, stored);
    let configs = report["configs"].as_array().unwrap();
    assert_eq!(configs.len(), 2);
    for (config, (name, replay)) in configs.iter().zip([("none", "none"), ("r3", "rollout")]) {
        assert_eq!(config["name"], name);
        assert_eq!(config["settings"]["algorithm.routing_replay"], replay);
        assert_eq!(config["final_pass_at_1"]["runs"], 2);
        assert_eq!(config["runs"].as_array().unwrap().len(), 2);
        for run in config["runs"].as_array().unwrap() {
            assert_eq!((&run["finished"], &run["failure"]), (&Value::Bool(true), &Value::Null));
        }
    }
    // A run that replays has the smaller divergence of the two it measures.
    let of_r3 = |key: &str| configs[1][key]["mean"].as_f64().unwrap();
    assert!(of_r3("kl_train_infer") <= of_r3("kl_train_infer_no_replay"), "{report}");
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.matches("<figure>").count() >= 10 && !page.contains("http"));

    // The same command has nothing left to do, and no Docker is needed to say so.
    let again = compare(&out, &[]).env("DOCKER_HOST", "unix:///nonexistent.sock").output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    assert_eq!(stderr(&again).matches(": finished").count(), 4, "{}", stderr(&again));
    let other = compare(&out, &["--set", "run.retry_pause=3s"]).output().unwrap();
    assert_eq!(other.status.code(), Some(3), "{}", stderr(&other));
    assert!(stderr(&other).contains("none/seed-1/plan.toml"), "{}", stderr(&other));

    reports_on_runs_that_exist(&out, folder.path());
    shows_a_whole_run(&out.join("r3/seed-2"), folder.path());
}

fn reports_on_runs_that_exist(out: &Path, folder: &Path) {
    let of = |to: &Path, runs: &[PathBuf]| {
        let mut args = vec!["compare", "--json", "--out", to.to_str().unwrap(), "--runs"];
        args.extend(runs.iter().map(|run| run.to_str().unwrap()));
        run(&args).unwrap()
    };
    let report = |to: &Path, runs: &[PathBuf]| -> Value {
        let output = of(to, runs);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (both, joined) = (folder.join("both"), folder.join("joined"));
    let runs = ["none/seed-1", "r3/seed-1", "none/seed-2"].map(|run| out.join(run));
    let three = report(&both, &runs);
    let seen: Vec<(&str, usize)> = three["configs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["name"].as_str().unwrap(), c["runs"].as_array().unwrap().len()))
        .collect();
    assert_eq!(seen, [("none", 2), ("r3", 1)]);
    assert!(both.join("report.html").exists());

    // Three runs from one machine and the fourth from another give the same report.
    let file = |folder: &Path| folder.join("runs.jsonl.zst");
    let all = report(&joined, &[file(&both), out.join("r3/seed-2")]);
    let whole = std::fs::read_to_string(out.join("report.md")).unwrap();
    assert_eq!(std::fs::read_to_string(joined.join("report.md")).unwrap(), whole);
    assert_eq!(all["configs"][1]["runs"].as_array().unwrap().len(), 2);
    let twice = of(&folder.join("twice"), &[file(&both), out.join("none/seed-2")]);
    assert!(!twice.status.success());
    assert!(stderr(&twice).contains("seed 2 of none was given twice"), "{}", stderr(&twice));
    let other = of(&folder.join("other"), &[out.join("report.md")]);
    assert!(stderr(&other).contains("report.md is not a runs.jsonl.zst"), "{}", stderr(&other));
}

fn shows_a_whole_run(run_dir: &Path, folder: &Path) {
    let page = folder.join("page.html");
    let args = ["analyze", run_dir.to_str().unwrap(), "--out", page.to_str().unwrap()];
    let output = run(&args).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(String::from_utf8(output.stdout).unwrap().contains("no sign of collapse"));
    let page = std::fs::read_to_string(page).unwrap();
    for figure in [
        "Evaluation Pass@1",
        "Entropy",
        "Train-inference KL",
        "Probabilities, as trained",
        "Probabilities, without replay",
        "Tokens by |ln ρ|",
        "Sequences by mean |ln ρ|",
        "Disagreement by layer",
        "Routers by experts that differ",
        "Tokens by routers that differ",
        "Expert load",
        "Gradient norm",
        "Prefix cache hits",
        "Seconds per step",
    ] {
        assert!(page.contains(&format!("<figcaption>{figure}")), "{figure}");
    }
    assert!(!page.contains("http") && !page.contains("NaN"));
}
