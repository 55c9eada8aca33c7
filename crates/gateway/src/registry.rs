//! The episodes of a server, each below a secret path.

use crate::episode::Episode;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::router::{routes, spoken};
use crate::sampler::Sampler;
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::sync::{Arc, PoisonError, RwLock};

/// Random bytes of a secret.
const SECRET_BYTES: usize = 24;

/// Generates a secret, in hexadecimal.
pub(crate) fn secret() -> String {
    let mut secret = String::with_capacity(2 * SECRET_BYTES);
    for byte in rand::random::<[u8; SECRET_BYTES]>() {
        // Writing to a string does not fail.
        let _ = write!(secret, "{byte:02x}");
    }
    secret
}

/// Episodes by their secrets; clones are the same registry.
#[derive(Clone)]
pub struct Registry {
    episodes: Arc<RwLock<HashMap<Arc<str>, Episode>>>,
    options: GatewayOptions,
}

impl fmt::Debug for Registry {
    /// Without the secrets.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = out.debug_struct("Registry");
        out.field("episodes", &self.len()).field("options", &self.options).finish()
    }
}

impl Registry {
    /// A registry without episodes.
    pub fn new(options: GatewayOptions) -> Self {
        Self { episodes: Arc::default(), options }
    }

    /// Adds an episode under a new secret. Dropping the registration removes it; replies that are
    /// being sampled are not interrupted by that.
    pub fn register(&self, sampler: Arc<dyn Sampler>) -> Registration {
        let secret: Arc<str> = secret().into();
        let key = self.options.require_key.then(|| Arc::clone(&secret));
        let episode = Episode::new(sampler, key);
        self.write().insert(Arc::clone(&secret), episode);
        Registration { secret, registry: self.clone() }
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

    fn find(&self, secret: &str) -> Option<Episode> {
        self.episodes.read().unwrap_or_else(PoisonError::into_inner).get(secret).cloned()
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<Arc<str>, Episode>> {
        self.episodes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An episode's place in a [`Registry`].
pub struct Registration {
    secret: Arc<str>,
    registry: Registry,
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

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.write().remove(&self.secret);
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
