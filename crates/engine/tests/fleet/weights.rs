//! Weight syncs of a fleet.

use crate::scripted::{Behaviour, fleet, request, sample, settle, states};
use camino::Utf8Path;
use orchestrate_engine::{Engine, Prompt};
use orchestrate_types::PolicyVersion;
use std::time::Duration;
use tokio::task::JoinSet;

const CHECKPOINT: &str = "/checkpoints/7";

async fn sync(fleet: &dyn Engine, version: u64) -> Result<(), orchestrate_engine::EngineError> {
    fleet.sync_weights(Utf8Path::new(CHECKPOINT), PolicyVersion(version)).await
}

#[tokio::test(start_paused = true)]
async fn all_workers_sync_concurrently_and_calls_wait() {
    let (fleet, workers) = fleet(3, 8);
    let started = tokio::time::Instant::now();
    let mut syncing = JoinSet::new();
    let other = fleet.clone();
    syncing.spawn(async move { sync(other.as_ref(), 7).await.unwrap() });
    settle().await;
    assert_eq!(states(&fleet), ["syncing"; 3]);
    let reply = sample(fleet.as_ref(), request("a", 10)).await.unwrap();
    assert_eq!(reply.versions()[0].version, PolicyVersion(7));
    syncing.join_all().await;
    assert!(started.elapsed() < Duration::from_millis(100), "50 ms each");
    let requests = workers[0].notes().requests.clone();
    assert_eq!(requests.len(), 1, "nothing was sent before the weights were loaded");
    let Prompt::Tokens(prompt) = &requests[0].0.prompt else { panic!("a prompt in messages") };
    assert_eq!(prompt.cache_namespace, PolicyVersion(7), "no KV cache of other weights is used");
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_sync_failed_serves_nothing_until_it_succeeds() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].notes().failing_syncs = 2;
    sync(fleet.as_ref(), 7).await.unwrap();
    assert_eq!(states(&fleet), ["out of service", "up"]);
    for session in ["a", "b", "c"] {
        let reply = sample(fleet.as_ref(), request(session, 10)).await.unwrap();
        assert_eq!(reply.versions()[0].version, PolicyVersion(7));
    }
    assert!(workers[0].sessions().is_empty());
    // The next recovery fails, the one after the backoff succeeds.
    tokio::time::sleep(Duration::from_secs(45)).await;
    assert_eq!(states(&fleet), ["up", "up"]);
    assert_eq!(workers[0].notes().syncs, [PolicyVersion(7); 3]);
    let reply = sample(fleet.as_ref(), request("d", 1)).await.unwrap();
    assert_eq!((reply.worker.as_str(), reply.versions()[0].version), ("w0", PolicyVersion(7)));
}

#[tokio::test(start_paused = true)]
async fn weights_that_every_worker_refuses_are_an_error_at_once() {
    let (fleet, workers) = fleet(2, 8);
    for worker in &workers {
        worker.notes().failing_syncs = 1;
    }
    let started = tokio::time::Instant::now();
    let error = sync(fleet.as_ref(), 7).await.unwrap_err();
    assert!(error.to_string().contains("half done"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(1));
    assert_eq!(states(&fleet), ["out of service", "out of service"]);
}

#[tokio::test(start_paused = true)]
async fn a_sync_waits_while_no_worker_is_in_service() {
    let (fleet, workers) = fleet(1, 8);
    workers[0].set(Behaviour::Gone);
    let mut syncing = JoinSet::new();
    let other = fleet.clone();
    syncing.spawn(async move { sync(other.as_ref(), 7).await });
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(syncing.try_join_next().is_none());
    workers[0].set(Behaviour::Healthy);
    syncing.join_all().await.remove(0).unwrap();
    assert_eq!(workers[0].notes().version, PolicyVersion(7));
    assert_eq!(states(&fleet), ["up"]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_restarted_unnoticed_goes_out_of_service_and_is_synced() {
    let (fleet, workers) = fleet(2, 8);
    sync(fleet.as_ref(), 7).await.unwrap();
    workers[0].notes().version = PolicyVersion(0);
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!(workers[0].notes().version, PolicyVersion(7));
    assert_eq!(workers[0].notes().syncs, [PolicyVersion(7); 2]);
    assert_eq!((states(&fleet), fleet.status()[0].ejected), (vec!["up", "up"], 1));
}

#[tokio::test(start_paused = true)]
async fn an_unstable_worker_is_recovered_less_and_less_often() {
    let (fleet, workers) = fleet(2, 8);
    sync(fleet.as_ref(), 7).await.unwrap();
    let restarts_for = async |minutes: u64| {
        let before = workers[0].notes().syncs.len();
        for _ in 0..minutes * 60 {
            workers[0].notes().version = PolicyVersion(0);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        workers[0].notes().syncs.len() - before
    };
    // Without a backoff, probes every ten seconds could recover it 90 times in half an hour.
    let recoveries = restarts_for(30).await;
    assert!((10..=18).contains(&recoveries), "{recoveries}");
    // Once it has stayed in service, the backoff starts over.
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(states(&fleet), ["up", "up"]);
    let recoveries = restarts_for(2).await;
    assert!((2..=4).contains(&recoveries), "{recoveries}");
}

#[tokio::test(start_paused = true)]
async fn a_sync_dropped_halfway_leaves_no_worker_in_service() {
    let (fleet, workers) = fleet(2, 8);
    let dropped = tokio::time::timeout(Duration::from_millis(20), sync(fleet.as_ref(), 7)).await;
    dropped.unwrap_err();
    assert_eq!(states(&fleet), ["out of service", "out of service"]);
    // Their health checks finish the sync.
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(states(&fleet), ["up", "up"]);
    assert!(workers.iter().all(|worker| worker.notes().version == PolicyVersion(7)));
}

#[tokio::test(start_paused = true)]
async fn a_fleet_reports_a_version_only_if_all_workers_agree() {
    let (fleet, workers) = fleet(2, 8);
    assert_eq!(fleet.info().await.unwrap().policy_version, Some(PolicyVersion(0)));
    workers[1].notes().version = PolicyVersion(3);
    assert_eq!(fleet.info().await.unwrap().policy_version, None);
}
