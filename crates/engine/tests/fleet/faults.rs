//! Workers that break off, stop, or answer what cannot be used.

use crate::scripted::{Mood, all_are, fleet, request, settle, states};
use orchestrate_engine::{Engine, EngineErrorKind};
use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;
use tokio::task::JoinSet;

#[tokio::test(start_paused = true)]
async fn a_conversation_of_a_worker_that_is_gone_goes_on_at_another_at_once() {
    let (fleet, workers) = fleet(2, 8);
    fleet.generate(request("a", 10)).await.unwrap();
    workers[0].is(Mood::Gone);
    let begun = tokio::time::Instant::now();
    let reply = fleet.generate(request("a", 20)).await.unwrap();
    assert_eq!(reply.worker, "w1");
    assert!(begun.elapsed() < Duration::from_millis(10), "one failed probe is enough");
    assert_eq!(states(&fleet), ["away", "up"]);
    assert_eq!((fleet.moves(), fleet.status()[0].ejected), (1, 1));
    fleet.generate(request("a", 30)).await.unwrap();
    assert_eq!(workers[1].sessions(), ["a", "a"]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_of_a_living_worker_is_the_callers_to_retry_there() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].is(Mood::BreaksOff);
    let error = fleet.generate(request("a", 10)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
    workers[0].is(Mood::Well);
    let reply = fleet.generate(request("a", 10)).await.unwrap();
    assert_eq!((reply.worker.as_str(), fleet.moves()), ("w0", 0));
    assert_eq!(states(&fleet), ["up", "up"]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_breaks_every_request_off_is_taken_out_though_it_answers_probes() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].is(Mood::BreaksOff);
    for _ in 0..3 {
        fleet.generate(request("a", 10)).await.unwrap_err();
    }
    assert_eq!(states(&fleet), ["away", "up"]);
    assert_eq!(fleet.generate(request("a", 10)).await.unwrap().worker, "w1");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_worker_is_found_by_probes_and_its_calls_move() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].is(Mood::Stopped);
    let begun = tokio::time::Instant::now();
    let mut calls = JoinSet::new();
    for session in ["a", "b", "c", "d"] {
        let fleet = fleet.clone();
        calls.spawn(async move { fleet.generate(request(session, 10)).await.unwrap().worker });
    }
    let found = calls.join_all().await;
    assert_eq!(found, ["w1"; 4]);
    // The first look comes after an interval of 10 s, and three in a row have 10 s each.
    assert!(begun.elapsed() <= Duration::from_secs(41), "{:?}", begun.elapsed());
    assert_eq!(states(&fleet), ["away", "up"]);
}

#[tokio::test(start_paused = true)]
async fn probes_without_news_wake_no_call() {
    let (fleet, workers) = fleet(1, 8);
    workers[0].is(Mood::Slow);
    let mut call = pin!(fleet.generate(request("a", 10)));
    let mut polls = 0;
    let counted = poll_fn(|context| {
        polls += 1;
        call.as_mut().poll(context)
    });
    tokio::time::timeout(Duration::from_secs(95), counted).await.unwrap_err();
    // To begin, after its own yield, and when time is up; nine probes lay between.
    assert!(polls <= 3, "polled {polls} times");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_reply_is_tried_again_elsewhere() {
    let (fleet, workers) = fleet(2, 8);
    workers[0].is(Mood::Invalid);
    let error = fleet.generate(request("a", 10)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
    assert_eq!(fleet.generate(request("a", 10)).await.unwrap().worker, "w1");
    for session in ["b", "c"] {
        let error = fleet.generate(request(session, 10)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
    }
    assert_eq!(states(&fleet), ["away", "up"], "three in a row");
}

#[tokio::test(start_paused = true)]
async fn calls_wait_while_all_workers_are_away_but_not_for_ever() {
    let (fleet, workers) = fleet(2, 8);
    all_are(&workers, Mood::Gone);
    let waiting = {
        let fleet = fleet.clone();
        let mut call = JoinSet::new();
        call.spawn(async move { fleet.generate(request("a", 10)).await });
        call
    };
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(states(&fleet), ["away", "away"]);
    workers[1].is(Mood::Well);
    let reply = waiting.join_all().await.remove(0).unwrap();
    assert_eq!(reply.worker, "w1");

    workers[1].is(Mood::Gone);
    let begun = tokio::time::Instant::now();
    let error = fleet.generate(request("a", 10)).await.unwrap_err();
    assert!(error.to_string().contains("no worker was up"), "{error}");
    assert!(begun.elapsed() >= Duration::from_mins(5));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_kills_workers_does_not_reach_them_all() {
    let (fleet, workers) = fleet(5, 8);
    all_are(&workers, Mood::Gone);
    fleet.generate(request("poison", 10)).await.unwrap_err();
    settle().await;
    assert_eq!(states(&fleet).iter().filter(|state| **state == "away").count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_gives_its_permit_back() {
    let (fleet, workers) = fleet(1, 1);
    workers[0].is(Mood::Slow);
    let call = tokio::time::timeout(Duration::from_secs(1), fleet.generate(request("a", 10)));
    call.await.unwrap_err();
    assert_eq!(fleet.status()[0].calls, 0);
    workers[0].is(Mood::Well);
    fleet.generate(request("b", 10)).await.unwrap();
}
