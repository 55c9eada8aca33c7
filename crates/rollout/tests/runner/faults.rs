//! Failing engines and sandboxes.

use crate::world::*;
use orchestrate_engine::EngineErrorKind;
use orchestrate_sandbox::{Purpose, SandboxErrorKind};
use orchestrate_testkit::{FakeEngine, FakeReply, Operation};
use orchestrate_types::{Limit, Outcome, PolicyVersion, Stage};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[tokio::test(start_paused = true)]
async fn sandbox_failure_breaks_the_attempt_at_its_stage_without_a_reward() {
    use Operation::{Collect, Exec, MarkTree, Open, Write};
    use Purpose::{Agent, Grader};
    let cases = [
        (Open, Agent, 0, Stage::Setup),
        (Write, Agent, 0, Stage::Setup),
        (MarkTree, Agent, 0, Stage::Setup),
        (Exec, Agent, 0, Stage::Exec),
        (Write, Agent, 1, Stage::Exec),
        (Collect, Agent, 0, Stage::Collect),
        (Open, Grader, 0, Stage::Grade),
        (Write, Grader, 0, Stage::Grade),
        (Exec, Grader, 0, Stage::Grade),
    ];
    for (operation, purpose, skip, expected) in cases {
        let world = world(solving());
        world.sandboxes.fail(operation, purpose, skip, u32::MAX);
        let report = world.run().await;
        let Outcome::Broken { stage, error } = &report.outcome else {
            panic!("{operation:?} of {purpose:?}: {:?}", report.outcome);
        };
        assert_eq!(*stage, expected, "{operation:?} of {purpose:?}");
        assert!(error.contains("planned fault"), "{error}");
        assert_eq!(report.outcome.trusted_reward(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn sandbox_that_commands_damaged_is_the_attempts_own_result() {
    let damaged = || SandboxErrorKind::Damaged { what: "process 1 was changed".to_owned() };
    let refused = |call| SandboxErrorKind::Refused { call, message: "no process".to_owned() };
    let cases = [
        (Operation::Exec, Purpose::Agent, damaged()),
        (Operation::Exec, Purpose::Agent, refused("exec")),
        (Operation::Collect, Purpose::Agent, damaged()),
        (Operation::Collect, Purpose::Agent, refused("list_changes")),
        (Operation::Exec, Purpose::Grader, damaged()),
    ];
    for (operation, purpose, kind) in cases {
        let world = world(solving());
        world.sandboxes.fail_with(operation, purpose, 0, kind);
        let report = world.run().await;
        let zero = Outcome::Truncated { limit: Limit::SandboxDamage, reward: 0.0 };
        assert_eq!(report.outcome, zero, "{operation:?} of {purpose:?}");
        assert!(report.trajectory().is_some() || operation == Operation::Exec);
        let graders = world.sandboxes.opened().iter().filter(|s| s.purpose == purpose).count();
        assert_eq!(graders, 1, "a damaged sandbox is replaced: {operation:?} of {purpose:?}");
    }
    // Setting up and grading start from what no command has touched.
    for (operation, purpose, stage) in [
        (Operation::MarkTree, Purpose::Agent, Stage::Setup),
        (Operation::Exec, Purpose::Grader, Stage::Grade),
    ] {
        let world = world(solving());
        world.sandboxes.fail_with(operation, purpose, 0, refused("exec"));
        let outcome = world.run().await.outcome;
        assert!(matches!(outcome, Outcome::Broken { stage: s, .. } if s == stage), "{outcome:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn sandbox_that_fails_once_at_setup_or_grading_is_replaced() {
    let world = world(solving());
    world.sandboxes.fail(Operation::Write, Purpose::Agent, 0, 1);
    world.sandboxes.fail(Operation::Exec, Purpose::Grader, 0, 1);
    world.sandboxes.fail(Operation::Close, Purpose::Agent, 0, 1);
    assert_eq!(world.run().await.outcome, Outcome::Scored { reward: 1.0 });
    assert_eq!(world.sandboxes.opened().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn engine_errors_are_retried_with_a_new_request_id() {
    let world = world(|call| match call {
        0 => FakeReply::Fail(EngineErrorKind::unreachable("refused")),
        1 => FakeReply::Fail(EngineErrorKind::TimedOut(Duration::from_secs(1))),
        2 => stop(turn_ids(&[fix()])),
        _ => stop(turn_ids(&[submit()])),
    });
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    let ids: Vec<String> =
        world.engine.requests().iter().map(|r| r.request_id.to_string()).collect();
    let ends: Vec<&str> = ids.iter().map(|id| id.rsplit_once("-a01-").unwrap().1).collect();
    assert_eq!(ends, ["n000-r00", "n000-r01", "n000-r02", "n001-r00"]);
    let seeds: Vec<u64> = world.engine.requests().iter().map(|r| r.sampling.seed).collect();
    assert_eq!(seeds[0], seeds[2]);
    assert_ne!(seeds[2], seeds[3]);
}

#[tokio::test(start_paused = true)]
async fn engine_restart_between_turns_neither_loses_nor_duplicates_rows() {
    let engine: Arc<OnceLock<Arc<FakeEngine>>> = Arc::default();
    let handle = Arc::clone(&engine);
    let world = world(move |call| match call {
        0 => stop(turn_ids(&[bash("cat total.py")])),
        1 => FakeReply::Fail(EngineErrorKind::unreachable("connection reset")),
        2 => {
            // The engine is back with the same weights and an empty KV cache.
            handle.get().unwrap().set_version(PolicyVersion(0));
            stop(turn_ids(&[fix()]))
        }
        _ => stop(turn_ids(&[submit()])),
    });
    engine.set(Arc::clone(&world.engine)).unwrap();
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    let requests = world.engine.requests();
    let first = requests[0].token_ids.len() + turn_ids(&[bash("cat total.py")]).len();
    assert_eq!(requests[1].routed_experts_start, Some(first - 2), "starts at the last row held");
    assert_eq!(requests[2].routed_experts_start, Some(first - 2));
    assert_eq!(requests[2].token_ids, requests[1].token_ids);
    assert_eq!(report.routing_drift, 0);
    assert!(report.cached_tokens < report.cacheable_tokens, "the prompt was prefilled again");
}

#[tokio::test(start_paused = true)]
async fn engine_that_stays_unreachable_breaks_the_episode() {
    let world = world(|_| FakeReply::Fail(EngineErrorKind::unreachable("refused")));
    let report = world.run().await;
    assert!(matches!(report.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 8);
    let late = || FakeReply::Fail(EngineErrorKind::TimedOut(Duration::from_secs(1)));
    let world = self::world(move |_| late());
    assert!(matches!(world.run().await.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 3, "late replies are retried less often");
    let world = self::world(|_| FakeReply::Fail(EngineErrorKind::unsupported("no".to_owned())));
    assert!(matches!(world.run().await.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 1, "a permanent error is not retried");
}

#[tokio::test(start_paused = true)]
async fn invalid_routing_rows_are_retried_once_then_break_the_episode() {
    for missing in [false, true] {
        let bad = move || {
            let ids = turn_ids(&[fix()]);
            if missing { FakeReply::NoRows { ids } } else { FakeReply::ShortRows { ids } }
        };
        let world = world(move |call| match call {
            0 => bad(),
            1 => stop(turn_ids(&[fix()])),
            _ => stop(turn_ids(&[submit()])),
        });
        let report = world.run().await;
        assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
        assert_whole(&report);

        let world = self::world(move |_| bad());
        let report = world.run().await;
        assert!(matches!(report.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
        assert!(report.routing_problem.as_deref().unwrap().contains("routing rows"));
        assert!(report.routing().is_none());
        assert_eq!(world.engine.requests().len(), 2);
    }
}
