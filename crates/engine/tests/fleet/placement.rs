//! Which worker a conversation is assigned to.

use crate::scripted::{Behaviour, Scripted, fleet, fleet_of, request, sample, set_all, settle};
use orchestrate_engine::{Engine, SessionOpening};
use tokio::task::JoinSet;

fn open(fleet: &dyn Engine, session: &str, group: &str) {
    fleet.open_session(&SessionOpening { session, group: Some(group), prompt_tokens: 100 });
}

#[tokio::test(start_paused = true)]
async fn a_conversation_stays_on_its_worker_and_new_ones_are_spread() {
    let (fleet, workers) = fleet(2, 8);
    for turn in 1..4 {
        for session in ["a", "b", "c", "d"] {
            let reply = sample(fleet.as_ref(), request(session, 100 * turn)).await.unwrap();
            assert_eq!(fleet.worker_of(session), Some(reply.worker));
        }
    }
    let found = workers.iter().map(|worker| worker.sessions());
    let expected = [["a", "c"].repeat(3), ["b", "d"].repeat(3)];
    assert_eq!(found.collect::<Vec<_>>(), expected);
    assert_eq!(fleet.moves(), 0);
    let status = fleet.status();
    assert_eq!((status[0].sessions, status[0].tokens, status[0].calls), (2, 602, 0));
    for session in ["a", "b", "c", "d"] {
        fleet.close_session(session);
    }
    assert!(fleet.status().iter().all(|worker| worker.sessions == 0 && worker.tokens == 0));
}

#[tokio::test(start_paused = true)]
async fn the_worker_is_known_before_the_first_call_and_groups_stay_together() {
    let (fleet, _) = fleet(3, 4);
    for member in ["g.0", "g.1", "g.2"] {
        open(fleet.as_ref(), member, "g");
    }
    open(fleet.as_ref(), "h.0", "h");
    let found = ["g.0", "g.1", "g.2", "h.0"].map(|session| fleet.worker_of(session).unwrap());
    assert_eq!(found, ["w0", "w0", "w0", "w1"]);
    assert_eq!(fleet.worker_of("unknown"), None);
    let reply = sample(fleet.as_ref(), request("g.2", 100)).await.unwrap();
    assert_eq!(reply.worker, "w0");
}

#[tokio::test(start_paused = true)]
async fn each_rank_is_assigned_separately_and_named_in_requests() {
    let workers = [Scripted::new("w0", 2)];
    let fleet = fleet_of(&workers, 8);
    for session in ["a", "b", "a", "b"] {
        let reply = sample(fleet.as_ref(), request(session, 10)).await.unwrap();
        assert_eq!(Some(reply.worker), fleet.worker_of(session));
    }
    let ranks: Vec<_> = workers[0].notes().requests.iter().map(|(_, rank)| *rank).collect();
    assert_eq!(ranks, [Some(0), Some(1), Some(0), Some(1)]);
    assert_eq!(fleet.worker_of("b").unwrap(), "w0#1");
}

#[tokio::test(start_paused = true)]
async fn a_worker_never_has_more_calls_than_permits() {
    let (fleet, workers) = fleet(2, 3);
    set_all(&workers, Behaviour::Slow);
    let mut calls = JoinSet::new();
    for session in 0..20 {
        let fleet = fleet.clone();
        calls.spawn(async move { sample(fleet.as_ref(), request(&session.to_string(), 10)).await });
    }
    settle().await;
    assert_eq!(fleet.status().iter().map(|worker| worker.calls).collect::<Vec<_>>(), [10, 10]);
    set_all(&workers, Behaviour::Healthy);
    while let Some(reply) = calls.join_next().await {
        reply.unwrap().unwrap();
    }
    assert_eq!(workers.iter().map(|w| w.notes().most_running).collect::<Vec<_>>(), [3, 3]);
}
