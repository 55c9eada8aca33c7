//! How far a run has come, according to its journal.

use crate::config::RunSettings;
use crate::error::RunError;
use orchestrate_store::{Reader, StepState};

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
