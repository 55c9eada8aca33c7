//! A sick daemon: what it loses is found again, what it holds back holds nobody else up.

use crate::common::{Bench, check_alive, docker};
use crate::proxy::{Fault, Proxy};
use orchestrate_sandbox::{SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec};
use orchestrate_types::{HumanDuration, RunId};
use std::time::{Duration, Instant};

async fn bench() -> Option<(Proxy, Bench)> {
    let proxy = Proxy::start()?;
    let raw = SandboxSection {
        docker_host: Some(proxy.host.clone()),
        call_timeout: Some(HumanDuration::secs(5)),
        max_containers: Some(4),
        ..SandboxSection::default()
    };
    // Probed first without the socket in front: an absent daemon is a skip, not a fault.
    Bench::new().await?.finish().await;
    Some((proxy, Bench::with(raw).await?))
}

#[tokio::test]
async fn docker_a_create_whose_answer_is_lost_leaves_nothing_behind() {
    let Some((proxy, bench)) = bench().await else { return };
    proxy.fault(["POST", "/containers/create"], Fault::LoseAnswer, 2);
    let mut sandbox = bench.open().await;
    assert_eq!(proxy.faults_left(), 0, "the answers were lost");
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    let mut other = bench.provider.open(&bench.spec(false)).await.unwrap();
    check_alive(&mut other).await;
    other.close().await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn docker_an_answer_lost_at_any_step_of_a_start_costs_no_container() {
    let Some((proxy, bench)) = bench().await else { return };
    for step in ["/images/", "/attach", "/start", "/archive"] {
        proxy.fault(["", step], Fault::LoseAnswer, 1);
        // Not used again, so that the archive with the supervisor is sent.
        let mut sandbox = bench.provider.open(&bench.spec(false)).await.unwrap();
        check_alive(&mut sandbox).await;
        sandbox.close().await.unwrap();
        assert_eq!(proxy.faults_left(), 0, "{step}");
    }
    bench.finish().await;
}

#[tokio::test]
async fn docker_a_container_that_the_daemon_will_not_let_go_holds_up_nobody_else() {
    let Some((proxy, bench)) = bench().await else { return };
    let wedged = SandboxSpec { deadline: Duration::from_mins(1), ..bench.spec(false) };
    let name = format!("orch-{}-{}-a", bench.run.short(), wedged.owner.attempt);
    for verb in ["POST", "DELETE"] {
        proxy.fault([verb, &format!("/containers/{name}")], Fault::Silence, usize::MAX);
    }
    let began = Instant::now();
    let (failed, mut sandbox) = tokio::join!(bench.provider.open(&wedged), async {
        let sandbox = bench.open().await;
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        sandbox
    });
    let error = failed.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::TimedOut { .. }), "{error}");
    assert_eq!(error.sandbox, name);
    // Its removal hangs, too; others go on at their pace, and their removals are not behind it.
    for _ in 0..3 {
        let began = Instant::now();
        check_alive(&mut sandbox).await;
        let other = bench.provider.open(&bench.spec(true)).await.unwrap();
        other.close().await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
    proxy.heal();
    sandbox.close().await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn docker_refusals_say_what_the_daemon_said_and_the_next_start_works() {
    let Some((proxy, bench)) = bench().await else { return };
    for (step, status, message) in [
        ("/start", 500, "no space left on device"),
        ("/start", 500, "adding interface veth1 to bridge: exchange full"),
        ("/containers/create", 500, "mkdir /var/lib/docker/overlay2: no space left on device"),
        ("/containers/create", 400, "invalid seccomp profile"),
    ] {
        proxy.fault(["POST", step], Fault::Answer(status, message), 1);
        let error = bench.provider.open(&bench.spec(true)).await.unwrap_err();
        let said = matches!(&error.kind, SandboxErrorKind::Refused { message: m, .. } if m.contains(message));
        assert!(said, "{error}");
        let mut sandbox = bench.open().await;
        check_alive(&mut sandbox).await;
        // Thrown away, so that the next round starts one.
        drop(sandbox);
    }
    proxy.fault(["POST", "/containers/create"], Fault::Answer(404, "No such image: x"), 2);
    let error = bench.provider.open(&bench.spec(false)).await.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::ImageMissing(_)), "{error}");
    bench.finish().await;
}

#[tokio::test]
async fn docker_what_the_daemon_lists_and_does_not_have_is_no_container() {
    let Some((proxy, bench)) = bench().await else { return };
    let sandbox = bench.open().await;
    let id = docker(&["inspect", "--format={{.Id}}", sandbox.name()]);
    let (id, ghost) = (id.trim(), "f".repeat(64));
    let (run, other) = (bench.run, RunId::generate());
    // As a daemon does after it was killed: without names, one that is there and one that is not.
    let listed = serde_json::json!([
        {"Id": ghost, "Names": [], "State": "dead", "Labels": {"orchestrate.run": run}},
        {"Id": id, "Names": [], "State": "running", "Labels": {"orchestrate.run": run}},
        {"Id": ghost, "Names": ["/named"], "State": "dead", "Labels": {"orchestrate.run": other}},
    ]);
    let list = ["GET", "/containers/json"];
    proxy.fault(list, Fault::Told(listed.to_string()), 2);
    let found = bench.provider.list().await.unwrap();
    let names: Vec<&str> = found.iter().map(|info| info.name.as_str()).collect();
    let mut expected = [id, "named"];
    expected.sort_unstable();
    assert_eq!(names, expected);

    // Where that cannot be found out, nothing is said of what is there.
    proxy.fault(["GET", &ghost], Fault::Answer(500, "deadlock"), 1);
    let error = bench.provider.list().await.unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
    assert_eq!(proxy.faults_left(), 0);
    sandbox.close().await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn docker_removals_that_fail_are_tried_until_they_succeed() {
    let Some((proxy, bench)) = bench().await else { return };
    proxy.fault(["DELETE", "/containers/"], Fault::Answer(500, "driver failed to remove"), 2);
    proxy.fault(["DELETE", "/containers/"], Fault::LoseAnswer, 1);
    proxy.fault(
        ["DELETE", "/containers/"],
        Fault::Answer(409, "removal is already in progress"),
        3,
    );
    drop(bench.open().await);
    bench.finish().await;
    assert_eq!(proxy.faults_left(), 0);
}

#[tokio::test]
async fn docker_what_cannot_be_removed_goes_to_quarantine_and_frees_its_slot() {
    let Some((proxy, bench)) = bench().await else { return };
    // Every slot that agents may have, and each holds a container that will not go.
    let mut wedged = Vec::new();
    for _ in 0..3 {
        wedged.push(bench.open().await);
    }
    let mut names: Vec<String> = wedged.iter().map(|s| s.name().to_owned()).collect();
    names.sort();
    for name in &names {
        let fault = Fault::Answer(500, "device or resource busy");
        proxy.fault(["DELETE", &format!("/containers/{name}?")], fault, usize::MAX);
    }
    drop(wedged);
    // Opens only once a slot is free, and so once the first was given up.
    let mut sandbox = bench.open().await;
    check_alive(&mut sandbox).await;
    assert!(!names.contains(&sandbox.name().to_owned()));
    let quarantined = bench.provider.quarantined();
    assert!(!quarantined.is_empty());
    for held in &quarantined {
        assert!(names.contains(&held.name) && held.reason.contains("busy"), "{held}");
    }
    sandbox.close().await.unwrap();
    proxy.heal();
    // Asked for once more at the end.
    bench.provider.shutdown().await.unwrap();
    assert_eq!(bench.provider.quarantined(), []);
    assert_eq!(bench.names().await, Vec::<String>::new());
}
