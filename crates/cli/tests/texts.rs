//! Snapshots of every text that the command line prints, so that a changed wording is a diff to review.
//!
//! Accept intended changes with `INSTA_UPDATE=always cargo nextest run -p orchestrate-cli texts`.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The program in the repository's root, without the user's environment variables that change its
/// output.
fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orchestrate"));
    command
        .args(args)
        .current_dir(root())
        .env("COLUMNS", "100")
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        .env_remove("RUST_LOG")
        .env_remove("CLICOLOR_FORCE")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    command
}

fn help(path: &[&str]) -> String {
    let output = program(&[path, &["--help"]].concat()).output().unwrap();
    assert!(output.status.success(), "{path:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Names in the list of commands of a help text.
fn commands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let name = line.strip_prefix("  ")?.split(' ').next()?;
        (!name.is_empty() && name != "help").then(|| name.to_owned())
    });
    names.collect()
}

fn collect(path: &[&str], all: &mut Vec<(String, String)>) {
    let text = help(path);
    for name in commands(&text) {
        collect(&[path, &[name.as_str()]].concat(), all);
    }
    let name = if path.is_empty() { "help".to_owned() } else { format!("help-{}", path.join("-")) };
    all.push((name, text));
}

#[test]
fn help_of_every_command() {
    let mut all = Vec::new();
    collect(&[], &mut all);
    assert!(all.len() > 20, "{} commands found", all.len());
    check_commands_page(&all);
    for (name, text) in all {
        insta::assert_snapshot!(name, text);
    }
}

/// Checks that `docs/src/commands.md` lists every help text as the program prints it.
fn check_commands_page(all: &[(String, String)]) {
    let mut page = "# Commands\n\nEvery command's `--help`, as the program prints it.\n".to_owned();
    for (name, text) in all {
        let title = name.replace("help-", "orchestrate ").replace("help", "orchestrate");
        let text = text.trim_end();
        page = format!("{page}\n## {}\n\n```text\n{text}\n```\n", title.replace('-', " "));
    }
    let file = root().join("docs/src/commands.md");
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    let remedy = "ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-cli help_of_every";
    assert!(committed == page, "docs/src/commands.md is out of date; run {remedy}");
}

/// The output and exit code of a command; paths and ports that differ between machines are replaced.
fn transcript(args: &[&str], folder: &Path) -> String {
    let output = program(args).output().unwrap();
    let mut text = format!("$ orchestrate {}\n", args.join(" "));
    for stream in [&output.stdout, &output.stderr] {
        text.push_str(&String::from_utf8_lossy(stream));
    }
    let code = output.status.code().unwrap_or(-1);
    let text = without_port(&format!("{text}exit code {code}\n\n"));
    text.replace(folder.to_str().unwrap(), "[folder]").replace(root().to_str().unwrap(), "[root]")
}

/// Replaces the port of a server that chose a free one.
fn without_port(text: &str) -> String {
    let mark = "listening on http://127.0.0.1:";
    let Some((before, after)) = text.split_once(mark) else { return text.to_owned() };
    let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{before}{mark}[port]{rest}")
}

fn transcripts(cases: &[&[&str]], folder: &Path) -> String {
    cases.iter().map(|args| transcript(args, folder)).collect()
}

/// All settings keys in the schema, as `section.key`.
fn settings_keys() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("configs/schema.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut keys = BTreeSet::new();
    for (section, of) in schema["properties"].as_object().unwrap() {
        let reference = of["$ref"].as_str().or_else(|| of["allOf"][0]["$ref"].as_str());
        let properties = match reference {
            Some(reference) => {
                &schema.pointer(reference.trim_start_matches('#')).unwrap()["properties"]
            }
            None => &of["properties"],
        };
        keys.extend(properties.as_object().unwrap().keys().map(|key| format!("{section}.{key}")));
    }
    keys.into_iter().collect()
}

#[test]
fn config_problem_of_every_key() {
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in [("zero", "0"), ("negative", "-1"), ("text", "\"nonsense\"")] {
        let mut text = String::new();
        for key in settings_keys() {
            let set = format!("{key}={value}");
            text.push_str(&transcript(&["config", "check", "--set", &set], folder.path()));
        }
        insta::assert_snapshot!(format!("config-{name}"), text);
    }
}

#[test]
fn config_problems_of_files_and_combinations() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let syntax = file("syntax.toml", "[rollout]\ngroup_size = = 3\n");
    let unknown = file("unknown.toml", "[rollout]\ngroup_sise = 3\n[algorithmm]\nclip = 1\n");
    let types = file("types.toml", "[rollout]\ngroup_size = \"many\"\n[sandbox]\nhosts = 3\n");
    let scalar = file("scalar.toml", "rollout = 3\n");
    let binary = file("binary.toml", "\u{0}\u{1}");
    let missing = folder.path().join("missing.toml").to_str().unwrap().to_owned();
    let check = |args: &[&str]| transcript(&[&["config", "check"], args].concat(), folder.path());
    let mut text = String::new();
    for path in [&syntax, &unknown, &types, &scalar, &binary, &missing] {
        text.push_str(&check(&["--config", path]));
    }
    text.push_str(&check(&["--config", &syntax, "--config", &unknown, "--config", &types]));
    for sets in [
        &["rollout.group_size"][..],
        &["=3"],
        &["rollout.group_sise=3"],
        &["rolout.group_size=3"],
        &["rollout.groups_per_step=8", "rollout.max_groups_per_step=4"],
        &["algorithm.policy_loss=gspo", "algorithm.dual_clip=3"],
        &["algorithm.policy_loss=sapo", "algorithm.clip_low=0.2"],
        &["algorithm.policy_loss=rspo", "algorithm.router_shift=none"],
        &["algorithm.policy_loss=gspo", "algorithm.aggregation=token-mean"],
        &["algorithm.aggregation=token-sum-norm"],
        &["algorithm.kl_estimator=k2"],
        &["algorithm.sapo_tau=[1,2]"],
        &["algorithm.importance_correction=icepop", "algorithm.importance_level=sequence"],
        &["algorithm.routing_replay=predictive", "algorithm.mini_steps=1"],
        &["algorithm.routing_replay=predictive", "engine.url=http://127.0.0.1:1"],
        &["algorithm.overlong_max_tokens=100"],
        &["algorithm.gae_lambda=0.9"],
        &["engine.url=notaurl"],
        &["engine.url=http://a", "engine.urls=[\"http://b\"]"],
        &["engine.kind=ollama"],
        &["trainer.url=notaurl"],
        &["trainer.token_env=not a name"],
        &["sandbox.docker_host=ftp://x"],
        &["tasks.environment=nowhere"],
        &["tasks.file=rows.jsonl"],
        &["run.max_staleness=-1"],
    ] {
        let args: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        text.push_str(&check(&args));
    }
    insta::assert_snapshot!("config-combinations", text);
}

#[test]
fn output_of_every_exit_status() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("empty")).unwrap();
    std::fs::write(path("text.txt"), "no rows here\n").unwrap();
    std::fs::write(path("bytes.log"), [0xff, 0xfe, 0x00]).unwrap();
    std::fs::write(path("nothing.jsonl"), "").unwrap();
    let (empty, text, bytes, none, absent) =
        (path("empty"), path("text.txt"), path("bytes.log"), path("nothing.jsonl"), path("absent"));
    let (quickstart, rows) = ("configs/quickstart.toml", path("rows.jsonl"));
    let cases: &[&[&str]] = &[
        &[],
        &["nonsense"],
        &["run"],
        &["run", "--run-dir"],
        &["run", "--config", quickstart, "--run-dir", &path("no-docker")],
        &["run", "--run-dir", &absent, "--resume"],
        &["run", "--run-dir", &empty, "--resume"],
        &["run", "--config", quickstart, "--run-dir", &text],
        &["run", "--config", "missing.toml", "--run-dir", &absent],
        &["run", "--config", quickstart, "--set", "engine.kind=openai", "--run-dir", &absent],
        &["eval", "--run-dir", &absent, "--resume"],
        &["eval", "--config", quickstart, "--checkpoint", &empty, "--run-dir", &path("eval")],
        &["show", &absent],
        &["show", &empty],
        &["analyze", &absent],
        &["compare", "--runs", &absent],
        &["compare", "--runs", &text],
        &["tasks", "show", "nosuch"],
        &["tasks", "show", "micro-nosuch-1"],
        &["tasks", "list", "--file", &absent],
        &["tasks", "list", "--file", &text],
        &["tasks", "import", &none],
        &["tasks", "import", &text],
        &["tasks", "verify", "micro"],
        &["tasks", "make", &absent, "--out", &rows],
        &["tasks", "make", &empty, "--out", &rows, "--held-out", "1.5"],
        &["tasks", "make", &empty, "--out", &rows],
        &["tasks", "make", &empty, "--out", &text],
        &["grade", "--tasks", &absent, "--instance", "a__b-1", "--log", &bytes],
        &["grade", "--tasks", &none, "--instance", "a__b-1", "--log", &bytes],
        &["grade", "--tasks", &text, "--instance", "a__b-1", "--log", &bytes],
        &["gc"],
        &["gc", "--run-dir", &absent],
        &["warm-start", "--out", &empty, "--from", &absent],
        &["serve-engine", "--model", &absent, "--listen", "127.0.0.1:0"],
        &["serve-engine", "--model", &empty, "--listen", "nowhere"],
        &["serve-trainer", "--model", &absent, "--checkpoints", &empty, "--listen", "127.0.0.1:0"],
        &["completions", "nosuch"],
    ];
    insta::assert_snapshot!("exit-paths", transcripts(cases, folder.path()));
}
