//! `orchestrate eval`: one evaluation of one checkpoint, with no training around it.

use super::run;
use crate::args::EvalArgs;
use crate::config::{self, RawConfig};
use crate::wiring::{self, Training};
use camino::Utf8PathBuf;
use orchestrate_coordinator::{StepProgress, TrainerSink};
use orchestrate_handoff::protocol::{PROTOCOL_VERSION, StepRequest, StepResult, TrainerInfo};
use orchestrate_handoff::{TrainerError, TrainerErrorKind};
use orchestrate_moe::ModelConfig;
use orchestrate_types::PolicyVersion;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the command.
pub(crate) async fn run(args: EvalArgs) -> anyhow::Result<ExitCode> {
    let mut raw: RawConfig = config::load(&args.source)?;
    if let Some(checkpoint) = &args.checkpoint {
        raw.engine.model = Some(wiring::absolute(checkpoint)?.into_string());
    }
    raw.run.steps = Some(1);
    raw.run.eval_every = Some(1);
    let folder = wiring::absolute(&args.run_dir)?;
    let (mut settings, store) = run::create_from(&folder, &raw).await?;
    // Only the evaluation before the first step, and no step.
    settings.run.steps = 0;
    let checkpoint = wiring::absolute(&settings.engine.model)?;
    let model = ModelConfig::load(&checkpoint)?;
    let policy = FixedPolicy { checkpoint, model };
    run::finish(&settings, &folder, store, Training::Fixed(Arc::new(policy)), args.json).await
}

/// A policy that nobody trains.
#[derive(Debug)]
struct FixedPolicy {
    checkpoint: Utf8PathBuf,
    model: ModelConfig,
}

#[async_trait::async_trait]
impl TrainerSink for FixedPolicy {
    async fn info(&self) -> Result<TrainerInfo, TrainerError> {
        Ok(TrainerInfo {
            protocol_version: PROTOCOL_VERSION,
            trainer: "none (evaluation only)".into(),
            model: self.model.shape(),
            algorithms: vec!["grpo".into()],
            policy_version: PolicyVersion(0),
            lineage: 0,
            last_step_id: None,
            checkpoint: self.checkpoint.clone(),
            world_size: 0,
            devices: vec![],
        })
    }

    async fn apply(
        &self,
        request: &StepRequest,
        _progress: &StepProgress,
    ) -> Result<StepResult, TrainerError> {
        let kind = TrainerErrorKind::StepFailed {
            step_id: request.step_id.clone(),
            error: "an evaluation has no trainer".into(),
        };
        Err(TrainerError { trainer: self.checkpoint.to_string(), call: "apply", kind })
    }
}
