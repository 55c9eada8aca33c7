//! A runner with fake engine and sandboxes, and scripts of engine replies.

use crate::common;
use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, ChatModel, ChatOptions, ChatTemplate, EpisodeReport, EpisodeRequest, EpisodeRunner,
    Episodes, ExpertEpisode, ExpertTurn, GradingRules, MICRO_CHAT_TEMPLATE, RolloutSection,
    opening_messages, train_tokenizer,
};
use orchestrate_testkit::{
    FakeEngine, FakeReply, FakeSandboxes, TOY_FIX, grade_toy, toy_shape, toy_shell, toy_task,
};
use orchestrate_types::{ModelShape, RunId};
use serde_json::json;
use std::sync::{Arc, OnceLock};
use tokio_util::sync::CancellationToken;

pub(crate) fn action(name: &str, arguments: serde_json::Value) -> Action {
    Action { name: name.to_owned(), arguments }
}

pub(crate) fn bash(command: &str) -> Action {
    action("bash", json!({"command": command}))
}

pub(crate) fn fix() -> Action {
    action("edit", json!({"path": "total.py", "line": 2, "new": TOY_FIX}))
}

pub(crate) fn submit() -> Action {
    action("submit", json!({}))
}

/// The episode that solves the toy task, with its observations.
pub(crate) fn expert() -> ExpertEpisode {
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

/// The files of a tokenizer that was trained on the expert's episode.
fn tokenizer_files() -> &'static [(String, Vec<u8>)] {
    static FILES: OnceLock<Vec<(String, Vec<u8>)>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(folder.path()).unwrap();
        let text = expert().text(&ChatTemplate::new(MICRO_CHAT_TEMPLATE).unwrap()).unwrap();
        let corpus = std::iter::repeat_n(text, 3);
        train_tokenizer(corpus, 400, MICRO_CHAT_TEMPLATE, path).unwrap();
        let entries = path.read_dir_utf8().unwrap().map(Result::unwrap);
        entries.map(|e| (e.file_name().to_owned(), std::fs::read(e.path()).unwrap())).collect()
    })
}

/// The tokenizer with another chat template.
pub(crate) fn chat_with(template: &str, options: ChatOptions) -> ChatModel {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8Path::from_path(folder.path()).unwrap();
    for (name, content) in tokenizer_files() {
        std::fs::write(path.join(name), content).unwrap();
    }
    std::fs::write(path.join("chat_template.jinja"), template).unwrap();
    ChatModel::load_for(path, options).unwrap()
}

pub(crate) fn chat() -> Arc<ChatModel> {
    static CHAT: OnceLock<Arc<ChatModel>> = OnceLock::new();
    let make = || Arc::new(chat_with(MICRO_CHAT_TEMPLATE, ChatOptions::default()));
    Arc::clone(CHAT.get_or_init(make))
}

pub(crate) fn turn_ids(calls: &[Action]) -> Vec<u32> {
    chat().assistant("", calls).unwrap()
}

pub(crate) fn stop(ids: Vec<u32>) -> FakeReply {
    FakeReply::Tokens { ids, finish: Finish::Stop }
}

/// A script of replies with `turns`, one call per turn.
pub(crate) fn playing(turns: Vec<Action>) -> impl Fn(usize) -> FakeReply + Send + Sync + 'static {
    move |call| stop(turn_ids(std::slice::from_ref(&turns[call.min(turns.len() - 1)])))
}

pub(crate) fn solving() -> impl Fn(usize) -> FakeReply + Send + Sync + 'static {
    playing(vec![bash("cat total.py"), fix(), bash("run-tests"), submit()])
}

pub(crate) struct World {
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) sandboxes: FakeSandboxes,
    pub(crate) runner: EpisodeRunner,
}

pub(crate) fn world_with(
    config: &RolloutSection,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> World {
    world_in(toy_shape(chat().vocab_size()).context, config, script)
}

/// Like [`world_with`], with a context of this many tokens.
pub(crate) fn world_in(
    context: usize,
    config: &RolloutSection,
    script: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
) -> World {
    let shape = ModelShape { context, ..toy_shape(chat().vocab_size()) };
    let engine = Arc::new(FakeEngine::new(shape, move |_, call| script(call)));
    let sandboxes = FakeSandboxes::new(toy_shell);
    let runner = common::runner(
        Arc::clone(&engine) as _,
        Arc::new(sandboxes.clone()),
        (chat(), config.check().unwrap()),
        GradingRules::new(grade_toy),
    );
    World { engine, sandboxes, runner }
}

pub(crate) fn world(script: impl Fn(usize) -> FakeReply + Send + Sync + 'static) -> World {
    world_with(&RolloutSection::default(), script)
}

pub(crate) fn request() -> EpisodeRequest {
    EpisodeRequest {
        run: "01900000-0000-7000-8000-000000000000".parse::<RunId>().unwrap(),
        attempt: "t000001.02-a01".parse().unwrap(),
        seed: 7,
        ..common::request(toy_task())
    }
}

impl World {
    pub(crate) async fn run(&self) -> EpisodeReport {
        self.run_until(&CancellationToken::new()).await
    }

    pub(crate) async fn run_until(&self, stop: &CancellationToken) -> EpisodeReport {
        let report = self.runner.run(request(), stop).await;
        assert_eq!(self.sandboxes.still_open(), 0, "a sandbox was left open");
        assert_eq!(self.sandboxes.dropped(), 0, "a sandbox was dropped instead of closed");
        report
    }
}

pub(crate) fn assert_whole(report: &EpisodeReport) {
    let trajectory = report.trajectory().unwrap();
    assert_eq!(report.routing_problem, None);
    assert_eq!(report.routing().unwrap().rows(), trajectory.len() - 1);
    assert_eq!(trajectory.loss_mask().last(), Some(&1));
}
