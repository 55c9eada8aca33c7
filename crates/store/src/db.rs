//! Connections, and the only way to write: a transaction that starts with the epoch check.

use crate::error::StoreError;
use crate::sql;
use camino::{Utf8Path, Utf8PathBuf};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Connection, SqlSafeStr, Sqlite, Transaction};
use std::time::Duration;

/// Name of the journal inside a run folder.
pub const JOURNAL_FILE: &str = "orchestrate.db";
/// How long to wait for another process (a backup, a viewer) that has locked the database.
const BUSY_TIMEOUT: Duration = Duration::from_mins(1);
/// Read connections: the run loop makes one query at a time, `orchestrate show` a few.
const READERS: u32 = 4;

/// Version, description and text of each file in `migrations/sqlite`, oldest first. Listed by hand,
/// because sqlx's macro that reads the folder compiles `SQLite` a second time, for the build machine.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "create journal", include_str!("../../../migrations/sqlite/0001_create_journal.sql")),
    (2, "record images", include_str!("../../../migrations/sqlite/0002_record_images.sql")),
    (3, "record amendments", include_str!("../../../migrations/sqlite/0003_record_amendments.sql")),
    (4, "record kind", include_str!("../../../migrations/sqlite/0004_record_kind.sql")),
];

fn migrator() -> Migrator {
    let migrations = MIGRATIONS.iter().map(|&(version, description, sql)| {
        let kind = MigrationType::Simple;
        Migration::new(version, description.into(), kind, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(migrations.collect())
}

fn options(journal: &Utf8Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(journal)
        .foreign_keys(true)
        .journal_mode(SqliteJournalMode::Wal)
        // FULL: an acknowledged commit survives a power failure, not only a crash.
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(BUSY_TIMEOUT)
}

/// The single write connection.
pub(crate) async fn writer(journal: &Utf8Path, create: bool) -> Result<SqlitePool, StoreError> {
    SqlitePoolOptions::new()
        .max_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        // SQLite ends a transaction by itself when the disk is full. The driver does not notice and
        // would reject every later transaction on that connection.
        .after_release(|connection, _| Box::pin(async move { Ok(!connection.is_in_transaction()) }))
        .connect_with(options(journal).create_if_missing(create))
        .await
        .map_err(|e| StoreError::from_db(journal, "open", e))
}

/// Connections that cannot write. They create no files in a read-only folder.
pub(crate) async fn readers(journal: &Utf8Path) -> Result<SqlitePool, StoreError> {
    let options = SqliteConnectOptions::new()
        .filename(journal)
        .busy_timeout(BUSY_TIMEOUT)
        .pragma("query_only", "ON");
    let options = match Access::of(journal) {
        Access::Writable => options,
        Access::ReadOnly { wal: false, .. } => options.read_only(true).immutable(true),
        Access::ReadOnly { wal: true, shared_memory: true } => options.read_only(true),
        Access::ReadOnly { wal: true, shared_memory: false } => {
            return Err(StoreError::NeedsRecovery { journal: journal.to_owned() });
        }
    };
    SqlitePoolOptions::new()
        .max_connections(READERS)
        .connect_with(options)
        .await
        .map_err(|e| StoreError::from_db(journal, "open", e))
}

/// How a journal can be opened for reading. SQLite opens a database in WAL mode only if it can use
/// or create the `-shm` file next to it; a database without a `-wal` file can be declared immutable
/// instead.
#[derive(Debug, Clone, Copy)]
enum Access {
    Writable,
    ReadOnly { wal: bool, shared_memory: bool },
}

impl Access {
    fn of(journal: &Utf8Path) -> Self {
        use rustix::fs::Access as Mode;
        let folder = journal.parent().unwrap_or(journal);
        let may = |path: &Utf8Path, mode| rustix::fs::access(path.as_std_path(), mode).is_ok();
        if may(folder, Mode::WRITE_OK | Mode::EXEC_OK) && may(journal, Mode::WRITE_OK) {
            return Self::Writable;
        }
        let length = |suffix: &str| {
            fs_err::metadata(format!("{journal}{suffix}")).map(|metadata| metadata.len()).ok()
        };
        let shared_memory = length("-shm").is_some();
        // An empty log next to a `-shm` file may belong to a live run.
        let wal = length("-wal").is_some_and(|bytes| bytes > 0 || shared_memory);
        Self::ReadOnly { wal, shared_memory }
    }
}

/// Fails if the journal has no byte, which SQLite would take for a new database.
pub(crate) fn check_not_empty(journal: &Utf8Path) -> Result<(), StoreError> {
    let length = |path: &str| fs_err::metadata(path).map_or(0, |about| about.len());
    // In WAL mode a new database may be in its log only.
    if length(journal.as_str()) > 0 || length(&format!("{journal}-wal")) > 0 {
        return Ok(());
    }
    Err(StoreError::Corrupt { journal: journal.to_owned(), detail: "it is empty".to_owned() })
}

/// Fails if the schema is newer than this program. A schema that is older, or not complete because
/// the creation was interrupted, is left to the queries.
pub(crate) async fn check_version(pool: &SqlitePool, journal: &Utf8Path) -> Result<(), StoreError> {
    let found: Result<(Option<i64>,), _> =
        sqlx::query_as("SELECT max(version) FROM _sqlx_migrations").fetch_one(pool).await;
    let known = MIGRATIONS.last().map_or(0, |(version, ..)| *version);
    match found {
        Ok((Some(version),)) if version > known => {
            let detail = format!("schema version {version}, this program reads up to {known}");
            Err(StoreError::Newer { journal: journal.to_owned(), detail })
        }
        Ok(_) | Err(sqlx::Error::Database(_)) => Ok(()),
        Err(error) => Err(StoreError::from_db(journal, "open", error)),
    }
}

/// Migrates the schema to the current version, one transaction per migration. A newer schema is an
/// error.
pub(crate) async fn migrate(pool: &SqlitePool, journal: &Utf8Path) -> Result<(), StoreError> {
    use sqlx::migrate::MigrateError;
    migrator().run(pool).await.map_err(|e| match e {
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) => {
            StoreError::Newer { journal: journal.to_owned(), detail: e.to_string() }
        }
        MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _) => {
            StoreError::from_db(journal, "migrate", e)
        }
        other => {
            let (journal, source) = (journal.to_owned(), sqlx::Error::Migrate(Box::new(other)));
            StoreError::Db { journal, what: "migrate", source }
        }
    })
}

/// Fails with [`StoreError::Corrupt`] if SQLite's quick check finds a problem.
pub(crate) async fn check(pool: &SqlitePool, journal: &Utf8Path) -> Result<(), StoreError> {
    let (verdict,): (String,) = sqlx::query_as("PRAGMA quick_check(1)")
        .fetch_one(pool)
        .await
        .map_err(|e| StoreError::from_db(journal, "check", e))?;
    if verdict == "ok" {
        Ok(())
    } else {
        Err(StoreError::Corrupt { journal: journal.to_owned(), detail: verdict })
    }
}

/// An open write transaction. Dropping it without [`Write::commit`] rolls it back.
pub(crate) struct Write {
    pub(crate) tx: Transaction<'static, Sqlite>,
    pub(crate) epoch: i64,
    pub(crate) now: i64,
    what: &'static str,
    journal: Utf8PathBuf,
}

impl Write {
    /// Starts the transaction. `BEGIN IMMEDIATE` takes the write lock first, so that the epoch cannot
    /// change between its check and the commit: a replaced coordinator gets [`StoreError::Fenced`].
    pub(crate) async fn begin(
        pool: &SqlitePool,
        journal: &Utf8Path,
        what: &'static str,
        epoch: i64,
    ) -> Result<Self, StoreError> {
        let fail = |e| StoreError::from_db(journal, what, e);
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.map_err(fail)?;
        let mine: Option<(i64,)> = sqlx::query_as(sql::CHECK_EPOCH)
            .bind(epoch)
            .fetch_optional(&mut *tx)
            .await
            .map_err(fail)?;
        if mine.is_none() {
            return Err(StoreError::Fenced { epoch });
        }
        let now = orchestrate_types::unix_micros();
        Ok(Self { tx, epoch, now, what, journal: journal.to_owned() })
    }

    /// Returns a function that translates driver errors of this write.
    pub(crate) fn fail(&self) -> impl Fn(sqlx::Error) -> StoreError + use<> {
        let (journal, what) = (self.journal.clone(), self.what);
        move |e| StoreError::from_db(&journal, what, e)
    }

    /// The error for a transition that the row's current state does not allow.
    pub(crate) fn refuse(&self, detail: impl Into<String>) -> StoreError {
        StoreError::Refused { what: self.what, detail: detail.into() }
    }

    /// Commits the transaction durably.
    pub(crate) async fn commit(self) -> Result<(), StoreError> {
        let (journal, what) = (self.journal, self.what);
        self.tx.commit().await.map_err(|e| StoreError::from_db(&journal, what, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reader, Store};
    use sqlx::Executor;

    #[test]
    fn every_file_of_the_folder_is_a_migration() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations/sqlite");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        let listed: Vec<_> = MIGRATIONS
            .iter()
            .map(|(version, what, _)| format!("{version:04}_{}.sql", what.replace(' ', "_")))
            .collect();
        assert_eq!(files, listed);
    }

    #[tokio::test]
    async fn every_statement_prepares_against_the_migrated_schema() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Utf8PathBuf::from_path_buf(folder.path().join("j.db")).unwrap();
        let pool = writer(&journal, true).await.unwrap();
        migrate(&pool, &journal).await.unwrap();
        for statement in sql::ALL {
            if let Err(error) = pool.prepare(statement.into_sql_str()).await {
                panic!("{statement}: {error}");
            }
        }
    }

    #[tokio::test]
    async fn newer_schema_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(folder.path().to_owned()).unwrap();
        let journal = root.join(JOURNAL_FILE);
        let pool = writer(&journal, true).await.unwrap();
        migrate(&pool, &journal).await.unwrap();
        let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, \
                     execution_time) VALUES (999, 'future', 1, x'00', 0)";
        sqlx::query(newer).execute(&pool).await.unwrap();
        let error = migrate(&pool, &journal).await.unwrap_err();
        assert!(matches!(error, StoreError::Newer { .. }), "{error}");
        let error = Reader::open(&root).await.unwrap_err();
        assert!(error.to_string().contains("schema version 999"), "{error}");
    }

    #[tokio::test]
    async fn a_journal_that_sqlite_cannot_open_is_reported_with_its_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Utf8PathBuf::from_path_buf(folder.path().join("j.db")).unwrap();
        // SQLite cannot open a folder, as it cannot where it finds no locks or no shared memory.
        fs_err::create_dir(&journal).unwrap();
        let error = writer(&journal, true).await.unwrap_err();
        let kind = crate::file_system::of(&journal).unwrap().kind;
        let message = error.to_string();
        for part in [journal.as_str(), &format!("the file system `{kind}` at "), "--run-dir"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[tokio::test]
    async fn empty_journal_is_reported_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(folder.path().to_owned()).unwrap();
        fs_err::write(root.join(JOURNAL_FILE), "").unwrap();
        let errors = [Reader::open(&root).await.err(), Store::open(&root).await.err()];
        for error in errors {
            let error = error.unwrap().to_string();
            assert!(error.contains("is damaged (it is empty)"), "{error}");
        }
    }
}
