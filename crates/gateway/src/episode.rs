//! The episode that a request belongs to.

use crate::problem::{Kind, Problem};
use crate::responses::StoredResponses;
use crate::sampler::Sampler;
use crate::secret::SecretDigest;
use axum::http::{HeaderMap, HeaderValue, header};
use std::fmt;
use std::sync::Arc;

/// An episode behind the routes.
#[derive(Clone)]
pub(crate) struct Episode {
    sampler: Arc<dyn Sampler>,
    stored: Arc<StoredResponses>,
    /// Digest of the key that clients must send.
    key: Option<SecretDigest>,
}

impl fmt::Debug for Episode {
    /// Without the key.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Episode").field("sampler", &self.sampler).finish_non_exhaustive()
    }
}

impl Episode {
    pub(crate) fn new(sampler: Arc<dyn Sampler>, key: Option<SecretDigest>) -> Self {
        Self { sampler, stored: Arc::default(), key }
    }

    pub(crate) fn sampler(&self) -> &Arc<dyn Sampler> {
        &self.sampler
    }

    /// The responses that requests may continue by their ids.
    pub(crate) fn stored(&self) -> &StoredResponses {
        &self.stored
    }

    /// Checks the key in `authorization` or `x-api-key`, where one is required.
    pub(crate) fn check_key(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(key) = self.key else { return Ok(()) };
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = bearer.and_then(|value| value.strip_prefix(b"Bearer "));
        let plain = headers.get("x-api-key").map(HeaderValue::as_bytes);
        // How long it takes to compare digests tells nothing about the key.
        if [bearer, plain].into_iter().flatten().any(|sent| SecretDigest::of(sent) == key) {
            return Ok(());
        }
        let message = "the API key must be the secret of the episode's base URL";
        Err(Problem::new(Kind::Key, message))
    }
}
