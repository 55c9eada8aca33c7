//! Runs one attempt of an episode, whatever its kind.

use crate::agent::ExternalWorkers;
use crate::api::{EpisodeReport, EpisodeRequest, Episodes};
use crate::attempt::{Attempt, Rewarded};
use crate::chat::ChatModel;
use crate::config::RolloutSettings;
use crate::prefill::PrefillLeaders;
use crate::rows::RowSharing;
use crate::sandboxed::Sandboxed;
use crate::sequence::EpisodeContext;
use orchestrate_engine::Engine;
use orchestrate_sandbox::SandboxProvider;
use orchestrate_types::{AttemptId, Outcome};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Runs attempts with one engine, one set of settings, and one kind of episode.
#[derive(Debug, Clone)]
pub struct EpisodeRunner {
    /// The engine that samples turns.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of the served model.
    pub chat: Arc<ChatModel>,
    /// The checked `[rollout]` section.
    pub settings: Arc<RolloutSettings>,
    /// How routing rows are shared, and what happens to mixed ones.
    pub rows: RowSharing,
    /// The prefill leader of each group.
    pub prefill_leaders: PrefillLeaders,
    /// Where episodes run.
    pub kind: EpisodeKind,
}

/// Where episodes run.
#[derive(Debug, Clone)]
pub enum EpisodeKind {
    /// In sandboxes of this program, which also grades them.
    Sandboxed(Sandboxed),
    /// At external workers, which return their rewards.
    External(ExternalWorkers),
}

impl EpisodeKind {
    /// Provider of the sandboxes; `None` if the episodes need none.
    pub fn sandboxes(&self) -> Option<&Arc<dyn SandboxProvider>> {
        match self {
            Self::Sandboxed(sandboxed) => Some(&sandboxed.provider),
            Self::External(_) => None,
        }
    }

    fn external(&self) -> Option<&ExternalWorkers> {
        match self {
            Self::Sandboxed(_) => None,
            Self::External(external) => Some(external),
        }
    }
}

#[async_trait::async_trait]
impl Episodes for EpisodeRunner {
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let span = tracing::info_span!(
            "attempt",
            episode_id = %request.attempt.episode,
            attempt = request.attempt.attempt,
            policy_version = request.policy_version.0,
        );
        // Boxed, because the future holds a whole episode and callers keep hundreds of them.
        Box::pin(self.run_inner(request, stop)).instrument(span).await
    }

    fn recorded(&self, attempt: AttemptId, outcome: &Outcome) {
        if let Some(external) = self.kind.external() {
            // Before the result is acknowledged, so that no file is left when the run ends.
            external.journals.remove(attempt);
            external.offers.recorded(attempt, outcome.name());
        }
    }

    fn unfinished(&self) -> Vec<AttemptId> {
        let external = self.kind.external().into_iter();
        let unfinished = external.flat_map(|external| external.journals.unfinished());
        unfinished.map(|(attempt, _)| attempt).collect()
    }
}

impl EpisodeRunner {
    /// What the sequences of an attempt share.
    fn context(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeContext {
        EpisodeContext {
            request,
            engine: Arc::clone(&self.engine),
            chat: Arc::clone(&self.chat),
            settings: Arc::clone(&self.settings),
            sharing: self.rows.clone(),
            leaders: self.prefill_leaders.clone(),
            stop: stop.clone(),
            deadline: None,
            restarts: 0,
        }
    }

    async fn run_inner(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let limits = self.settings.limits(self.engine.shape().context);
        let mut attempt = Attempt::new(self.context(request, stop));
        let rewarded = match &self.kind {
            EpisodeKind::Sandboxed(sandboxed) => sandboxed.run(&mut attempt, limits).await,
            EpisodeKind::External(external) => attempt.run_external(external, limits).await,
        };
        let outcome = rewarded.map_or_else(|outcome| outcome, Rewarded::outcome);
        tracing::debug!(outcome = outcome.name(), "episode ended");
        attempt.report(outcome)
    }
}
