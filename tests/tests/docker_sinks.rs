//! Sinks of whole runs: what a killed and resumed run leaves there is read by the programs that the sinks
//! are for, and a sink that fails never ends a run.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use orchestrate_e2e::{docker_or_skip, metrics, orchestrate, pause, root, skip, stderr};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

/// More than anything here takes, on a machine under load.
const LONG: Duration = Duration::from_mins(8);
/// Starts that are killed, each after its first new line.
const KILLS: usize = 3;
const TOKEN: &str = "token-of-the-scraper";

/// Settings of a run of three steps and two evaluations, with sinks for files.
const RUN: &[&str] = &[
    "run.steps=3",
    "run.eval_every=3",
    "run.eval_tasks=4",
    "run.eval_samples=1",
    "diagnostics.no_replay_every=2",
    "rollout.group_size=4",
    "rollout.groups_per_step=2",
    "rollout.max_groups_per_step=4",
    "rollout.max_in_flight=8",
    "sandbox.max_containers=6",
    "tasks.held_out=50",
    "sinks.tensorboard=true",
    "sinks.csv=true",
    "sinks.parquet=true",
];

fn run(run_dir: &Path, settings: &[&str]) -> Command {
    let mut args = vec!["run", "--run-dir", run_dir.to_str().unwrap(), "--json"];
    if settings.is_empty() {
        args.push("--resume");
    } else {
        args.extend(["--config", "configs/quickstart.toml"]);
        args.extend(settings.iter().flat_map(|setting| ["--set", *setting]));
    }
    let mut command = orchestrate(&args).unwrap();
    command.env("SCRAPER_TOKEN", TOKEN).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A process that does not outlive its test.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The text after `mark` up to a space in the first line that has it, and the rest of the output.
fn find(stderr: ChildStderr, mark: &str) -> (String, BufReader<ChildStderr>) {
    let mut reader = BufReader::new(stderr);
    let mut said = String::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "no `{mark}` in: {said}");
        if let Some((_, rest)) = line.split_once(mark) {
            return (rest.split_whitespace().next().unwrap().to_owned(), reader);
        }
        said.push_str(&line);
    }
}

/// Status and body of `GET path` at `address`.
fn get(address: &str, path: &str, token: Option<&str>) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let token = token.map_or(String::new(), |token| format!("authorization: Bearer {token}\r\n"));
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n{token}connection: close\r\n\r\n")
        .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    (status, reply)
}

/// Real `prometheus` from the folder in `ORCHESTRATE_PROMETHEUS`, or from the search path.
fn prometheus() -> Option<PathBuf> {
    let program = std::env::var_os("ORCHESTRATE_PROMETHEUS").map_or_else(
        || PathBuf::from("prometheus"),
        |folder| Path::new(&folder).join("prometheus"),
    );
    let answers = Command::new(&program).arg("--version").output();
    if answers.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    skip::skip("sinks", "no prometheus in ORCHESTRATE_PROMETHEUS or on the search path");
    None
}

/// Cuts the last record of the newest event file, as a kill in the middle of a write does. The kill before may have
/// come earlier: before the folder, the file or the file's first byte.
fn cut_newest_event_file(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let Some(newest) = entries.map(|entry| entry.unwrap().path()).max() else { return };
    let file = std::fs::OpenOptions::new().write(true).open(newest).unwrap();
    file.set_len(file.metadata().unwrap().len().saturating_sub(5)).unwrap();
}

#[test]
fn docker_sinks_of_a_killed_run_hold_exactly_its_lines() {
    let Some(python) = std::env::var_os("ORCHESTRATE_SINKS_PYTHON") else {
        skip::skip("sinks", "ORCHESTRATE_SINKS_PYTHON is not set");
        return;
    };
    let Some(prometheus) = prometheus() else { return };
    if !docker_or_skip("docker_sinks_of_a_killed_run").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let scraped = [
        "sinks.prometheus=127.0.0.1:0",
        "sinks.prometheus_token_env=SCRAPER_TOKEN",
        "sinks.flush_timeout=8m",
    ];
    let settings = [RUN, &scraped].concat();
    for kill in 1..=KILLS {
        let first = if run_dir.join("orchestrate.db").exists() { &[][..] } else { &settings };
        let mut start = Owned(run(&run_dir, first).stderr(Stdio::null()).spawn().unwrap());
        let begun = Instant::now();
        while metrics(&run_dir).map_or(0, |lines| lines.len()) < kill {
            assert!(begun.elapsed() < LONG, "no line {kill} within {LONG:?}");
            assert!(start.0.try_wait().unwrap().is_none(), "the run ended before line {kill}");
            pause(Duration::from_millis(10));
        }
        start.0.kill().unwrap();
        start.0.wait().unwrap();
        cut_newest_event_file(&run_dir.join("tensorboard"));
    }

    let mut last = Owned(run(&run_dir, &[]).spawn().unwrap());
    let (url, mut said) = find(last.0.stderr.take().unwrap(), "prometheus: metrics at ");
    let address = url.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    assert_eq!(get(address, "/metrics", None).0, 401);
    // The run now waits at its end until its last values were scraped.
    let (status, text) = get(address, "/metrics", Some(TOKEN));
    assert!(status == 200 && text.contains("orchestrate_run_info{run="), "{text}");
    assert_eq!(get(address, "/", Some(TOKEN)).0, 404);
    let config = folder.path().join("prometheus.yml");
    let target = format!(
        "scrape_configs:\n- job_name: run\n  scrape_interval: 5s\n  scrape_timeout: 5s\n  \
         authorization: {{credentials: {TOKEN}}}\n  static_configs:\n  - targets: ['{address}']\n"
    );
    std::fs::write(&config, target).unwrap();
    let server = Command::new(prometheus)
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", folder.path().join("tsdb").display()))
        .arg("--web.listen-address=127.0.0.1:0")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut server = Owned(server.unwrap());
    let (listens, _log) = find(server.0.stderr.take().unwrap(), "\"Listening on\" address=");

    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(last.0.wait().unwrap().success(), "{rest}");
    assert!(!rest.contains("warning: sink"), "{rest}");
    let read = Command::new(python)
        .arg(root().join("tests/sinks/read_back.py"))
        .arg(&run_dir)
        .arg(format!("http://{listens}"))
        .output()
        .unwrap();
    assert!(read.status.success(), "{}", stderr(&read));
    let counts: serde_json::Value = serde_json::from_slice(&read.stdout).unwrap();
    orchestrate_e2e::say(&format!("values read back: {counts}"));
    assert_eq!(counts["lines"], 5);
    for sink in ["tensorboard", "csv", "parquet", "prometheus"] {
        assert!(counts[sink].as_u64().unwrap() > 10, "{counts}");
    }
}

#[test]
fn docker_failing_sinks_never_end_a_run() {
    if !docker_or_skip("docker_failing_sinks").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    // A folder where a file must be, a file where a folder must be, and an address in use.
    std::fs::create_dir_all(run_dir.join("metrics.csv")).unwrap();
    std::fs::write(run_dir.join("tensorboard"), "").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("sinks.prometheus={}", taken.local_addr().unwrap());
    let settings = [RUN, &["run.steps=1", "run.eval_every=0", &address]].concat();
    let output = run(&run_dir, &settings).output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    for (sink, cause) in
        [("csv", "metrics.csv"), ("tensorboard", "tensorboard"), ("prometheus", "cannot listen on")]
    {
        let warnings: Vec<&str> =
            said.lines().filter(|line| line.contains(&format!("warning: sink {sink}: "))).collect();
        assert!(warnings.len() == 1 && warnings.concat().contains(cause), "{sink}: {said}");
    }
    assert!(said.contains("sink csv still failed"), "{said}");
    assert!(run_dir.join("metrics.parquet").is_file());

    // Once the cause is gone, the finished run writes what is missing.
    std::fs::remove_dir(run_dir.join("metrics.csv")).unwrap();
    let output = run(&run_dir, &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let rows = std::fs::read_to_string(run_dir.join("metrics.csv")).unwrap();
    assert_eq!(rows.lines().count(), 1 + metrics(&run_dir).unwrap().len());
}
