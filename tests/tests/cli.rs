//! Bad input has clear ends: each exits with its documented code, names the thing and a remedy.

#![expect(clippy::unwrap_used, reason = "a failure is the verdict of a test")]

use orchestrate_e2e::{run, stderr};

fn fails(args: &[&str], code: i32, words: &[&str]) {
    let output = run(args).unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?}: no `{word}` in: {text}");
    }
}

#[test]
fn every_command_has_help_with_its_arguments() {
    let top = String::from_utf8(run(&["--help"]).unwrap().stdout).unwrap();
    for command in [
        "run",
        "eval",
        "tasks",
        "config",
        "doctor",
        "show",
        "gc",
        "warm-start",
        "serve-engine",
        "serve-trainer",
        "bench",
        "completions",
    ] {
        assert!(top.contains(command), "{command} is not in --help");
        assert!(run(&[command, "--help"]).unwrap().status.success());
    }
}

#[test]
fn wrong_command_lines_exit_with_2() {
    fails(&["run"], 2, &["--run-dir"]);
    fails(&["dance"], 2, &["dance"]);
}

#[test]
fn wrong_settings_exit_with_3_and_name_key_and_remedy() {
    fails(&["config", "check", "--set", "rollout.group_sise=8"], 3, &["group_sise"]);
    fails(
        &["config", "check", "--set", "run.steps=0", "--set", "algorithm.clip_low=7"],
        3,
        &["run.steps", "algorithm.clip_low"],
    );
    fails(&["config", "check", "--config", "no/such.toml"], 3, &["no/such.toml"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("broken.toml");
    std::fs::write(&file, "[run]\nsteps = = 3\n").unwrap();
    fails(&["config", "check", "--config", file.to_str().unwrap()], 3, &["broken.toml", "2"]);
}

#[test]
fn all_shipped_configs_are_sound_and_the_schema_is_current() {
    for entry in std::fs::read_dir(orchestrate_e2e::root().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "toml") {
            let output = run(&["config", "check", "--config", path.to_str().unwrap()]).unwrap();
            assert!(output.status.success(), "{}: {}", path.display(), stderr(&output));
        }
    }
    let schema = run(&["config", "schema"]).unwrap().stdout;
    let stored = std::fs::read(orchestrate_e2e::root().join("configs/schema.json")).unwrap();
    assert!(
        schema == stored,
        "configs/schema.json is out of date: orchestrate config schema > configs/schema.json"
    );
}

#[test]
fn a_corrupt_checkpoint_exits_with_3_and_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let policy = orchestrate_e2e::root().join("environments/micro/policy");
    for entry in std::fs::read_dir(policy).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    std::fs::write(model.join("model.safetensors"), b"not a checkpoint").unwrap();
    let listen = ["--listen", "127.0.0.1:0"];
    let engine = ["serve-engine", "--model", model.to_str().unwrap(), listen[0], listen[1]];
    fails(&engine, 3, &["model.safetensors"]);
    fails(&["serve-engine", "--model", "no/such", listen[0], listen[1]], 3, &["no/such"]);
}

#[test]
fn a_dead_engine_url_exits_with_4() {
    // Port 9 (discard) is closed on any machine that runs tests.
    fails(&["doctor", "--engine", "http://127.0.0.1:9"], 4, &["http://127.0.0.1:9", "hint:"]);
}

#[test]
fn a_missing_docker_daemon_exits_with_5() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let output = orchestrate_e2e::orchestrate(&["run", "--run-dir", dir.to_str().unwrap()])
        .unwrap()
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        .output()
        .unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(5), "{text}");
    assert!(text.contains("/nonexistent/docker.sock") && text.contains("hint:"), "{text}");
}

#[test]
fn resuming_nothing_exits_with_6() {
    let folder = tempfile::tempdir().unwrap();
    fails(&["run", "--resume", "--run-dir", folder.path().to_str().unwrap()], 6, &["--run-dir"]);
    fails(&["show", folder.path().to_str().unwrap()], 6, &["orchestrate.db"]);
}
