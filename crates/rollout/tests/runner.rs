//! Whole episodes with a fake engine and in-memory sandboxes.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed step fails the test"
)]

use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
};
use orchestrate_rollout::{
    Action, CONTROL_TOKENS, ChatModel, ChatTemplate, EpisodeReport, EpisodeRequest, EpisodeRunner,
    Episodes, ExpertEpisode, ExpertTurn, Leads, MICRO_CHAT_TEMPLATE, RolloutConfig, RowSharing,
    Rules, opening_messages, train_tokenizer,
};
use orchestrate_routing::{
    BLOCK_ROWS, CacheOptions, MixedRows, PrefixCache, RoutingMask, SharingScope,
};
use orchestrate_sandbox::{Limits, Purpose};
use orchestrate_testkit::{
    FakeEngine, FakeReply, FakeSandboxes, Operation, TOY_FIX, judge_toy, toy_shape, toy_shell,
    toy_task,
};
use orchestrate_types::{
    AbortCause, ByteSize, HumanDuration, Limit, ModelShape, Outcome, PolicyVersion, RequestId,
    RunId, Stage,
};
use serde_json::json;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

fn action(name: &str, arguments: serde_json::Value) -> Action {
    Action { name: name.to_owned(), arguments }
}

fn bash(command: &str) -> Action {
    action("bash", json!({"command": command}))
}

fn fix() -> Action {
    action("edit", json!({"path": "total.py", "line": 2, "new": TOY_FIX}))
}

fn submit() -> Action {
    action("submit", json!({}))
}

/// The episode that solves the toy, with what the environment answers.
fn expert() -> ExpertEpisode {
    let turn = |call: Action, observation: &str| ExpertTurn {
        content: String::new(),
        calls: vec![call],
        observations: vec![observation.to_owned()],
        weight: 1.0,
    };
    ExpertEpisode {
        prompt: opening_messages(None, &toy_task().problem_statement),
        turns: vec![
            turn(bash("cat total.py"), "def total(items):\n    return sum(items[:-1])"),
            turn(fix(), "ok"),
            turn(bash("run-tests"), "exit 2\nno tests"),
            turn(submit(), ""),
        ],
    }
}

fn chat() -> Arc<ChatModel> {
    static CHAT: OnceLock<Arc<ChatModel>> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(folder.path()).unwrap();
        let text = expert().text(&ChatTemplate::new(MICRO_CHAT_TEMPLATE).unwrap()).unwrap();
        let corpus = std::iter::repeat_n(text, 3);
        train_tokenizer(corpus, 400, MICRO_CHAT_TEMPLATE, path).unwrap();
        Arc::new(ChatModel::load(path).unwrap())
    };
    Arc::clone(CHAT.get_or_init(make))
}

fn turn_ids(calls: &[Action]) -> Vec<u32> {
    chat().assistant("", calls).unwrap()
}

fn stop(ids: Vec<u32>) -> FakeReply {
    FakeReply::Tokens { ids, finish: Finish::Stop }
}

/// Replies that play `turns`, one call per turn.
fn playing(turns: Vec<Action>) -> impl Fn(usize) -> FakeReply + Send + Sync + 'static {
    move |call| stop(turn_ids(std::slice::from_ref(&turns[call.min(turns.len() - 1)])))
}

fn solving() -> impl Fn(usize) -> FakeReply + Send + Sync + 'static {
    playing(vec![bash("cat total.py"), fix(), bash("run-tests"), submit()])
}

struct World {
    engine: Arc<FakeEngine>,
    sandboxes: FakeSandboxes,
    runner: EpisodeRunner,
}

fn world_with(
    config: &RolloutConfig,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> World {
    let shape = toy_shape(chat().vocab_size());
    let engine = Arc::new(FakeEngine::new(shape, move |_, call| script(call)));
    let sandboxes = FakeSandboxes::new(toy_shell);
    let runner = EpisodeRunner {
        engine: Arc::clone(&engine) as _,
        sandboxes: Arc::new(sandboxes.clone()),
        chat: chat(),
        plan: config.check().unwrap(),
        container_limits: Limits {
            memory: ByteSize::mib(256),
            cpu_millis: 500,
            pids: 64,
            tmpfs: ByteSize::mib(64),
        },
        rules: Rules::new(judge_toy),
        logs: None,
        rows: RowSharing::default(),
        leads: Leads::default(),
    };
    World { engine, sandboxes, runner }
}

fn world(script: impl Fn(usize) -> FakeReply + Send + Sync + 'static) -> World {
    world_with(&RolloutConfig::default(), script)
}

fn request() -> EpisodeRequest {
    EpisodeRequest {
        run: "01900000-0000-7000-8000-000000000000".parse::<RunId>().unwrap(),
        epoch: 1,
        attempt: "t000001.02-a01".parse().unwrap(),
        task: Arc::new(toy_task()),
        policy_version: PolicyVersion(0),
        seed: 7,
        temperature: 1.0,
        want_routing: true,
    }
}

impl World {
    async fn run(&self) -> EpisodeReport {
        self.run_until(&CancellationToken::new()).await
    }

    async fn run_until(&self, stop: &CancellationToken) -> EpisodeReport {
        let report = self.runner.run(request(), stop).await;
        assert_eq!(self.sandboxes.still_open(), 0, "a sandbox was left open");
        assert_eq!(self.sandboxes.dropped(), 0, "a sandbox was dropped instead of closed");
        report
    }
}

fn assert_whole(report: &EpisodeReport) {
    let trajectory = report.trajectory.as_ref().unwrap();
    assert_eq!(report.routing_problem, None);
    assert_eq!(report.routing.as_ref().unwrap().rows(), trajectory.len() - 1);
    assert_eq!(trajectory.loss_mask().last(), Some(&1));
}

#[tokio::test(start_paused = true)]
async fn a_solved_task_is_scored_with_a_row_for_every_token_but_the_last() {
    let world = world(solving());
    let report = world.run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert_whole(&report);
    assert_eq!(report.turns.len(), 4);
    assert_eq!(report.turns[2].observation, "exit 2\nno tests");
    assert_eq!(report.turns[1].actions, [fix()]);
    assert!(report.patch.contains("-    return sum(items[:-1])\n+    return sum(items)\n"));
    assert!(report.verdict.is_some());

    let trajectory = report.trajectory.unwrap();
    let expert = expert().supervised(&chat(), 0.0).unwrap();
    assert_eq!(trajectory.token_ids(), expert.token_ids, "supervised data is token-exact");
    let mask: Vec<f32> = trajectory.loss_mask().iter().map(|&m| f32::from(m)).collect();
    assert_eq!(mask, expert.weights);

    // Each request carries all tokens so far and asks for rows from the last one held.
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
async fn the_grader_gets_the_change_and_the_hidden_files_and_nothing_planted() {
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
async fn an_unchanged_tree_is_graded_and_gets_no_reward() {
    let report = world(playing(vec![submit()])).run().await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 0.0 });
    assert_eq!(report.patch, "");
}

#[tokio::test(start_paused = true)]
async fn a_broken_sandbox_is_broken_at_its_stage_and_never_a_reward() {
    use Operation::{Exec, Open, ReadTree, Write};
    use Purpose::{Agent, Grader};
    let cases = [
        (Open, Agent, 0, Stage::Setup),
        (Write, Agent, 0, Stage::Setup),
        (ReadTree, Agent, 0, Stage::Setup),
        (Exec, Agent, 0, Stage::Exec),
        (Write, Agent, 1, Stage::Exec),
        (ReadTree, Agent, 1, Stage::Collect),
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
async fn a_sandbox_that_fails_once_at_setup_or_grading_is_replaced() {
    let world = world(solving());
    world.sandboxes.fail(Operation::Write, Purpose::Agent, 0, 1);
    world.sandboxes.fail(Operation::Exec, Purpose::Grader, 0, 1);
    world.sandboxes.fail(Operation::Close, Purpose::Agent, 0, 1);
    assert_eq!(world.run().await.outcome, Outcome::Scored { reward: 1.0 });
    assert_eq!(world.sandboxes.opened().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn engine_errors_are_retried_under_a_new_request_id() {
    let world = world(|call| match call {
        0 => FakeReply::Fail(EngineErrorKind::Unreachable("refused".to_owned())),
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
async fn an_engine_that_dies_between_turns_costs_no_row_and_doubles_none() {
    let engine: Arc<OnceLock<Arc<FakeEngine>>> = Arc::default();
    let handle = Arc::clone(&engine);
    let world = world(move |call| match call {
        0 => stop(turn_ids(&[bash("cat total.py")])),
        1 => FakeReply::Fail(EngineErrorKind::Unreachable("connection reset".to_owned())),
        2 => {
            // Back under the same weights, all its KV gone.
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
    assert_eq!(requests[1].routed_experts_start, Some(first - 2), "the last row held");
    assert_eq!(requests[2].routed_experts_start, Some(first - 2));
    assert_eq!(requests[2].token_ids, requests[1].token_ids);
    assert_eq!(report.routing_drift, 0);
    assert!(report.cached_tokens < report.cacheable_tokens, "it was prefilled again");
}

#[tokio::test(start_paused = true)]
async fn rows_sent_grow_with_the_tokens_of_an_episode_and_not_with_its_turns() {
    let world = world(|call| {
        let last = call == 20;
        stop(turn_ids(&[if last { submit() } else { bash("cat total.py") }]))
    });
    let report = world.run().await;
    assert_whole(&report);
    let mask = report.routing.unwrap();
    let turns = report.trajectory.as_ref().unwrap().turns();
    assert_eq!(turns.len(), 21);
    // Every row once, and one row of overlap per turn after the first.
    let row_text = mask.row_bytes() * 4;
    let sent = mask.rows() + turns.len() - 1;
    assert_eq!(report.routing_wire_bytes, (sent * row_text) as u64);
    let prefixes: usize = turns.iter().map(|turn| turn.output_end - 1).sum();
    assert!(prefixes > 8 * sent, "whole prefixes would be {prefixes} rows");
}

#[tokio::test(start_paused = true)]
async fn sampled_tokens_are_sent_back_as_they_were_sampled_though_their_text_encodes_otherwise() {
    /// The same text in one token per letter, as a policy may well sample it.
    fn spelled(call: Action) -> Vec<u32> {
        let letters = |id: u32| -> Vec<u32> {
            let text = chat().decode(&[id]).unwrap();
            let kept = CONTROL_TOKENS.contains(&text.as_str()) || text.is_empty();
            let each = text.chars().map(|letter| chat().encode(&letter.to_string()).unwrap());
            if kept { vec![id] } else { each.flatten().collect() }
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
    let trajectory = report.trajectory.unwrap();
    let span = &trajectory.turns()[0];
    assert_eq!(trajectory.token_ids()[span.prompt_end..span.output_end], sampled);
    for (turn, request) in world.engine.requests().iter().enumerate() {
        let end = trajectory.turns()[turn].prompt_end;
        assert_eq!(*request.token_ids, trajectory.token_ids()[..end], "turn {turn}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_stays_away_breaks_the_episode() {
    let world = world(|_| FakeReply::Fail(EngineErrorKind::Unreachable("refused".to_owned())));
    let report = world.run().await;
    assert!(matches!(report.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 8);
    let late = || FakeReply::Fail(EngineErrorKind::TimedOut(Duration::from_secs(1)));
    let world = self::world(move |_| late());
    assert!(matches!(world.run().await.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 3, "late replies are not waited for again and again");
    let world = self::world(|_| FakeReply::Fail(EngineErrorKind::Unfit("no".to_owned())));
    assert!(matches!(world.run().await.outcome, Outcome::Broken { stage: Stage::Generate, .. }));
    assert_eq!(world.engine.requests().len(), 1, "a hopeless error is not retried");
}

#[tokio::test(start_paused = true)]
async fn bad_routing_rows_are_retried_once_then_break_the_episode() {
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
        assert!(report.routing_problem.unwrap().contains("routing rows"));
        assert!(report.routing.is_none());
        assert_eq!(world.engine.requests().len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn an_evaluation_episode_asks_for_no_rows() {
    let world = world(solving());
    let request = EpisodeRequest { want_routing: false, ..request() };
    let report = world.runner.run(request, &CancellationToken::new()).await;
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    assert!(report.routing.is_none() && report.routing_problem.is_none());
    assert!(world.engine.requests().iter().all(|r| r.routed_experts_start.is_none()));
}

async fn truncated(
    config: RolloutConfig,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> (Limit, EpisodeReport) {
    let report = world_with(&config, script).run().await;
    let Outcome::Truncated { limit, reward } = report.outcome else {
        panic!("{:?}", report.outcome);
    };
    assert!((reward - 1.0).abs() < 1e-9, "what was there is graded");
    assert_whole(&report);
    (limit, report)
}

#[tokio::test(start_paused = true)]
async fn each_limit_truncates_and_what_was_there_is_graded() {
    let config = RolloutConfig { max_turns: Some(2), ..RolloutConfig::default() };
    let turns = || playing(vec![fix(), bash("echo hi")]);
    assert_eq!(truncated(config, turns()).await.0, Limit::Turns);

    let config = RolloutConfig { max_response_tokens: Some(60), ..RolloutConfig::default() };
    let long = |call| match call {
        0 => stop(turn_ids(&[fix()])),
        _ => FakeReply::Tokens { ids: vec![300; 60], finish: Finish::Length },
    };
    let (limit, report) = truncated(config, long).await;
    assert_eq!(limit, Limit::ResponseTokens);
    let trajectory = report.trajectory.unwrap();
    assert_eq!(trajectory.token_ids().last(), Some(&300), "no closing token is invented");

    let prompt = chat().prompt(&expert().prompt).unwrap().len();
    let room = prompt + turn_ids(&[fix()]).len() + 5;
    let config = RolloutConfig { max_sequence_tokens: Some(room), ..RolloutConfig::default() };
    let (limit, report) = truncated(config, turns()).await;
    assert_eq!(limit, Limit::SequenceTokens);
    assert_eq!(report.trajectory.unwrap().turns().len(), 1);

    let config = RolloutConfig {
        episode_timeout: Some(HumanDuration::secs(60)),
        command_timeout: Some(HumanDuration::secs(5)),
        ..RolloutConfig::default()
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
async fn a_stop_request_ends_the_episode_at_the_turn_border() {
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
    assert_eq!(report.turns.len(), 2, "the turn under way is finished");
    let world = self::world(solving());
    let report = world.run_until(&stop_now).await;
    assert_eq!(report.outcome, Outcome::Aborted { by: AbortCause::Shutdown });
    assert!(world.sandboxes.opened().is_empty(), "nothing is opened after a stop");
}

#[tokio::test(start_paused = true)]
async fn a_malformed_call_is_answered_and_the_episode_goes_on() {
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
    let said: Vec<&str> = report.turns.iter().map(|t| t.observation.as_str()).collect();
    assert!(said[0].starts_with("no tool call found: "), "{said:?}");
    assert!(said[1].starts_with("tool call is not valid: "), "{said:?}");
    assert_eq!(said[2], "path ../x is outside /testbed");
    assert_eq!(said[3], "exit 1\n(no output)\nok");
    assert_whole(&report);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_reply_goes_on_in_the_same_turn_under_the_new_weights() {
    let engine: Arc<OnceLock<Arc<FakeEngine>>> = Arc::default();
    let handle = Arc::clone(&engine);
    let world = world(move |call| {
        let whole = turn_ids(&[fix()]);
        let (head, tail) = whole.split_at(4);
        match call {
            // Aborted before the first token, then after four; then the weights change.
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
    let trajectory = report.trajectory.unwrap();
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
async fn the_same_seed_gives_the_same_trajectory() {
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
    assert_eq!(first.trajectory, second.trajectory);
    assert_eq!(first.routing, second.routing);
    let other = EpisodeRequest { seed: 8, ..request() };
    let third = make().runner.run(other, &CancellationToken::new()).await;
    assert_ne!(first.trajectory, third.trajectory);
}

fn shared_world(
    mixed: MixedRows,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> (World, Arc<PrefixCache>) {
    let config = RolloutConfig {
        system_prompt: Some("fix the program, then submit ".repeat(30)),
        ..RolloutConfig::default()
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
async fn a_groups_prompt_rows_are_asked_for_and_held_once() {
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
        assert_eq!(report.routing, reports[0].routing, "the same tokens, the same rows");
    }
    let masks: Vec<&RoutingMask> = reports.iter().map(|r| r.routing.as_ref().unwrap()).collect();
    // The three played the same turns, so that whole conversations are held once.
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
async fn members_that_start_together_fetch_their_prompts_rows_once() {
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
    assert_eq!(requests[0].routed_experts_start, Some(0), "who goes first asks for all of them");
    for report in [&a, &b, &c, &d] {
        assert_whole(report);
        assert_eq!(report.routing, a.routing, "the same tokens, the same rows");
    }
}

/// Answers in the name of another worker than it promised.
#[derive(Debug)]
struct Moved(Arc<FakeEngine>);

#[async_trait::async_trait]
impl Engine for Moved {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        self.0.info().await
    }

    fn shape(&self) -> &ModelShape {
        self.0.shape()
    }

    fn worker_of(&self, session: &str) -> Option<String> {
        self.0.worker_of(session)
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let reply = self.0.generate(request).await?;
        Ok(Generation { worker: "another".to_owned(), ..reply })
    }

    async fn sync_weights(&self, _: &Utf8Path, _: PolicyVersion) -> Result<(), EngineError> {
        Ok(())
    }

    async fn abort(&self, _: &RequestId) -> Result<(), EngineError> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn rows_of_one_workers_cache_do_not_begin_a_mask_of_another() {
    let (mut world, _) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    world.runner.run(member(0), &stop).await;
    let before = world.engine.requests().len();
    world.runner.engine = Arc::new(Moved(Arc::clone(&world.engine)));
    let report = world.runner.run(member(1), &stop).await;
    assert_whole(&report);
    let starts: Vec<Option<usize>> =
        world.engine.requests()[before..].iter().map(|r| r.routed_experts_start).collect();
    assert!(starts[0] > Some(0), "its worker's cache had them");
    assert_eq!(starts[1], Some(0), "the worker that answered is asked for all");
    assert_eq!(report.routing_rows_shared, 0);
}

#[tokio::test(start_paused = true)]
async fn rows_of_the_cache_are_thrown_away_when_the_weights_changed_before_the_first_reply() {
    let (world, _) = shared_world(MixedRows::Mask, solving());
    let stop = CancellationToken::new();
    world.runner.run(member(0), &stop).await;
    let before = world.engine.requests().len();
    // The coordinator's word is still version 0.
    world.engine.set_version(PolicyVersion(1));
    let report = world.runner.run(member(1), &stop).await;
    assert_whole(&report);
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 });
    let starts: Vec<Option<usize>> =
        world.engine.requests()[before..].iter().map(|r| r.routed_experts_start).collect();
    assert!(starts[0] > Some(0));
    assert_eq!(starts[1], Some(0), "another try fetches every row");
    let versions = report.routing.unwrap().versions().to_vec();
    assert_eq!((versions.len(), versions[0].version), (1, PolicyVersion(1)));
    assert_eq!(report.routing_rows_shared, 0);
}

#[tokio::test(start_paused = true)]
async fn mixed_rows_are_kept_masked_or_dropped_as_the_plan_says() {
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
    let trajectory = kept.trajectory.unwrap();
    let mixed = kept.routing.unwrap().mixed().to_vec();
    let spans = trajectory.turns();
    assert_eq!(mixed.len(), 1);
    assert_eq!(mixed[0], spans[0].output_end - 1..spans[1].output_end - 1);
    assert_eq!(kept.routing_rows_mixed, mixed[0].len() as u64);

    let masked = run(MixedRows::Mask).await;
    assert_whole(&masked);
    let masked = masked.trajectory.unwrap();
    assert_eq!(masked.token_ids(), trajectory.token_ids());
    for (t, (&before, &after)) in trajectory.loss_mask().iter().zip(masked.loss_mask()).enumerate()
    {
        let turn_two = (spans[1].prompt_end..spans[1].output_end).contains(&t);
        assert_eq!(after, if turn_two { 0 } else { before }, "token {t}");
    }

    let dropped = run(MixedRows::Drop).await;
    assert!(dropped.routing.is_none());
    assert!(dropped.routing_problem.unwrap().contains("mixed"));
    assert_eq!(dropped.trajectory.unwrap().loss_mask(), trajectory.loss_mask());
}
