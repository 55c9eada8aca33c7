//! A faulty daemon: lost answers leave no containers behind, and slow answers delay no other
//! request.

use crate::common::{Fixture, check_alive, docker};
use crate::proxy::{Fault, Proxy};
use futures::future::{Either, select};
use orchestrate_sandbox::{SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec};
use orchestrate_types::{HumanDuration, RunId};
use std::pin::pin;
use std::time::{Duration, Instant};

/// More faults than a test uses; those that are left can be added up.
const MANY: usize = usize::MAX / 8;

async fn fixture() -> Option<(Proxy, Fixture)> {
    fixture_with(Duration::from_mins(1)).await
}

/// The daemon's answers may take so long.
async fn fixture_with(call_timeout: Duration) -> Option<(Proxy, Fixture)> {
    let proxy = Proxy::start()?;
    let raw = SandboxSection {
        docker_host: Some(proxy.host.clone()),
        call_timeout: Some(HumanDuration(call_timeout)),
        max_containers: Some(4),
        ..SandboxSection::default()
    };
    // Checked first without the proxy, because a missing daemon skips the test instead of failing
    // it.
    Fixture::new().await?.finish().await;
    Some((proxy, Fixture::with(raw).await?))
}

#[tokio::test]
async fn docker_lost_answer_of_create_leaves_no_container() {
    let Some((proxy, fixture)) = fixture().await else { return };
    proxy.fault(["POST", "/containers/create"], Fault::LoseAnswer, 2);
    let mut sandbox = fixture.open().await;
    assert_eq!(proxy.faults_left(), 0, "the answers were lost");
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    let mut other = fixture.provider.open(&fixture.spec(false)).await.unwrap();
    check_alive(&mut other).await;
    other.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_lost_answer_at_any_step_of_a_start_is_recovered() {
    let Some((proxy, fixture)) = fixture().await else { return };
    for step in ["/images/", "/attach", "/start", "/archive"] {
        proxy.fault(["", step], Fault::LoseAnswer, 1);
        // Not reusable, so that the archive with the supervisor is uploaded.
        let mut sandbox = fixture.provider.open(&fixture.spec(false)).await.unwrap();
        check_alive(&mut sandbox).await;
        sandbox.close().await.unwrap();
        assert_eq!(proxy.faults_left(), 0, "{step}");
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_container_that_cannot_be_removed_delays_no_other_request() {
    // Long enough for a start on a busy machine; the test waits for it twice or more.
    let Some((proxy, fixture)) = fixture_with(Duration::from_secs(15)).await else { return };
    let stuck = SandboxSpec { deadline: Duration::from_mins(3), ..fixture.spec(false) };
    let name = format!("orch-{}-{}-a", fixture.run.short(), stuck.owner.attempt);
    for verb in ["POST", "DELETE"] {
        proxy.fault([verb, &format!("/containers/{name}")], Fault::Silence, MANY);
    }
    let (mut sandbox, error) = {
        let other = pin!(fixture.open());
        match select(fixture.provider.open(&stuck), other).await {
            Either::Left(_) => panic!("a start waits for one that hangs"),
            Either::Right((sandbox, failing)) => (sandbox, failing.await.unwrap_err()),
        }
    };
    assert!(matches!(error.kind, SandboxErrorKind::TimedOut { .. }), "{error}");
    assert_eq!(error.sandbox, name);
    // Its removal hangs as well, but does not delay others: one of them starts and ends while the removal
    // waits for the same answer. If it waited for the removal, the removal would be tried again first.
    let start = Instant::now();
    loop {
        let before = proxy.faults_left();
        check_alive(&mut sandbox).await;
        let other = fixture.provider.open(&fixture.spec(true)).await.unwrap();
        other.close().await.unwrap();
        if proxy.faults_left() == before {
            break;
        }
        assert!(start.elapsed() < Duration::from_mins(5), "others wait for the removal");
    }
    proxy.clear_faults();
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_refusals_contain_the_daemons_message_and_the_next_start_works() {
    let Some((proxy, fixture)) = fixture().await else { return };
    for (step, status, message) in [
        ("/start", 500, "no space left on device"),
        ("/start", 500, "adding interface veth1 to bridge: exchange full"),
        ("/containers/create", 500, "mkdir /var/lib/docker/overlay2: no space left on device"),
        ("/containers/create", 400, "invalid seccomp profile"),
    ] {
        proxy.fault(["POST", step], Fault::Answer(status, message), 1);
        let error = fixture.provider.open(&fixture.spec(true)).await.unwrap_err();
        let has_message = matches!(&error.kind, SandboxErrorKind::Refused { message: m, .. } if m.contains(message));
        assert!(has_message, "{error}");
        let mut sandbox = fixture.open().await;
        check_alive(&mut sandbox).await;
        // Dropped, so that the next round starts a new container.
        drop(sandbox);
    }
    proxy.fault(["POST", "/containers/create"], Fault::Answer(404, "No such image: x"), 2);
    let error = fixture.provider.open(&fixture.spec(false)).await.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::ImageMissing(_)), "{error}");
    fixture.finish().await;
}

#[tokio::test]
async fn docker_stale_records_of_the_daemon_are_not_listed() {
    let Some((proxy, fixture)) = fixture().await else { return };
    let sandbox = fixture.open().await;
    let id = docker(&["inspect", "--format={{.Id}}", sandbox.name()]);
    let (id, ghost) = (id.trim(), "f".repeat(64));
    let (run, other) = (fixture.run, RunId::generate());
    // Like a daemon after it was killed: without names, one container that exists and one that does
    // not.
    let listed = serde_json::json!([
        {"Id": ghost, "Names": [], "State": "dead", "Labels": {"orchestrate.run": run}},
        {"Id": id, "Names": [], "State": "running", "Labels": {"orchestrate.run": run}},
        {"Id": ghost, "Names": ["/named"], "State": "dead", "Labels": {"orchestrate.run": other}},
    ]);
    let list = ["GET", "/containers/json"];
    proxy.fault(list, Fault::AnswerJson(listed.to_string()), 2);
    let found = fixture.provider.list().await.unwrap();
    let names: Vec<&str> = found.iter().map(|info| info.name.as_str()).collect();
    let mut expected = [id, "named"];
    expected.sort_unstable();
    assert_eq!(names, expected);

    // Listing fails if the daemon cannot say whether a container exists.
    proxy.fault(["GET", &ghost], Fault::Answer(500, "deadlock"), 1);
    let error = fixture.provider.list().await.unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
    assert_eq!(proxy.faults_left(), 0);
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_failed_removals_are_retried() {
    let Some((proxy, fixture)) = fixture().await else { return };
    proxy.fault(["DELETE", "/containers/"], Fault::Answer(500, "driver failed to remove"), 2);
    proxy.fault(["DELETE", "/containers/"], Fault::LoseAnswer, 1);
    proxy.fault(
        ["DELETE", "/containers/"],
        Fault::Answer(409, "removal is already in progress"),
        3,
    );
    drop(fixture.open().await);
    fixture.finish().await;
    assert_eq!(proxy.faults_left(), 0);
}

#[tokio::test]
async fn docker_container_that_cannot_be_removed_is_quarantined_and_frees_its_slot() {
    let Some((proxy, fixture)) = fixture().await else { return };
    // All slots of agents are occupied by containers that cannot be removed.
    let mut stuck = Vec::new();
    for _ in 0..3 {
        stuck.push(fixture.open().await);
    }
    let mut names: Vec<String> = stuck.iter().map(|s| s.name().to_owned()).collect();
    names.sort();
    for name in &names {
        let fault = Fault::Answer(500, "device or resource busy");
        proxy.fault(["DELETE", &format!("/containers/{name}?")], fault, usize::MAX);
    }
    drop(stuck);
    // Opens once a slot is free, that is, once the first container is in quarantine.
    let mut sandbox = fixture.open().await;
    check_alive(&mut sandbox).await;
    assert!(!names.contains(&sandbox.name().to_owned()));
    let quarantined = fixture.provider.quarantined();
    assert!(!quarantined.is_empty());
    for container in &quarantined {
        let matches = names.contains(&container.name) && container.reason.contains("busy");
        assert!(matches, "{container}");
    }
    sandbox.close().await.unwrap();
    proxy.clear_faults();
    // Shutdown tries to remove them once more.
    fixture.provider.shutdown().await.unwrap();
    assert_eq!(fixture.provider.quarantined(), []);
    assert_eq!(fixture.names().await, Vec::<String>::new());
}
