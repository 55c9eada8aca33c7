use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn workers(count: usize, permits: usize) -> Placement {
    Placement::new(std::iter::repeat_n((permits, 1), count))
}

fn worker_of(placement: &Placement, session: &str) -> Option<usize> {
    placement.place(session).map(|place| place.worker)
}

#[test]
fn new_conversations_go_where_the_fewest_tokens_are() {
    let mut placement = workers(3, 8);
    for (session, tokens) in [("a", 100), ("b", 30), ("c", 60), ("d", 10), ("e", 10)] {
        placement.open(session, None, tokens);
    }
    let found = ["a", "b", "c", "d", "e"].map(|s| worker_of(&placement, s).unwrap());
    assert_eq!(found, [0, 1, 2, 1, 1]);
    placement.close("a");
    placement.open("f", None, 1);
    assert_eq!(worker_of(&placement, "f"), Some(0), "what is closed weighs nothing");
}

#[test]
fn ranks_of_a_worker_are_filled_like_workers() {
    let mut placement = Placement::new([(8, 2), (8, 1)]);
    let places = ["a", "b", "c"].map(|s| placement.open(s, None, 10).unwrap());
    let expected = [(0, 0), (0, 1), (1, 0)].map(|(worker, rank)| Place { worker, rank });
    assert_eq!(places, expected);
}

#[test]
fn a_group_follows_its_first_member_while_there_is_room() {
    let mut placement = workers(2, 3);
    for member in 0..5 {
        placement.open(&format!("g.{member}"), Some("g"), 100);
    }
    let found: Vec<_> = (0..5).map(|m| worker_of(&placement, &format!("g.{m}")).unwrap()).collect();
    assert_eq!(found, [0, 0, 0, 1, 1], "three permits, then the other worker");
    let place = placement.begin_call("g.0", 100).unwrap();
    placement.end_call(place);
    placement.open("g.5", Some("g"), 100);
    assert_eq!(worker_of(&placement, "g.5"), Some(0), "a finished call makes room");
}

#[test]
fn conversations_of_a_worker_that_left_move_once_and_stay_there() {
    let mut placement = workers(2, 8);
    for session in ["a", "b", "c", "d"] {
        placement.begin_call(session, 10);
    }
    assert_eq!(["a", "b", "c", "d"].map(|s| worker_of(&placement, s).unwrap()), [0, 1, 0, 1]);
    placement.leave(0);
    assert_eq!(worker_of(&placement, "a"), None);
    assert_eq!(placement.begin_call("a", 12).map(|place| place.worker), Some(1));
    placement.join(0);
    assert_eq!(worker_of(&placement, "a"), Some(1), "a worker that returns takes nothing back");
    assert_eq!(placement.begin_call("c", 12).map(|place| place.worker), Some(0));
    assert_eq!(placement.moves(), 2);
}

#[test]
fn a_worker_whose_reply_was_no_good_is_shunned_where_there_is_another() {
    let mut placement = workers(2, 8);
    placement.begin_call("a", 10);
    placement.open("heavy", None, 1000);
    placement.shun("a", 0);
    assert_eq!(placement.begin_call("a", 10).map(|place| place.worker), Some(1));
    placement.leave(0);
    placement.shun("a", 1);
    assert_eq!(worker_of(&placement, "a"), Some(1), "the only one is not shunned");
}

#[test]
fn without_workers_there_is_no_place() {
    let mut placement = workers(1, 1);
    placement.leave(0);
    assert!(!placement.any_up());
    assert_eq!(placement.open("a", None, 1), None);
    placement.join(0);
    assert_eq!(placement.begin_call("a", 1), Some(Place { worker: 0, rank: 0 }));
}

#[derive(Debug, Clone)]
enum Step {
    Open { session: usize, group: Option<usize>, tokens: usize },
    Call { session: usize, tokens: usize },
    End,
    Close { session: usize },
    Leave { worker: usize },
    Join { worker: usize },
    Shun { session: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0usize..12;
    prop_oneof![
        (session.clone(), proptest::option::of(0usize..3), 1usize..500)
            .prop_map(|(session, group, tokens)| Step::Open { session, group, tokens }),
        (session.clone(), 1usize..500).prop_map(|(session, tokens)| Step::Call { session, tokens }),
        Just(Step::End),
        session.clone().prop_map(|session| Step::Close { session }),
        (0usize..3).prop_map(|worker| Step::Leave { worker }),
        (0usize..3).prop_map(|worker| Step::Join { worker }),
        session.prop_map(|session| Step::Shun { session }),
    ]
}

proptest! {
    #[test]
    fn prop_sessions_are_sticky_followers_fit_and_loads_add_up(
        steps in proptest::collection::vec(step(), 1..200),
        permits in 1usize..5,
    ) {
        let mut placement = workers(3, permits);
        let mut up = [true; 3];
        let mut open: BTreeSet<usize> = BTreeSet::new();
        let mut calls: Vec<Place> = Vec::new();
        for step in steps {
            let before: Vec<(usize, Option<usize>)> = open
                .iter()
                .map(|session| (*session, worker_of(&placement, &session.to_string())))
                .collect();
            let mut moved = None;
            match step {
                Step::Open { session, group, tokens } => {
                    let name = group.map(|group| group.to_string());
                    let is_new = open.insert(session);
                    let lead = name.as_ref().and_then(|g| placement.groups.get(g)?.lead);
                    let may_follow = lead.is_some_and(|place| placement.has_room(place.worker));
                    let least = placement.least_loaded(None);
                    let place = placement.open(&session.to_string(), name.as_deref(), tokens);
                    prop_assert_eq!(place.is_some(), up.contains(&true));
                    if is_new {
                        prop_assert_eq!(place, if may_follow { lead } else { least });
                    }
                    moved = Some(session);
                }
                Step::Call { session, tokens } => {
                    if let Some(place) = placement.begin_call(&session.to_string(), tokens) {
                        calls.push(place);
                    }
                    open.insert(session);
                    moved = Some(session);
                }
                Step::End => {
                    if let Some(place) = calls.pop() {
                        placement.end_call(place);
                    }
                }
                Step::Close { session } => {
                    placement.close(&session.to_string());
                    open.remove(&session);
                }
                Step::Leave { worker } => {
                    placement.leave(worker);
                    up[worker] = false;
                }
                Step::Join { worker } => {
                    placement.join(worker);
                    up[worker] = true;
                }
                Step::Shun { session } => {
                    if let Some(worker) = worker_of(&placement, &session.to_string()) {
                        placement.shun(&session.to_string(), worker);
                    }
                    moved = Some(session);
                }
            }
            for (session, was) in before {
                let now = worker_of(&placement, &session.to_string());
                let left = was.is_some_and(|worker| !up[worker]);
                let may_change = moved == Some(session) || left || !open.contains(&session);
                prop_assert!(now == was || may_change, "{} moved", session);
            }
            for (worker, is_up) in up.iter().enumerate() {
                let there = |s: &&usize| worker_of(&placement, &s.to_string()) == Some(worker);
                let here: Vec<_> = open.iter().filter(there).collect();
                let load = placement.load(worker);
                prop_assert!(*is_up || here.is_empty());
                prop_assert_eq!(load.sessions, here.len());
                let tokens: u64 = here
                    .iter()
                    .map(|s| placement.sessions[&s.to_string()].tokens)
                    .sum();
                prop_assert_eq!(load.tokens, tokens);
                prop_assert_eq!(load.calls, calls.iter().filter(|p| p.worker == worker).count());
                let slot = &placement.slots[worker];
                let silent =
                    here.iter().filter(|s| !placement.sessions[&s.to_string()].has_called).count();
                prop_assert_eq!(slot.expected, silent);
            }
            let members: usize = placement.groups.values().map(|group| group.members).sum();
            let grouped = placement.sessions.values().filter(|s| s.group.is_some()).count();
            prop_assert_eq!(members, grouped);
        }
        for session in &open {
            placement.close(&session.to_string());
        }
        prop_assert!(placement.sessions.is_empty() && placement.groups.is_empty());
    }
}
