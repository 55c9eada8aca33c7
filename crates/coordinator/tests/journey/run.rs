//! Runs that are not killed.

use crate::parts::{Kill, mix};
use crate::support::{World, plan, task, usual};
use orchestrate_coordinator::{Event, FailureClass, OnCollapse, RunEnd, RunError, Stop};
use orchestrate_handoff::{AdvantageNorm, AlgorithmSection, Batch, group_advantages};
use orchestrate_store::{BatchState, GroupState, Reader, StepState, StoreError};
use orchestrate_tasks::Split;
use orchestrate_types::{GroupId, Outcome, PolicyVersion, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn scored(solved: bool) -> Outcome {
    Outcome::Scored { reward: f64::from(u8::from(solved)) }
}

fn report(end: &RunEnd) -> &orchestrate_report::RunReport {
    match end {
        RunEnd::Finished(report) | RunEnd::Stopped(report) => report,
    }
}

#[tokio::test]
async fn run_trains_evaluates_and_reports() {
    let world = World::new(plan(3), usual);
    let end = world.finish().await;
    let report = report(&end);
    assert_eq!((report.steps_applied, report.steps_skipped), (3, 0));
    let (first, last) = (report.baseline.unwrap(), report.last.unwrap());
    assert_eq!((first.global_step, last.global_step, last.tasks), (0, 3, 2));
    assert_eq!(last.policy_version, PolicyVersion(3));
    assert_eq!(report.gain.unwrap().tasks, 2);
    assert!((report.kl_ratio.unwrap() - 3.0).abs() < 1e-9);

    let lines = world.metrics();
    let kinds: Vec<(u64, bool)> = lines
        .iter()
        .map(|l| (l["global_step"].as_u64().unwrap(), l.get("eval_tasks").is_some()))
        .collect();
    let expected = [(0, true), (1, false), (1, true), (2, false), (2, true), (3, false), (3, true)];
    assert_eq!(kinds, expected);
    let text = fs_err::read_to_string(world.folder.join("metrics.jsonl")).unwrap();
    let step = text.lines().nth(1).unwrap();
    for key in [
        "global_step",
        "policy_version",
        "reward_mean",
        "solve_rate",
        "groups_kept",
        "groups_dropped",
        "episodes",
        "broken_episodes",
        "truncated_episodes",
        "staleness_mean",
        "staleness_max",
        "turns_mean",
        "response_tokens_mean",
        "entropy",
        "grad_norm",
        "loss",
        "kl_train_infer",
        "extreme_token_fraction",
        "kl_train_infer_no_replay",
        "extreme_token_fraction_no_replay",
        "router_disagreement",
        "token_disagreement",
        "sequence_disagreement_mean",
        "routing_bytes_wire",
        "routing_bytes_held",
        "routing_rows_reused",
        "routing_rows_mixed",
        "routing_drift",
        "routing_missing",
        "prefix_cache_hit_rate",
        "prefix_cache_hit_rate_possible",
        "time_rollout_s",
        "time_train_s",
        "time_sync_s",
        "time_sandbox_s",
        "loop_lag_p99_ms",
        "loop_lag_max_ms",
        "sandbox_hosts",
        "tokens_per_s",
    ] {
        assert!(step.contains(&format!("\"{key}\":")), "{key}");
    }
    // Measured without replay at steps 1 and 3.
    assert!(lines[1]["kl_train_infer_no_replay"].is_f64());
    assert!(lines[3]["kl_train_infer_no_replay"].is_null());
    assert!(lines[5]["kl_train_infer_no_replay"].is_f64());

    let predictions = fs_err::read_to_string(world.folder.join("predictions.jsonl")).unwrap();
    let first: serde_json::Value =
        serde_json::from_str(predictions.lines().next().unwrap()).unwrap();
    assert_eq!(first["instance_id"], "h0");
    assert_eq!(first["model_name_or_path"], "toy-model@3");
    assert_eq!(first["model_patch"], "patch of h0");
    assert!(fs_err::read_to_string(world.folder.join("report.html")).unwrap().contains("<svg"));
    assert!(world.episodes.most_running.load(Ordering::SeqCst) <= 4);
    assert_eq!(world.sandboxes.shut_down.load(Ordering::SeqCst), 1);
}

/// Waits until a step has all the groups that it trains on.
async fn until_sampled(world: &World, step: u32) {
    let sampling = &world.plan.sampling;
    loop {
        let groups = match Reader::open(&world.folder).await {
            Ok(reader) => reader.groups_of_step(step).await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        let count = |state| groups.iter().filter(|g| g.state == state).count();
        let (kept, dropped) = (count(GroupState::Kept), count(GroupState::Dropped));
        let (wanted, most) = (sampling.groups_per_step, sampling.max_groups_per_step);
        if kept == wanted as usize || kept + dropped == most as usize {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs five steps. Returns how many started to sample while an earlier one was open, and the largest
/// staleness of a trained episode.
async fn overlap(max_staleness: u32) -> (usize, u64) {
    let mut plan = plan(5);
    plan.run.max_staleness = max_staleness;
    plan.run.eval_every = 0;
    let world = World::new(plan, usual);
    world.trainer.may_finish.send_replace(0);
    // Each step stays in training until the last step that may be sampled meanwhile is sampled.
    let holding = async {
        for step in 1..=5 {
            until_sampled(&world, 5.min(step + max_staleness)).await;
            world.trainer.may_finish.send_replace(step);
        }
    };
    let both = async { tokio::join!(world.finish(), holding) };
    let (end, ()) = tokio::time::timeout(Duration::from_mins(10), both).await.unwrap();
    assert_eq!(report(&end).steps_applied, 5);
    let (mut open, mut overlapping) = (0, 0);
    for event in world.events.lock().unwrap().iter() {
        match event {
            Event::StepSampling { .. } => {
                overlapping += usize::from(open > 0);
                open += 1;
            }
            Event::StepFinished { .. } => open -= 1,
            _ => {}
        }
    }
    let ages = world.metrics();
    let ages = ages.iter().map(|line| line["staleness_max"].as_u64().unwrap());
    (overlapping, ages.max().unwrap())
}

#[tokio::test]
async fn sampling_runs_ahead_of_training_by_max_staleness_steps() {
    assert_eq!(overlap(0).await, (0, 0));
    for ahead in [1, 2, 3] {
        let (overlapping, oldest) = overlap(ahead).await;
        assert_eq!(overlapping, 4, "every step but the first starts early");
        assert_eq!(oldest, u64::from(ahead), "as stale as allowed, and no more");
    }
}

#[tokio::test]
async fn groups_without_a_gradient_are_replaced() {
    let world = World::new(plan(1), usual);
    world.finish().await;
    let reader = Reader::open(&world.folder).await.unwrap();
    let groups = reader.groups_of_step(1).await.unwrap();
    let kept = groups.iter().filter(|g| g.state == GroupState::Kept).count();
    assert_eq!(kept, 2);
    assert!(groups.len() > 2, "the seed has a dropped group");
    for group in groups.iter().filter(|g| g.state == GroupState::Dropped) {
        assert!(group.reason.as_ref().unwrap().starts_with("all rewards are"));
    }
}

#[tokio::test]
async fn step_without_any_gradient_is_skipped_with_its_reason() {
    let world = World::new(plan(2), |_| scored(true));
    world.finish().await;
    let reader = Reader::open(&world.folder).await.unwrap();
    let steps = reader.steps().await.unwrap();
    assert!(steps.iter().all(|s| s.state == StepState::Skipped));
    assert_eq!(steps[0].reason.as_deref(), Some("no gradient in 6 groups"));
    assert_eq!(world.trainer.state.lock().unwrap().version, 0);
    let line = &world.metrics()[1];
    assert!(line["loss"].is_null());
    assert_eq!(line["reward_mean"], 1.0);
}

#[tokio::test]
async fn step_at_the_group_limit_trains_on_the_groups_it_kept() {
    let script = |r: &orchestrate_rollout::EpisodeRequest| match r.attempt.episode.group {
        GroupId::Train { seq } => scored(seq != 3 || r.attempt.episode.member == 0),
        GroupId::Eval { .. } => scored(true),
    };
    let world = World::new(plan(1), script);
    world.finish().await;
    let trained = world.trainer.state.lock().unwrap().trained.clone();
    let expected: BTreeSet<String> = (0..3).map(|m| format!("t000003.{m:02}")).collect();
    assert_eq!(trained, [expected]);
}

#[tokio::test]
async fn broken_and_untrusted_episodes_do_not_move_the_baseline() {
    // Member 0 always breaks; of the others one is solved and one is not.
    let script = |r: &orchestrate_rollout::EpisodeRequest| match r.attempt.episode.group {
        GroupId::Train { .. } if r.attempt.episode.member == 0 => {
            Outcome::Broken { stage: Stage::Exec, error: "lost container".into() }
        }
        GroupId::Train { .. } => scored(r.attempt.episode.member == 1),
        GroupId::Eval { .. } => scored(false),
    };
    let world = World::new(plan(1), script);
    world.finish().await;
    let reader = Reader::open(&world.folder).await.unwrap();
    let members = reader.batch_members(1).await.unwrap();
    assert_eq!(members.len(), 4);
    for pair in members.chunks(2) {
        assert!((pair[0].1 + pair[1].1).abs() < 1e-9, "the two trusted ones balance");
        assert!(pair[0].1 > 0.5);
    }
    let line = &world.metrics()[1];
    assert_eq!((&line["broken_episodes"], &line["episodes"]), (&2.into(), &4.into()));
    assert_eq!(line["reward_mean"], 0.5);
    let given_up = |e: &Event| matches!(e, Event::EpisodeGivenUp { .. });
    assert_eq!(world.events.lock().unwrap().iter().filter(|e| given_up(e)).count(), 2);
}

#[tokio::test]
async fn broken_infrastructure_stops_the_run_and_it_resumes_after_the_repair() {
    let docker_down = Arc::new(AtomicBool::new(true));
    let down = docker_down.clone();
    let world = World::new(plan(1), move |r| {
        if down.load(Ordering::SeqCst) {
            return Outcome::Broken { stage: Stage::Setup, error: "docker is down".into() };
        }
        usual(r)
    });
    let error = world.start(&Kill::never()).await.unwrap().unwrap_err();
    assert_eq!(error.class(), FailureClass::Sandbox);
    assert!(error.to_string().contains("docker is down"), "{error}");
    docker_down.store(false, Ordering::SeqCst);
    assert!(matches!(world.finish().await, RunEnd::Finished(_)));
    assert!(!world.metrics().iter().any(|l| l["eval_broken"].as_u64().is_some_and(|n| n > 0)));
}

#[tokio::test]
async fn panicking_episode_is_a_broken_attempt() {
    let panicked = AtomicBool::new(false);
    let world = World::new(plan(1), move |r| {
        assert!(panicked.swap(true, Ordering::SeqCst), "scripted panic");
        usual(r)
    });
    assert!(matches!(world.finish().await, RunEnd::Finished(_)));
}

#[tokio::test]
async fn stop_request_drains_and_the_run_can_be_resumed() {
    let reference = World::new(plan(1), usual);
    reference.finish().await;

    let world = World::new(plan(1), usual);
    world.episodes.hold.store(true, Ordering::SeqCst);
    let stop = Stop::default();
    let coordinator = world.coordinator(&Kill::never()).await;
    let (end, ()) = tokio::join!(coordinator.run(stop.clone()), async {
        world.episodes.started.notified().await;
        stop.drain.cancel();
    });
    assert!(matches!(end.unwrap(), RunEnd::Stopped(_)));
    assert_eq!(world.sandboxes.shut_down.load(Ordering::SeqCst), 1);
    assert!(world.sealed().await.is_empty());
    assert!(world.events.lock().unwrap().contains(&Event::Draining));

    world.episodes.hold.store(false, Ordering::SeqCst);
    world.finish().await;
    assert_eq!(world.metrics(), reference.metrics());
    assert_eq!(*world.sandboxes.swept_below.lock().unwrap(), [1, 2]);
}

#[tokio::test]
async fn second_stop_request_ends_the_run_immediately() {
    let world = World::new(plan(1), usual);
    world.episodes.hold.store(true, Ordering::SeqCst);
    let stop = Stop::default();
    let coordinator = world.coordinator(&Kill::never()).await;
    let (end, ()) = tokio::join!(coordinator.run(stop.clone()), async {
        world.episodes.started.notified().await;
        stop.now.cancel();
    });
    assert!(matches!(end.unwrap(), RunEnd::Stopped(_)));
}

#[tokio::test]
async fn replaced_coordinator_stops_without_writing() {
    let world = World::new(plan(1), usual);
    world.episodes.hold.store(true, Ordering::SeqCst);
    let coordinator = world.coordinator(&Kill::never()).await;
    let stop = Stop::default();
    let journal = format!("sqlite://{}", world.folder.join("orchestrate.db"));
    let (end, ()) = tokio::join!(coordinator.run(stop.clone()), async {
        world.episodes.started.notified().await;
        let pool = sqlx::SqlitePool::connect(&journal).await.unwrap();
        sqlx::query("UPDATE run SET epoch = epoch + 1").execute(&pool).await.unwrap();
        pool.close().await;
        stop.drain.cancel();
    });
    let error = end.unwrap_err();
    assert!(matches!(error, RunError::Store(StoreError::Fenced { epoch: 1 })), "{error}");
    assert_eq!(error.class(), FailureClass::Store);
}

#[tokio::test]
async fn failed_step_keeps_its_batch_and_is_retried_at_the_next_start() {
    let world = World::new(plan(1), usual);
    world.trainer.fail.store(true, Ordering::SeqCst);
    let error = world.start(&Kill::never()).await.unwrap().unwrap_err();
    assert_eq!(error.class(), FailureClass::Trainer);
    let reader = Reader::open(&world.folder).await.unwrap();
    assert_eq!(reader.batches().await.unwrap()[0].state, BatchState::Published);
    world.trainer.fail.store(false, Ordering::SeqCst);
    let episodes = world.episodes.requests.lock().unwrap().len();
    world.finish().await;
    let after = world.episodes.requests.lock().unwrap();
    assert!(after[episodes..].iter().all(|r| !r.want_routing), "only the last evaluation is new");
}

#[tokio::test]
async fn trainer_at_another_version_is_refused() {
    let mut world = World::new(plan(1), usual);
    world.finish().await;
    world.trainer.state.lock().unwrap().version = 7;
    world.plan = plan(2);
    world.plan.run.eval_every = 0;
    let error = world.start(&Kill::never()).await.unwrap().unwrap_err();
    assert!(matches!(error, RunError::TrainerElsewhere { .. }), "{error}");
    assert!(error.to_string().contains("/toy/1"), "{error}");
}

#[tokio::test]
async fn evaluations_use_the_same_seeds_every_round_and_never_request_routing() {
    let world = World::new(plan(2), usual);
    world.finish().await;
    let mut rounds = vec![BTreeSet::new(); 3];
    for request in world.episodes.requests.lock().unwrap().iter() {
        if let GroupId::Eval { round, index } = request.attempt.episode.group {
            rounds[round as usize].insert((index, request.seed));
            assert!(!request.want_routing);
            assert!(request.temperature.abs() < f32::EPSILON);
        } else {
            assert!(request.want_routing);
        }
    }
    assert_eq!(rounds[0].len(), 3);
    assert!(rounds.iter().all(|round| *round == rounds[0]));
}

#[tokio::test]
async fn episodes_without_routing_rows_are_counted_and_not_replayed() {
    let script = |r: &orchestrate_rollout::EpisodeRequest| scored(mix(&[r.seed]).is_multiple_of(2));
    let mut world = World::new(plan(1), script);
    world.tasks.train = vec![task("unrouted", Split::Train)];
    world.finish().await;
    assert!(world.trainer.state.lock().unwrap().trained.is_empty());
    let line = &world.metrics()[1];
    assert_eq!(line["routing_missing"], line["episodes"]);

    let mut world = World::new(plan(1), script);
    world.tasks.train = vec![task("unrouted", Split::Train)];
    let section: AlgorithmSection = toml::from_str("routing_replay = \"none\"").unwrap();
    world.plan.algorithm = section.check().unwrap();
    world.finish().await;
    assert_eq!(world.trainer.state.lock().unwrap().trained.len(), 1);
}

#[tokio::test]
async fn masked_truncated_episodes_count_only_in_the_baseline() {
    let script = |r: &orchestrate_rollout::EpisodeRequest| match r.attempt.episode.member {
        0 => Outcome::Truncated { limit: orchestrate_types::Limit::Turns, reward: 0.0 },
        member => scored(member == 1),
    };
    let mut world = World::new(plan(1), script);
    let section: AlgorithmSection = toml::from_str("truncated = \"mask\"").unwrap();
    world.plan.algorithm = section.check().unwrap();
    world.finish().await;
    let trained = world.trainer.state.lock().unwrap().trained[0].clone();
    assert_eq!(trained.len(), 4);
    assert!(trained.iter().all(|id| !id.ends_with(".00")));
    assert_eq!(world.metrics()[1]["truncated_episodes"], 2);
}

#[tokio::test]
async fn long_episodes_lose_reward_in_the_batch_but_not_in_the_metrics() {
    let script = |r: &orchestrate_rollout::EpisodeRequest| scored(r.attempt.episode.member == 1);
    let mut world = World::new(plan(1), script);
    let shaped = "overlong_max_tokens = 6\noverlong_cache_tokens = 4";
    let section: AlgorithmSection = toml::from_str(shaped).unwrap();
    world.plan.algorithm = section.check().unwrap();
    world.finish().await;
    let batch = Batch::open(&world.folder.join("batches/000001/manifest.json")).unwrap();
    let mut groups: BTreeMap<i64, Vec<(f64, f64)>> = BTreeMap::new();
    let mut penalised = 0;
    for sequence in batch.sequences().map(Result::unwrap) {
        let solved = sequence.episode_id.ends_with(".01");
        let written: u32 = sequence.loss_mask.iter().map(|&m| u32::from(m)).sum();
        let penalty = if written > 2 { (f64::from(written) - 2.0) / 4.0 } else { 0.0 };
        penalised += u32::from(penalty > 0.0);
        let (reward, advantage) = (f64::from(sequence.reward), f64::from(sequence.advantage));
        assert!((reward - (f64::from(u8::from(solved)) - penalty)).abs() < 1e-6);
        groups.entry(sequence.group).or_default().push((reward, advantage));
    }
    assert!(penalised > 0 && groups.len() == 2);
    for members in groups.values() {
        let rewards: Vec<Option<f64>> = members.iter().map(|m| Some(m.0)).collect();
        let expected = group_advantages(&rewards, AdvantageNorm::Std).values;
        for ((_, found), expected) in members.iter().zip(expected) {
            assert!((found - expected.unwrap()).abs() < 1e-5);
        }
    }
    let line = &world.metrics()[1];
    assert!((line["solve_rate"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-9);
    assert_eq!(line["reward_mean"], line["solve_rate"]);
}

#[tokio::test]
async fn branches_share_a_reward_and_weigh_as_configured() {
    let script = |r: &orchestrate_rollout::EpisodeRequest| scored(r.attempt.episode.member == 1);
    for (weight, divisor) in [("full", 1.0), ("shared", 2.0)] {
        let mut world = World::new(plan(1), script);
        let section = format!("branch_weight = \"{weight}\"");
        let section: AlgorithmSection = toml::from_str(&section).unwrap();
        world.plan.algorithm = section.check().unwrap();
        world.tasks.train = vec![task("forked", Split::Train)];
        world.finish().await;
        let batch = Batch::open(&world.folder.join("batches/000001/manifest.json")).unwrap();
        let mut episodes: BTreeMap<String, Vec<(f32, f32)>> = BTreeMap::new();
        for sequence in batch.sequences().map(Result::unwrap) {
            let pair = (sequence.reward, sequence.advantage);
            episodes.entry(sequence.episode_id.to_string()).or_default().push(pair);
        }
        let rewards: Vec<Option<f64>> = vec![Some(0.0), Some(1.0), Some(0.0)];
        let expected = group_advantages(&rewards, AdvantageNorm::Std).values;
        for (id, branches) in episodes {
            let member: usize = id.rsplit_once('.').unwrap().1.parse().unwrap();
            let [first, second] = branches.as_slice() else { panic!("{id}: {branches:?}") };
            assert_eq!(first, second);
            let advantage = expected[member].unwrap() / divisor;
            assert!((f64::from(first.1) - advantage).abs() < 1e-5, "{weight} {id}: {first:?}");
        }
    }
}

#[tokio::test]
async fn collapse_ends_the_run_if_configured_but_not_after_a_resume() {
    let reported = |world: &World| {
        let events = world.events.lock().unwrap();
        events.iter().filter(|event| format!("{event:?}").contains("training collapsed")).count()
    };
    let world = World::new(plan(7), usual);
    world.trainer.sick.store(true, Ordering::SeqCst);
    world.finish().await;
    assert_eq!(reported(&world), 1, "a warning, once");

    let mut world = World::new(plan(7), usual);
    world.plan.diagnostics.on_collapse = OnCollapse::Stop;
    world.trainer.sick.store(true, Ordering::SeqCst);
    let error = world.start(&Kill::never()).await.unwrap().unwrap_err();
    assert!(matches!(error, RunError::Collapsed { step: 1, .. }), "{error:?}");
    assert_eq!(error.class(), FailureClass::Trainer);
    assert!(error.to_string().contains("the starting policy"), "{error}");
    assert_eq!(world.trainer.state.lock().unwrap().version, 5);
    // A resumed run has reported the symptom before, so it does not end the run again.
    world.finish().await;
    assert_eq!(world.trainer.state.lock().unwrap().version, 7);
}

#[tokio::test]
async fn old_batches_are_deleted_and_the_newest_are_kept() {
    let mut world = World::new(plan(4), usual);
    world.plan.run.keep_batches = 1;
    world.finish().await;
    let names: Vec<String> = fs_err::read_dir(world.folder.join("batches"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["000004"]);
}
