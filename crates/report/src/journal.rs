//! Reads the metrics lines and task scores of a journal.

use crate::error::ReportError;
use orchestrate_metrics::{MetricsLine, TaskScore};
use orchestrate_store::{Reader, StoreError};
use orchestrate_types::Outcome;

/// The lines of `metrics.jsonl`, in their order.
///
/// # Errors
/// Store errors, and a line that this version cannot read.
pub async fn metrics_lines(reader: &Reader) -> Result<Vec<MetricsLine>, ReportError> {
    let lines = reader.metrics().await?;
    let read = |(index, value)| {
        MetricsLine::try_from(value)
            .map_err(|source| ReportError::Line { number: index + 1, source })
    };
    lines.into_iter().enumerate().map(read).collect()
}

/// Scores of the evaluation after global step `round`, by task index: held-out tasks of known families
/// first, then those of unseen ones.
///
/// # Errors
/// Store errors.
pub async fn task_scores(reader: &Reader, round: u32) -> Result<Vec<TaskScore>, StoreError> {
    let mut scores = Vec::new();
    for group in reader.groups_of_eval(round).await? {
        let attempts = reader.sealed_of_group(group.id).await?;
        let outcomes = attempts.iter().filter_map(|attempt| attempt.outcome.as_ref());
        let rewards: Vec<f64> = outcomes.filter_map(Outcome::trusted_reward).collect();
        scores.push(TaskScore::new(usize::from(group.size), &rewards));
    }
    Ok(scores)
}
