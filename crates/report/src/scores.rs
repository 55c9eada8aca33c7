//! Scores of an evaluation round, from the journal.

use orchestrate_metrics::{TaskScore, is_solved};
use orchestrate_store::{Reader, StoreError};
use orchestrate_types::Outcome;

/// Scores of the evaluation after global step `round`, by task index.
///
/// # Errors
/// Store errors.
pub async fn task_scores(reader: &Reader, round: u32) -> Result<Vec<TaskScore>, StoreError> {
    let mut scores = Vec::new();
    for group in reader.groups_of_eval(round).await? {
        let sealed = reader.sealed_of_group(group.id).await?;
        let rewards: Vec<f64> = sealed
            .iter()
            .filter_map(|attempt| attempt.outcome.as_ref().and_then(Outcome::trusted_reward))
            .collect();
        scores.push(TaskScore {
            solved: rewards.iter().filter(|&&reward| is_solved(reward)).count(),
            trusted: rewards.len(),
            broken: usize::from(group.size).saturating_sub(rewards.len()),
        });
    }
    Ok(scores)
}
