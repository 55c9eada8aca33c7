//! Harbor tasks from folder to verdict, alone and compared with the `harbor` package.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a panic fails the test"
)]

mod oracle;
mod tasks;

use orchestrate_e2e::{docker_or_skip, run, stderr};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use tasks::TaskFolder;

/// Imports the tasks in `folder`, and returns the report.
fn import(folder: &Path, rows: &Path) -> Value {
    let arguments = ["tasks", "import", "harbor", folder.to_str().unwrap(), "--json", "--out"];
    let output = run(&[&arguments[..], &[rows.to_str().unwrap()]].concat()).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The rewards of the solution and of doing nothing, by task, from the logs of a verification.
fn verified(rows: &Path, out: &Path) -> BTreeMap<String, [f64; 2]> {
    let (rows, logs) = (rows.to_str().unwrap(), out.to_str().unwrap());
    let output = run(&["tasks", "verify", rows, "--all", "--json", "--out", logs]).unwrap();
    let text = stderr(&output);
    let report: Value = serde_json::from_slice(&output.stdout).expect(&text);
    assert_eq!(report["broken"], Value::Object(serde_json::Map::new()), "{text}");
    let runs = out.join("logs/run_evaluation/round-1");
    let reward = |model: &str, id: &str| {
        let path = runs.join(model).join(id).join("report.json");
        let verdict: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        verdict["reward"].as_f64().unwrap()
    };
    let ids = std::fs::read_dir(runs.join("gold")).unwrap();
    let ids = ids.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    ids.map(|id| (id.clone(), [reward("gold", &id), reward("nothing", &id)])).collect()
}

/// Whether two pairs of rewards are the same numbers.
fn is_same(one: [f64; 2], other: [f64; 2]) -> bool {
    one.map(f64::to_bits) == other.map(f64::to_bits)
}

/// The name of a task in a row's id and in Harbor.
fn named(task: &TaskFolder) -> String {
    if task.name == "packaged" { "org__packaged".to_owned() } else { task.name.to_owned() }
}

/// Imports and verifies four tasks, and three whose solutions forge the reward instead of solving
/// them.
#[test]
fn docker_harbor_tasks_are_imported_and_their_rewards_verified() {
    if !docker_or_skip("docker_harbor_tasks_are_imported").unwrap() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let wanted = ["plain", "bundled-tests", "planted-reward", "half-of-two-steps"];
    let tasks = tasks::tasks().into_iter().filter(|task| wanted.contains(&task.name));
    let tasks: Vec<TaskFolder> = tasks.chain(tasks::attacks()).collect();
    let folder = dir.path().join("tasks");
    for task in &tasks {
        task.write(&folder);
    }
    let windows = folder.join("windows");
    std::fs::create_dir_all(windows.join("environment")).unwrap();
    std::fs::create_dir_all(windows.join("tests")).unwrap();
    std::fs::write(windows.join("task.toml"), "[environment]\nos = \"windows\"\n").unwrap();
    std::fs::write(windows.join("instruction.md"), "x").unwrap();
    std::fs::write(windows.join("environment/Dockerfile"), "FROM x\n").unwrap();
    std::fs::write(windows.join("tests/test.sh"), "").unwrap();
    std::fs::write(folder.join("README.md"), "not a task").unwrap();

    let rows = dir.path().join("rows.jsonl");
    let report = import(&folder, &rows);
    assert_eq!(report["usable"], 7, "{report:#}");
    assert_eq!(report["refused"]["windows"], "not supported: Windows containers", "{report:#}");
    assert_eq!((&report["ask_for_network"], &report["several_steps"]), (&7.into(), &1.into()));
    let found = verified(&rows, &dir.path().join("logs"));
    for task in &tasks {
        assert!(is_same(found[task.name], task.rewards), "{}: {found:?}", task.name);
    }
}

#[test]
fn docker_harbor_tasks_are_evaluated_with_a_shared_and_a_separate_verifier() {
    if !docker_or_skip("docker_harbor_tasks_are_evaluated").unwrap() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tasks");
    // These tasks reward every agent: they only check that a variable is set where the tests run.
    for task in tasks::given() {
        task.write(&folder);
    }
    let rows = dir.path().join("rows.jsonl");
    assert_eq!(import(&folder, &rows)["usable"], 3);
    let rows = format!("={}", rows.to_str().unwrap());
    let files = ["tasks.held_out_file", "tasks.file"].map(|key| format!("{key}{rows}"));
    let mut arguments = vec!["eval", "--json", "--run-dir"];
    let run_dir = dir.path().join("eval");
    arguments.push(run_dir.to_str().unwrap());
    let fixed = ["run.eval_samples=1", "run.eval_held_out_families=0", "rollout.max_turns=2"];
    for set in fixed.into_iter().chain(files.iter().map(String::as_str)) {
        arguments.extend(["--set", set]);
    }
    let output = run(&arguments).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("1 Harbor task with several steps"), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["baseline"]["tasks"], 2, "{found:#}");
    assert_eq!(found["baseline"]["pass_at_1"], 1.0, "{found:#}");
    assert_eq!(found["baseline"]["broken"], 0, "{found:#}");
}
