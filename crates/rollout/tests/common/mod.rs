//! Helpers that several test programs share.

use orchestrate_engine::Engine;
use orchestrate_rollout::{
    Actor, ChatModel, EpisodeKind, EpisodeRequest, EpisodeRunner, GradingRules, PrefillLeaders,
    RolloutSettings, RowSharing, Sandboxed,
};
use orchestrate_sandbox::{SandboxLimits, SandboxProvider};
use orchestrate_tasks::Task;
use orchestrate_types::{ByteSize, PolicyVersion, RunId};
use std::sync::Arc;

/// A runner of a scaffold's episodes without row sharing, tool servers and grading logs.
pub(crate) fn runner(
    engine: Arc<dyn Engine>,
    sandboxes: Arc<dyn SandboxProvider>,
    (chat, settings): (Arc<ChatModel>, RolloutSettings),
    rules: GradingRules,
) -> EpisodeRunner {
    EpisodeRunner {
        engine,
        chat,
        settings: Arc::new(settings),
        rows: RowSharing::default(),
        prefill_leaders: PrefillLeaders::default(),
        kind: sandboxed(Actor::Scaffold(Arc::default()), sandboxes, rules),
    }
}

/// Episodes of `actor` in small sandboxes, without grading logs.
pub(crate) fn sandboxed(
    actor: Actor,
    provider: Arc<dyn SandboxProvider>,
    rules: GradingRules,
) -> EpisodeKind {
    let limits = SandboxLimits {
        memory: ByteSize::mib(256),
        cpu_millis: 1000,
        pids: 64,
        tmpfs: ByteSize::mib(64),
    };
    EpisodeKind::Sandboxed(Sandboxed { actor, provider, limits, rules, logs: None })
}

/// A request for the first attempt of an episode, with routing rows.
pub(crate) fn request(task: Task) -> EpisodeRequest {
    EpisodeRequest {
        run: RunId::generate(),
        epoch: 1,
        attempt: "t000001.00-a01".parse().unwrap(),
        task: Arc::new(task),
        policy_version: PolicyVersion(0),
        seed: 1,
        temperature: 1.0,
        want_routing: true,
    }
}
