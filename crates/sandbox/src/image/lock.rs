//! The image lock: which image each name stands for, for all attempts and all hosts of a run.

use crate::error::SandboxError;
use bollard::models::ImageInspect;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Identifies an image independently of its names.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ImageIdentity {
    /// The daemon's id of the image, `sha256:…`.
    pub id: String,
    /// Digest of its manifest, by which a registry delivers the same image again; `None` if the
    /// image was never in a registry.
    pub digest: Option<String>,
}

impl ImageIdentity {
    /// The identity of an image that the daemon described. Prefers its digest in `repository`.
    /// `None` if the description has no id.
    pub(super) fn of(found: ImageInspect, repository: &str) -> Option<Self> {
        let digests = found.repo_digests.unwrap_or_default();
        let pairs = || digests.iter().filter_map(|digest| digest.split_once('@'));
        let own = pairs().find(|(name, _)| *name == repository).or_else(|| pairs().next());
        Some(Self { id: found.id?, digest: own.map(|(_, digest)| digest.to_owned()) })
    }

    /// Whether both identify the same image: by id, or by digest, because daemons may assign
    /// different ids to the same image.
    pub fn is_same_image(&self, other: &Self) -> bool {
        self.id == other.id || (self.digest.is_some() && self.digest == other.digest)
    }
}

impl std::fmt::Display for ImageIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.digest {
            Some(digest) => write!(f, "{} (digest {digest})", self.id),
            None => f.write_str(&self.id),
        }
    }
}

/// Records which image each name stood for when a run first used it.
#[async_trait::async_trait]
pub trait ImageLock: Send + Sync + std::fmt::Debug {
    /// Returns the recorded image of a name, if there is one.
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError>;

    /// Records `found` for a name unless an image is recorded already. Returns the recorded image.
    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError>;
}

/// An image lock that lives as long as its provider.
#[derive(Debug, Default)]
pub struct InMemoryImageLock(Mutex<HashMap<String, ImageIdentity>>);

#[async_trait::async_trait]
impl ImageLock for InMemoryImageLock {
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(image).cloned())
    }

    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError> {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(recorded.entry(image.to_owned()).or_insert_with(|| found.clone()).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_prefers_the_digest_of_its_own_repository() {
        let found = ImageInspect {
            id: Some("sha256:1".into()),
            repo_digests: Some(vec!["other@sha256:2".into(), "a/b@sha256:3".into()]),
            ..ImageInspect::default()
        };
        let digest = |repository| ImageIdentity::of(found.clone(), repository).unwrap().digest;
        assert_eq!(digest("a/b").as_deref(), Some("sha256:3"));
        assert_eq!(digest("c").as_deref(), Some("sha256:2"));
    }

    #[test]
    fn images_are_the_same_by_id_or_by_digest() {
        let image = |id: &str, digest: Option<&str>| ImageIdentity {
            id: id.into(),
            digest: digest.map(str::to_owned),
        };
        assert!(image("1", None).is_same_image(&image("1", Some("d"))));
        assert!(image("1", Some("d")).is_same_image(&image("2", Some("d"))));
        assert!(!image("1", None).is_same_image(&image("2", None)));
        assert!(!image("1", Some("d")).is_same_image(&image("2", Some("e"))));
    }
}
