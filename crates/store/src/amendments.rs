//! Settings that were changed when a run was resumed.

use crate::error::StoreError;
use crate::read::Reader;
use crate::sql;
use crate::store::Store;

/// A changed setting. The plan of the run with all amendments, in order, is what it runs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmendmentRow {
    /// The change, as `KEY=VALUE` with the value in TOML.
    pub assignment: String,
    /// Epoch of the coordinator that was started with it.
    pub epoch: i64,
    /// When it was recorded, µs since the Unix epoch.
    pub recorded_us: i64,
}

impl Store {
    /// Records changed settings, each as `KEY=VALUE`, in one transaction.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] once another coordinator has taken over the run, and any database error.
    pub async fn amend(&self, assignments: &[String]) -> Result<(), StoreError> {
        if assignments.is_empty() {
            return Ok(());
        }
        let mut write = self.begin("amend").await?;
        let fail = write.fail();
        for assignment in assignments {
            sqlx::query(sql::INSERT_AMENDMENT)
                .bind(assignment)
                .bind(write.epoch)
                .bind(write.now)
                .execute(&mut *write.tx)
                .await
                .map_err(&fail)?;
        }
        self.commit(write, "amend").await
    }
}

impl Reader {
    /// All changed settings, in the order of the changes. A journal of an older version has none.
    ///
    /// # Errors
    /// Any database error.
    pub async fn amendments(&self) -> Result<Vec<AmendmentRow>, StoreError> {
        let found: Result<Vec<(String, i64, i64)>, sqlx::Error> =
            sqlx::query_as(sql::SELECT_AMENDMENTS).fetch_all(self.pool()).await;
        let rows = match found {
            Err(sqlx::Error::Database(error)) if error.message().contains("no such table") => {
                return Ok(Vec::new());
            }
            found => found.map_err(self.fail("amendments"))?,
        };
        let row =
            |(assignment, epoch, recorded_us)| AmendmentRow { assignment, epoch, recorded_us };
        Ok(rows.into_iter().map(row).collect())
    }
}
