//! Whole runs of the built program against real Docker: train, kill, resume, separate processes.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a panic fails the test"
)]

use orchestrate_e2e::{containers_of, docker_or_skip, metrics, orchestrate, say, skip, stderr};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Settings of a run that ends within a minute.
const SMALL: &[&str] = &[
    "--config",
    "configs/quickstart.toml",
    "--set",
    "run.steps=3",
    "--set",
    "run.eval_every=3",
    "--set",
    "run.eval_tasks=6",
    "--set",
    "run.eval_samples=1",
    "--set",
    "diagnostics.no_replay_every=1",
    "--set",
    "rollout.group_size=4",
    "--set",
    "rollout.groups_per_step=3",
    "--set",
    "rollout.max_groups_per_step=6",
    "--set",
    "rollout.max_in_flight=8",
    "--set",
    "sandbox.max_containers=6",
    "--set",
    "run.keep_batches=100",
    "--set",
    "tasks.held_out=50",
];

fn start(run_dir: &Path, more: &[&str]) -> Command {
    let mut args = vec!["run", "--run-dir", run_dir.to_str().unwrap(), "--json"];
    args.extend(more);
    orchestrate(&args).unwrap()
}

fn finished(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn steps(run_dir: &Path) -> Vec<Value> {
    metrics(run_dir).unwrap().into_iter().filter(has_step).collect()
}

fn has_step(line: &Value) -> bool {
    line["loss"].is_number()
}

/// Every episode id in every published batch, in order.
fn trained_episodes(run_dir: &Path) -> Vec<String> {
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(run_dir.join("batches")).unwrap() {
        let folder = entry.unwrap().path();
        for shard in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()) {
            if shard.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(&shard).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let end = 8 + usize::try_from(length).unwrap();
            let header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
            let list = header["__metadata__"]["episode_ids"].as_str().unwrap();
            ids.extend(serde_json::from_str::<Vec<String>>(list).unwrap());
        }
    }
    ids.sort();
    ids
}

fn assert_once(ids: &[String]) {
    let mut unique = ids.to_vec();
    unique.dedup();
    assert_eq!(unique.len(), ids.len(), "an episode was trained on twice: {ids:?}");
}

#[test]
fn docker_a_run_trains_evaluates_and_leaves_nothing_behind() {
    if !docker_or_skip("docker_a_run").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let report = finished(&mut start(&run_dir, SMALL));
    let lines = steps(&run_dir);
    let count = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(count("steps_applied") + count("steps_skipped"), 3);
    for line in &lines {
        assert_eq!(line["routing_missing"], 0, "{line}");
        assert_eq!(line["broken_episodes"], 0, "{line}");
        let hit = line["prefix_cache_hit_rate"].as_f64().unwrap();
        let possible = line["prefix_cache_hit_rate_possible"].as_f64().unwrap();
        assert!(hit >= 0.98 * possible, "{line}");
        assert!(line["router_disagreement"].as_f64().unwrap() > 0.0, "{line}");
    }
    assert_once(&trained_episodes(&run_dir));
    assert!(run_dir.join("report.html").exists());
    let run = report["run"].as_str().unwrap();
    assert_eq!(containers_of(run).unwrap(), Vec::<String>::new());

    // `show` finds every row of the mask.
    let id = trained_episodes(&run_dir).first().cloned();
    if let Some(id) = id {
        let shown = orchestrate_e2e::run(&["show", run_dir.to_str().unwrap(), &id]).unwrap();
        let text = String::from_utf8(shown.stdout).unwrap();
        assert!(text.contains("routing mask:") && text.contains("turn 1"), "{text}");
    }
    // A second run in the same folder is refused; resuming a finished one only reports.
    let again = start(&run_dir, SMALL).output().unwrap();
    assert_eq!(again.status.code(), Some(6), "{}", stderr(&again));
    assert_eq!(finished(&mut start(&run_dir, &["--resume"]))["run"], report["run"]);
}

#[test]
fn docker_equal_f32_engines_have_no_mismatch() {
    if !docker_or_skip("docker_equal_f32_engines").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let mut settings = SMALL.to_vec();
    settings.extend(["--set", "embedded.weight_format=f32", "--set", "run.eval_every=0"]);
    finished(&mut start(&run_dir, &settings));
    for line in steps(&run_dir) {
        let kl = line["kl_train_infer"].as_f64().unwrap();
        let without = line["kl_train_infer_no_replay"].as_f64().unwrap();
        assert!(kl.abs() <= 1e-8 && without.abs() <= 1e-8, "{line}");
    }
}

/// A small tmpfs mounted at `at` and unmounted when dropped; `None` if mounting is not allowed.
struct SmallDisk {
    at: std::path::PathBuf,
}

impl SmallDisk {
    fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let options = format!("size={size}");
        let mount = ["-t", "tmpfs", "-o", options.as_str(), "orchestrate-test"];
        let done = Command::new("mount").args(mount).arg(at).stderr(Stdio::null()).status();
        done.is_ok_and(|status| status.success()).then(|| Self { at: at.to_path_buf() })
    }

    fn grow(&self, size: &str) {
        let options = format!("remount,size={size}");
        let status = Command::new("mount").args(["-o", &options]).arg(&self.at).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

/// A digest of what a run sampled and trained: the tensors of its batches, and its last weights.
fn digest(run_dir: &Path) -> String {
    let mut files = Vec::new();
    for folder in ["batches", "checkpoints"] {
        let mut folders = vec![run_dir.join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "safetensors") {
                    files.push(path);
                }
            }
        }
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        hasher.update(path.strip_prefix(run_dir).unwrap().to_str().unwrap().as_bytes());
        let bytes = std::fs::read(&path).unwrap();
        // The header names the run; everything after it is tensors.
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        hasher.update(&bytes[8 + usize::try_from(length).unwrap()..]);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Checks the digest of a seeded run with the instructions of `limit`, a value of `ORCHESTRATE_CPU`.
fn seeded_run_gives_its_recorded_digest(limit: &str) {
    if !docker_or_skip("docker_a_seeded_run").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        "--set",
        "run.seed=5",
        "--set",
        "run.steps=2",
        "--set",
        "run.eval_every=0",
        "--set",
        "rollout.groups_per_step=2",
    ];
    let run_dir = folder.path().join("run");
    let mut command = start(&run_dir, &[SMALL, &settings].concat());
    finished(command.env("ORCHESTRATE_CPU", limit));
    // Recorded once; changes of tasks, prompts, policy or algorithms change it, a processor does not.
    assert_eq!(digest(&run_dir), "a48713ce4a3f17b7", "ORCHESTRATE_CPU={limit}");
}

#[test]
fn docker_a_seeded_run_gives_its_recorded_digest_natively() {
    seeded_run_gives_its_recorded_digest("native");
}

#[test]
fn docker_a_seeded_run_gives_its_recorded_digest_with_avx2() {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // Elsewhere this is what runs natively.
    if cpu.contains("avx512f") {
        seeded_run_gives_its_recorded_digest("avx2");
    }
}

#[test]
fn docker_a_seeded_run_gives_its_recorded_digest_without_vector_instructions() {
    seeded_run_gives_its_recorded_digest("base");
}

#[test]
fn docker_a_full_disk_exits_with_6_and_the_run_resumes_when_there_is_space() {
    if !docker_or_skip("docker_a_full_disk").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Room for the journal and some episodes, not for a checkpoint with its optimizer (23 MB).
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), "12m") else {
        skip::skip_test("docker_a_full_disk", "mount", "no right to mount a tmpfs");
        return;
    };
    let run_dir = disk.at.join("run");
    let stopped = start(&run_dir, SMALL).output().unwrap();
    let words = stderr(&stopped);
    assert_eq!(stopped.status.code(), Some(6), "{words}");
    assert!(words.contains("No space left on device"), "{words}");
    assert!(words.contains(run_dir.to_str().unwrap()), "the file is not named: {words}");
    assert!(words.contains("hint:") && words.contains("--resume"), "{words}");

    disk.grow("400m");
    let report = finished(&mut start(&run_dir, &["--resume"]));
    let count = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(count("steps_applied") + count("steps_skipped"), 3);
    assert_once(&trained_episodes(&run_dir));
    assert_eq!(containers_of(report["run"].as_str().unwrap()).unwrap(), Vec::<String>::new());
}

#[test]
fn docker_run_is_not_resumed_with_another_image_of_the_same_name() {
    if !docker_or_skip("docker_run_is_not_resumed").unwrap() {
        return;
    }
    let name = format!("orchestrate/test-moving:{}", std::process::id());
    let docker = |args: &[&str]| {
        let output = orchestrate_e2e::docker(None, args).unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    docker(&["tag", "orchestrate/micro:latest", &name]);
    let id = docker(&["image", "inspect", "-f", "{{.Id}}", &name]);
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let image = format!("tasks.image=\"{name}\"");
    let mut settings = SMALL.to_vec();
    settings.extend(["--set", "run.steps=1", "--set", "run.eval_every=0", "--set", &image]);
    finished(&mut start(&run_dir, &settings));
    // The name now means an image with one more layer.
    let container = docker(&["create", &name]);
    docker(&["commit", "-m", "another", &container, &name]);
    docker(&["rm", &container]);
    let more = ["--resume", "--set", "run.steps=2"];
    let output = start(&run_dir, &more).output().unwrap();
    docker(&["rmi", &name]);
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains(&name) && said.contains(&id) && said.contains("new run"), "{said}");
}

#[test]
fn docker_kills_at_any_moment_lose_and_duplicate_nothing() {
    if !docker_or_skip("docker_kills").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let kills: u64 =
        std::env::var("ORCHESTRATE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    // A step takes about as long as a start lives, so this run outlasts its kills.
    let wanted = kills.max(3);
    let (steps_set, eval_set) = (format!("run.steps={wanted}"), format!("run.eval_every={wanted}"));
    let mut first = SMALL.to_vec();
    first.extend(["--set", &steps_set, "--set", &eval_set]);
    let mut moment = 0x9e37_79b9_u64;
    let mut interrupted = 0;
    for round in 0..kills {
        let begun = run_dir.join("orchestrate.db").exists();
        let more: &[&str] = if begun { &["--resume"] } else { &first };
        let mut child =
            start(&run_dir, more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
        if !ends_within(&mut child, Duration::from_millis(600 + (moment >> 40) % 5000)) {
            interrupted += 1;
        }
        child.kill().ok();
        child.wait().unwrap();
    }
    say(&format!("{interrupted} of {kills} starts were killed before their end"));
    assert!(2 * interrupted > kills, "most starts ended before their kill: the run is too short");
    let begun = run_dir.join("orchestrate.db").exists();
    let more: &[&str] = if begun { &["--resume"] } else { &first };
    let report = finished(&mut start(&run_dir, more));
    let count = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(count("steps_applied") + count("steps_skipped"), wanted);
    let lines = steps(&run_dir);
    let mut numbers: Vec<u64> = lines.iter().map(|l| l["global_step"].as_u64().unwrap()).collect();
    numbers.dedup();
    assert_eq!(numbers.len(), lines.len(), "a step has two lines");
    assert_once(&trained_episodes(&run_dir));
    assert_eq!(containers_of(report["run"].as_str().unwrap()).unwrap(), Vec::<String>::new());
}

#[test]
fn docker_sampling_ahead_stays_within_its_limit_after_a_kill() {
    if !docker_or_skip("docker_sampling_ahead").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let mut settings = SMALL.to_vec();
    settings.extend(["--set", "run.steps=6", "--set", "run.max_staleness=2"]);
    // Old weights are then nearly equal to the new ones, so that a disagreement is a mistake.
    settings.extend(["--set", "algorithm.learning_rate=1e-6"]);
    let mut child =
        start(&run_dir, &settings).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !metrics(&run_dir).is_ok_and(|lines| lines.iter().any(has_step)) {
        assert!(
            !ends_within(&mut child, Duration::from_millis(100)),
            "ended before its first step"
        );
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let report = finished(&mut start(&run_dir, &["--resume"]));

    let lines = steps(&run_dir);
    let stale = |line: &Value| line["staleness_max"].as_u64().unwrap();
    assert!(lines.iter().all(|line| stale(line) <= 2), "{lines:?}");
    assert!(lines.iter().any(|line| stale(line) > 0), "nothing was sampled ahead: {lines:?}");
    for line in &lines {
        assert_eq!(line["routing_missing"], 0, "{line}");
        // Rows from other weights than the log-probs next to them would show up here.
        assert!(line["kl_train_infer"].as_f64().unwrap() < 1e-2, "{line}");
    }
    assert_once(&trained_episodes(&run_dir));
    assert_eq!(containers_of(report["run"].as_str().unwrap()).unwrap(), Vec::<String>::new());
}

fn ends_within(child: &mut Child, time: Duration) -> bool {
    let begun = Instant::now();
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    while begun.elapsed() < time {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        // There is no event to wait for, so this polls until the deadline.
        let _ = receiver.recv_timeout(Duration::from_millis(20));
    }
    drop(sender);
    false
}

/// One of our own servers, on a port chosen by the system.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::of(&mut orchestrate(args).unwrap())
    }

    fn of(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let line = stderr
            .lines()
            .map_while(Result::ok)
            .find(|line| line.contains("http://"))
            .expect("the server says where it listens");
        let url = line[line.find("http://").unwrap()..].trim().to_owned();
        Self { child, url }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn docker_separate_processes_give_the_same_run_as_one() {
    if !docker_or_skip("docker_separate_processes").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let one = folder.path().join("one");
    finished(&mut start(&one, SMALL));

    let policy = "environments/micro/policy";
    let checkpoints = folder.path().join("checkpoints");
    let root = folder.path().to_str().unwrap();
    let engine = Server::start(&[
        "serve-engine",
        "--model",
        policy,
        "--checkpoint-root",
        root,
        "--listen",
        "127.0.0.1:0",
    ]);
    let trainer = Server::start(&[
        "serve-trainer",
        "--model",
        policy,
        "--checkpoints",
        checkpoints.to_str().unwrap(),
        "--batch-root",
        root,
        "--listen",
        "127.0.0.1:0",
    ]);
    let several = folder.path().join("several");
    let engine_url = format!("engine.url=\"{}\"", engine.url);
    let trainer_url = format!("trainer.url=\"{}\"", trainer.url);
    let mut settings = SMALL.to_vec();
    settings.extend(["--set", &engine_url, "--set", &trainer_url]);
    finished(&mut start(&several, &settings));

    assert_eq!(trained_episodes(&one), trained_episodes(&several));
    let (one, several) = (steps(&one), steps(&several));
    assert_eq!(one.len(), several.len());
    for (a, b) in one.iter().zip(&several) {
        for key in ["reward_mean", "loss", "kl_train_infer", "response_tokens_mean"] {
            assert_eq!(a[key], b[key], "{key} of step {}", a["global_step"]);
        }
    }
}

const SECRET: &str = "canary-4f1d9c";

/// Bytes of files below `folder` that hold the secret.
fn betrayals(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(betrayals(&path));
        } else if memchr::memmem::find(&std::fs::read(&path).unwrap(), SECRET.as_bytes()).is_some()
        {
            found.push(path);
        }
    }
    found
}

/// What `folder` holds, itself included, that its user is not alone in accessing.
fn readable_by_others(folder: &Path) -> Vec<PathBuf> {
    let is_open =
        |path: &Path| std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o077 != 0;
    let mut found: Vec<PathBuf> = is_open(folder).then(|| folder.to_owned()).into_iter().collect();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(readable_by_others(&path));
        } else if is_open(&path) {
            found.push(path);
        }
    }
    found
}

/// Everything that Docker and the kernel report about a run's containers: settings, labels, environment,
/// and once the files.
fn told_of_containers(export: bool) -> Option<Vec<u8>> {
    let docker = |args: &[&str]| Command::new("docker").args(args).output().unwrap().stdout;
    let ids = docker(&["ps", "-q", "--filter", "label=orchestrate.run"]);
    let ids = String::from_utf8(ids).unwrap();
    let first = ids.lines().next()?;
    let mut told = docker(&["inspect", first]);
    let inspected: Value = serde_json::from_slice(&told).ok()?;
    let process = inspected[0]["State"]["Pid"].to_string();
    for file in ["environ", "cmdline"] {
        told.extend(std::fs::read(format!("/proc/{process}/{file}")).unwrap_or_default());
    }
    if export {
        told.extend(docker(&["export", first]));
    }
    Some(told)
}

#[test]
fn docker_secrets_stay_out_of_sandboxes_files_and_logs() {
    if !docker_or_skip("docker_secrets").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let policy = "environments/micro/policy";
    let checkpoints = folder.path().join("checkpoints");
    let serve = |args: &[&str]| {
        let mut command = orchestrate(args).unwrap();
        Server::of(command.args(["--listen", "127.0.0.1:0"]).env("CANARY", SECRET))
    };
    let root = folder.path().to_str().unwrap();
    let engine = ["serve-engine", "--model", policy, "--checkpoint-root", root];
    let engine = serve(&[&engine[..], &["--api-key-env", "CANARY"]].concat());
    let checkpoints = checkpoints.to_str().unwrap();
    let trainer =
        ["serve-trainer", "--model", policy, "--checkpoints", checkpoints, "--batch-root", root];
    let trainer = serve(&[&trainer[..], &["--token-env", "CANARY"]].concat());
    let (engine_url, trainer_url) =
        (format!("engine.url=\"{}\"", engine.url), format!("trainer.url=\"{}\"", trainer.url));
    let run_dir = folder.path().join("run");
    let mut command = start(&run_dir, SMALL);
    command.env("CANARY", SECRET).args(["--set", &engine_url, "--set", &trainer_url]);
    command.args(["--set", "engine.api_key_env=CANARY", "--set", "trainer.token_env=CANARY"]);
    command.args(["--set", "run.steps=1", "--log-filter", "trace"]);
    let log = folder.path().join("log");
    let output = std::fs::File::create(&log).unwrap();
    let mut child = command.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
    let mut looks = 0;
    while !ends_within(&mut child, Duration::from_millis(200)) {
        let Some(told) = told_of_containers(looks == 3) else { continue };
        assert!(memchr::memmem::find(&told, SECRET.as_bytes()).is_none());
        looks += 1;
    }
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    assert!(looks > 3, "no container was seen");
    assert_eq!(steps(&run_dir).len(), 1);
    assert_eq!(betrayals(folder.path()), Vec::<PathBuf>::new());
    for folder in [run_dir.as_path(), Path::new(checkpoints)] {
        assert_eq!(readable_by_others(folder), Vec::<PathBuf>::new());
    }
}

#[test]
fn docker_dry_run_lists_present_and_missing_images() {
    if !docker_or_skip("docker_dry_run").unwrap() {
        return;
    }
    for (image, there) in [("orchestrate/micro", 1), ("nobody.example/nothing:1", 0)] {
        let image = format!("tasks.image=\"{image}\"");
        let args = ["run", "--dry-run", "--json", "--set", &image];
        let planned = finished(&mut orchestrate(&args).unwrap());
        let host = &planned["docker_hosts"][0];
        assert_eq!((&planned["images"], &host["images"]), (&1.into(), &there.into()), "{planned}");
        assert_eq!(planned["image_pulls"], 1 - there, "{planned}");
        assert_eq!(host["image_bytes"].as_u64() > Some(0), there == 1, "{planned}");
    }
}
