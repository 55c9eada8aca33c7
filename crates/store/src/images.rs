//! Container images of a run: which image each name referred to at its first use.

use crate::db::Write;
use crate::error::StoreError;
use crate::read::Reader;
use crate::sql;
use crate::store::Store;
use camino::Utf8PathBuf;
use sqlx::sqlite::SqlitePool;

/// Which image a name used by tasks refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRow {
    /// Image name as tasks give it, e.g. `orchestrate/micro:latest`.
    pub name: String,
    /// Id of the image in the container engine, `sha256:…`.
    pub image_id: String,
    /// Digest of its registry manifest; `None` for an image built locally.
    pub digest: Option<String>,
}

/// Reads and writes [`ImageRow`]s under the coordinator's epoch. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ImageRecords {
    journal: Utf8PathBuf,
    pool: SqlitePool,
    epoch: i64,
    reader: Reader,
}

impl Store {
    /// A handle for the sandbox provider, which resolves image names.
    pub fn image_records(&self) -> ImageRecords {
        ImageRecords {
            journal: self.journal.clone(),
            pool: self.pool.clone(),
            epoch: self.epoch,
            reader: self.reader().clone(),
        }
    }
}

impl ImageRecords {
    /// The image recorded for `name`, if any.
    ///
    /// # Errors
    /// Any database error.
    pub async fn get(&self, name: &str) -> Result<Option<ImageRow>, StoreError> {
        self.reader.image(name).await
    }

    /// Records the image of a name unless the name has one already, and returns the recorded image.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] once another coordinator has taken over the run, and any database error.
    pub async fn record(&self, row: &ImageRow) -> Result<ImageRow, StoreError> {
        // The common case: a name is written once and looked up at every start.
        if let Some(known) = self.get(&row.name).await? {
            return Ok(known);
        }
        let mut write = Write::begin(&self.pool, &self.journal, "record_image", self.epoch).await?;
        let fail = write.fail();
        sqlx::query(sql::INSERT_IMAGE)
            .bind(&row.name)
            .bind(&row.image_id)
            .bind(&row.digest)
            .bind(write.epoch)
            .bind(write.now)
            .execute(&mut *write.tx)
            .await
            .map_err(fail)?;
        write.commit().await?;
        Ok(self.get(&row.name).await?.unwrap_or_else(|| row.clone()))
    }
}

impl Reader {
    /// All recorded images, by name.
    ///
    /// # Errors
    /// Any database error.
    pub async fn images(&self) -> Result<Vec<ImageRow>, StoreError> {
        let rows: Vec<(String, String, Option<String>)> = sqlx::query_as(sql::SELECT_IMAGES)
            .fetch_all(self.pool())
            .await
            .map_err(self.fail("images"))?;
        Ok(rows.into_iter().map(row).collect())
    }

    async fn image(&self, name: &str) -> Result<Option<ImageRow>, StoreError> {
        let found: Option<(String, String, Option<String>)> = sqlx::query_as(sql::SELECT_IMAGE)
            .bind(name)
            .fetch_optional(self.pool())
            .await
            .map_err(self.fail("images"))?;
        Ok(found.map(row))
    }
}

fn row((name, image_id, digest): (String, String, Option<String>)) -> ImageRow {
    ImageRow { name, image_id, digest }
}
