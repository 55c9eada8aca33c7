//! Real sandboxes and real grading around a scripted sampler.

use camino::Utf8Path;
use orchestrate_e2e::root;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, Actor, ChatModel, EpisodeKind, EpisodeReport, EpisodeRequest, EpisodeRunner,
    Episodes as _, GradingRules, PrefillLeaders, RolloutSection, RowSharing, Sandboxed,
    grade_by_summary,
};
use orchestrate_sandbox::{DockerProvider, SandboxLimits, SandboxSection};
use orchestrate_tasks::{Task, micro};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{
    AttemptId, ByteSize, EpisodeId, GroupId, HumanDuration, ModelShape, PolicyVersion, RunId,
};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

pub(crate) struct World {
    pub(crate) provider: Arc<DockerProvider>,
    chat: Arc<ChatModel>,
    pub(crate) run: RunId,
}

impl World {
    pub(crate) async fn new() -> Self {
        let config = SandboxSection::default().check().unwrap();
        let provider = Arc::new(DockerProvider::connect(config).await.unwrap());
        let policy = root().join("environments/micro/policy");
        let chat = Arc::new(ChatModel::load(Utf8Path::from_path(&policy).unwrap()).unwrap());
        Self { provider, chat, run: RunId::generate() }
    }

    /// The task of all episodes.
    pub(crate) fn task() -> Task {
        let counts = micro::MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
        let mut task = micro::generate(8, counts).remove(0);
        "orchestrate/micro:latest".clone_into(&mut task.image);
        task
    }

    pub(crate) fn config() -> RolloutSection {
        RolloutSection {
            command_timeout: Some(HumanDuration::secs(60)),
            max_response_tokens: Some(20_000),
            ..RolloutSection::default()
        }
    }

    /// Runs an episode whose agent runs these commands, one per turn, and then submits.
    pub(crate) async fn episode(
        &self,
        number: u32,
        task: &Task,
        turns: &[String],
    ) -> EpisodeReport {
        self.episode_with(number, task, turns, Self::config(), &CancellationToken::new()).await
    }

    pub(crate) async fn episode_with(
        &self,
        number: u32,
        task: &Task,
        turns: &[String],
        config: RolloutSection,
        stop: &CancellationToken,
    ) -> EpisodeReport {
        let call = |name: &str, arguments| Action { name: name.to_owned(), arguments };
        let mut calls: Vec<Action> =
            turns.iter().map(|turn| call("bash", serde_json::json!({"command": turn}))).collect();
        calls.push(call("submit", serde_json::json!({})));
        let replies: Vec<Vec<u32>> = calls
            .iter()
            .map(|call| self.chat.assistant("", std::slice::from_ref(call)).unwrap())
            .collect();
        let shape = ModelShape { context: 65_536, ..toy_shape(self.chat.vocab_size()) };
        let engine = FakeEngine::new(shape, move |_, call| FakeReply::Tokens {
            ids: replies[call.min(replies.len() - 1)].clone(),
            finish: Finish::Stop,
        });
        let runner = EpisodeRunner {
            engine: Arc::new(engine),
            chat: Arc::clone(&self.chat),
            settings: Arc::new(config.check().unwrap()),
            rows: RowSharing::default(),
            prefill_leaders: PrefillLeaders::default(),
            kind: EpisodeKind::Sandboxed(Sandboxed {
                actor: Actor::Scaffold(Arc::default()),
                provider: Arc::clone(&self.provider) as _,
                limits: SandboxLimits {
                    memory: ByteSize::mib(256),
                    cpu_millis: 1000,
                    pids: 64,
                    tmpfs: ByteSize::mib(48),
                },
                rules: GradingRules::new(grade_by_summary),
                logs: None,
            }),
        };
        let group = GroupId::Eval { round: 0, index: number };
        let request = EpisodeRequest {
            run: self.run,
            epoch: 1,
            attempt: AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 },
            task: Arc::new(task.clone()),
            policy_version: PolicyVersion(0),
            seed: 1,
            temperature: 1.0,
            want_routing: false,
        };
        Box::pin(runner.run(request, stop)).await
    }
}
