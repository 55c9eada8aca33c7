//! The episodes of a server, each below a secret path.

use crate::episode::Episode;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::router::{routes, spoken};
use crate::sampler::Sampler;
use crate::secret::{SecretDigest, secret};
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;

/// Maximum time that a request waits for its episode to be restored.
const RESTORE_WAIT: Duration = Duration::from_secs(20);

/// Episodes by the digests of their secrets; clones are the same registry.
#[derive(Clone)]
pub struct Registry {
    episodes: Arc<RwLock<HashMap<SecretDigest, Episode>>>,
    /// Secrets that an earlier process gave out and that are about to be restored.
    expected: watch::Sender<HashSet<SecretDigest>>,
    options: GatewayOptions,
}

impl fmt::Debug for Registry {
    /// Without the secrets.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = out.debug_struct("Registry");
        out.field("episodes", &self.len()).field("options", &self.options).finish_non_exhaustive()
    }
}

impl Registry {
    /// A registry without episodes.
    pub fn new(options: GatewayOptions) -> Self {
        Self { episodes: Arc::default(), expected: watch::Sender::default(), options }
    }

    /// Adds an episode under a new secret. Dropping the registration removes it; replies that are
    /// being sampled are not interrupted by that.
    pub fn register(&self, sampler: Arc<dyn Sampler>) -> Registration {
        let secret: Arc<str> = secret().into();
        let entry = self.enter(SecretDigest::of(secret.as_bytes()), sampler);
        Registration { secret, _entry: entry }
    }

    /// Adds an episode under the secret that has this digest.
    pub(crate) fn enter(&self, secret: SecretDigest, sampler: Arc<dyn Sampler>) -> Entry {
        let key = self.options.require_key.then_some(secret);
        self.write().insert(secret, Episode::new(sampler, key));
        Entry { secret, registry: self.clone() }
    }

    /// Lets requests with these secrets wait, because their episodes are about to be restored.
    pub(crate) fn expect(&self, secrets: impl IntoIterator<Item = SecretDigest>) {
        self.expected.send_modify(|expected| expected.extend(secrets));
    }

    /// Lets requests with these secrets be answered: their episodes were restored, or never will be.
    pub(crate) fn settle(&self, secrets: impl IntoIterator<Item = SecretDigest>) {
        self.expected.send_modify(|expected| {
            for secret in secrets {
                expected.remove(&secret);
            }
        });
    }

    /// Waits until nothing with this secret is about to be restored; `false` if that takes too long.
    pub(crate) async fn is_settled(&self, secret: SecretDigest) -> bool {
        let mut expected = self.expected.subscribe();
        let settled = expected.wait_for(|expected| !expected.contains(&secret));
        // The sender is part of this registry.
        tokio::time::timeout(RESTORE_WAIT, settled).await.is_ok()
    }

    /// Number of episodes.
    pub fn len(&self) -> usize {
        self.episodes.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The routes of all episodes, below `/e/SECRET`.
    pub fn router(&self) -> Router {
        let routes = routes(self.options).layer(from_fn_with_state(self.clone(), enter));
        Router::new().nest("/e/{secret}", routes).fallback(unknown)
    }

    fn find(&self, secret: SecretDigest) -> Option<Episode> {
        self.episodes.read().unwrap_or_else(PoisonError::into_inner).get(&secret).cloned()
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<SecretDigest, Episode>> {
        self.episodes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An episode's place in a [`Registry`], which ends when this is dropped.
pub(crate) struct Entry {
    secret: SecretDigest,
    registry: Registry,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.registry.write().remove(&self.secret);
    }
}

/// An episode's place in a [`Registry`], and its secret.
pub struct Registration {
    secret: Arc<str>,
    _entry: Entry,
}

impl fmt::Debug for Registration {
    /// Without the secret.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Registration").finish_non_exhaustive()
    }
}

impl Registration {
    /// The secret: all that a client needs to sample.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// The path below which the routes are.
    pub fn path(&self) -> String {
        format!("/e/{}", self.secret)
    }
}

/// Gives a request its episode.
async fn enter(
    State(registry): State<Registry>,
    Path(parameters): Path<HashMap<String, String>>,
    mut request: Request,
    next: Next,
) -> Response {
    let secret = parameters.get("secret").map_or("", String::as_str);
    let secret = SecretDigest::of(secret.as_bytes());
    if !registry.is_settled(secret).await {
        let message = "the run was restarted and has not restored this episode yet; send it again";
        let dialect = spoken(request.uri(), request.headers());
        return Problem::new(Kind::Unavailable, message).response(dialect);
    }
    match registry.find(secret) {
        Some(episode) => {
            request.extensions_mut().insert(episode);
            next.run(request).await
        }
        None => unknown(request).await,
    }
}

async fn unknown(request: Request) -> Response {
    let message = "there is no episode at this base URL: it is over, or the URL is incomplete";
    Problem::new(Kind::Episode, message).response(spoken(request.uri(), request.headers()))
}
