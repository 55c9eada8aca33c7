//! How far a run has come, according to its journal.

use crate::config::RunSettings;
use crate::error::RunError;
use camino::Utf8Path;
use orchestrate_store::{Reader, RunKind, StepState, VersionRow};

/// Whether every step is closed and every evaluation is done.
///
/// # Errors
/// Store errors.
pub async fn is_finished(reader: &Reader, run: &RunSettings) -> Result<bool, RunError> {
    let closed = match reader.step(run.steps).await?.map(|row| row.state) {
        Some(StepState::Applied | StepState::Skipped) => true,
        Some(StepState::Sampling | StepState::Training | StepState::Trained) | None => false,
    };
    let evals = reader.evals().await?;
    let evaluated = evals.iter().any(|e| e.round == run.steps && e.metrics.is_some());
    Ok(closed && (evaluated || !run.evaluates_after(run.steps)))
}

/// The kind of a run. A journal of an older version does not record it: there, it follows from the steps and
/// from the first weights of a plan that names the policy `model`, a folder or a model's name. `None` if such a
/// run has announced no weights yet, when nothing was sampled.
///
/// # Errors
/// Store errors.
pub async fn run_kind(reader: &Reader, model: &Utf8Path) -> Result<Option<RunKind>, RunError> {
    if let Some(kind) = reader.kind().await? {
        return Ok(Some(kind));
    }
    if !reader.steps().await?.is_empty() {
        return Ok(Some(RunKind::Training));
    }
    // Before its first step, a training run serves what its trainer wrote. An evaluation serves the model itself,
    // whose path in the plan may be relative.
    let model = model.strip_prefix(".").unwrap_or(model);
    let is_evaluated = |row: &VersionRow| row.lineage == 0 && row.checkpoint.ends_with(model);
    let versions = reader.versions().await?;
    Ok(versions
        .first()
        .map(|row| if is_evaluated(row) { RunKind::Evaluation } else { RunKind::Training }))
}
