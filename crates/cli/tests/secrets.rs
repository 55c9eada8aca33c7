//! A canary in every place where a secret can be given reaches no output, no log and no file. Runs with
//! secrets that are used are in `tests/tests/docker_run.rs`.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::path::Path;
use std::process::Command;

const CANARY: &str = "canary-7be1a4";

/// Files below `folder` that contain the canary, except the inputs of the test.
fn betrayals(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(betrayals(&path));
        } else if String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains(CANARY) {
            found.push(path.display().to_string());
        }
    }
    found
}

/// Runs a command with a canary in the environment's own secrets and in `more`; returns its exit code
/// and standard error.
fn run(folder: &Path, args: &[&str], more: &[(&str, &str)]) -> (Option<i32>, String) {
    let proxy = format!("http://user:{CANARY}@127.0.0.1:9");
    let output = Command::new(env!("CARGO_BIN_EXE_orchestrate"))
        .args(args)
        .args(["-vv", "--log-filter", "trace"])
        .current_dir(folder)
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        .env("KEY", CANARY)
        .env("HF_TOKEN", CANARY)
        .env("HTTPS_PROXY", &proxy)
        .env("ALL_PROXY", &proxy)
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    for stream in [&output.stdout, &output.stderr] {
        let text = String::from_utf8_lossy(stream);
        assert!(!text.contains(CANARY), "{args:?}: {text}");
    }
    (output.status.code(), stderr)
}

#[test]
fn passwords_in_addresses_are_refused_everywhere_and_shown_nowhere() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("work");
    std::fs::create_dir(&folder).unwrap();
    let model =
        format!("engine.model={}/../../environments/micro/policy", env!("CARGO_MANIFEST_DIR"));
    for (key, value, remedy) in [
        ("engine.url", format!("http://user:{CANARY}@127.0.0.1:9"), "engine.api_key_env"),
        ("engine.url", format!("http://{CANARY}@127.0.0.1:9"), "engine.api_key_env"),
        ("engine.url", format!("http://127.0.0.1:9/v1?api_key={CANARY}"), "engine.api_key_env"),
        ("engine.url", format!("http://user:{CANARY}/x@:bad port"), "engine.api_key_env"),
        (
            "engine.urls",
            format!("[\"http://a:1\", \"https://u:{CANARY}@b:1\"]"),
            "engine.api_key_env",
        ),
        ("engine.discover", format!("http://u:{CANARY}@b:1"), "engine.api_key_env"),
        ("trainer.url", format!("http://u:{CANARY}@b:1"), "trainer.token_env"),
        ("sandbox.docker_host", format!("ssh://u:{CANARY}@b"), "ssh_config"),
        ("sandbox.docker_host", format!("tcp://u:{CANARY}@b:2375"), "certificates"),
        ("sandbox.hosts", format!("[{{ url = \"ssh://u:{CANARY}@b\" }}]"), "ssh_config"),
        ("sandbox.mirror", format!("u:{CANARY}@mirror.local:5000"), "docker login"),
    ] {
        let file = temp.path().join("config.toml");
        let (section, name) = key.split_once('.').unwrap();
        let toml = if value.starts_with('[') { value.clone() } else { format!("{value:?}") };
        std::fs::write(&file, format!("[{section}]\n{name} = {toml}\n")).unwrap();
        let file = file.to_str().unwrap();
        let set = format!("{key}={value}");
        for source in [["--set", &set], ["--config", file]] {
            for command in [
                &["config", "check"][..],
                &["config", "show"],
                &["run", "--run-dir", "run"],
                &["run", "--dry-run"],
                &["eval", "--run-dir", "run"],
                &["doctor"],
            ] {
                let args = [command, &source, &["--set", &model]].concat();
                let (code, stderr) = run(&folder, &args, &[]);
                assert_eq!(code, Some(3), "{args:?}: {stderr}");
                assert!(stderr.contains(key) && stderr.contains(remedy), "{args:?}: {stderr}");
            }
        }
    }
    assert_eq!(betrayals(&folder), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a run folder was made");
}

#[test]
fn keys_of_servers_stay_in_the_environment() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    let model =
        format!("engine.model={}/../../environments/micro/policy", env!("CARGO_MANIFEST_DIR"));
    let keys = [
        "--set",
        &model,
        "--set",
        "engine.url=http://127.0.0.1:9",
        "--set",
        "engine.api_key_env=KEY",
        "--set",
        "trainer.url=http://127.0.0.1:9",
        "--set",
        "trainer.token_env=KEY",
        "--set",
        "engine.start_timeout=0.1",
    ];
    for command in [
        &["config", "check"][..],
        &["config", "show"],
        &["run", "--run-dir", "run"],
        &["run", "--run-dir", "run", "--resume"],
        &["eval", "--run-dir", "eval"],
        &["doctor"],
        &["doctor", "--engine", "http://127.0.0.1:9"],
    ] {
        let keys = if command.contains(&"--resume") { &[][..] } else { &keys[..] };
        run(folder, &[command, keys].concat(), &[]);
    }
    let url = format!("http://u:{CANARY}@127.0.0.1:9");
    let (code, stderr) = run(folder, &["doctor", "--set", &model, "--engine", &url], &[]);
    assert_eq!(code, Some(3), "{stderr}");
    for host in ["ssh://u:", "tcp://u:", "https://u:"] {
        let host = format!("{host}{CANARY}@127.0.0.1:9");
        let (code, stderr) = run(folder, &["doctor", "--set", &model], &[("DOCKER_HOST", &host)]);
        assert_eq!(code, Some(5), "{stderr}");
        run(folder, &["gc"], &[("DOCKER_HOST", &host)]);
    }
    // The key itself in place of its variable's name.
    let set = format!("engine.api_key_env={CANARY}");
    let (code, stderr) = run(folder, &["config", "show", "--set", &set], &[]);
    assert_eq!(code, Some(3), "{stderr}");
    // Nothing is left of runs that did not begin.
    assert!(!folder.join("run").exists() && !folder.join("eval").exists());
    assert_eq!(betrayals(folder), Vec::<String>::new());
}
