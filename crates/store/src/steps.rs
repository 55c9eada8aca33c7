//! Transitions of global steps, batches, policy versions and evaluations.
//!
//! | from | call | to |
//! |---|---|---|
//! | – | [`Store::open_step`] | step sampling |
//! | step sampling | [`Store::assemble_batch`] | batch assembling, members decided |
//! | batch assembling | [`Store::publish_batch`] | batch published, step training |
//! | step training | [`Store::record_result`] | step trained, batch applied, version announced |
//! | version announced | [`Store::version_live`] | live |
//! | step trained | [`Store::finish_step`] | applied |
//! | step sampling | [`Store::skip_step`] | skipped |

use crate::db::Write;
use crate::error::StoreError;
use crate::rows::{BatchState, StepRow};
use crate::sql;
use crate::store::Store;
use camino::Utf8Path;
use orchestrate_types::{EpisodeId, PolicyVersion};

/// An episode of a batch, with its advantage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchMember {
    /// Id of the episode.
    pub episode: EpisodeId,
    /// Advantage of the whole episode.
    pub advantage: f64,
}

impl Store {
    /// Opens a global step, or returns it unchanged if it was opened before.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn open_step(
        &self,
        step: u32,
        step_id: &str,
        base_version: PolicyVersion,
    ) -> Result<StepRow, StoreError> {
        if let Some(row) = self.reader().step(step).await? {
            return Ok(row);
        }
        let mut write = self.begin("open_step").await?;
        let base = to_i64(&write, base_version.0)?;
        sqlx::query(sql::INSERT_STEP)
            .bind(step)
            .bind(step_id)
            .bind(base)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?;
        self.commit(write, "open_step").await?;
        let row = self.reader().step(step).await?;
        row.ok_or_else(|| StoreError::Absent { what: format!("step {step}") })
    }

    /// Records which episodes a step trains on and from which weights, before the first byte of its
    /// batch is written. May be repeated until the batch is published.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if an episode is in another batch (INV-4) or the batch is already
    /// published, [`StoreError::Fenced`], and any database error.
    pub async fn assemble_batch(
        &self,
        step: u32,
        base_version: PolicyVersion,
        folder: &Utf8Path,
        members: &[BatchMember],
    ) -> Result<(), StoreError> {
        let mut write = self.begin("assemble_batch").await?;
        let fail = write.fail();
        let changed = sqlx::query(sql::INSERT_BATCH)
            .bind(step)
            .bind(folder.as_str())
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("the batch of step {step} is already published")));
        }
        let base = to_i64(&write, base_version.0)?;
        sqlx::query(sql::STEP_BASE)
            .bind(step)
            .bind(base)
            .bind(write.epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?;
        sqlx::query(sql::CLEAR_MEMBERS).bind(step).execute(&mut *write.tx).await.map_err(&fail)?;
        for (position, member) in members.iter().enumerate() {
            let position = to_i64(&write, position as u64)?;
            sqlx::query(sql::INSERT_MEMBER)
                .bind(member.episode.to_string())
                .bind(step)
                .bind(position)
                .bind(member.advantage)
                .bind(write.epoch)
                .execute(&mut *write.tx)
                .await
                .map_err(&fail)?;
        }
        self.commit(write, "assemble_batch").await
    }

    /// Records that the batch folder is complete; `digest` is the digest of its manifest.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is not assembling, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn publish_batch(&self, step: u32, digest: &str) -> Result<(), StoreError> {
        let mut write = self.begin("publish_batch").await?;
        let fail = write.fail();
        let published = sqlx::query(sql::PUBLISH_BATCH)
            .bind(step)
            .bind(digest)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected();
        let training = sqlx::query(sql::STEP_TRAINING)
            .bind(step)
            .bind(write.epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected();
        if (published, training) != (1, 1) {
            return Err(write.refuse(format!("the batch of step {step} is not assembling")));
        }
        self.commit(write, "publish_batch").await
    }

    /// Records the trainer's result of a step. Repeating it changes nothing.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the step has no published batch, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn record_result(
        &self,
        step: u32,
        result: &serde_json::Value,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("record_result").await?;
        let fail = write.fail();
        let changed = sqlx::query(sql::STEP_TRAINED)
            .bind(step)
            .bind(result.to_string())
            .bind(write.epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("step {step} is not training")));
        }
        set_batch_state(&mut write, step, BatchState::Published, BatchState::Applied).await?;
        self.commit(write, "record_result").await
    }

    /// Records new weights before any engine loads them.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn announce_version(
        &self,
        version: PolicyVersion,
        lineage: u64,
        checkpoint: &Utf8Path,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("announce_version").await?;
        let (version, lineage) = (to_i64(&write, version.0)?, to_i64(&write, lineage)?);
        sqlx::query(sql::INSERT_VERSION)
            .bind(version)
            .bind(lineage)
            .bind(checkpoint.as_str())
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?;
        self.commit(write, "announce_version").await
    }

    /// Records that every engine serves these weights.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn version_live(&self, version: PolicyVersion) -> Result<(), StoreError> {
        let mut write = self.begin("version_live").await?;
        let version = to_i64(&write, version.0)?;
        sqlx::query(sql::VERSION_LIVE)
            .bind(version)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?;
        self.commit(write, "version_live").await
    }

    /// Closes a trained step with its line of `metrics.jsonl`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is not trained, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn finish_step(
        &self,
        step: u32,
        metrics: &serde_json::Value,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("finish_step").await?;
        let changed = sqlx::query(sql::STEP_APPLIED)
            .bind(step)
            .bind(metrics.to_string())
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("step {step} is not trained")));
        }
        self.commit(write, "finish_step").await
    }

    /// Closes a step without training, with the reason and its line of `metrics.jsonl`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is not sampling, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn skip_step(
        &self,
        step: u32,
        reason: &str,
        metrics: &serde_json::Value,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("skip_step").await?;
        let changed = sqlx::query(sql::STEP_SKIPPED)
            .bind(step)
            .bind(metrics.to_string())
            .bind(reason)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("step {step} is not sampling")));
        }
        self.commit(write, "skip_step").await
    }

    /// Marks an applied batch as retired. This is committed before its folder is deleted.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn retire_batch(&self, step: u32) -> Result<(), StoreError> {
        let mut write = self.begin("retire_batch").await?;
        set_batch_state(&mut write, step, BatchState::Applied, BatchState::Retired).await?;
        self.commit(write, "retire_batch").await
    }

    /// Opens an evaluation round; opening it again changes nothing.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn open_eval(&self, round: u32, version: PolicyVersion) -> Result<(), StoreError> {
        let mut write = self.begin("open_eval").await?;
        let version = to_i64(&write, version.0)?;
        sqlx::query(sql::INSERT_EVAL)
            .bind(round)
            .bind(version)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?;
        self.commit(write, "open_eval").await
    }

    /// Closes an evaluation round with its line of `metrics.jsonl`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is not running, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn finish_eval(
        &self,
        round: u32,
        metrics: &serde_json::Value,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("finish_eval").await?;
        let changed = sqlx::query(sql::FINISH_EVAL)
            .bind(round)
            .bind(metrics.to_string())
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("evaluation round {round} is not running")));
        }
        self.commit(write, "finish_eval").await
    }
}

async fn set_batch_state(
    write: &mut Write,
    step: u32,
    from: BatchState,
    to: BatchState,
) -> Result<(), StoreError> {
    sqlx::query(sql::SET_BATCH_STATE)
        .bind(step)
        .bind(to.name())
        .bind(write.epoch)
        .bind(from.name())
        .execute(&mut *write.tx)
        .await
        .map(drop)
        .map_err(write.fail())
}

fn to_i64(write: &Write, value: u64) -> Result<i64, StoreError> {
    i64::try_from(value)
        .map_err(|_| write.refuse(format!("number {value} is larger than 2^63 − 1")))
}
