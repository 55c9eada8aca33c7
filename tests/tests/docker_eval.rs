//! `orchestrate eval` with the config of a training run.

use orchestrate_e2e::{docker_or_skip, run, stderr};
use orchestrate_handoff::protocol::PolicyLoss;
use serde_json::Value;

/// Settings of a short evaluation.
const SMALL: &[&str] = &[
    "--set",
    "run.eval_tasks=1",
    "--set",
    "run.eval_samples=1",
    "--set",
    "run.eval_held_out_families=0",
    "--set",
    "rollout.max_turns=2",
];

#[test]
fn docker_eval_accepts_the_config_of_a_training_run_with_each_policy_loss() {
    if !docker_or_skip("docker_eval_accepts_the_config_of_a_training_run").unwrap() {
        return;
    }
    for loss in PolicyLoss::ALL {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("eval");
        let run_dir = dir.to_str().unwrap();
        let set = format!("algorithm.policy_loss={}", loss.name());
        let start = ["eval", "--set", &set, "--run-dir", run_dir];
        let output = run(&[&start[..], SMALL, &["--json"]].concat()).unwrap();
        let text = stderr(&output);
        assert!(output.status.success(), "{}: {text}", loss.name());
        assert!(text.contains("evaluation") && !text.contains("step"), "{text}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found.pointer("/baseline/tasks"), Some(&1.into()), "{found:#}");

        // Repeating it runs nothing and reports the same.
        let again = run(&["eval", "--run-dir", run_dir, "--resume", "--json"]).unwrap();
        assert!(again.status.success(), "{}", stderr(&again));
        let repeated: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!(repeated, found);
        let shown = run(&["show", run_dir]).unwrap();
        assert!(String::from_utf8_lossy(&shown.stdout).contains("v00000-00000.00"), "{shown:?}");
    }
}
