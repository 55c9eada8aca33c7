//! Helpers that several test programs share.

use orchestrate_engine::Engine;
use orchestrate_rollout::{
    ChatModel, EpisodeRequest, EpisodeRunner, GradingRules, PrefillLeaders, RolloutSettings,
    RowSharing,
};
use orchestrate_sandbox::{SandboxLimits, SandboxProvider};
use orchestrate_tasks::Task;
use orchestrate_types::{ByteSize, PolicyVersion, RunId};
use std::sync::Arc;

/// A runner without row sharing and without grading logs.
pub(crate) fn runner(
    engine: Arc<dyn Engine>,
    sandboxes: Arc<dyn SandboxProvider>,
    (chat, settings): (Arc<ChatModel>, RolloutSettings),
    rules: GradingRules,
) -> EpisodeRunner {
    let container_limits = SandboxLimits {
        memory: ByteSize::mib(256),
        cpu_millis: 1000,
        pids: 64,
        tmpfs: ByteSize::mib(64),
    };
    let (rows, prefill_leaders) = (RowSharing::default(), PrefillLeaders::default());
    EpisodeRunner {
        engine,
        sandboxes,
        chat,
        settings: Arc::new(settings),
        container_limits,
        rules,
        agent: None,
        external: None,
        tool_servers: Arc::default(),
        logs: None,
        rows,
        prefill_leaders,
    }
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
