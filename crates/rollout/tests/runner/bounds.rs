//! Hostile trees cost a neighbour no time, and this program a bounded amount of memory.

use crate::common;
use crate::world::*;
use orchestrate_e2e::process_cpu_time;
use orchestrate_engine::Engine;
use orchestrate_rollout::{EpisodeReport, Episodes as _, GradingRules, RolloutSection};
use orchestrate_sandbox::SandboxProvider;
use orchestrate_testkit::{FakeEngine, FakeExec, FakeSandboxes, grade_toy, toy_shape, toy_shell};
use orchestrate_types::{Limit, Outcome};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Runs an episode whose only command leaves these files.
async fn episode_with(files: Vec<(String, Vec<u8>)>) -> EpisodeReport {
    let shape = toy_shape(chat().vocab_size());
    let script = playing(vec![bash("attack"), submit()]);
    let engine: Arc<dyn Engine> = Arc::new(FakeEngine::new(shape, move |_, call| script(call)));
    let sandboxes: Arc<dyn SandboxProvider> = Arc::new(FakeSandboxes::new(move |tree, line| {
        if line != "attack" {
            return toy_shell(tree, line);
        }
        tree.extend(files.iter().map(|(path, text)| (path.clone(), (0o644, text.clone()))));
        FakeExec::new(0, "")
    }));
    let model = (chat(), RolloutSection::default().check().unwrap());
    let runner = common::runner(engine, sandboxes, model, GradingRules::new(grade_toy));
    runner.run(request(), &CancellationToken::new()).await
}

fn newlines(bytes: usize) -> Vec<u8> {
    vec![b'\n'; bytes]
}

/// Bytes other than NUL that no compression shortens.
fn dense(bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8 | 1
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Different lines without any order, which no comparison can shorten.
fn noise(seed: usize) -> Vec<u8> {
    (0..19_000).flat_map(|n| format!("{}\n", n * seed % 19_001).into_bytes()).collect()
}

#[tokio::test]
async fn hostile_trees_are_too_large_or_graded_within_seconds() {
    let many = (0..6_000).map(|n| (format!("f{n}"), b"x\n".to_vec())).collect();
    let too_large = Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 };
    let graded = Outcome::Scored { reward: 0.0 };
    let name = || "total.py".to_owned();
    for (what, files, expected) in [
        ("huge", vec![(name(), newlines(5 << 20))], &too_large),
        ("newlines", vec![(name(), newlines(4 << 20))], &too_large),
        ("many", many, &too_large),
        ("large", vec![(name(), newlines(1 << 20))], &graded),
        ("binary", vec![("core".to_owned(), vec![0; 64 << 20])], &graded),
        ("not UTF-8", vec![("latin".to_owned(), vec![0xe9; 3 << 20])], &graded),
        ("not UTF-8 and dense", vec![("dense".to_owned(), dense(4 << 20))], &too_large),
        ("noise", vec![(name(), noise(7)), ("b".to_owned(), noise(12_345))], &graded),
    ] {
        let began = process_cpu_time().unwrap();
        let report = episode_with(files).await;
        let used = process_cpu_time().unwrap().saturating_sub(began);
        assert_eq!(report.outcome, *expected, "{what}");
        assert!(report.patch.len() <= 4 << 20, "{what}");
        assert!(!report.patch.contains("core"));
        assert!(used < Duration::from_secs(20), "{what}: {used:?}");
    }
}

/// One thread serves all episodes here, so that whatever computes on it delays the neighbour by as
/// much. Processor time of the thread is measured, not the clock, which other programs move as well.
/// The fake sandbox itself runs on that thread, so the best of several tries counts.
#[tokio::test]
async fn hostile_episodes_do_not_delay_a_neighbours_timer() {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let mut attacks = tokio::task::JoinSet::new();
        for n in 0..8 {
            let text = if n % 2 == 0 { newlines(3 << 20) } else { noise(7 + n) };
            attacks.spawn(episode_with(vec![("total.py".to_owned(), text)]));
        }
        let (mut longest, mut ended) = (Duration::ZERO, 0);
        while ended < 8 {
            let began = orchestrate_e2e::thread_cpu_time().unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
            longest =
                longest.max(orchestrate_e2e::thread_cpu_time().unwrap().saturating_sub(began));
            while attacks.try_join_next().is_some_and(|attack| attack.is_ok()) {
                ended += 1;
            }
        }
        best = best.min(longest);
        if best <= Duration::from_millis(50) {
            break;
        }
    }
    assert!(best <= Duration::from_millis(50), "{best:?}");
}
