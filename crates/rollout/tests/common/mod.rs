//! What the episodes of several test programs have in common.

use orchestrate_engine::Engine;
use orchestrate_rollout::{
    ChatModel, EpisodeRequest, EpisodeRunner, Leads, RolloutSettings, RowSharing, Rules,
};
use orchestrate_sandbox::{Limits, SandboxProvider};
use orchestrate_tasks::Task;
use orchestrate_types::{ByteSize, PolicyVersion, RunId};
use std::sync::Arc;

/// A runner that shares no rows and keeps no logs of grading.
pub(crate) fn runner(
    engine: Arc<dyn Engine>,
    sandboxes: Arc<dyn SandboxProvider>,
    (chat, plan): (Arc<ChatModel>, RolloutSettings),
    rules: Rules,
) -> EpisodeRunner {
    let container_limits =
        Limits { memory: ByteSize::mib(256), cpu_millis: 1000, pids: 64, tmpfs: ByteSize::mib(64) };
    let (rows, leads) = (RowSharing::default(), Leads::default());
    EpisodeRunner {
        engine,
        sandboxes,
        chat,
        plan,
        container_limits,
        rules,
        logs: None,
        rows,
        leads,
    }
}

/// The first attempt of an episode, with its routing rows.
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
