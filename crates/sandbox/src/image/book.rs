//! What the images of a run are: decided once, for all attempts and all hosts.

use crate::api::SandboxError;
use bollard::models::ImageInspect;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// What an image is, whatever its name means today.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ImageIdentity {
    /// The daemon's id of it, `sha256:…`.
    pub id: String,
    /// The digest of its manifest, by which a registry gives out the same again; `None` where it
    /// never was in a registry.
    pub digest: Option<String>,
}

impl ImageIdentity {
    /// From the daemon's answer.
    pub(super) fn of(found: ImageInspect, repository: &str) -> Option<Self> {
        let digests = found.repo_digests.unwrap_or_default();
        let pairs = || digests.iter().filter_map(|digest| digest.split_once('@'));
        let own = pairs().find(|(name, _)| *name == repository).or_else(|| pairs().next());
        Some(Self { id: found.id?, digest: own.map(|(_, digest)| digest.to_owned()) })
    }

    /// Whether both are the same image: by id, or (for daemons that number images differently) by
    /// what a registry calls it.
    pub fn is(&self, other: &Self) -> bool {
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

/// Where it is written down what the images of a run are.
#[async_trait::async_trait]
pub trait ImageBook: Send + Sync + std::fmt::Debug {
    /// What is written for this name.
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError>;

    /// Writes what a name means, where nothing was written before, and answers what is written.
    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError>;
}

/// A book that lives as long as its provider.
#[derive(Debug, Default)]
pub(crate) struct MemoryBook(Mutex<HashMap<String, ImageIdentity>>);

#[async_trait::async_trait]
impl ImageBook for MemoryBook {
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(image).cloned())
    }

    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError> {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(written.entry(image.to_owned()).or_insert_with(|| found.clone()).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_repository_asked_for() {
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
    fn the_same_by_id_or_by_digest() {
        let image = |id: &str, digest: Option<&str>| ImageIdentity {
            id: id.into(),
            digest: digest.map(str::to_owned),
        };
        assert!(image("1", None).is(&image("1", Some("d"))));
        assert!(image("1", Some("d")).is(&image("2", Some("d"))));
        assert!(!image("1", None).is(&image("2", None)));
        assert!(!image("1", Some("d")).is(&image("2", Some("e"))));
    }
}
