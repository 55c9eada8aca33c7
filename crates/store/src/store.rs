//! Opening a journal for writing.

use crate::blob::{Blobs, sync_folder};
use crate::db::{self, JOURNAL_FILE, Write};
use crate::error::StoreError;
#[cfg(feature = "failpoints")]
use crate::failpoint::Failpoint;
use crate::lock::{self, RunLock};
use crate::read::Reader;
use crate::rows::RunKind;
use crate::sql;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::RunId;
use sqlx::sqlite::SqlitePool;
use std::io::ErrorKind;
use std::sync::Arc;

/// Values that are fixed when a run is created.
#[derive(Debug, Clone)]
pub struct NewRun {
    /// Id of the run.
    pub run: RunId,
    /// Digest of the recorded plan. The caller compares it on resume.
    pub plan_digest: String,
    /// What it does.
    pub kind: RunKind,
}

/// The journal of one run, open for writing. At most one exists per run folder at any time, across
/// all processes of this machine. Dropping it, or the end of its process, releases the folder.
#[derive(Debug)]
pub struct Store {
    pub(crate) journal: Utf8PathBuf,
    pub(crate) pool: SqlitePool,
    pub(crate) blobs: Arc<Blobs>,
    pub(crate) epoch: i64,
    reader: Reader,
    lock: Arc<RunLock>,
    #[cfg(feature = "failpoints")]
    failpoint: Option<Arc<dyn Failpoint>>,
}

/// Closes a journal after its [`Store`] was dropped or given away.
#[derive(Debug)]
pub struct Closer {
    writer: SqlitePool,
    reader: SqlitePool,
}

impl Closer {
    /// Closes all connections. SQLite then merges its log into the journal, which becomes a single file
    /// that can be copied, and read where nothing can be written.
    pub async fn close(self) {
        self.reader.close().await;
        self.writer.close().await;
    }
}

/// Keeps other processes from opening a run, after its [`Store`] is dropped as well.
#[derive(Debug, Clone)]
pub struct RunHold {
    _lock: Arc<RunLock>,
}

impl RunHold {
    /// Takes the run in `folder` without opening it.
    ///
    /// # Errors
    /// [`StoreError::Locked`] if another process uses it, or another part of this one, and any file error.
    pub fn take(folder: &Utf8Path) -> Result<Self, StoreError> {
        Ok(Self { _lock: Arc::new(RunLock::take(folder)?) })
    }
}

/// Folders of a run that have entries once it has started. A trainer may write its first checkpoint before
/// that.
const RUN_FOLDERS: [&str; 2] = ["batches", "blobs"];
/// Name of a journal while it is created.
const UNFINISHED_JOURNAL: &str = "orchestrate.db.new";

/// Checks that `folder` does not hold a run whose journal is gone: a new journal next to its files would
/// hide that they belong to another run.
///
/// # Errors
/// [`StoreError::JournalLost`].
pub fn check_new(folder: &Utf8Path) -> Result<(), StoreError> {
    let has_entries = |name: &str| {
        std::fs::read_dir(folder.join(name)).is_ok_and(|mut entries| entries.next().is_some())
    };
    let started = lock::recorded_epoch(folder) > 0 || RUN_FOLDERS.into_iter().any(has_entries);
    if started && !folder.join(JOURNAL_FILE).exists() {
        return Err(StoreError::JournalLost { folder: folder.to_owned() });
    }
    Ok(())
}

impl Store {
    /// Creates the journal of a new run in `folder`, which is created if absent, and starts its first
    /// epoch.
    ///
    /// # Errors
    /// [`StoreError::Exists`] if the folder already has a journal, [`StoreError::Locked`] if another
    /// process uses the folder, and any file or database error.
    pub async fn create(folder: &Utf8Path, new: &NewRun) -> Result<Self, StoreError> {
        check_new(folder)?;
        fs_err::create_dir_all(folder).map_err(|e| StoreError::from_io(folder, e))?;
        let lock = RunLock::take(folder)?;
        let journal = folder.join(JOURNAL_FILE);
        if journal.exists() {
            return Err(StoreError::Exists { journal });
        }
        // The journal gets its name once it holds the run: whenever this process is killed, a journal that exists can
        // be resumed, and without one the creation can be repeated.
        let unfinished = folder.join(UNFINISHED_JOURNAL);
        for suffix in ["", "-wal", "-shm"] {
            let left = Utf8PathBuf::from(format!("{unfinished}{suffix}"));
            match fs_err::remove_file(&left) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(StoreError::from_io(&left, error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        let pool = db::writer(&unfinished, true).await?;
        db::migrate(&pool, &unfinished).await?;
        sqlx::query(sql::INSERT_RUN)
            .bind(new.run.to_string())
            .bind(&new.plan_digest)
            .bind(orchestrate_types::unix_micros())
            .bind(new.kind.name())
            .execute(&pool)
            .await
            .map_err(|e| StoreError::from_db(&unfinished, "create", e))?;
        // Merges SQLite's log into the file.
        pool.close().await;
        fs_err::rename(&unfinished, &journal)
            .and_then(|()| sync_folder(folder))
            .map_err(|e| StoreError::from_io(&journal, e))?;
        let pool = db::writer(&journal, false).await?;
        Self::begin_epoch(folder, journal, pool, lock).await
    }

    /// Opens the journal in `folder` to resume its run: checks the database, removes half-written
    /// files, starts the next epoch, and marks attempts left running by the previous one as lost.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Locked`], [`StoreError::Corrupt`],
    /// [`StoreError::OldCopy`], [`StoreError::Newer`], and any file or database error.
    pub async fn open(folder: &Utf8Path) -> Result<Self, StoreError> {
        let journal = folder.join(JOURNAL_FILE);
        if !journal.exists() {
            return Err(StoreError::Missing { folder: folder.to_owned() });
        }
        db::check_not_empty(&journal)?;
        let lock = RunLock::take(folder)?;
        let pool = db::writer(&journal, false).await?;
        db::check(&pool, &journal).await?;
        db::migrate(&pool, &journal).await?;
        Self::begin_epoch(folder, journal, pool, lock).await
    }

    async fn begin_epoch(
        folder: &Utf8Path,
        journal: Utf8PathBuf,
        pool: SqlitePool,
        mut lock: RunLock,
    ) -> Result<Self, StoreError> {
        let reader = Reader::open(folder).await?;
        let before = reader.run().await?.epoch;
        if before < lock.epoch_before() {
            let lock_epoch = lock.epoch_before();
            return Err(StoreError::OldCopy { journal, journal_epoch: before, lock_epoch });
        }
        let mut write = Write::begin(&pool, &journal, "begin_epoch", before).await?;
        let fail = write.fail();
        let (epoch,): (i64,) =
            sqlx::query_as(sql::NEXT_EPOCH).fetch_one(&mut *write.tx).await.map_err(&fail)?;
        let now = write.now;
        sqlx::query(sql::LOSE_ATTEMPTS)
            .bind(epoch)
            .bind(now)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?;
        sqlx::query(sql::REOPEN_QUARANTINED)
            .bind(epoch)
            .execute(&mut *write.tx)
            .await
            .map_err(&fail)?;
        write.commit().await?;
        lock.write(epoch)?;

        let blobs = Arc::new(Blobs::new(folder));
        let named = reader.named_blobs().await?;
        let removed = blobs.collect_garbage(&named)?;
        if removed > 0 {
            tracing::info!(removed, "removed stored files that no journal row refers to");
        }
        Ok(Self {
            journal,
            pool,
            blobs,
            epoch,
            reader,
            lock: Arc::new(lock),
            #[cfg(feature = "failpoints")]
            failpoint: None,
        })
    }

    /// This coordinator's epoch: 1 at the first start of the run, then counting up.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// A handle that closes this journal once the store is no longer used.
    pub fn closer(&self) -> Closer {
        Closer { writer: self.pool.clone(), reader: self.reader.pool().clone() }
    }

    /// Keeps the run from being opened by another process until it is dropped.
    pub fn hold(&self) -> RunHold {
        RunHold { _lock: self.lock.clone() }
    }

    /// A reader of the same journal, for queries without the epoch check.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Starts a write named `what` after checking the epoch.
    pub(crate) async fn begin(&self, what: &'static str) -> Result<Write, StoreError> {
        self.reach(what, "before").await;
        Write::begin(&self.pool, &self.journal, what, self.epoch).await
    }

    /// Commits a write; `what` names it for failpoints.
    pub(crate) async fn commit(&self, write: Write, what: &'static str) -> Result<(), StoreError> {
        write.commit().await?;
        self.reach(what, "after").await;
        Ok(())
    }

    /// Installs a failpoint that is called around every later write.
    #[cfg(feature = "failpoints")]
    pub fn set_failpoint(&mut self, failpoint: Arc<dyn Failpoint>) {
        self.failpoint = Some(failpoint);
    }

    /// Limits the database file to `pages` pages of 4 KiB, to simulate a full disk.
    #[cfg(feature = "failpoints")]
    pub async fn limit_pages(&self, pages: u32) {
        let pragma = format!("PRAGMA max_page_count = {pages}");
        let _ = sqlx::query(sqlx::AssertSqlSafe(pragma)).execute(&self.pool).await;
    }

    #[cfg(feature = "failpoints")]
    pub(crate) async fn reach(&self, what: &str, side: &str) {
        if let Some(failpoint) = &self.failpoint {
            failpoint.reach(&format!("{what}.{side}")).await;
        }
    }

    #[cfg(not(feature = "failpoints"))]
    #[expect(clippy::unused_self, reason = "same signature as the version with failpoints")]
    pub(crate) fn reach(&self, _what: &str, _side: &str) -> std::future::Ready<()> {
        std::future::ready(())
    }
}
