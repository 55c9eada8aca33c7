//! Routes of one episode.

use crate::answer::{count, sample};
use crate::chat::Chat;
use crate::dialect::Dialect;
use crate::episode::Episode;
use crate::messages::Messages;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::responses::Responses;
use crate::sampler::Sampler;
use crate::tokens::generate;
use axum::extract::{Extension, Path, Request};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// What clients put before a route: base URLs differ in whether they include the version, and some
/// clients add it again.
const VERSIONS: [&str; 3] = ["", "/v1", "/v1/v1"];

/// The routes of one episode, without a base path and for any key.
pub fn router(sampler: Arc<dyn Sampler>, options: GatewayOptions) -> Router {
    routes(options).layer(Extension(Episode::new(sampler, None)))
}

/// The routes, for requests that carry their [`Episode`].
pub(crate) fn routes(options: GatewayOptions) -> Router {
    let mut router = Router::new();
    for version in VERSIONS {
        let path = |route: &str| format!("{version}/{route}");
        router = router
            .route(&path("chat/completions"), post(sample::<Chat>))
            .route(&path("responses"), post(sample::<Responses>))
            .route(&path("responses/input_tokens"), post(count::<Responses>))
            .route(&path("messages"), post(sample::<Messages>))
            .route(&path("messages/count_tokens"), post(count::<Messages>))
            .route(&path("models"), get(models))
            .route(&path("models/{*id}"), get(model));
    }
    router
        .route("/inference/v1/generate", post(generate))
        // What Claude Code asks to see whether there is a server.
        .route("/api/hello", get(async || Json(json!({"message": "hello"}))))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::new(options))
}

/// A model in the form of both vendors.
fn described(sampler: &dyn Sampler) -> Value {
    json!({
        "id": sampler.model(),
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "orchestrate",
        "display_name": sampler.model(),
        "max_model_len": sampler.context(),
        "max_input_tokens": sampler.context(),
    })
}

async fn models(Extension(episode): Extension<Episode>, uri: Uri, headers: HeaderMap) -> Response {
    if let Err(problem) = episode.check_key(&headers) {
        return problem.response(spoken(&uri, &headers));
    }
    let sampler = episode.sampler();
    Json(json!({
        "object": "list",
        "data": [described(&**sampler)],
        "has_more": false,
        "first_id": sampler.model(),
        "last_id": sampler.model(),
    }))
    .into_response()
}

async fn model(
    Extension(episode): Extension<Episode>,
    Path(parameters): Path<HashMap<String, String>>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let sampler = episode.sampler();
    let found = episode.check_key(&headers).and_then(|()| {
        let message = || format!("the model `{}` is served here, no other", sampler.model());
        let known = parameters.get("id").is_some_and(|id| id == sampler.model());
        known.then_some(()).ok_or_else(|| Problem::new(Kind::Model, message()))
    });
    match found {
        Ok(()) => Json(described(&**sampler)).into_response(),
        Err(problem) => problem.response(spoken(&uri, &headers)),
    }
}

/// The dialect of a request to a path of no dialect's own.
pub(crate) fn spoken(uri: &Uri, headers: &HeaderMap) -> Dialect {
    let path = uri.path();
    if headers.contains_key("anthropic-version") || path.contains("/messages") {
        Dialect::Messages
    } else if path.contains("/responses") {
        Dialect::Responses
    } else {
        Dialect::Chat
    }
}

async fn not_found(request: Request) -> Response {
    let message = "unknown path: this server has chat/completions, responses, messages and models";
    Problem::new(Kind::Route, message).response(spoken(request.uri(), request.headers()))
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("the method {} is not allowed here", request.method());
    Problem::new(Kind::Method, message).response(spoken(request.uri(), request.headers()))
}
