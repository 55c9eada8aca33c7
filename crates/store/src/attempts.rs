//! Transitions of groups, episodes and attempts.
//!
//! | from | call | to |
//! |---|---|---|
//! | – | [`Store::open_group`] | group filling, episodes open |
//! | episode open | [`Store::claim_attempt`] | attempt intended |
//! | attempt lost | [`Store::resume_attempt`] | attempt intended |
//! | attempt intended | [`Store::seal_attempt`] | attempt sealed (or superseded), episode sealed |
//! | attempt intended | [`Store::break_attempt`] | attempt broken; episode open or quarantined |
//! | attempt intended | [`Store::abort_attempt`] | attempt aborted, episode open |
//! | group filling | [`Store::keep_group`], [`Store::drop_group`] | kept or dropped |
//!
//! An attempt that was running when its coordinator died is marked lost at the next start. It can be
//! resumed if it is the newest one of an open episode.

use crate::error::StoreError;
use crate::record::EpisodeRecord;
use crate::rows::{AttemptState, EpisodeState, GroupState};
use crate::sql;
use crate::store::Store;
use orchestrate_types::{AttemptId, EpisodeId, GroupId};

/// Result of [`Store::claim_attempt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Run this attempt.
    Attempt(AttemptId),
    /// The episode already has its outcome.
    Sealed,
    /// The episode was given up after too many broken attempts.
    Quarantined,
}

/// Result of [`Store::seal_attempt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealing {
    /// This attempt is the episode's outcome.
    Sealed,
    /// Another attempt was sealed first; this one is kept as evidence.
    Superseded,
}

/// Result of [`Store::break_attempt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterBreak {
    /// Claim another attempt.
    Retry,
    /// The episode is given up until the next start of the run.
    Quarantined,
}

struct StoredFile {
    outcome: String,
    summary: String,
    blob: String,
    bytes: i64,
}

impl Store {
    /// Opens a group of `size` episodes for `task_id` in global step (or evaluation round)
    /// `step`. Opening it again changes nothing.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] and any database error.
    pub async fn open_group(
        &self,
        id: GroupId,
        step: u32,
        task_id: &str,
        size: u16,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("open_group").await?;
        let fail = write.fail();
        let kind = match id {
            GroupId::Train { .. } => sql::TRAIN,
            GroupId::Eval { .. } => sql::EVAL,
        };
        sqlx::query(sql::INSERT_GROUP)
            .bind(id.to_string())
            .bind(kind)
            .bind(step)
            .bind(task_id)
            .bind(size)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?;
        for member in 0..size {
            sqlx::query(sql::INSERT_EPISODE)
                .bind(EpisodeId { group: id, member }.to_string())
                .bind(id.to_string())
                .bind(member)
                .bind(write.epoch)
                .execute(&mut *write.tx)
                .await
                .map_err(&fail)?;
        }
        self.commit(write, "open_group").await
    }

    /// Records the next attempt of an episode. This is committed before anything is started for it.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if an attempt of this coordinator is still running,
    /// [`StoreError::Absent`], [`StoreError::Fenced`], and any database error.
    pub async fn claim_attempt(&self, episode: EpisodeId) -> Result<Claim, StoreError> {
        let mut write = self.begin("claim_attempt").await?;
        let fail = write.fail();
        let state: Option<(String,)> = sqlx::query_as(sql::SELECT_EPISODE_STATE)
            .bind(episode.to_string())
            .fetch_optional(&mut *write.tx)
            .await
            .map_err(&fail)?;
        let (state,) =
            state.ok_or_else(|| StoreError::Absent { what: format!("episode {episode}") })?;
        match EpisodeState::parse(&state) {
            Some(EpisodeState::Open) => {}
            Some(EpisodeState::Sealed) => return Ok(Claim::Sealed),
            Some(EpisodeState::Quarantined) => return Ok(Claim::Quarantined),
            None => return Err(write.refuse(format!("unknown episode state `{state}`"))),
        }
        let (last,): (i64,) = sqlx::query_as(sql::LAST_ATTEMPT)
            .bind(episode.to_string())
            .fetch_one(&mut *write.tx)
            .await
            .map_err(&fail)?;
        let attempt = u16::try_from(last + 1)
            .map_err(|_| write.refuse("more than 65535 attempts of one episode"))?;
        let id = AttemptId { episode, attempt };
        sqlx::query(sql::INSERT_ATTEMPT)
            .bind(id.to_string())
            .bind(episode.to_string())
            .bind(attempt)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?;
        self.commit(write, "claim_attempt").await?;
        Ok(Claim::Attempt(id))
    }

    /// Continues an attempt that was lost with an earlier coordinator.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is not the newest attempt of an open episode, or not lost,
    /// [`StoreError::Fenced`], and any database error.
    pub async fn resume_attempt(&self, attempt: AttemptId) -> Result<(), StoreError> {
        let mut write = self.begin("resume_attempt").await?;
        let changed = sqlx::query(sql::RESUME_ATTEMPT)
            .bind(attempt.to_string())
            .bind(write.epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("attempt {attempt} cannot be resumed")));
        }
        self.commit(write, "resume_attempt").await
    }

    /// Stores a finished attempt and makes it the episode's outcome.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the attempt is not running, [`StoreError::Full`],
    /// [`StoreError::Fenced`], and any file or database error.
    pub async fn seal_attempt(&self, record: &EpisodeRecord) -> Result<Sealing, StoreError> {
        let file = self.write_record("seal_attempt", record).await?;
        let mut write = self.begin("seal_attempt").await?;
        let fail = write.fail();
        let sealed = sqlx::query(sql::SET_EPISODE_STATE)
            .bind(record.attempt.episode.to_string())
            .bind(EpisodeState::Sealed.name())
            .bind(write.epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected()
            == 1;
        let state = if sealed { AttemptState::Sealed } else { AttemptState::Superseded };
        self.close(&mut write, record.attempt, state, Some(&file)).await?;
        self.commit(write, "seal_attempt").await?;
        Ok(if sealed { Sealing::Sealed } else { Sealing::Superseded })
    }

    /// Stores a broken attempt. The episode is quarantined once `max_attempts` of its attempts have
    /// broken since this coordinator started.
    ///
    /// # Errors
    /// The errors of [`Store::seal_attempt`].
    pub async fn break_attempt(
        &self,
        record: &EpisodeRecord,
        max_attempts: u16,
    ) -> Result<AfterBreak, StoreError> {
        let file = self.write_record("break_attempt", record).await?;
        let episode = record.attempt.episode.to_string();
        let mut write = self.begin("break_attempt").await?;
        let fail = write.fail();
        self.close(&mut write, record.attempt, AttemptState::Broken, Some(&file)).await?;
        let (broken,): (i64,) = sqlx::query_as(sql::COUNT_BROKEN)
            .bind(&episode)
            .bind(write.epoch)
            .fetch_one(&mut *write.tx)
            .await
            .map_err(&fail)?;
        let give_up = broken >= i64::from(max_attempts);
        if give_up {
            sqlx::query(sql::SET_EPISODE_STATE)
                .bind(&episode)
                .bind(EpisodeState::Quarantined.name())
                .bind(write.epoch)
                .execute(&mut *write.tx)
                .await
                .map_err(&fail)?;
        }
        self.commit(write, "break_attempt").await?;
        Ok(if give_up { AfterBreak::Quarantined } else { AfterBreak::Retry })
    }

    /// Marks an attempt as aborted because it was cancelled; its episode stays open.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the attempt is not running, [`StoreError::Fenced`], and any
    /// database error.
    pub async fn abort_attempt(&self, attempt: AttemptId) -> Result<(), StoreError> {
        let mut write = self.begin("abort_attempt").await?;
        self.close(&mut write, attempt, AttemptState::Aborted, None).await?;
        self.commit(write, "abort_attempt").await
    }

    /// Keeps a group: its episodes may be trained on or, for an evaluation, are counted.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the group was already kept or dropped, [`StoreError::Fenced`], and
    /// any database error.
    pub async fn keep_group(&self, id: GroupId) -> Result<(), StoreError> {
        self.decide_group(id, GroupState::Kept, None).await
    }

    /// Drops a group from training or evaluation, and records the reason.
    ///
    /// # Errors
    /// The errors of [`Store::keep_group`].
    pub async fn drop_group(&self, id: GroupId, reason: &str) -> Result<(), StoreError> {
        self.decide_group(id, GroupState::Dropped, Some(reason)).await
    }

    async fn decide_group(
        &self,
        id: GroupId,
        state: GroupState,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        let mut write = self.begin("decide_group").await?;
        let fail = write.fail();
        let changed = sqlx::query(sql::DECIDE_GROUP)
            .bind(id.to_string())
            .bind(state.name())
            .bind(reason)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?
            .rows_affected();
        if changed != 1 {
            return Err(write.refuse(format!("group {id} is not filling")));
        }
        self.commit(write, "decide_group").await
    }

    async fn write_record(
        &self,
        what: &'static str,
        record: &EpisodeRecord,
    ) -> Result<StoredFile, StoreError> {
        let copy = record.clone();
        let blobs = self.blobs.clone();
        let journal = self.journal.clone();
        let written = tokio::task::spawn_blocking(move || {
            let bytes = copy
                .encode()
                .map_err(|source| StoreError::Record { path: journal.clone(), source })?;
            Ok((blobs.write(&bytes)?, bytes.len()))
        })
        .await;
        let Ok(written) = written else {
            let detail = "the encoder panicked".to_owned();
            return Err(StoreError::Refused { what, detail });
        };
        let (blob, bytes) = written?;
        self.reach(what, "file_written").await;
        Ok(StoredFile {
            outcome: to_json(what, &record.outcome)?,
            summary: to_json(what, &record.summary)?,
            blob,
            bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        })
    }

    async fn close(
        &self,
        write: &mut crate::db::Write,
        attempt: AttemptId,
        state: AttemptState,
        file: Option<&StoredFile>,
    ) -> Result<(), StoreError> {
        let changed = sqlx::query(sql::CLOSE_ATTEMPT)
            .bind(attempt.to_string())
            .bind(state.name())
            .bind(file.map(|f| f.outcome.as_str()))
            .bind(file.map(|f| f.summary.as_str()))
            .bind(file.map(|f| f.blob.as_str()))
            .bind(file.map(|f| f.bytes))
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(write.fail())?
            .rows_affected();
        if changed == 1 {
            Ok(())
        } else {
            Err(write.refuse(format!("attempt {attempt} is not running")))
        }
    }
}

fn to_json(what: &'static str, value: &impl serde::Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|e| StoreError::Refused { what, detail: e.to_string() })
}
