//! Workers that break connections, stop, or send invalid replies.

use crate::scripted::{Behaviour, fleet, request, sample, set_all, settle, states};
use orchestrate_engine::EngineErrorKind;
use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;
use tokio::task::JoinSet;

#[tokio::test(start_paused = true)]
async fn a_conversation_of_a_lost_worker_moves_to_another_at_once() {
    let (fleet, workers) = fleet(2, 8);
    sample(fleet.as_ref(), request("a", 10)).await.unwrap();
    workers[0].set(Behaviour::Gone);
    let started = tokio::time::Instant::now();
    let reply = sample(fleet.as_ref(), request("a", 20)).await.unwrap();
    assert_eq!(reply.worker, "w1");
    assert!(started.elapsed() < Duration::from_millis(10), "one failed probe is enough");
    assert_eq!(states(&fleet), ["out of service", "up"]);
    assert_eq!((fleet.moves(), fleet.status()[0].ejected), (1, 1));
    sample(fleet.as_ref(), request("a", 30)).await.unwrap();
    assert_eq!(workers[1].sessions(), ["a", "a"]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_of_a_live_worker_is_retried_there_by_the_caller() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].set(Behaviour::BreaksConnections);
    let error = sample(fleet.as_ref(), request("a", 10)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
    workers[0].set(Behaviour::Healthy);
    let reply = sample(fleet.as_ref(), request("a", 10)).await.unwrap();
    assert_eq!((reply.worker.as_str(), fleet.moves()), ("w0", 0));
    assert_eq!(states(&fleet), ["up", "up"]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_breaks_every_connection_goes_out_of_service_though_it_answers_probes() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].set(Behaviour::BreaksConnections);
    for _ in 0..3 {
        sample(fleet.as_ref(), request("a", 10)).await.unwrap_err();
    }
    assert_eq!(states(&fleet), ["out of service", "up"]);
    assert_eq!(sample(fleet.as_ref(), request("a", 10)).await.unwrap().worker, "w1");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_worker_is_detected_by_probes_and_its_calls_move() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].set(Behaviour::Stopped);
    let started = tokio::time::Instant::now();
    let mut calls = JoinSet::new();
    for session in ["a", "b", "c", "d"] {
        let fleet = fleet.clone();
        calls.spawn(
            async move { sample(fleet.as_ref(), request(session, 10)).await.unwrap().worker },
        );
    }
    let found = calls.join_all().await;
    assert_eq!(found, ["w1"; 4]);
    // The first probe starts after an interval of 10 s, and each of three takes up to 10 s.
    assert!(started.elapsed() <= Duration::from_secs(41), "{:?}", started.elapsed());
    assert_eq!(states(&fleet), ["out of service", "up"]);
}

#[tokio::test(start_paused = true)]
async fn probes_without_a_change_wake_no_call() {
    let (fleet, workers) = fleet(1, 8);
    workers[0].set(Behaviour::Slow);
    let mut call = pin!(sample(fleet.as_ref(), request("a", 10)));
    let mut polls = 0;
    let counted = poll_fn(|context| {
        polls += 1;
        call.as_mut().poll(context)
    });
    tokio::time::timeout(Duration::from_secs(95), counted).await.unwrap_err();
    // At the start, after its own yield, and at the timeout, with nine probes in between.
    assert!(polls <= 3, "polled {polls} times");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_reply_is_retried_on_another_worker() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].set(Behaviour::Invalid);
    let error = sample(fleet.as_ref(), request("a", 10)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
    assert_eq!(sample(fleet.as_ref(), request("a", 10)).await.unwrap().worker, "w1");
    for session in ["b", "c"] {
        let error = sample(fleet.as_ref(), request(session, 10)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
    }
    assert_eq!(states(&fleet), ["out of service", "up"], "three in a row");
}

#[tokio::test(start_paused = true)]
async fn calls_wait_for_a_worker_in_service_but_not_forever() {
    let (fleet, workers) = fleet(2, 8);
    set_all(&workers, Behaviour::Gone);
    let waiting = {
        let fleet = fleet.clone();
        let mut call = JoinSet::new();
        call.spawn(async move { sample(fleet.as_ref(), request("a", 10)).await });
        call
    };
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(states(&fleet), ["out of service", "out of service"]);
    workers[1].set(Behaviour::Healthy);
    let reply = waiting.join_all().await.remove(0).unwrap();
    assert_eq!(reply.worker, "w1");

    workers[1].set(Behaviour::Gone);
    let started = tokio::time::Instant::now();
    let error = sample(fleet.as_ref(), request("a", 10)).await.unwrap_err();
    assert!(error.to_string().contains("no worker was in service"), "{error}");
    assert!(started.elapsed() >= Duration::from_mins(5));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_crashes_workers_does_not_reach_them_all() {
    let (fleet, workers) = fleet(5, 8);
    set_all(&workers, Behaviour::Gone);
    sample(fleet.as_ref(), request("poison", 10)).await.unwrap_err();
    settle().await;
    assert_eq!(states(&fleet).iter().filter(|state| **state == "out of service").count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_frees_its_permit() {
    let (fleet, workers) = fleet(1, 1);
    workers[0].set(Behaviour::Slow);
    let call =
        tokio::time::timeout(Duration::from_secs(1), sample(fleet.as_ref(), request("a", 10)));
    call.await.unwrap_err();
    assert_eq!(fleet.status()[0].calls, 0);
    workers[0].set(Behaviour::Healthy);
    sample(fleet.as_ref(), request("b", 10)).await.unwrap();
}
