//! Runs the same tasks with the `harbor` package: `ORCHESTRATE_HARBOR` names its virtual
//! environment.

use super::{import, is_same, named, tasks, verified};
use orchestrate_e2e::{docker_or_skip, run, say, skip, stderr};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package's virtual environment, if one is named.
fn harbor(test: &str) -> Option<PathBuf> {
    let Some(path) = std::env::var_os("ORCHESTRATE_HARBOR").map(PathBuf::from) else {
        skip::skip_test(test, "harbor", "ORCHESTRATE_HARBOR names no virtual environment");
        return None;
    };
    assert!(path.join("bin/harbor").exists(), "{} has no bin/harbor", path.display());
    Some(path)
}

/// A Docker client configuration whose Compose plugin is a stand-in, for clients without that
/// plugin.
fn docker_config(harbor: &Path, dir: &Path) -> Option<PathBuf> {
    let compose = Command::new("docker").args(["compose", "version"]).output().unwrap();
    if compose.status.success() {
        return None;
    }
    let config = dir.join("docker-config");
    let plugin = config.join("cli-plugins/docker-compose");
    std::fs::create_dir_all(plugin.parent().unwrap()).unwrap();
    let script = orchestrate_e2e::root().join("tests/tests/docker_harbor/compose.py");
    let script = script.canonicalize().unwrap();
    let python = harbor.join("bin/python");
    let text = format!("#!/bin/sh\nexec {} {} \"$@\"\n", python.display(), script.display());
    std::fs::write(&plugin, text).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(config)
}

/// The rewards of `agent` by task: the one named `reward`, the only one, or 0.
fn harbor_rewards(harbor: &Path, tasks: &Path, agent: &str, dir: &Path) -> BTreeMap<String, f64> {
    let jobs = dir.join(format!("jobs-{agent}"));
    let mut command = Command::new(harbor.join("bin/harbor"));
    command.args(["run", "--agent", agent, "--n-concurrent", "2", "--yes", "--quiet", "--path"]);
    command.arg(tasks).arg("--jobs-dir").arg(&jobs).args(["--job-name", "job"]);
    command.env("HARBOR_TELEMETRY", "0").current_dir(dir);
    if let Some(config) = docker_config(harbor, dir) {
        command.env("DOCKER_CONFIG", config);
    }
    let output = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(output.status.success(), "{text}");
    let mut rewards = BTreeMap::new();
    for trial in std::fs::read_dir(jobs.join("job")).unwrap() {
        let Ok(result) = std::fs::read(trial.unwrap().path().join("result.json")) else { continue };
        let result: Value = serde_json::from_slice(&result).unwrap();
        let Some(name) = result["task_name"].as_str() else { continue };
        let found = result["verifier_result"]["rewards"].as_object().cloned().unwrap_or_default();
        let only = found.values().next().filter(|_| found.len() == 1);
        let reward = found.get("reward").or(only).and_then(Value::as_f64);
        if reward.is_none() {
            let why = &result["exception_info"]["exception_type"];
            say(&format!("harbor, {agent}, {name}: no reward ({why})"));
        }
        rewards.insert(name.replace('/', "__"), reward.unwrap_or(0.0));
    }
    rewards
}

/// Compares all tasks in a folder.
fn compare(harbor: &Path, folder: &Path, dir: &Path) -> BTreeMap<String, [f64; 2]> {
    let rows = dir.join("rows.jsonl");
    let report = import(folder, &rows);
    assert_eq!(report["refused"], Value::Object(serde_json::Map::new()), "{report:#}");
    let ours = verified(&rows, &dir.join("logs"));
    let oracle = harbor_rewards(harbor, folder, "oracle", dir);
    let nop = harbor_rewards(harbor, folder, "nop", dir);
    let mut differing = Vec::new();
    for (id, rewards) in &ours {
        let theirs =
            [oracle.get(id), nop.get(id)].map(|reward| reward.copied().unwrap_or(f64::NAN));
        say(&format!("{id}: here {rewards:?}, harbor {theirs:?}"));
        if !is_same(*rewards, theirs) {
            differing.push(id);
        }
    }
    assert!(differing.is_empty(), "{differing:?}");
    ours
}

#[test]
fn docker_harbor_verdicts_equal_those_of_the_harbor_package() {
    let test = "docker_harbor_verdicts_equal_those_of_the_harbor_package";
    let Some(harbor) = harbor(test) else { return };
    if !docker_or_skip(test).unwrap() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tasks = tasks::tasks();
    assert!(tasks.len() >= 20, "{}", tasks.len());
    for task in &tasks {
        task.write(&dir.path().join("tasks"));
    }
    let ours = compare(&harbor, &dir.path().join("tasks"), dir.path());
    assert_eq!(ours.len(), tasks.len());
    for task in &tasks {
        assert!(is_same(ours[&named(task)], task.rewards), "{}: {ours:?}", task.name);
    }
}

#[test]
fn docker_exported_tasks_have_the_same_verdicts_in_harbor() {
    let test = "docker_exported_tasks_have_the_same_verdicts_in_harbor";
    let Some(harbor) = harbor(test) else { return };
    if !docker_or_skip(test).unwrap() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("micro");
    let out = folder.to_str().unwrap();
    let output =
        run(&["tasks", "export", "harbor", "micro", "--sample", "4", "--out", out]).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    for task in std::fs::read_dir(&folder).unwrap() {
        // Harbor disables the network with an image that it pulls from a registry.
        let config = task.unwrap().path().join("task.toml");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("no-network", "public")).unwrap();
    }
    let rewards = compare(&harbor, &folder, dir.path());
    assert!(rewards.values().all(|rewards| rewards[0] > 0.5 && rewards[1] < 0.5), "{rewards:?}");
    assert_eq!(rewards.len(), 4);
}
