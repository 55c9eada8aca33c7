//! Invalid input: each case exits with its documented code and names the cause and a remedy.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use orchestrate_e2e::{run, stderr};
use orchestrate_handoff::protocol::PolicyLoss;

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
    let (_, commands) = top.split_once("\nCommands:\n").unwrap();
    let commands = commands.split("\n\n").next().unwrap().lines();
    // A description that is wrapped is indented by more.
    let named = commands.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<&str> = named.filter_map(|line| line.split_whitespace().next()).collect();
    for command in ["run", "eval", "gateway", "grade", "status", "runs"] {
        assert!(names.contains(&command), "{command} is not among {names:?}");
    }
    for command in names.into_iter().filter(|name| *name != "help") {
        assert!(run(&[command, "--help"]).unwrap().status.success(), "{command}");
    }
}

#[test]
fn invalid_command_lines_exit_with_2() {
    fails(&["run"], 2, &["--run-dir"]);
    fails(&["dance"], 2, &["dance"]);
    fails(&["compare"], 2, &["CONFIG", "--seeds", "--out"]);
    let mild = "configs/compare/mild.toml";
    let named = ["compare", mild, "--seeds", "1", "--out", "x", "--variant", "a/b:c=1"];
    fails(&named, 2, &["a/b", "NAME:KEY=VALUE"]);
}

#[test]
fn invalid_settings_exit_with_3_and_name_the_key_and_a_remedy() {
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
    // A comparison with one invalid setting starts no run.
    let out = folder.path().join("out");
    let compare = ["compare", "configs/compare/mild.toml", "--seeds", "1", "--out"];
    let mut args = compare.to_vec();
    args.extend([
        out.to_str().unwrap(),
        "--variant",
        "fine",
        "--variant",
        "odd:algorithm.clip_low=7",
    ]);
    fails(&args, 3, &["\"odd\"", "algorithm.clip_low"]);
    assert!(!out.exists());
}

#[test]
fn comparison_in_the_docs_has_valid_settings() {
    let folder = tempfile::tempdir().unwrap();
    for setting in ["mild", "coarse"] {
        let out = folder.path().join(setting);
        let output = std::process::Command::new("scripts/compare-micro")
            .args([setting, "--dry-run", "--out", out.to_str().unwrap()])
            .current_dir(orchestrate_e2e::root())
            .env("ORCHESTRATE", orchestrate_e2e::program().unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let listed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(listed.matches("starts").count(), 11 * 3, "{listed}");
    }
}

#[test]
fn all_shipped_configs_are_valid_and_the_schema_is_current() {
    let files = |folder: &str| std::fs::read_dir(orchestrate_e2e::root().join(folder)).unwrap();
    let examples =
        files("examples").flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    for entry in files("configs").chain(files("configs/compare")).chain(examples) {
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
fn docker_a_dead_engine_url_exits_with_4() {
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
fn folder_without_a_run_exits_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    for command in
        [&["run", "--resume", "--run-dir"][..], &["show"], &["analyze"], &["compare", "--runs"]]
    {
        fails(&[command, &[path]].concat(), 2, &["not a run folder", "orchestrate.db"]);
    }
}

/// The rule: an argument that names nothing exits with 2, an invalid input file with 3.
#[test]
fn unknown_ids_exit_with_2_and_invalid_input_files_with_3() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (empty, bad) = (file("empty.jsonl", b""), file("bad.jsonl", b"{\"a\": 1}\n"));
    let missing = folder.path().join("missing.jsonl");
    let missing = missing.to_str().unwrap();

    fails(&["tasks", "show", "nosuch"], 2, &["nosuch", "tasks list"]);
    fails(&["tasks", "verify", "micro", "--ids", "nosuch"], 2, &["nosuch"]);
    fails(&["doctor", "--battery", "nosuch*"], 2, &["nosuch"]);
    for rows in [&empty, &bad] {
        fails(&["tasks", "import", rows], 3, &[rows, "no usable row"]);
        fails(&["tasks", "list", "--file", rows], 3, &[rows, "no usable row"]);
        fails(&["tasks", "verify", rows], 3, &[rows, "no usable row"]);
    }
    for command in [&["tasks", "import", missing][..], &["tasks", "list", "--file", missing]] {
        fails(command, 3, &[missing]);
    }
}

#[test]
fn address_in_use_exits_with_2() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let policy = "environments/micro/policy";
    let serve = ["serve-engine", "--model", policy, "--listen", &address];
    fails(&serve, 2, &[&address, "--listen"]);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().to_str().unwrap();
    let serve = ["serve-trainer", "--model", policy, "--checkpoints", checkpoints];
    fails(&[&serve[..], &["--listen", &address]].concat(), 2, &[&address, "--listen"]);
}

#[test]
fn bench_names_the_program_that_replaced_it() {
    fails(&["bench", "routing"], 2, &["orchestrate-bench"]);
}

#[test]
fn closed_pipe_ends_output_quietly() {
    for shell in ["bash", "zsh"] {
        let mut command = orchestrate_e2e::orchestrate(&["completions", shell]).unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(writer).stderr(std::process::Stdio::piped()).output().unwrap();
        assert!(output.status.success(), "{shell}: {}", stderr(&output));
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn missing_default_policy_exits_with_3_and_creates_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |arguments: &[&str]| {
        let mut command = std::process::Command::new(orchestrate_e2e::program().unwrap());
        command.args(arguments).current_dir(folder.path()).output().unwrap()
    };
    for command in ["run", "eval"] {
        let output = at(&[command, "--run-dir", "here"]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{text}");
        for part in ["engine.model", "environments/micro/policy", "checkout"] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
        assert!(!folder.path().join("here").exists());
    }
}

/// Without Docker an evaluation gets as far as the daemon, whatever the loss; with it, see
/// `docker_eval.rs`.
#[test]
fn eval_accepts_the_config_of_a_training_run_with_each_policy_loss() {
    for loss in PolicyLoss::ALL {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("eval");
        let set = format!("algorithm.policy_loss={}", loss.name());
        let mut command = orchestrate_e2e::orchestrate(&["eval", "--run-dir"]).unwrap();
        let output = command
            .arg(&dir)
            .args(["--set", &set])
            .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
            .output()
            .unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{}: {text}", loss.name());
        // It got as far as the sandboxes, and left nothing behind.
        assert!(!dir.exists());
    }
}
