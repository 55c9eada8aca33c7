//! The life of a run folder without Docker: failed and interrupted starts, changed settings, the list of
//! runs. Nothing answers the episodes that are offered, so a run goes on until it is stopped.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]
#![expect(
    clippy::disallowed_methods,
    reason = "these tests have no runtime, and wait for processes"
)]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for something that takes a second or two.
const PATIENCE: Duration = Duration::from_mins(2);

/// A process that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Whether the process has a handler of the signal: before that, the signal would kill it.
    fn handles(&self, signal: Signal) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << (signal.as_raw() - 1)) != 0
    }

    /// Stops a run that can be resumed.
    fn stop(self) {
        let started = Instant::now();
        while !self.handles(Signal::TERM) {
            assert!(started.elapsed() < PATIENCE, "the run did not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal(Signal::TERM);
        let (code, text) = self.end();
        assert_eq!(code, Some(130), "{text}");
    }

    /// Exit code and standard error, read to the end.
    fn end(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut text).unwrap();
        (self.0.wait().unwrap().code(), text)
    }
}

fn program(folder: &Path, args: &[&str]) -> Command {
    // The mask lets others read and write what a program does not protect itself.
    let mut command = Command::new("sh");
    command.args(["-c", "umask 000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_orchestrate")]);
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command
}

fn orchestrate(folder: &Path, args: &[&str]) -> Output {
    program(folder, args).output().unwrap()
}

fn start(folder: &Path, args: &[&str]) -> Running {
    let mut command = program(folder, args);
    Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with the configuration of a run whose episodes are offered to workers.
fn configured() -> (tempfile::TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().to_owned();
    // With `..` in it, which an embedded server refuses.
    let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../environments/micro/policy");
    let rows = "{\"id\": \"sum__1\", \"prompt\": \"What is 17 + 25?\"}\n";
    std::fs::write(folder.join("rows.jsonl"), rows).unwrap();
    let config = format!(
        "[run]\nname = \"sums\"\ntags = [\"a\", \"b\"]\nsteps = 3\neval_every = 0\nshutdown_grace = \"1s\"\n\
         [tasks]\nfile = \"rows.jsonl\"\n[engine]\nmodel = \"{policy}\"\n[rollout]\nscaffold = \"outside\"\n\
         group_size = 2\ngroups_per_step = 1\nmax_sequence_tokens = 448\nmax_response_tokens = 64\n\
         [gateway]\nlisten = \"127.0.0.1:0\"\n[algorithm]\nlearning_rate = 1e-4\n"
    );
    std::fs::write(folder.join("run.toml"), config).unwrap();
    (temp, folder)
}

const RUN: [&str; 5] = ["run", "--config", "run.toml", "--run-dir", "runs/first"];
const RESUME: [&str; 4] = ["run", "--run-dir", "runs/first", "--resume"];

/// The overview of the run, once `ready` holds.
fn wait_for(folder: &Path, running: &mut Running, ready: impl Fn(&Value) -> bool) -> Value {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if let Some(status) = running.0.try_wait().unwrap() {
            panic!("the run ended early: {status}");
        }
        let shown = orchestrate(folder, &["show", "runs/first", "--json"]);
        if let Ok(overview) = serde_json::from_slice::<Value>(&shown.stdout)
            && ready(&overview)
        {
            return overview;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("waited for {PATIENCE:?}");
}

fn has_episodes(overview: &Value) -> bool {
    overview["episodes"].as_array().is_some_and(|episodes| !episodes.is_empty())
}

fn changes(overview: &Value) -> Vec<String> {
    let rows = overview["changed_settings"].as_array();
    rows.into_iter().flatten().map(|row| row["setting"].as_str().unwrap().to_owned()).collect()
}

/// Runs until an episode is offered, and stops.
fn run_and_stop(folder: &Path, args: &[&str], ready: impl Fn(&Value) -> bool) {
    let mut running = start(folder, args);
    wait_for(folder, &mut running, |overview| has_episodes(overview) && ready(overview));
    running.stop();
}

#[test]
fn a_start_that_fails_or_is_interrupted_leaves_nothing_behind() {
    let (_temp, folder) = configured();
    let dead = ["--set", "engine.url=http://127.0.0.1:9"];
    let refused =
        orchestrate(&folder, &[&RUN, &dead[..], &["--set", "engine.start_timeout=1s"]].concat());
    assert_eq!(refused.status.code(), Some(4), "{}", stderr(&refused));
    assert!(!folder.join("runs/first").exists());

    // The same folder, which the user has made, with a note in it.
    std::fs::create_dir_all(folder.join("runs/first")).unwrap();
    std::fs::write(folder.join("runs/first/note"), "mine").unwrap();
    let waiting = start(&folder, &[&RUN, &dead[..]].concat());
    let journal = folder.join("runs/first/orchestrate.db");
    let started = Instant::now();
    while !(journal.exists() && waiting.handles(Signal::INT)) {
        assert!(started.elapsed() < PATIENCE, "the run did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    waiting.signal(Signal::INT);
    let (code, text) = waiting.end();
    assert_eq!(code, Some(130), "{text}");
    assert!(text.contains("nothing was sampled"), "{text}");
    let left: Vec<_> = std::fs::read_dir(folder.join("runs/first")).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");

    // The corrected command.
    run_and_stop(&folder, &RUN, |_| true);
    assert!(!folder.join("runs/first/orchestrate.db-wal").exists());
}

#[test]
fn a_run_that_was_killed_while_its_journal_was_created_is_resumed() {
    let (_temp, folder) = configured();
    let plan = folder.join("runs/first/plan.toml");
    // A little later each time; the creation takes some milliseconds.
    for moment in 0..8 {
        let mut killed = start(&folder, &RUN);
        let started = Instant::now();
        while !plan.exists() {
            assert!(started.elapsed() < PATIENCE, "the run did not start");
        }
        std::thread::sleep(Duration::from_millis(4 * moment));
        killed.0.kill().unwrap();
        killed.0.wait().unwrap();
        run_and_stop(&folder, &RESUME, |_| true);
        std::fs::remove_dir_all(folder.join("runs/first")).unwrap();
    }
}

#[test]
fn settings_that_may_change_are_recorded_and_others_are_refused() {
    let (_temp, folder) = configured();
    run_and_stop(&folder, &RUN, |_| true);
    let plan = std::fs::read(folder.join("runs/first/plan.toml")).unwrap();
    for (set, code, text) in [
        ("rollout.group_size=4", 2, "rollout.group_size is fixed"),
        ("run.stepz=4", 3, "did you mean `steps`"),
        ("run.steps=0", 3, "must be at least 1"),
        ("engine.url=http://127.0.0.1:9", 3, "must stay as it is"),
        ("trainer.url=http://127.0.0.1:9", 3, "must stay as it is"),
    ] {
        let output = orchestrate(&folder, &[&RESUME, &["--set", set][..]].concat());
        assert_eq!(output.status.code(), Some(code), "{set}: {}", stderr(&output));
        assert!(stderr(&output).contains(text), "{set}: {}", stderr(&output));
    }
    let output = orchestrate(&folder, &[&RESUME, &["--config", "run.toml"][..]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));

    let sets = ["--set", "run.steps=7", "--set", "run.tags=[\"c\"]"];
    run_and_stop(&folder, &[&RESUME, &sets[..]].concat(), |overview| changes(overview).len() == 2);
    // A setting's old name is recorded as the present one.
    let sets = ["--set", "run.steps=5", "--set", "engine.away_timeout=3m"];
    let recorded =
        ["run.steps=7", "run.tags=[\"c\"]", "run.steps=5", "engine.out_of_service_timeout=3m"];
    run_and_stop(&folder, &[&RESUME, &sets[..]].concat(), |overview| changes(overview) == recorded);
    assert_eq!(std::fs::read(folder.join("runs/first/plan.toml")).unwrap(), plan);
    let shown = orchestrate(&folder, &["show", "runs/first"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("run.steps=5"), "{shown:?}");

    let listed = orchestrate(&folder, &["runs", "--json", "--tag", "c"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let run = &listed["runs"][0];
    assert_eq!(run["folder"], "runs/first");
    assert_eq!(run["name"], "sums");
    assert_eq!((&run["state"], &run["kind"]), (&"stopped".into(), &"training".into()));
    assert_eq!((run["step"].as_u64(), run["steps"].as_u64()), (Some(0), Some(5)));
    let listed = orchestrate(&folder, &["runs", "--json", "--tag", "a"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed["runs"], Value::Array(Vec::new()));
}

#[test]
fn the_folder_of_an_evaluation_is_listed_as_such_and_training_in_it_is_refused() {
    let (_temp, folder) = configured();
    let run = &RUN[1..];
    run_and_stop(&folder, &[&["gateway", "--tasks", "rows.jsonl"], run].concat(), |_| true);
    let shown = orchestrate(&folder, &["status", "runs/first"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("stopped, evaluation"), "{shown}");
    let shown = orchestrate(&folder, &["status", "runs/first", "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!((&shown["state"], &shown["kind"]), (&"stopped".into(), &"evaluation".into()));
    assert_eq!((&shown["step"], &shown["steps"]), (&Value::Null, &Value::Null));
    let shown = orchestrate(&folder, &["show", "runs/first", "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["kind"], "evaluation");
    let shown = orchestrate(&folder, &["show", "runs/first"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(!shown.contains("held-out") && !shown.contains("global steps"), "{shown}");

    let output = orchestrate(&folder, &RESUME);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("the folder holds an evaluation"), "{}", stderr(&output));
    run_and_stop(&folder, &["gateway", "--run-dir", "runs/first", "--resume"], |_| true);
}

#[test]
fn a_model_is_evaluated_and_recorded_by_one_path_however_it_is_written() {
    let (_temp, folder) = configured();
    let folder = folder.canonicalize().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let root = root.canonicalize().unwrap();
    let policy = root.join("environments/micro/policy");
    std::os::unix::fs::symlink(&policy, folder.join("link")).unwrap();
    // A model of a hub's cache, whose files are links to a folder of their own.
    for name in ["cache/snapshot", "cache/blobs"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    for entry in std::fs::read_dir(&policy).unwrap().flatten() {
        let blob = folder.join("cache/blobs").join(entry.file_name());
        std::fs::copy(entry.path(), &blob).unwrap();
        let link = folder.join("cache/snapshot").join(entry.file_name());
        std::os::unix::fs::symlink(blob, link).unwrap();
    }
    let run = &RUN[1..];
    for (written, recorded) in [
        (format!("{}/crates/../environments/./micro/policy/", root.display()), policy),
        ("cache/../link".to_owned(), folder.join("link")),
        ("link/../policy".to_owned(), root.join("environments/micro/policy")),
        ("cache/blobs/../snapshot".to_owned(), folder.join("cache/snapshot")),
    ] {
        let set = format!("engine.model={written:?}");
        let args = [&["gateway", "--tasks", "rows.jsonl", "--set", &set][..], run].concat();
        run_and_stop(&folder, &args, |_| true);
        let plan = std::fs::read_to_string(folder.join("runs/first/plan.toml")).unwrap();
        assert!(plan.contains(&format!("model = {recorded:?}\n")), "{written}: {plan}");
        let file = format!("held_out_file = {:?}\n", folder.join("rows.jsonl"));
        assert!(plan.contains(&file), "{written}: {plan}");
        std::fs::remove_dir_all(folder.join("runs/first")).unwrap();
    }
}

#[test]
fn a_run_is_resumed_from_any_current_folder() {
    let (_temp, folder) = configured();
    run_and_stop(&folder, &RUN, |_| true);
    let elsewhere = folder.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let resume = ["run", "--run-dir", "../runs/first", "--resume", "--set", "run.steps=7"];
    let mut running = start(&elsewhere, &resume);
    wait_for(&folder, &mut running, |overview| changes(overview) == ["run.steps=7"]);
    running.stop();
}

/// Checks the modes of a folder and of everything in it; returns how many files there are.
fn private_files(folder: &Path) -> usize {
    use std::os::unix::fs::PermissionsExt as _;
    // A file of a running program may have been replaced since it was listed.
    let mode = |path: &Path| Some(std::fs::metadata(path).ok()?.permissions().mode() & 0o777);
    assert_eq!(mode(folder), Some(0o700), "{}", folder.display());
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files += private_files(&path);
        } else if let Some(mode) = mode(&path) {
            assert_eq!(mode, 0o600, "{}", path.display());
            files += 1;
        }
    }
    files
}

#[test]
fn files_of_a_run_are_private_whatever_the_mask_was() {
    let (_temp, folder) = configured();
    let mut running = start(&folder, &RUN);
    wait_for(&folder, &mut running, has_episodes);
    assert!(private_files(&folder.join("runs")) > 4);
    running.stop();
    assert!(private_files(&folder.join("runs")) > 4);
}

/// An inference server, and its address.
fn serve_engine(folder: &Path) -> (Running, String) {
    let policy = format!("{}/../../environments/micro/policy", env!("CARGO_MANIFEST_DIR"));
    let args = ["serve-engine", "--model", policy.as_str(), "--listen", "127.0.0.1:0"];
    let mut server = start(folder, &[&args[..], &["--checkpoint-root", "."]].concat());
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains("http://")).unwrap().unwrap();
    let address = line.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
    let address = address.trim_end_matches([',', '.']).to_owned();
    // Its log is read on, so that it never waits for a full pipe.
    std::thread::spawn(move || lines.for_each(drop));
    (server, address)
}

#[test]
fn a_run_continues_with_another_server_and_forgets_one_that_never_answered() {
    let (_temp, folder) = configured();
    let (server, address) = serve_engine(&folder);
    let url = format!("engine.url={address}");
    run_and_stop(&folder, &[&RUN, &["--set", url.as_str()][..]].concat(), |_| true);
    drop(server);

    let dead = "engine.url=http://127.0.0.1:9";
    let short = "engine.start_timeout=1s";
    let output = orchestrate(&folder, &[&RESUME, &["--set", dead, "--set", short][..]].concat());
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    let shown = orchestrate(&folder, &["show", "runs/first", "--json"]);
    assert_eq!(changes(&serde_json::from_slice(&shown.stdout).unwrap()), Vec::<String>::new());

    let (_server, address) = serve_engine(&folder);
    let url = format!("engine.url={address}");
    run_and_stop(&folder, &[&RESUME, &["--set", url.as_str()][..]].concat(), |overview| {
        changes(overview) == [url.as_str()]
    });
}

#[test]
fn gc_of_a_run_uses_the_hosts_of_its_plan_and_of_its_changes() {
    let (_temp, folder) = configured();
    let (first, second) = ("unix:///nonexistent/first.sock", "unix:///nonexistent/second.sock");
    let host = |address: &str| format!("sandbox.docker_host=\"{address}\"");
    let gc = |more: &[&str]| {
        let mut command = program(&folder, &[&["gc"][..], more].concat());
        command.env("DOCKER_HOST", "unix:///nonexistent/of-the-environment.sock").output().unwrap()
    };
    let of_run = ["--run-dir", "runs/first"];
    for (args, address, changed) in [(&RUN[..], first, 0), (&RESUME[..], second, 1)] {
        let started = |overview: &Value| changes(overview).len() == changed;
        run_and_stop(&folder, &[args, &["--set", &host(address)]].concat(), started);
        for more in [&[][..], &["--all"], &["--dry-run"]] {
            let output = gc(&[&of_run[..], more].concat());
            assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
            assert!(stderr(&output).contains(address), "{}", stderr(&output));
        }
    }
    let both = gc(&[&of_run[..], &["--set", "sandbox.docker_host=\"unix:///x\""]].concat());
    assert_eq!(both.status.code(), Some(3), "{}", stderr(&both));
    // Without a run, the host of the environment is used.
    assert!(stderr(&gc(&[])).contains("of-the-environment.sock"));
}
