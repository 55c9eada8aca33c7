//! Reading a live or finished run without taking its lock.

use crate::blob::Blobs;
use crate::db::{self, JOURNAL_FILE};
use crate::error::StoreError;
use crate::record::{EpisodeRecord, RecordError};
use crate::rows::{
    AttemptRow, AttemptState, BatchRow, BatchState, EpisodeRow, EpisodeState, EvalRow, GroupRow,
    GroupState, RunKind, StepRow, StepState, VersionRow,
};
use crate::sql;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion, RunId};
use sqlx::sqlite::SqlitePool;
use std::collections::HashSet;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

/// The row of the run itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRow {
    /// Id of the run.
    pub run: RunId,
    /// Number of coordinators so far: the current or last coordinator's epoch.
    pub epoch: i64,
    /// Digest of the plan recorded when the run was created.
    pub plan_digest: String,
    /// When the run was created, µs since the Unix epoch.
    pub created_us: i64,
}

/// An episode with all its attempts, and one stored record.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredEpisode {
    /// State of the episode.
    pub episode: EpisodeRow,
    /// All attempts, in order of their number.
    pub attempts: Vec<AttemptRow>,
    /// The stored record: of the attempt that was asked for, or else of the sealed attempt; without one, of
    /// the newest attempt that stored a record.
    pub record: Option<EpisodeRecord>,
}

/// An attempt, or an episode without one, in a list of the newest.
#[derive(Debug, Clone, PartialEq)]
pub struct NewestRow {
    /// Id of the attempt, or of the episode.
    pub id: String,
    /// Id of its task.
    pub task_id: String,
    /// State of the attempt, or of the episode, by its name in the journal.
    pub state: String,
    /// How it ended; `None` while it is running, or if it was aborted or lost.
    pub outcome: Option<Outcome>,
    /// JSON object with the numbers that metrics are computed from; null if nothing was recorded.
    pub summary: serde_json::Value,
}

/// Reads the journal of one run. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Reader {
    journal: Utf8PathBuf,
    pool: SqlitePool,
    blobs: Arc<Blobs>,
}

type AttemptTuple =
    (String, String, Option<String>, Option<String>, Option<String>, Option<i64>, i64, Option<i64>);
type NewestTuple =
    (String, String, String, Option<String>, Option<String>, Option<String>, Option<String>);
type GroupTuple = (String, i64, String, i64, String, Option<String>);
type StepTuple = (i64, String, String, i64, Option<String>, Option<String>, Option<String>);

impl Reader {
    /// Opens the journal of the run in `folder`.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if the folder has no journal, [`StoreError::Corrupt`] if it is empty,
    /// [`StoreError::Newer`], and any database error.
    pub async fn open(folder: &Utf8Path) -> Result<Self, StoreError> {
        let journal = folder.join(JOURNAL_FILE);
        if !journal.exists() {
            return Err(StoreError::Missing { folder: folder.to_owned() });
        }
        db::check_not_empty(&journal)?;
        let pool = db::readers(&journal).await?;
        db::check_version(&pool, &journal).await?;
        Ok(Self { journal, pool, blobs: Arc::new(Blobs::new(folder)) })
    }

    /// Closes all connections, and waits for that.
    pub async fn close(self) {
        self.pool.close().await;
    }

    /// The run's own row: id, epoch, plan digest, creation time.
    ///
    /// # Errors
    /// Any database error; [`StoreError::Absent`] if its creation was interrupted.
    pub async fn run(&self) -> Result<RunRow, StoreError> {
        let row: Option<(String, i64, String, i64)> = sqlx::query_as(sql::SELECT_RUN)
            .fetch_optional(&self.pool)
            .await
            .map_err(self.fail("run"))?;
        let (run, epoch, plan_digest, created_us) =
            row.ok_or_else(|| StoreError::Absent { what: "the run".to_owned() })?;
        Ok(RunRow { run: self.parse(&run)?, epoch, plan_digest, created_us })
    }

    /// What the run does; `None` in a journal of an older version, which does not say it.
    ///
    /// # Errors
    /// Any database error.
    pub async fn kind(&self) -> Result<Option<RunKind>, StoreError> {
        let found: Result<Option<(Option<String>,)>, sqlx::Error> =
            sqlx::query_as(sql::SELECT_KIND).fetch_optional(&self.pool).await;
        let row = match found {
            Err(sqlx::Error::Database(error)) if error.message().contains("no such column") => {
                return Ok(None);
            }
            found => found.map_err(self.fail("kind"))?,
        };
        Ok(row.and_then(|(kind,)| kind).as_deref().and_then(RunKind::parse))
    }

    /// Whether anything was sampled yet.
    ///
    /// # Errors
    /// Any database error.
    pub async fn has_begun(&self) -> Result<bool, StoreError> {
        let (groups,): (i64,) = sqlx::query_as(sql::HAS_BEGUN)
            .fetch_one(&self.pool)
            .await
            .map_err(self.fail("has_begun"))?;
        Ok(groups > 0)
    }

    /// All global steps, in order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn steps(&self) -> Result<Vec<StepRow>, StoreError> {
        let rows: Vec<StepTuple> = sqlx::query_as(sql::SELECT_STEPS)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("steps"))?;
        rows.into_iter().map(|row| self.step_row(row)).collect()
    }

    /// The global step with number `step`; `None` if it was never opened.
    ///
    /// # Errors
    /// Any database error.
    pub async fn step(&self, step: u32) -> Result<Option<StepRow>, StoreError> {
        let row: Option<StepTuple> = sqlx::query_as(sql::SELECT_STEP)
            .bind(step)
            .fetch_optional(&self.pool)
            .await
            .map_err(self.fail("step"))?;
        row.map(|row| self.step_row(row)).transpose()
    }

    /// All evaluation rounds, in order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn evals(&self) -> Result<Vec<EvalRow>, StoreError> {
        let rows: Vec<(i64, i64, String, Option<String>)> = sqlx::query_as(sql::SELECT_EVALS)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("evals"))?;
        rows.into_iter()
            .map(|(round, version, _, metrics)| {
                Ok(EvalRow {
                    round: self.number(round)?,
                    policy_version: PolicyVersion(self.number(version)?),
                    metrics: self.json(metrics)?,
                })
            })
            .collect()
    }

    /// The lines of `metrics.jsonl`: evaluation 0, then each closed step followed by the
    /// evaluation after it.
    ///
    /// # Errors
    /// Any database error.
    pub async fn metrics(&self) -> Result<Vec<serde_json::Value>, StoreError> {
        let steps = self.steps().await?;
        let evals = self.evals().await?;
        let mut lines: Vec<(u32, bool, serde_json::Value)> = Vec::new();
        lines.extend(steps.into_iter().filter_map(|s| Some((s.step, false, s.metrics?))));
        lines.extend(evals.into_iter().filter_map(|e| Some((e.round, true, e.metrics?))));
        lines.sort_by_key(|(step, is_eval, _)| (*step, *is_eval));
        Ok(lines.into_iter().map(|(_, _, line)| line).collect())
    }

    /// All policy versions known to the run, in order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn versions(&self) -> Result<Vec<VersionRow>, StoreError> {
        let rows: Vec<(i64, i64, String, String)> = sqlx::query_as(sql::SELECT_VERSIONS)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("versions"))?;
        rows.into_iter()
            .map(|(version, lineage, checkpoint, state)| {
                Ok(VersionRow {
                    version: PolicyVersion(self.number(version)?),
                    lineage: self.number(lineage)?,
                    checkpoint: checkpoint.into(),
                    live: state == "live",
                })
            })
            .collect()
    }

    /// All batches, in order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn batches(&self) -> Result<Vec<BatchRow>, StoreError> {
        let rows: Vec<(i64, String, String, Option<String>)> = sqlx::query_as(sql::SELECT_BATCHES)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("batches"))?;
        rows.into_iter()
            .map(|(step, state, folder, digest)| {
                Ok(BatchRow {
                    step: self.number(step)?,
                    state: self.state(BatchState::parse(&state), &state)?,
                    folder: folder.into(),
                    digest,
                })
            })
            .collect()
    }

    /// Episodes of a step's batch with their advantages, in batch order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn batch_members(&self, step: u32) -> Result<Vec<(EpisodeId, f64)>, StoreError> {
        let rows: Vec<(String, f64)> = sqlx::query_as(sql::SELECT_MEMBERS)
            .bind(step)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("batch_members"))?;
        rows.into_iter().map(|(id, advantage)| Ok((self.parse(&id)?, advantage))).collect()
    }

    /// The group with this id; `None` if it was never opened.
    ///
    /// # Errors
    /// Any database error.
    pub async fn group(&self, id: GroupId) -> Result<Option<GroupRow>, StoreError> {
        let row: Option<GroupTuple> = sqlx::query_as(sql::SELECT_GROUP)
            .bind(id.to_string())
            .fetch_optional(&self.pool)
            .await
            .map_err(self.fail("group"))?;
        row.map(|row| self.group_row(row)).transpose()
    }

    /// The training groups of a global step, in order of opening.
    ///
    /// # Errors
    /// Any database error.
    pub async fn groups_of_step(&self, step: u32) -> Result<Vec<GroupRow>, StoreError> {
        self.groups(sql::TRAIN, step).await
    }

    /// The groups of an evaluation round, by task index.
    ///
    /// # Errors
    /// Any database error.
    pub async fn groups_of_eval(&self, round: u32) -> Result<Vec<GroupRow>, StoreError> {
        self.groups(sql::EVAL, round).await
    }

    async fn groups(&self, kind: &str, step: u32) -> Result<Vec<GroupRow>, StoreError> {
        let rows: Vec<GroupTuple> = sqlx::query_as(sql::SELECT_GROUPS)
            .bind(kind)
            .bind(step)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("groups"))?;
        rows.into_iter().map(|row| self.group_row(row)).collect()
    }

    /// Number of training groups opened so far, which is the sequence number of the next one.
    ///
    /// # Errors
    /// Any database error.
    pub async fn train_groups(&self) -> Result<u32, StoreError> {
        let (count,): (i64,) = sqlx::query_as(sql::COUNT_TRAIN_GROUPS)
            .fetch_one(&self.pool)
            .await
            .map_err(self.fail("train_groups"))?;
        self.number(count)
    }

    /// Number of attempts of a step's training groups that are in `state`.
    ///
    /// # Errors
    /// Any database error.
    pub async fn attempts_of_step(
        &self,
        step: u32,
        state: AttemptState,
    ) -> Result<u64, StoreError> {
        let (count,): (i64,) = sqlx::query_as(sql::COUNT_ATTEMPTS_OF_STEP)
            .bind(sql::TRAIN)
            .bind(step)
            .bind(state.name())
            .fetch_one(&self.pool)
            .await
            .map_err(self.fail("attempts_of_step"))?;
        self.number(count)
    }

    /// Outcomes of the sealed and broken attempts of a step's training groups.
    ///
    /// # Errors
    /// Any database error.
    pub async fn outcomes_of_step(&self, step: u32) -> Result<Vec<Outcome>, StoreError> {
        self.outcomes(sql::TRAIN, step).await
    }

    /// Outcomes of the sealed and broken attempts of an evaluation round.
    ///
    /// # Errors
    /// Any database error.
    pub async fn outcomes_of_eval(&self, round: u32) -> Result<Vec<Outcome>, StoreError> {
        self.outcomes(sql::EVAL, round).await
    }

    async fn outcomes(&self, kind: &str, step: u32) -> Result<Vec<Outcome>, StoreError> {
        let rows: Vec<(Option<String>,)> = sqlx::query_as(sql::SELECT_OUTCOMES)
            .bind(kind)
            .bind(step)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("outcomes"))?;
        rows.into_iter().filter_map(|(outcome,)| self.json(outcome).transpose()).collect()
    }

    /// Episodes of a group, in order of their member number.
    ///
    /// # Errors
    /// Any database error.
    pub async fn episodes_of_group(&self, id: GroupId) -> Result<Vec<EpisodeRow>, StoreError> {
        let rows: Vec<(String, String, String, i64)> = sqlx::query_as(sql::SELECT_EPISODES)
            .bind(id.to_string())
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("episodes_of_group"))?;
        rows.into_iter().map(|row| self.episode_row(row)).collect()
    }

    /// All episodes of the run, ordered by id.
    ///
    /// # Errors
    /// Any database error.
    pub async fn episodes(&self) -> Result<Vec<EpisodeRow>, StoreError> {
        let rows: Vec<(String, String, String, i64)> = sqlx::query_as(sql::SELECT_ALL_EPISODES)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("episodes"))?;
        rows.into_iter().map(|row| self.episode_row(row)).collect()
    }

    /// The sealed attempts of a group, ordered by member number.
    ///
    /// # Errors
    /// Any database error.
    pub async fn sealed_of_group(&self, id: GroupId) -> Result<Vec<AttemptRow>, StoreError> {
        let rows: Vec<AttemptTuple> = sqlx::query_as(sql::SELECT_SEALED)
            .bind(id.to_string())
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("sealed_of_group"))?;
        rows.into_iter().map(|row| self.attempt_row(row)).collect()
    }

    /// All attempts of an episode, in order.
    ///
    /// # Errors
    /// Any database error.
    pub async fn attempts(&self, id: EpisodeId) -> Result<Vec<AttemptRow>, StoreError> {
        let rows: Vec<AttemptTuple> = sqlx::query_as(sql::SELECT_ATTEMPTS)
            .bind(id.to_string())
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("attempts"))?;
        rows.into_iter().map(|row| self.attempt_row(row)).collect()
    }

    /// Attempts that were lost with an earlier coordinator and that can be resumed: each is the newest one
    /// of an open episode.
    ///
    /// # Errors
    /// Any database error.
    pub async fn lost_attempts(&self) -> Result<Vec<AttemptId>, StoreError> {
        let rows: Vec<(String,)> = sqlx::query_as(sql::SELECT_LOST)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("lost_attempts"))?;
        rows.iter().map(|(id,)| self.parse(id)).collect()
    }

    /// The newest attempts, newest first: of all episodes, or of training in `step`. Episodes without an
    /// attempt are among them.
    ///
    /// # Errors
    /// Any database error.
    pub async fn newest(
        &self,
        step: Option<u32>,
        limit: u32,
    ) -> Result<Vec<NewestRow>, StoreError> {
        let rows: Vec<NewestTuple> = sqlx::query_as(sql::SELECT_NEWEST)
            .bind(step)
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("newest"))?;
        let row = |(episode, open, task_id, attempt, state, outcome, summary): NewestTuple| {
            Ok(NewestRow {
                id: attempt.unwrap_or(episode),
                task_id,
                state: state.unwrap_or(open),
                outcome: self.json(outcome)?,
                summary: self.json(summary)?.unwrap_or_default(),
            })
        };
        rows.into_iter().map(row).collect()
    }

    /// An episode with its attempts and its trajectory, checked against the digest.
    ///
    /// # Errors
    /// [`StoreError::Absent`], [`StoreError::Record`], and any database error.
    pub async fn load_episode(&self, id: EpisodeId) -> Result<StoredEpisode, StoreError> {
        let (episode, attempts) = self.episode_with_attempts(id).await?;
        let best = attempts
            .iter()
            .find(|a| a.state == AttemptState::Sealed)
            .or_else(|| attempts.iter().rev().find(|a| a.blob.is_some()));
        let record = self.record_of(best).await?;
        Ok(StoredEpisode { episode, attempts, record })
    }

    /// As [`Reader::load_episode`], with the record of this attempt, if it stored one.
    ///
    /// # Errors
    /// [`StoreError::Absent`], [`StoreError::Record`], and any database error.
    pub async fn load_attempt(&self, id: AttemptId) -> Result<StoredEpisode, StoreError> {
        let (episode, attempts) = self.episode_with_attempts(id.episode).await?;
        let attempt = attempts
            .iter()
            .find(|attempt| attempt.id == id)
            .ok_or_else(|| StoreError::Absent { what: format!("attempt {id}") })?;
        let record = self.record_of(Some(attempt).filter(|a| a.blob.is_some())).await?;
        Ok(StoredEpisode { episode, attempts, record })
    }

    async fn episode_with_attempts(
        &self,
        id: EpisodeId,
    ) -> Result<(EpisodeRow, Vec<AttemptRow>), StoreError> {
        let members = self.episodes_of_group(id.group).await?;
        let episode = members
            .into_iter()
            .find(|e| e.id == id)
            .ok_or_else(|| StoreError::Absent { what: format!("episode {id}") })?;
        Ok((episode, self.attempts(id).await?))
    }

    async fn record_of(
        &self,
        attempt: Option<&AttemptRow>,
    ) -> Result<Option<EpisodeRecord>, StoreError> {
        match attempt {
            Some(attempt) => Ok(Some(self.load_record(attempt).await?)),
            None => Ok(None),
        }
    }

    /// The stored record of an attempt, checked against its digest.
    ///
    /// # Errors
    /// [`StoreError::Absent`] if nothing was stored, [`StoreError::Record`] if it is damaged.
    pub async fn load_record(&self, attempt: &AttemptRow) -> Result<EpisodeRecord, StoreError> {
        let digest = attempt.blob.clone().ok_or_else(|| StoreError::Absent {
            what: format!("the trajectory of attempt {}", attempt.id),
        })?;
        let path = self.blobs.path(&digest);
        let summary = attempt.summary.clone();
        let job_path = path.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            let bytes = fs_err::read(&job_path).map_err(RecordError::Unreadable)?;
            EpisodeRecord::decode(&bytes, &digest, summary)
        })
        .await;
        match loaded {
            Ok(Ok(record)) => Ok(record),
            Ok(Err(source)) => Err(StoreError::Record { path, source }),
            Err(_) => {
                let source = RecordError::Malformed("its decoder panicked");
                Err(StoreError::Record { path, source })
            }
        }
    }

    /// Digests of all stored files that rows refer to.
    pub(crate) async fn named_blobs(&self) -> Result<HashSet<String>, StoreError> {
        let rows: Vec<(String,)> = sqlx::query_as(sql::NAMED_BLOBS)
            .fetch_all(&self.pool)
            .await
            .map_err(self.fail("named_blobs"))?;
        Ok(rows.into_iter().map(|(digest,)| digest).collect())
    }

    pub(crate) fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    pub(crate) fn fail(&self, what: &'static str) -> impl Fn(sqlx::Error) -> StoreError + '_ {
        move |e| StoreError::from_db(&self.journal, what, e)
    }

    fn unreadable(&self, detail: impl Display) -> StoreError {
        StoreError::Unreadable { journal: self.journal.clone(), detail: detail.to_string() }
    }

    fn parse<T: FromStr<Err: Display>>(&self, text: &str) -> Result<T, StoreError> {
        text.parse().map_err(|e: T::Err| self.unreadable(e))
    }

    fn number<T: TryFrom<i64>>(&self, value: i64) -> Result<T, StoreError> {
        T::try_from(value).map_err(|_| self.unreadable(format!("number {value} is out of range")))
    }

    fn state<T>(&self, parsed: Option<T>, text: &str) -> Result<T, StoreError> {
        parsed.ok_or_else(|| self.unreadable(format!("unknown state `{text}`")))
    }

    fn json<T: serde::de::DeserializeOwned>(
        &self,
        text: Option<String>,
    ) -> Result<Option<T>, StoreError> {
        text.map(|t| serde_json::from_str(&t)).transpose().map_err(|e| self.unreadable(e))
    }

    fn step_row(&self, row: StepTuple) -> Result<StepRow, StoreError> {
        let (step, step_id, state, base, result, metrics, reason) = row;
        Ok(StepRow {
            step: self.number(step)?,
            step_id,
            state: self.state(StepState::parse(&state), &state)?,
            base_version: PolicyVersion(self.number(base)?),
            result: self.json(result)?,
            metrics: self.json(metrics)?,
            reason,
        })
    }

    fn group_row(&self, row: GroupTuple) -> Result<GroupRow, StoreError> {
        let (id, step, task_id, size, state, reason) = row;
        Ok(GroupRow {
            id: self.parse(&id)?,
            step: self.number(step)?,
            task_id,
            size: self.number(size)?,
            state: self.state(GroupState::parse(&state), &state)?,
            reason,
        })
    }

    fn episode_row(&self, row: (String, String, String, i64)) -> Result<EpisodeRow, StoreError> {
        let (id, state, task_id, attempts) = row;
        Ok(EpisodeRow {
            id: self.parse(&id)?,
            state: self.state(EpisodeState::parse(&state), &state)?,
            task_id,
            attempts: self.number(attempts)?,
        })
    }

    fn attempt_row(&self, row: AttemptTuple) -> Result<AttemptRow, StoreError> {
        let (id, state, outcome, summary, blob, blob_bytes, opened_us, closed_us) = row;
        Ok(AttemptRow {
            id: self.parse(&id)?,
            state: self.state(AttemptState::parse(&state), &state)?,
            outcome: self.json(outcome)?,
            summary: self.json(summary)?.unwrap_or_default(),
            blob,
            blob_bytes: self.number(blob_bytes.unwrap_or(0))?,
            opened_us,
            closed_us,
        })
    }
}
