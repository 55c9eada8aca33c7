//! Commands that manage Docker hosts cover all of them and name the host they refer to.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use orchestrate_e2e::{
    Daemon, containers, docker, docker_or_skip, metrics, orchestrate, pause, run, say, skip, stderr,
};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

const IMAGE: &str = "orchestrate/micro:latest";
/// A time long ago, so that the container cannot be in use.
const EXPIRED: &str = "orchestrate.deadline=1000000000";
/// More than anything here takes, on a machine under load.
const LONG: Duration = Duration::from_mins(5);

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The default daemon as an entry of `sandbox.hosts`.
fn near(max_containers: u32) -> String {
    let usual = std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty());
    let usual = usual.unwrap_or_else(|| "unix:///var/run/docker.sock".to_owned());
    format!("{{url=\"{usual}\", name=\"near\", max_containers={max_containers}}}")
}

/// A daemon started by the test, reached through TLS.
fn far(daemon: &Daemon) -> String {
    format!(
        "{{url=\"{}\", name=\"far\", certificates=\"{}\"}}",
        daemon.tls_host().unwrap(),
        daemon.certificates().display()
    )
}

#[test]
fn docker_gc_and_doctor_cover_all_hosts() {
    let test = "docker_gc_and_doctor_cover_all_hosts";
    if !docker_or_skip(test).unwrap() {
        return;
    }
    let Some(daemon) = Daemon::start_with_tls().unwrap() else {
        skip::skip_test(test, "daemons", "no second daemon with TLS");
        return;
    };
    daemon.load(IMAGE).unwrap();
    let name = format!("orch-expired-{}", std::process::id());
    for host in [None, Some(daemon.host())] {
        let labels = ["--label", "orchestrate.run=none", "--label", EXPIRED];
        let create =
            [&["create", "--name", &name, "--network=none"][..], &labels, &[IMAGE]].concat();
        let output = docker(host.as_deref(), &create).unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let (near, far) = (near(2), far(&daemon));
    let gone = "{url=\"unix:///nonexistent.sock\", name=\"gone\"}";
    let both = format!("sandbox.hosts=[{near}, {far}]");

    let listed = printed(&run(&["gc", "--dry-run", "--set", &both]).unwrap());
    for host in ["near", "far"] {
        assert!(listed.contains(&format!("{name}\tcreated\t{host}\n")), "{listed}");
    }
    // An unreachable host is reported and does not block the others.
    let with_gone = format!("sandbox.hosts=[{gone}, {near}, {far}]");
    let swept = run(&["gc", "--set", &with_gone]).unwrap();
    assert_eq!(swept.status.code(), Some(5), "{}", stderr(&swept));
    assert!(stderr(&swept).contains("sandbox gone:"), "{}", stderr(&swept));
    for host in ["near", "far"] {
        assert!(printed(&swept).contains(&format!("{name}\t{host}\n")), "{}", printed(&swept));
    }
    let left = |host: Option<&str>| {
        let filter = format!("name={name}");
        printed(&docker(host, &["ps", "-aq", "--filter", &filter]).unwrap())
    };
    assert_eq!((left(None), left(Some(&daemon.host()))), (String::new(), String::new()));

    let seen = run(&["doctor", "--json", "--set", &both]).unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    for host in ["near", "far"] {
        for what in ["docker", "sandbox"] {
            let found = findings.as_array().unwrap().iter().any(|finding| {
                let detail = finding["detail"].as_str().unwrap();
                finding["what"] == what
                    && finding["ok"] == true
                    && detail.starts_with(&format!("{host}: "))
            });
            assert!(found, "{what} of {host} in {findings:#}");
        }
    }
}

#[test]
fn docker_run_on_two_hosts_survives_the_loss_of_one() {
    let test = "docker_run_on_two_hosts_survives_the_loss_of_one";
    if !docker_or_skip(test).unwrap() {
        return;
    }
    let Some(mut daemon) = Daemon::start_with_tls().unwrap() else {
        skip::skip_test(test, "daemons", "no second daemon with TLS");
        return;
    };
    daemon.load(IMAGE).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (dir, log) = (folder.path().join("run"), folder.path().join("log"));
    let hosts = format!("sandbox.hosts=[{}, {}]", near(6), far(&daemon));
    let mut command = orchestrate(&["run", "--config", "configs/quickstart.toml"]).unwrap();
    command.arg("--run-dir").arg(&dir).args(["--json", "--set", &hosts]);
    for set in [
        "run.steps=4",
        "run.eval_every=0",
        "rollout.group_size=4",
        "rollout.groups_per_step=4",
        "rollout.max_in_flight=8",
        "tasks.held_out=10",
    ] {
        command.args(["--set", set]);
    }
    let written = std::fs::File::create(&log).unwrap();
    let mut child = command.stdout(Stdio::piped()).stderr(written).spawn().unwrap();
    let told = || std::fs::read_to_string(&log).unwrap();
    // Only running ones: a container that was created but not started is not a sandbox yet.
    let running = ["ps", "-q", "--filter", "label=orchestrate.epoch"];
    let far_host = daemon.host();
    let held = || printed(&docker(Some(&far_host), &running).unwrap()).lines().count();
    let began = Instant::now();
    // The daemon is killed in the middle of the run: after the first step, while it has open
    // sandboxes.
    while !dir.join("metrics.jsonl").exists() || held() < 4 {
        let runs = child.try_wait().unwrap().is_none();
        assert!(runs && began.elapsed() < LONG, "{}", told());
        pause(Duration::from_millis(50));
    }
    daemon.kill().unwrap();
    let began = Instant::now();
    while !told().contains("out of service") {
        assert!(began.elapsed() < LONG, "{}", told());
        pause(Duration::from_millis(50));
    }
    assert!(daemon.spawn().unwrap() || daemon.spawn().unwrap(), "the daemon did not restart");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", told());

    let lines = metrics(&dir).unwrap();
    let sum = |key: &str| lines.iter().filter_map(|line| line[key].as_u64()).sum::<u64>();
    assert_eq!(sum("broken_episodes"), 0, "{}", told());
    let last = lines.last().unwrap()["sandbox_hosts"].as_array().unwrap().clone();
    assert_eq!((&last[0]["host"], &last[1]["host"]), (&"near".into(), &"far".into()));
    assert!(last.iter().all(|host| host["started"].as_u64().unwrap() > 0), "{last:?}");
    assert!(last[1]["taken_out"].as_u64().unwrap() >= 1, "{last:?}");
    say(&format!("{} broken attempts were retried; {last:?}", sum("broken_attempts")));
    let id: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let id = id["run"].as_str().unwrap();
    for host in [None, Some(daemon.host())] {
        let left = || containers(host.as_deref(), Some(&format!("orchestrate.run={id}"))).unwrap();
        // A daemon that came back after the run's end removes what has ended meanwhile.
        let began = Instant::now();
        while !left().is_empty() {
            assert!(began.elapsed() < LONG, "{:?} on {host:?}", left());
            pause(Duration::from_millis(200));
        }
    }
}
