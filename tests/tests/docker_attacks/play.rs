//! Plays episodes of scripted agents with real sandboxes and real grading.

use camino::Utf8Path;
use orchestrate_e2e::root;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, Actor, ChatModel, EpisodeKind, EpisodeReport, EpisodeRequest, EpisodeRunner,
    Episodes as _, PrefillLeaders, RewardSettings, RolloutSection, RowSharing, Sandboxed,
    grade_patch,
};
use orchestrate_sandbox::{
    DockerProvider, Owner, Purpose, SandboxLimits, SandboxProvider as _, SandboxSection,
    SandboxSpec,
};
use orchestrate_tasks::{Origin, Task};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{
    AttemptId, ByteSize, EpisodeId, GroupId, HumanDuration, ModelShape, PolicyVersion, RunId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const LIMITS: SandboxLimits = SandboxLimits {
    memory: ByteSize::mib(256),
    cpu_millis: 1000,
    pids: 64,
    tmpfs: ByteSize::mib(48),
};

/// A provider of sandboxes, and the numbers of the episodes that use it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) provider: Arc<DockerProvider>,
    chat: Arc<ChatModel>,
    run: RunId,
    next: AtomicU32,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with_containers(12).await
    }

    pub(crate) async fn with_containers(count: usize) -> Self {
        let config = SandboxSection { max_containers: Some(count), ..SandboxSection::default() };
        let provider = Arc::new(DockerProvider::connect(config.check().unwrap()).await.unwrap());
        let policy = root().join("environments/micro/policy");
        let chat = Arc::new(ChatModel::load(Utf8Path::from_path(&policy).unwrap()).unwrap());
        Self { provider, chat, run: RunId::generate(), next: AtomicU32::new(1) }
    }

    pub(crate) async fn shutdown(&self) {
        self.provider.shutdown().await.unwrap();
    }

    fn attempt(&self) -> AttemptId {
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let group = GroupId::Train { seq };
        AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 }
    }

    /// A sandbox for `task`, as the runner asks for it.
    pub(crate) fn spec(&self, task: &Task, purpose: Purpose) -> SandboxSpec {
        SandboxSpec {
            image: task.image.clone(),
            purpose,
            owner: Owner { run: self.run, epoch: 1, attempt: self.attempt() },
            workdir: task.workdir.clone(),
            limits: LIMITS,
            deadline: Duration::from_mins(10),
            reusable: task.origin == Origin::Files,
        }
    }

    /// The log of the hidden tests on the task's own tree.
    pub(crate) async fn log_of(&self, task: &Task) -> Vec<u8> {
        let spec = self.spec(task, Purpose::Grader);
        let rules = RewardSettings::default().rules();
        grade_patch(self.provider.as_ref(), &spec, task, "", rules).await.unwrap().log
    }

    /// Runs a training episode whose agent runs these commands, one per turn, and then submits.
    pub(crate) async fn episode(&self, task: &Task, commands: &[String]) -> EpisodeReport {
        let call = |name: &str, arguments| Action { name: name.to_owned(), arguments };
        let mut calls: Vec<Action> = commands
            .iter()
            .map(|command| call("bash", serde_json::json!({"command": command})))
            .collect();
        calls.push(call("submit", serde_json::json!({})));
        let replies: Vec<Vec<u32>> = calls
            .iter()
            .map(|call| self.chat.assistant("", std::slice::from_ref(call)).unwrap())
            .collect();
        let shape = ModelShape { context: 131_072, ..toy_shape(self.chat.vocab_size()) };
        let engine = FakeEngine::new(shape, move |_, call| FakeReply::Tokens {
            ids: replies[call.min(replies.len() - 1)].clone(),
            finish: Finish::Stop,
        });
        let config = RolloutSection {
            command_timeout: Some(HumanDuration::secs(60)),
            max_response_tokens: Some(100_000),
            ..RolloutSection::default()
        };
        let runner = EpisodeRunner {
            engine: Arc::new(engine),
            chat: Arc::clone(&self.chat),
            settings: Arc::new(config.check().unwrap()),
            rows: RowSharing::default(),
            prefill_leaders: PrefillLeaders::default(),
            kind: EpisodeKind::Sandboxed(Sandboxed {
                actor: Actor::Scaffold(Arc::default()),
                provider: Arc::clone(&self.provider) as _,
                limits: LIMITS,
                rules: RewardSettings::default().rules(),
                logs: None,
            }),
        };
        let request = EpisodeRequest {
            run: self.run,
            epoch: 1,
            attempt: self.attempt(),
            task: Arc::new(task.clone()),
            policy_version: PolicyVersion(0),
            seed: 1,
            temperature: 1.0,
            want_routing: false,
        };
        Box::pin(runner.run(request, &CancellationToken::new())).await
    }
}
