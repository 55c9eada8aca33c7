//! A run that is killed at any point and resumed ends as if it had not been killed.

use crate::parts::Kill;
use crate::support::{World, plan, usual};
use orchestrate_coordinator::RunEnd;
use orchestrate_store::{AttemptState, Reader};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// Asserts that a killed run has the same result as the reference run, which was not killed.
async fn assert_same(world: &World, reference: &World, what: &str) {
    let (got, want) = (
        world.trainer.state.lock().unwrap().clone(),
        reference.trainer.state.lock().unwrap().clone(),
    );
    assert_eq!(got.applied, want.applied, "{what}: each step is applied once, in order (INV-5)");
    assert_eq!(got.trained, want.trained, "{what}: same episodes in the same batches");
    assert_eq!(got.digest, want.digest, "{what}: bit-equal weights");
    assert_eq!(world.metrics(), reference.metrics(), "{what}: one line per step");
    assert_eq!(world.sealed().await, reference.sealed().await, "{what}: INV-12");
    let mut seen = std::collections::BTreeSet::new();
    for episode in got.trained.iter().flatten() {
        assert!(seen.insert(episode.clone()), "{what}: {episode} is in two batches (INV-4)");
    }
}

async fn reference() -> World {
    let world = World::new(plan(2), usual);
    assert!(matches!(world.finish().await, RunEnd::Finished(_)));
    world
}

#[tokio::test]
async fn run_killed_at_any_point_ends_as_if_never_killed() {
    let reference = reference().await;
    let mut points = 0;
    let mut names = std::collections::BTreeSet::new();
    loop {
        let world = World::new(plan(2), usual);
        let kill = Kill::after(points + 1);
        let end = world.start(&kill).await;
        names.append(&mut kill.names.lock().unwrap().clone());
        if let Some(end) = end {
            end.unwrap();
            break;
        }
        points += 1;
        world.finish().await;
        assert_same(&world, &reference, &format!("killed at point {points}")).await;
    }
    assert!(points > 150, "only {points} points");
    for transition in [
        "open_step",
        "open_group",
        "claim_attempt",
        "seal_attempt",
        "break_attempt",
        "decide_group",
        "assemble_batch",
        "publish_batch",
        "record_result",
        "announce_version",
        "version_live",
        "finish_step",
        "open_eval",
        "finish_eval",
        "trainer",
        "engine",
    ] {
        for side in ["before", "after"] {
            assert!(names.contains(&format!("{transition}.{side}")), "{transition}.{side}");
        }
    }
}

#[tokio::test]
async fn repeated_kills_even_during_recovery_do_not_change_the_result() {
    let reference = reference().await;
    for stride in [23, 41, 67] {
        let world = World::new(plan(2), usual);
        let mut starts = 0;
        let end = loop {
            starts += 1;
            assert!(starts < 100, "no progress with a kill every {stride} points");
            if let Some(end) = world.start(&Kill::after(stride)).await {
                break end;
            }
        };
        end.unwrap();
        assert!(starts > 2);
        assert_same(&world, &reference, &format!("{starts} starts")).await;
    }
}

/// As with external agents, whose episodes outlive the coordinator.
#[tokio::test]
async fn attempts_that_are_continued_after_a_kill_are_sealed_once_and_keep_their_number() {
    let reference = reference().await;
    let numbers = async |world: &World| {
        let reader = Reader::open(&world.folder).await.unwrap();
        let mut numbers = BTreeMap::new();
        for episode in reader.episodes().await.unwrap() {
            for row in reader.attempts(episode.id).await.unwrap() {
                let is_valid = matches!(row.state, AttemptState::Sealed | AttemptState::Broken);
                assert!(is_valid, "{} is {:?}", row.id, row.state);
                numbers.insert(row.id, row.state);
            }
        }
        numbers
    };
    let expected = numbers(&reference).await;
    let mut names = BTreeSet::new();
    for point in (1..).step_by(5) {
        let mut world = World::new(plan(2), usual);
        world.continues = true;
        let kill = Kill::after(point);
        if let Some(end) = world.start(&kill).await {
            end.unwrap();
            assert!(point > 150, "only {point} points");
            break;
        }
        // Killed again while it continues.
        let again = Kill::after(9);
        if let Some(end) = world.start(&again).await {
            end.unwrap();
        } else {
            world.finish().await;
        }
        names.append(&mut again.names.lock().unwrap().clone());
        let what = format!("killed at point {point}");
        assert_same(&world, &reference, &what).await;
        assert_eq!(numbers(&world).await, expected, "{what}");
        let limit = world.plan.sampling.max_in_flight as usize;
        assert!(world.episodes.most_running.load(Ordering::SeqCst) <= limit, "{what}");
    }
    assert!(names.contains("resume_attempt.before") && names.contains("resume_attempt.after"));
}

/// Which weights an episode is sampled with depends on when it starts, so two runs differ. But each step
/// is applied exactly once, and no episode is trained on twice.
#[tokio::test]
async fn run_killed_while_sampling_is_ahead_applies_each_step_once() {
    const STEPS: usize = 3;
    let ahead = || {
        let mut plan = plan(3);
        plan.run.max_staleness = 1;
        let world = World::new(plan, usual);
        world.trainer.yields.store(50, std::sync::atomic::Ordering::SeqCst);
        world
    };
    for point in (1..).step_by(3) {
        let world = ahead();
        if let Some(end) = world.start(&Kill::after(point)).await {
            end.unwrap();
            assert!(point > 300, "only {point} points");
            return;
        }
        world.finish().await;
        let weights = world.trainer.state.lock().unwrap().clone();
        assert_eq!(weights.applied.len(), STEPS, "killed at {point}: each step once");
        let mut seen = std::collections::BTreeSet::new();
        for episode in weights.trained.iter().flatten() {
            assert!(seen.insert(episode.clone()), "killed at {point}: {episode} in two batches");
        }
        let lines = world.metrics();
        let steps: Vec<_> = lines.iter().filter(|line| line.get("episodes").is_some()).collect();
        assert_eq!(steps.len(), STEPS, "killed at {point}: one line per step");
        for line in steps {
            assert!(line["staleness_max"].as_u64().unwrap() <= 1, "killed at {point}");
        }
    }
}

#[tokio::test]
async fn finished_run_started_again_only_repairs_its_files() {
    let world = reference().await;
    let requests = world.episodes.requests.lock().unwrap().len();
    let before = fs_err::read(world.folder.join("metrics.jsonl")).unwrap();
    fs_err::write(world.folder.join("metrics.jsonl"), "{\"damaged").unwrap();
    assert!(matches!(world.finish().await, RunEnd::Finished(_)));
    assert_eq!(world.episodes.requests.lock().unwrap().len(), requests);
    assert_eq!(fs_err::read(world.folder.join("metrics.jsonl")).unwrap(), before);
}
