//! Whole episodes with a fake engine and in-memory sandboxes.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed step fails the test"
)]
mod bounds;
#[path = "../common/mod.rs"]
mod common;
mod external;
mod faults;
mod foreign_text;
mod mcp;
mod sharing;
mod spans;
mod tools;
mod world;

use crate::world::*;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, CONTROL_TOKENS, EpisodeReport, EpisodeRequest, Episodes, RolloutSection,
};
use orchestrate_sandbox::Purpose;
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{AbortCause, HumanDuration, Limit, Outcome, PolicyVersion};
use std::sync::{Arc, OnceLock};
use tokio_util::sync::CancellationToken;

#[tokio::test(start_paused = true)]
async fn solved_task_is_scored_with_a_row_for_every_token_but_the_last() {
    let world = world(solving());
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    assert_eq!(report.turns.len(), 4);
    assert_eq!(report.turns[2].observation, "exit 2\nno tests");
    assert_eq!(report.turns[1].actions, [fix()]);
    assert!(report.patch.contains("-    return sum(items[:-1])\n+    return sum(items)\n"));
    assert!(report.verdict.is_some());

    let trajectory = report.trajectory().unwrap();
    let expert = expert().supervised_example(&chat(), 0.0).unwrap();
    assert_eq!(trajectory.token_ids(), expert.token_ids, "supervised data is token-exact");
    let mask: Vec<f32> = trajectory.loss_mask().iter().map(|&m| f32::from(m)).collect();
    assert_eq!(mask, expert.weights);

    // Each request carries all tokens so far and requests rows from the last one held.
    let requests = world.engine.requests();
    let mut cacheable = 0;
    for (turn, request) in requests.iter().enumerate() {
        let span = &trajectory.turns()[turn];
        assert_eq!(*request.token_ids, trajectory.token_ids()[..span.prompt_end]);
        assert_eq!(request.priority, i32::try_from(turn).unwrap());
        let before = turn.checked_sub(1).map(|t| trajectory.turns()[t].output_end);
        let start = before.map_or(0, |total| total - 2);
        assert_eq!(request.routed_experts_start, Some(start));
        cacheable += before.map_or(0, |total| total as u64 - 1);
    }
    assert_eq!(report.cacheable_tokens, cacheable);
    assert_eq!(report.cached_tokens, cacheable, "the fake's cache is perfect");
    assert_eq!(report.routing_rows_reused, 3, "one row of overlap per later turn");
    assert_eq!(report.routing_drift, 0);
    assert!(report.routing_wire_bytes > 0);
}

#[tokio::test(start_paused = true)]
async fn grader_receives_the_change_and_the_hidden_files_but_nothing_planted() {
    let turns = vec![fix(), bash("rm README"), bash("plant r2e_tests/conftest.py"), submit()];
    let world = world(playing(turns));
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    let trees = world.sandboxes.graded_trees();
    let paths: Vec<&str> = trees[0].keys().map(String::as_str).collect();
    assert_eq!(paths, ["r2e_tests/test_1.py", "total.py"]);
    let purposes: Vec<Purpose> = world.sandboxes.opened().iter().map(|s| s.purpose).collect();
    assert_eq!(purposes, [Purpose::Agent, Purpose::Grader]);
}

#[tokio::test(start_paused = true)]
async fn unchanged_tree_is_graded_with_reward_zero() {
    let report = world(playing(vec![submit()])).run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 0.0 });
    assert_eq!(report.patch, "");
}

#[tokio::test(start_paused = true)]
async fn sent_rows_grow_with_the_tokens_of_an_episode_and_not_with_its_turns() {
    let world = world(|call| {
        let last = call == 20;
        stop(turn_ids(&[if last { submit() } else { bash("cat total.py") }]))
    });
    let report = world.run().await;
    assert_whole(&report);
    let mask = report.routing().unwrap();
    let turns = report.trajectory().unwrap().turns();
    assert_eq!(turns.len(), 21);
    // Every row once, and one row of overlap per turn after the first.
    let row_text = mask.row_bytes() * 4;
    let sent = mask.rows() + turns.len() - 1;
    assert_eq!(report.routing_wire_bytes, (sent * row_text) as u64);
    let prefixes: usize = turns.iter().map(|turn| turn.output_end - 1).sum();
    assert!(prefixes > 8 * sent, "whole prefixes would be {prefixes} rows");
}

#[tokio::test(start_paused = true)]
async fn sampled_tokens_are_sent_back_unchanged_even_if_their_text_encodes_differently() {
    /// The same text with one token per letter, which a policy may sample too.
    fn spelled(call: Action) -> Vec<u32> {
        let letters = |id: u32| -> Vec<u32> {
            let text = chat().decode(&[id]).unwrap();
            let is_kept = CONTROL_TOKENS.contains(&text.as_str()) || text.is_empty();
            let each = text.chars().map(|letter| chat().encode(&letter.to_string()).unwrap());
            if is_kept { vec![id] } else { each.flatten().collect() }
        };
        turn_ids(&[call]).into_iter().flat_map(letters).collect()
    }
    let canonical = turn_ids(&[fix()]);
    let sampled = spelled(fix());
    assert_eq!(chat().decode(&sampled).unwrap(), chat().decode(&canonical).unwrap());
    assert!(sampled.len() > canonical.len());

    let turns = [fix(), bash("run-tests"), submit()];
    let world = world(move |call| stop(spelled(turns[call.min(2)].clone())));
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    let trajectory = report.trajectory().unwrap();
    let span = &trajectory.turns()[0];
    assert_eq!(trajectory.token_ids()[span.prompt_end..span.output_end], sampled);
    for (turn, request) in world.engine.requests().iter().enumerate() {
        let end = trajectory.turns()[turn].prompt_end;
        assert_eq!(*request.token_ids, trajectory.token_ids()[..end], "turn {turn}");
    }
}

#[tokio::test(start_paused = true)]
async fn evaluation_episode_requests_no_rows() {
    let world = world(solving());
    let request = EpisodeRequest { want_routing: false, ..request() };
    let report = world.runner.run(request, &CancellationToken::new()).await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert!(report.routing().is_none() && report.routing_problem.is_none());
    assert!(world.engine.requests().iter().all(|r| r.routed_experts_start.is_none()));
}

async fn truncated(
    config: RolloutSection,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> (Limit, EpisodeReport) {
    let report = world_with(&config, script).run().await;
    let Outcome::Truncated { limit, reward } = report.outcome else {
        panic!("{:?}", report.outcome);
    };
    assert!((reward - 1.0).abs() < 1e-9, "the change so far is graded");
    assert_whole(&report);
    (limit, report)
}

#[tokio::test(start_paused = true)]
async fn each_limit_truncates_and_the_change_so_far_is_graded() {
    let config = RolloutSection { max_turns: Some(2), ..RolloutSection::default() };
    let turns = || playing(vec![fix(), bash("echo hi")]);
    assert_eq!(truncated(config, turns()).await.0, Limit::Turns);

    let config = RolloutSection { max_response_tokens: Some(60), ..RolloutSection::default() };
    let long = |call| match call {
        0 => stop(turn_ids(&[fix()])),
        _ => FakeReply::Tokens { ids: vec![300; 60], finish: Finish::Length },
    };
    let (limit, report) = truncated(config, long).await;
    assert_eq!(limit, Limit::ResponseTokens);
    let trajectory = report.trajectory().unwrap();
    assert_eq!(trajectory.token_ids().last(), Some(&300), "no closing token is added");

    let prompt = chat().prompt(&expert().prompt).unwrap().len();
    let room = prompt + turn_ids(&[fix()]).len() + 5;
    let config = RolloutSection { max_sequence_tokens: Some(room), ..RolloutSection::default() };
    let (limit, report) = truncated(config, turns()).await;
    assert_eq!(limit, Limit::SequenceTokens);
    assert_eq!(report.trajectory().unwrap().turns().len(), 1);

    let config = RolloutSection {
        episode_timeout: Some(HumanDuration::secs(60)),
        command_timeout: Some(HumanDuration::secs(5)),
        ..RolloutSection::default()
    };
    let hanging = |call| match call {
        0 => stop(turn_ids(&[fix()])),
        1 => stop(turn_ids(&[bash("hang")])),
        _ => FakeReply::Hang,
    };
    let (limit, report) = truncated(config, hanging).await;
    assert_eq!(limit, Limit::EpisodeTime);
    assert_eq!(report.turns[1].observation, "timed out after 5s\n(no output)");
}

#[tokio::test(start_paused = true)]
async fn stop_request_ends_the_episode_after_the_current_turn() {
    let stop_now = CancellationToken::new();
    let inner = stop_now.clone();
    let world = world(move |call| {
        if call == 1 {
            inner.cancel();
        }
        stop(turn_ids(&[bash("echo hi")]))
    });
    let report = world.run_until(&stop_now).await;
    assert_eq!(report.outcome, Outcome::Aborted { by: AbortCause::Shutdown });
    assert_eq!(report.turns.len(), 2, "the current turn is finished");
    let world = self::world(solving());
    let report = world.run_until(&stop_now).await;
    assert_eq!(report.outcome, Outcome::Aborted { by: AbortCause::Shutdown });
    assert!(world.sandboxes.opened().is_empty(), "nothing is opened after a stop");
}

#[tokio::test(start_paused = true)]
async fn malformed_call_is_observed_and_the_episode_continues() {
    let end = chat().end_of_turn();
    let text = move |text: &str| {
        let mut ids = chat().encode(text).unwrap();
        ids.push(end);
        stop(ids)
    };
    let [.., open, close] = CONTROL_TOKENS;
    let world = world(move |call| match call {
        0 => text("I think"),
        1 => text(&format!("{open}{{\"name\": \"bash\"{close}")),
        2 => text(&format!(
            "{open}{{\"name\": \"edit\", \"arguments\": {{\"path\": \"../x\", \"line\": 1, \"new\": \"\"}}}}{close}"
        )),
        3 => stop(turn_ids(&[bash("false"), fix(), submit(), bash("rm total.py")])),
        _ => FakeReply::Hang,
    });
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 }, "nothing runs after submit");
    let observed: Vec<&str> = report.turns.iter().map(|t| t.observation.as_str()).collect();
    assert!(observed[0].starts_with("no tool call found: "), "{observed:?}");
    assert!(observed[1].starts_with("tool call is not valid: "), "{observed:?}");
    assert_eq!(observed[2], "path ../x is outside /testbed");
    assert_eq!(observed[3], "exit 1\n(no output)\nok");
    assert_whole(&report);
}

#[tokio::test(start_paused = true)]
async fn aborted_reply_continues_in_the_same_turn_with_the_new_weights() {
    let engine: Arc<OnceLock<Arc<FakeEngine>>> = Arc::default();
    let handle = Arc::clone(&engine);
    let world = world(move |call| {
        let whole = turn_ids(&[fix()]);
        let (head, tail) = whole.split_at(4);
        match call {
            // Aborted before the first token, then after four tokens; then the weights change.
            0 => FakeReply::Tokens { ids: Vec::new(), finish: Finish::Abort },
            1 => FakeReply::Tokens { ids: head.to_vec(), finish: Finish::Abort },
            2 => {
                handle.get().unwrap().set_version(PolicyVersion(1));
                stop(tail.to_vec())
            }
            _ => stop(turn_ids(&[submit()])),
        }
    });
    engine.set(Arc::clone(&world.engine)).unwrap();
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    let trajectory = report.trajectory().unwrap();
    assert_eq!(trajectory.turns().len(), 2);
    let span = &trajectory.turns()[0];
    assert_eq!(trajectory.token_ids()[span.prompt_end..span.output_end], turn_ids(&[fix()]));
    let versions = &trajectory.policy_versions()[span.prompt_end..span.output_end];
    assert_eq!(&versions[..4], [0; 4]);
    assert!(versions[4..].iter().all(|&v| v == 1));
    assert_eq!(
        report.routing_drift, 1,
        "the overlap row of the resumed call came from old weights"
    );
    let requests = world.engine.requests();
    assert_eq!(requests[2].token_ids.len(), span.prompt_end + 4);
    let seeds: Vec<u64> = requests.iter().map(|r| r.sampling.seed).collect();
    assert_ne!(seeds[1], seeds[2]);
    assert_eq!(report.turns[0].text, chat().decode(&turn_ids(&[fix()])).unwrap());
}

#[tokio::test(start_paused = true)]
async fn same_seed_gives_the_same_trajectory() {
    let make = || {
        let engine = Arc::new(FakeEngine::new(toy_shape(chat().vocab_size()), |request, call| {
            if call == 2 {
                return stop(turn_ids(&[submit()]));
            }
            let words = ["alpha", "beta", "gamma", "delta"];
            let word = words[usize::try_from(request.sampling.seed % 4).unwrap()];
            let number = request.sampling.seed % 1_000_003;
            stop(turn_ids(&[bash(&format!("echo {word} {number}"))]))
        }));
        let mut world = world(|_| FakeReply::Hang);
        world.runner.engine = Arc::clone(&engine) as _;
        World { engine, ..world }
    };
    let (first, second) = (make().run().await, make().run().await);
    assert_eq!(first.trajectory(), second.trajectory());
    assert_eq!(first.routing(), second.routing());
    let other = EpisodeRequest { seed: 8, ..request() };
    let third = make().runner.run(other, &CancellationToken::new()).await;
    assert_ne!(first.trajectory(), third.trajectory());
}
