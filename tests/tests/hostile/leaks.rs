//! Nothing may be left behind by abandoned episodes, by killed coordinators, or by a daemon that is
//! killed while its containers run.

use crate::world::World;
use orchestrate_e2e::{Daemon, docker_or_skip, metrics, orchestrate, pause, say};
use orchestrate_rollout::RolloutSection;
use orchestrate_sandbox::SandboxProvider as _;
use orchestrate_types::{HumanDuration, Outcome};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// A count that an environment variable may raise.
fn count(variable: &str, ordinary: u32) -> u32 {
    std::env::var(variable).ok().and_then(|n| n.parse().ok()).unwrap_or(ordinary)
}

fn docker(host: Option<&str>, args: &[&str]) -> Output {
    orchestrate_e2e::docker(host, args).unwrap()
}

fn lines(output: &Output) -> BTreeSet<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Ids of the containers of a run, in any state.
fn ids(host: Option<&str>, run: &str) -> BTreeSet<String> {
    let filter = format!("label=orchestrate.run={run}");
    lines(&docker(host, &["ps", "-aq", "--no-trunc", "--filter", &filter]))
}

/// Docker's shim processes of these containers that are still alive.
fn shims(ids: &BTreeSet<String>) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().map_while(Result::ok);
    let commands = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let commands = commands.map(|line| String::from_utf8_lossy(&line).into_owned());
    commands
        .filter(|line| line.contains("containerd-shim"))
        .filter(|line| ids.iter().any(|id| line.contains(id.as_str())))
        .collect()
}

/// Longest wait for a condition; much longer than any takes, also on a slow machine.
const PATIENCE: Duration = Duration::from_mins(5);

/// Waits until a condition holds, and returns the time it took.
fn wait_for(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        pause(Duration::from_millis(100));
    }
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_abandoned_episodes_leave_no_container_volume_or_process() {
    if !docker_or_skip("docker_abandoned_episodes").unwrap() {
        return;
    }
    let volumes = lines(&docker(None, &["volume", "ls", "-q"]));
    let world = World::new().await;
    let run = world.run.to_string();
    let task = World::task();
    let episodes = count("ORCHESTRATE_ABANDONED", 24);
    let (seen, done) = (std::sync::Mutex::new(BTreeSet::new()), CancellationToken::new());
    let watching = async {
        while !done.is_cancelled() {
            let run = run.clone();
            let found = tokio::task::spawn_blocking(move || ids(None, &run)).await.unwrap();
            seen.lock().unwrap().extend(found);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let linger = "setsid sh -c 'trap \"\" TERM; sleep 100' & sleep 100".to_owned();
    let working = async {
        let mut ends = [0; 3];
        for first in (0..episodes).step_by(8) {
            let batch = (first..episodes.min(first + 8)).map(async |number| {
                let time = Duration::from_millis(u64::from(number * 7919 % 1500));
                let stop = CancellationToken::new();
                let config = RolloutSection {
                    command_timeout: Some(HumanDuration::secs(1)),
                    episode_timeout: Some(HumanDuration::secs(if number % 3 == 2 {
                        1
                    } else {
                        60
                    })),
                    ..World::config()
                };
                let turns = vec![linger.clone(); 6];
                let episode = world.episode_with(number, &task, &turns, config, &stop);
                match number % 3 {
                    // As when the program receives the request to stop immediately.
                    0 => drop(tokio::time::timeout(time, episode).await),
                    1 => {
                        let stopping = async {
                            tokio::time::sleep(time).await;
                            stop.cancel();
                        };
                        let (report, ()) = tokio::join!(episode, stopping);
                        assert!(matches!(report.outcome, Outcome::Aborted { .. }), "{report:?}");
                    }
                    _ => {
                        let report = episode.await;
                        assert!(matches!(report.outcome, Outcome::Truncated { .. }), "{report:?}");
                    }
                }
                number % 3
            });
            for kind in futures::future::join_all(batch).await {
                ends[usize::try_from(kind).unwrap()] += 1;
            }
        }
        world.provider.shutdown().await.unwrap();
        done.cancel();
        ends
    };
    let (ends, ()) = tokio::join!(working, watching);
    let seen = seen.into_inner().unwrap();
    say(&format!("dropped, stopped, timed out: {ends:?}; {} containers", seen.len()));
    assert!(!seen.is_empty());
    assert_eq!(ids(None, &run), BTreeSet::new());
    wait_for("processes next to containers", || shims(&seen).is_empty());
    let after = lines(&docker(None, &["volume", "ls", "-q"]));
    assert_eq!(after.difference(&volumes).collect::<Vec<_>>(), Vec::<&String>::new());
}

/// A run that keeps eight sandboxes busy for longer than any test.
const BUSY: &[&str] = &[
    "--config",
    "configs/quickstart.toml",
    "--set",
    "run.steps=1000",
    "--set",
    "run.eval_every=0",
    "--set",
    "rollout.group_size=4",
    "--set",
    "rollout.groups_per_step=4",
    "--set",
    "rollout.max_groups_per_step=8",
    "--set",
    "rollout.max_in_flight=8",
    "--set",
    "sandbox.max_containers=16",
    "--set",
    "tasks.held_out=10",
];

fn start(run_dir: &Path, more: &[&str]) -> Command {
    let mut args = vec!["run", "--run-dir", run_dir.to_str().unwrap(), "--json"];
    args.extend(more);
    orchestrate(&args).unwrap()
}

/// The run's id, and every container of it with its epoch, from the labels of those in this folder.
fn containers(host: Option<&str>, known: &BTreeSet<String>) -> Vec<(String, u64)> {
    let format = "{{.Label \"orchestrate.run\"}} {{.Label \"orchestrate.epoch\"}}";
    let listed =
        docker(host, &["ps", "-a", "--filter", "label=orchestrate.epoch", "--format", format]);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs
        .filter(|(run, _)| !known.contains(*run))
        .map(|(run, epoch)| (run.to_owned(), epoch.parse().unwrap()))
        .collect()
}

#[test]
fn docker_killed_coordinators_leave_no_container() {
    if !docker_or_skip("docker_killed_coordinators").unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    // Other runs may be using the daemon.
    let others: BTreeSet<String> =
        containers(None, &BTreeSet::new()).into_iter().map(|(run, _)| run).collect();
    let kills = count("ORCHESTRATE_COORDINATOR_KILLS", 3);
    let (mut seen, mut slowest, mut run) = (BTreeSet::new(), Duration::ZERO, String::new());
    for kill in 1..=kills {
        let more: &[&str] = if kill == 1 { BUSY } else { &["--resume"] };
        let mut child =
            start(&run_dir, more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mine = || -> Vec<(String, u64)> {
            let mut found = containers(None, &others);
            found.retain(|(id, _)| run.is_empty() || *id == run);
            found
        };
        wait_for("eight live sandboxes", || {
            assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
            let newest = mine().iter().map(|(_, epoch)| *epoch).max();
            mine().iter().filter(|(_, epoch)| Some(*epoch) == newest).count() >= 8
        });
        // The daemon may still have been creating what the dead coordinator had asked for.
        let mut living = String::new();
        wait_for("only a living coordinator's containers", || {
            let found = mine();
            let Some((newest, id)) = found.iter().map(|(id, epoch)| (*epoch, id.clone())).max()
            else {
                return false;
            };
            living = id;
            found.iter().all(|(_, epoch)| *epoch == newest)
        });
        run = living;
        seen.extend(ids(None, &run));
        child.kill().unwrap();
        child.wait().unwrap();
        // The coordinator is not restarted immediately, because its containers must end by
        // themselves.
        if kill % 2 == 1 || kill == kills {
            let gone = || ids(None, &run).is_empty();
            slowest = slowest.max(wait_for("containers", gone));
        }
    }
    wait_for("processes next to containers", || shims(&seen).is_empty());
    say(&format!("{kills} kills, {} containers, the last gone within {slowest:?}", seen.len()));
}

#[test]
fn docker_run_survives_a_killed_daemon_with_broken_attempts() {
    if !docker_or_skip("docker_a_daemon_that_is_killed").unwrap() {
        return;
    }
    let Some(mut daemon) = Daemon::start().unwrap() else {
        orchestrate_e2e::skip::skip("daemons", "no second daemon can be started");
        return;
    };
    let host = daemon.host();
    let image = "orchestrate/micro:latest";
    daemon.load(image).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let host_set = format!("sandbox.docker_host=\"{host}\"");
    let mut settings = BUSY.to_vec();
    settings.extend(["--set", "run.steps=6", "--set", &host_set]);
    let log = folder.path().join("log");
    let written = std::fs::File::create(&log).unwrap();
    let mut child =
        start(&run_dir, &settings).stdout(Stdio::piped()).stderr(written).spawn().unwrap();
    // Setup is retried within an attempt, and some kills fall between episodes. The daemon is
    // therefore killed until an attempt has lost its sandbox midway.
    for kill in 0..6 {
        wait_for("live sandboxes", || {
            assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
            containers(Some(&host), &BTreeSet::new()).len() >= 8
        });
        pause(Duration::from_millis(500 + 400 * kill));
        daemon.kill().unwrap();
        // A start soon after a crash can give up on its containerd; the second try then works.
        assert!(daemon.spawn().unwrap() || daemon.spawn().unwrap(), "the daemon did not restart");
        if std::fs::read_to_string(&log).unwrap().contains("attempt broken") {
            break;
        }
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", std::fs::read_to_string(&log).unwrap());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(number("steps_applied") + number("steps_skipped"), 6, "{report}");
    let broken: u64 =
        metrics(&run_dir).unwrap().iter().filter_map(|line| line["broken_attempts"].as_u64()).sum();
    let given_up: u64 =
        metrics(&run_dir).unwrap().iter().filter_map(|line| line["broken_episodes"].as_u64()).sum();
    say(&format!("{broken} broken attempts were retried, {given_up} episodes were given up"));
    assert!(broken >= 1, "every kill fell between episodes");
    assert_eq!(given_up, 0);
    let left = orchestrate_e2e::containers(Some(&host), None).unwrap();
    assert_eq!(left, Vec::<String>::new());
}
