//! The image lock of a run, kept in its journal.

use orchestrate_sandbox::{ImageIdentity, ImageLock, SandboxError, SandboxErrorKind};
use orchestrate_store::{ImageRecords, ImageRow, StoreError};

/// Records in the journal which image each name stood for.
#[derive(Debug)]
pub(crate) struct Journal(pub(crate) ImageRecords);

fn failed(image: &str) -> impl Fn(StoreError) -> SandboxError {
    move |error| SandboxError {
        sandbox: "journal".to_owned(),
        kind: SandboxErrorKind::NotRecorded {
            image: image.to_owned(),
            source: std::sync::Arc::new(error),
        },
    }
}

/// A recorded image, as the sandbox crate represents it.
pub(crate) fn identity(row: ImageRow) -> ImageIdentity {
    ImageIdentity { id: row.image_id, digest: row.digest }
}

#[async_trait::async_trait]
impl ImageLock for Journal {
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError> {
        Ok(self.0.get(image).await.map_err(failed(image))?.map(identity))
    }

    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError> {
        let row = ImageRow {
            name: image.to_owned(),
            image_id: found.id.clone(),
            digest: found.digest.clone(),
        };
        self.0.record(&row).await.map(identity).map_err(failed(image))
    }
}
