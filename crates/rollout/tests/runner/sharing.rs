//! Routing rows shared within a group, and rows of changing weights.

use crate::world::*;
use camino::Utf8Path;
use orchestrate_engine::{Engine, EngineError, EngineInfo, GenerateRequest, Reply};
use orchestrate_rollout::{EpisodeRequest, Episodes, RolloutSection, RowSharing};
use orchestrate_routing::{
    BLOCK_ROWS, CacheOptions, MixedRows, PrefixCache, RoutingMask, SharingScope,
};
use orchestrate_testkit::{FakeEngine, FakeReply};
use orchestrate_types::{ModelShape, Outcome, PolicyVersion};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

fn shared_world(
    mixed: MixedRows,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> (World, Arc<PrefixCache>) {
    let config = RolloutSection {
        system_prompt: Some("fix the program, then submit ".repeat(30)),
        ..RolloutSection::default()
    };
    let cache = PrefixCache::open(CacheOptions { bytes: 1 << 20, spill: None }).unwrap();
    let cache = Arc::new(cache);
    let mut world = world_with(&config, script);
    world.runner.rows =
        RowSharing { cache: Some(Arc::clone(&cache)), scope: SharingScope::Worker, mixed };
    (world, cache)
}

fn member(number: u16) -> EpisodeRequest {
    EpisodeRequest { attempt: format!("t000001.{number:02}-a01").parse().unwrap(), ..request() }
}

#[tokio::test(start_paused = true)]
async fn prompt_rows_of_a_group_are_requested_and_held_once() {
    let (world, cache) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    let mut reports = Vec::new();
    for number in 0..3 {
        reports.push(world.runner.run(member(number), &stop).await);
    }
    let requests = world.engine.requests();
    let prompt = requests[0].token_ids.len();
    let blocks = prompt / BLOCK_ROWS * BLOCK_ROWS;
    assert!(blocks >= BLOCK_ROWS, "a prompt of {prompt} tokens");
    let starts: Vec<usize> = requests
        .iter()
        .filter(|request| request.token_ids.len() == prompt)
        .map(|request| request.routed_experts_start.unwrap())
        .collect();
    assert_eq!(starts, [0, blocks - 1, blocks - 1], "one row of overlap");
    for report in &reports {
        assert_whole(report);
        assert_eq!(report.routing_drift, 0);
        assert_eq!(report.routing(), reports[0].routing(), "same tokens, same rows");
    }
    let masks: Vec<&RoutingMask> = reports.iter().map(|r| r.routing().unwrap()).collect();
    // All three have the same turns, so whole conversations are held once.
    let whole = masks[0].rows() / BLOCK_ROWS * BLOCK_ROWS;
    let tails = 3 * (masks[0].rows() - whole);
    let row_bytes = masks[0].row_bytes();
    assert_eq!(RoutingMask::held_together(masks.iter().copied()), (whole + tails) * row_bytes);
    assert_eq!(cache.metrics().bytes_held, (whole * row_bytes) as u64);
    let shared: Vec<u64> = reports.iter().map(|r| r.routing_rows_shared).collect();
    assert_eq!(shared, [0, whole as u64, whole as u64]);
    assert!(reports[1].routing_wire_bytes < reports[0].routing_wire_bytes);
    assert!(reports[1].routing_rows_reused >= blocks as u64);
}

#[tokio::test(start_paused = true)]
async fn episodes_that_start_together_fetch_their_prompt_rows_once() {
    let (world, _) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    let run = |number| world.runner.run(member(number), &stop);
    let (a, b, c, d) = tokio::join!(run(0), run(1), run(2), run(3));
    let requests = world.engine.requests();
    let prompt = requests[0].token_ids.len();
    let blocks = prompt / BLOCK_ROWS * BLOCK_ROWS;
    let mut starts: Vec<usize> = requests
        .iter()
        .filter(|request| request.token_ids.len() == prompt)
        .map(|request| request.routed_experts_start.unwrap())
        .collect();
    starts.sort_unstable();
    assert_eq!(starts, [0, blocks - 1, blocks - 1, blocks - 1]);
    assert_eq!(requests[0].routed_experts_start, Some(0), "the prefill leader requests all rows");
    for report in [&a, &b, &c, &d] {
        assert_whole(report);
        assert_eq!(report.routing(), a.routing(), "the same tokens, the same rows");
        assert!(report.cached_tokens <= report.cacheable_tokens, "{report:?}");
    }
    let mut possible = [&a, &b, &c, &d].map(|report| report.cacheable_tokens);
    possible.sort_unstable();
    let shared = possible[0] + prompt as u64 - 1;
    assert_eq!(possible[1..], [shared; 3], "all but the first can find the prompt in the cache");
}

/// An engine that answers as another worker than the one it announced.
#[derive(Debug)]
struct MovedEngine(Arc<FakeEngine>);

#[async_trait::async_trait]
impl Engine for MovedEngine {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        self.0.info().await
    }

    fn shape(&self) -> &ModelShape {
        self.0.shape()
    }

    fn worker_of(&self, session: &str) -> Option<String> {
        self.0.worker_of(session)
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        let mut reply = self.0.generate(request).await?;
        reply.set_worker("another".to_owned());
        Ok(reply)
    }

    async fn sync_weights(&self, _: &Utf8Path, _: PolicyVersion) -> Result<(), EngineError> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn cached_rows_of_one_worker_do_not_start_a_mask_of_another() {
    let (mut world, _) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    world.runner.run(member(0), &stop).await;
    let before = world.engine.requests().len();
    world.runner.engine = Arc::new(MovedEngine(Arc::clone(&world.engine)));
    let report = world.runner.run(member(1), &stop).await;
    assert_whole(&report);
    let starts: Vec<Option<usize>> =
        world.engine.requests()[before..].iter().map(|r| r.routed_experts_start).collect();
    assert!(starts[0] > Some(0), "seeded from the announced worker's rows");
    assert_eq!(starts[1], Some(0), "all rows are requested from the worker that answered");
    assert_eq!(report.routing_rows_shared, 0);
}

#[tokio::test(start_paused = true)]
async fn cached_rows_are_dropped_if_weights_changed_before_the_first_reply() {
    let (world, _) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    world.runner.run(member(0), &stop).await;
    let before = world.engine.requests().len();
    // The coordinator still assumes version 0.
    world.engine.set_version(PolicyVersion(1));
    let report = world.runner.run(member(1), &stop).await;
    assert_whole(&report);
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    let starts: Vec<Option<usize>> =
        world.engine.requests()[before..].iter().map(|r| r.routed_experts_start).collect();
    assert!(starts[0] > Some(0));
    assert_eq!(starts[1], Some(0), "the retry requests every row");
    let versions = report.routing().unwrap().versions().to_vec();
    assert_eq!((versions.len(), versions[0].version), (1, PolicyVersion(1)));
    assert_eq!(report.routing_rows_shared, 0);
}

#[tokio::test(start_paused = true)]
async fn mixed_rows_are_kept_masked_or_dropped_according_to_the_plan() {
    let script = |call| {
        let turn = |call| turn_ids(&[call]);
        match call {
            0 => stop(turn(bash("cat total.py"))),
            1 => FakeReply::Retracted { ids: turn(fix()) },
            _ => stop(turn(submit())),
        }
    };
    let run = |mixed| async move {
        let (world, _) = shared_world(mixed, script);
        world.run().await
    };
    let kept = run(MixedRows::Keep).await;
    assert_whole(&kept);
    let trajectory = kept.trajectory().unwrap();
    let mixed = kept.routing().unwrap().mixed().to_vec();
    let spans = trajectory.turns();
    assert_eq!(mixed.len(), 1);
    assert_eq!(mixed[0], spans[0].output_end - 1..spans[1].output_end - 1);
    assert_eq!(kept.routing_rows_mixed, mixed[0].len() as u64);

    let masked = run(MixedRows::Mask).await;
    assert_whole(&masked);
    let masked = masked.trajectory().unwrap();
    assert_eq!(masked.token_ids(), trajectory.token_ids());
    for (t, (&before, &after)) in trajectory.loss_mask().iter().zip(masked.loss_mask()).enumerate()
    {
        let turn_two = (spans[1].prompt_end..spans[1].output_end).contains(&t);
        assert_eq!(after, if turn_two { 0 } else { before }, "token {t}");
    }

    let dropped = run(MixedRows::Drop).await;
    assert!(dropped.routing().is_none());
    assert!(dropped.routing_problem.as_deref().unwrap().contains("mixed"));
    assert_eq!(dropped.trajectory().unwrap().loss_mask(), trajectory.loss_mask());
}
