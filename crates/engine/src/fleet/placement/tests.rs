use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn workers(count: usize, permits: usize) -> Placement {
    Placement::new(std::iter::repeat_n((permits, 1), count))
}

fn worker_of(placement: &Placement, session: &str) -> Option<usize> {
    placement.assigned(session).map(|place| place.worker)
}

#[test]
fn new_conversations_go_to_the_worker_with_the_fewest_tokens() {
    let mut placement = workers(3, 8);
    for (session, tokens) in [("a", 100), ("b", 30), ("c", 60), ("d", 10), ("e", 10)] {
        placement.open(session, None, tokens);
    }
    let found = ["a", "b", "c", "d", "e"].map(|s| worker_of(&placement, s).unwrap());
    assert_eq!(found, [0, 1, 2, 1, 1]);
    placement.close("a");
    placement.open("f", None, 1);
    assert_eq!(worker_of(&placement, "f"), Some(0), "a closed conversation has no load");
}

#[test]
fn ranks_are_filled_like_workers() {
    let mut placement = Placement::new([(8, 2), (8, 1)]);
    let places = ["a", "b", "c"].map(|s| placement.open(s, None, 10).unwrap());
    let expected = [(0, 0), (0, 1), (1, 0)].map(|(worker, rank)| WorkerRank { worker, rank });
    assert_eq!(places, expected);
}

#[test]
fn a_group_follows_its_first_member_while_its_worker_has_room() {
    let mut placement = workers(2, 3);
    for member in 0..5 {
        placement.open(&format!("g.{member}"), Some("g"), 100);
    }
    let found: Vec<_> = (0..5).map(|m| worker_of(&placement, &format!("g.{m}")).unwrap()).collect();
    assert_eq!(found, [0, 0, 0, 1, 1], "three permits, then the other worker");
    let place = placement.begin_call("g.0", 100).unwrap();
    placement.end_call(place);
    placement.open("g.5", Some("g"), 100);
    assert_eq!(worker_of(&placement, "g.5"), Some(0), "a finished call frees its permit");
}

#[test]
fn conversations_of_a_lost_worker_move_once_and_stay() {
    let mut placement = workers(2, 8);
    for session in ["a", "b", "c", "d"] {
        placement.begin_call(session, 10);
    }
    assert_eq!(["a", "b", "c", "d"].map(|s| worker_of(&placement, s).unwrap()), [0, 1, 0, 1]);
    placement.take_out(0);
    assert_eq!(worker_of(&placement, "a"), None);
    assert_eq!(placement.begin_call("a", 12).map(|place| place.worker), Some(1));
    placement.put_back(0);
    assert_eq!(
        worker_of(&placement, "a"),
        Some(1),
        "a worker that returns gets no conversations back"
    );
    assert_eq!(placement.begin_call("c", 12).map(|place| place.worker), Some(0));
    assert_eq!(placement.moves(), 2);
}

#[test]
fn a_worker_with_an_invalid_reply_is_avoided_if_there_is_another() {
    let mut placement = workers(2, 8);
    placement.begin_call("a", 10);
    placement.open("heavy", None, 1000);
    placement.avoid("a", 0);
    assert_eq!(placement.begin_call("a", 10).map(|place| place.worker), Some(1));
    placement.take_out(0);
    placement.avoid("a", 1);
    assert_eq!(worker_of(&placement, "a"), Some(1), "the only worker is not avoided");
}

#[test]
fn nothing_is_assigned_while_no_worker_is_in_service() {
    let mut placement = workers(1, 1);
    placement.take_out(0);
    assert!(!placement.any_in_service());
    assert_eq!(placement.open("a", None, 1), None);
    placement.put_back(0);
    assert_eq!(placement.begin_call("a", 1), Some(WorkerRank { worker: 0, rank: 0 }));
}

#[derive(Debug, Clone)]
enum Operation {
    Open { session: usize, group: Option<usize>, tokens: usize },
    Call { session: usize, tokens: usize },
    End,
    Close { session: usize },
    TakeOut { worker: usize },
    PutBack { worker: usize },
    Avoid { session: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    let session = 0usize..12;
    prop_oneof![
        (session.clone(), proptest::option::of(0usize..3), 1usize..500)
            .prop_map(|(session, group, tokens)| Operation::Open { session, group, tokens }),
        (session.clone(), 1usize..500)
            .prop_map(|(session, tokens)| Operation::Call { session, tokens }),
        Just(Operation::End),
        session.clone().prop_map(|session| Operation::Close { session }),
        (0usize..3).prop_map(|worker| Operation::TakeOut { worker }),
        (0usize..3).prop_map(|worker| Operation::PutBack { worker }),
        session.prop_map(|session| Operation::Avoid { session }),
    ]
}

proptest! {
    #[test]
    fn prop_conversations_stay_groups_follow_and_loads_add_up(
        operations in proptest::collection::vec(operation(), 1..200),
        permits in 1usize..5,
    ) {
        let mut placement = workers(3, permits);
        let mut in_service = [true; 3];
        let mut open: BTreeSet<usize> = BTreeSet::new();
        let mut calls: Vec<WorkerRank> = Vec::new();
        for operation in operations {
            let before: Vec<(usize, Option<usize>)> = open
                .iter()
                .map(|session| (*session, worker_of(&placement, &session.to_string())))
                .collect();
            let mut moved = None;
            match operation {
                Operation::Open { session, group, tokens } => {
                    let name = group.map(|group| group.to_string());
                    let is_new = open.insert(session);
                    let first = name.as_ref().and_then(|g| placement.groups.get(g)?.first);
                    let may_follow = first.is_some_and(|place| placement.has_room(place.worker));
                    let least = placement.least_loaded(None);
                    let place = placement.open(&session.to_string(), name.as_deref(), tokens);
                    prop_assert_eq!(place.is_some(), in_service.contains(&true));
                    if is_new {
                        prop_assert_eq!(place, if may_follow { first } else { least });
                    }
                    moved = Some(session);
                }
                Operation::Call { session, tokens } => {
                    if let Some(place) = placement.begin_call(&session.to_string(), tokens) {
                        calls.push(place);
                    }
                    open.insert(session);
                    moved = Some(session);
                }
                Operation::End => {
                    if let Some(place) = calls.pop() {
                        placement.end_call(place);
                    }
                }
                Operation::Close { session } => {
                    placement.close(&session.to_string());
                    open.remove(&session);
                }
                Operation::TakeOut { worker } => {
                    placement.take_out(worker);
                    in_service[worker] = false;
                }
                Operation::PutBack { worker } => {
                    placement.put_back(worker);
                    in_service[worker] = true;
                }
                Operation::Avoid { session } => {
                    if let Some(worker) = worker_of(&placement, &session.to_string()) {
                        placement.avoid(&session.to_string(), worker);
                    }
                    moved = Some(session);
                }
            }
            for (session, was) in before {
                let now = worker_of(&placement, &session.to_string());
                let left = was.is_some_and(|worker| !in_service[worker]);
                let may_change = moved == Some(session) || left || !open.contains(&session);
                prop_assert!(now == was || may_change, "{} moved", session);
            }
            for (worker, is_in_service) in in_service.iter().enumerate() {
                let assigned_here = |s: &&usize| worker_of(&placement, &s.to_string()) == Some(worker);
                let here: Vec<_> = open.iter().filter(assigned_here).collect();
                let load = placement.load(worker);
                prop_assert!(*is_in_service || here.is_empty());
                prop_assert_eq!(load.sessions, here.len());
                let tokens: u64 = here
                    .iter()
                    .map(|s| placement.sessions[&s.to_string()].tokens)
                    .sum();
                prop_assert_eq!(load.tokens, tokens);
                prop_assert_eq!(load.calls, calls.iter().filter(|p| p.worker == worker).count());
                let slot = &placement.slots[worker];
                let before_first_call =
                    here.iter().filter(|s| !placement.sessions[&s.to_string()].has_called).count();
                prop_assert_eq!(slot.before_first_call, before_first_call);
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
