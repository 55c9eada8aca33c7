//! HTTP server of the trainer: protocol version 1 of `orchestrate_handoff::protocol`.

use super::service::{TrainerHandle, TrainerOptions, TrainerRefusal, start};
use crate::CheckpointError;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use orchestrate_handoff::protocol::{ErrorBody, ErrorDetail, LogprobsRequest, StepRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Largest request body in bytes: requests contain paths of files rather than data.
const BODY_LIMIT: usize = 1 << 20;

/// Number of bytes of a larger body that are read and discarded before replying: a client that is
/// still sending when the connection closes would not see the error.
const DRAIN_LIMIT: usize = 64 << 20;

/// Why a trainer cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeTrainerError {
    /// Checkpoints cannot be read or written.
    #[error("cannot start the trainer")]
    Start(#[from] CheckpointError),
    /// The HTTP listener failed.
    #[error("cannot serve the trainer")]
    Serve(#[from] std::io::Error),
    /// The task that starts or stops the trainer was cancelled or panicked.
    #[error("starting or stopping the trainer was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
}

#[derive(Clone)]
struct Server {
    trainer: TrainerHandle,
    token: Option<Arc<blake3::Hash>>,
}

/// Serves a trainer on `listener` until `stop` is cancelled. It then accepts no new requests, stops
/// the current step at its next phase, and joins the trainer's thread.
///
/// # Errors
/// If the checkpoints cannot be read or written, or the listener fails.
pub async fn serve_trainer(
    options: TrainerOptions,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), ServeTrainerError> {
    let token = options.token.as_deref().map(|token| Arc::new(blake3::hash(token.as_bytes())));
    let (trainer, thread) = tokio::task::spawn_blocking(move || start(&options)).await??;
    let server = Server { trainer, token };
    let served =
        axum::serve(listener, routes(server)).with_graceful_shutdown(stop.cancelled_owned()).await;
    tokio::task::spawn_blocking(move || thread.stop()).await?;
    Ok(served?)
}

fn routes(server: Server) -> Router {
    Router::new()
        .route("/v1/info", get(info))
        .route("/v1/steps", post(submit))
        .route("/v1/steps/{step_id}", get(status))
        .route("/v1/logprobs", post(logprobs))
        .route("/v1/checkpoints", post(checkpoint))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "not_found", "no such path") })
        .method_not_allowed_fallback(|| async {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "method not allowed on this path",
            )
        })
        .layer(from_fn_with_state(server.clone(), authorised))
        .with_state(server)
}

async fn authorised(State(server): State<Server>, request: Request, next: Next) -> Response {
    let Some(expected) = &server.token else { return next.run(request).await };
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let sent = sent.and_then(|value| value.strip_prefix("Bearer "));
    // blake3 hashes are compared in constant time.
    if sent.is_some_and(|token| blake3::hash(token.as_bytes()) == **expected) {
        return next.run(request).await;
    }
    problem(StatusCode::UNAUTHORIZED, "unauthorized", "a valid bearer token is required")
}

async fn info(State(server): State<Server>) -> Response {
    Json(server.trainer.info()).into_response()
}

async fn submit(State(server): State<Server>, body: Body) -> Response {
    let request: StepRequest = match parse(body).await {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    if !is_plain_id(&request.step_id) {
        let message = "step_id must be 1 to 128 letters, digits, `.`, `_` or `-`";
        return problem(StatusCode::BAD_REQUEST, "bad_step_id", message);
    }
    // Blocking, because it reads the batch.
    answer(tokio::task::spawn_blocking(move || server.trainer.submit(request)).await)
}

async fn status(State(server): State<Server>, Path(step_id): Path<String>) -> Response {
    answer(Ok(server.trainer.status(&step_id)))
}

async fn logprobs(State(server): State<Server>, body: Body) -> Response {
    let request: LogprobsRequest = match parse(body).await {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let queued = tokio::task::spawn_blocking(move || server.trainer.logprobs(&request)).await;
    match queued {
        Ok(Ok(reply)) => answer(Ok(reply.await.map_err(|_| TrainerRefusal::Down))),
        Ok(Err(refusal)) => refused(&refusal),
        Err(lost) => answer::<()>(Err(lost)),
    }
}

async fn checkpoint(State(server): State<Server>) -> Response {
    Json(server.trainer.checkpoint()).into_response()
}

/// Whether an id is safe in paths and file names.
fn is_plain_id(id: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=128).contains(&id.len()) && id.chars().all(plain)
}

async fn parse<T: DeserializeOwned>(body: Body) -> Result<T, Response> {
    let bad = |message: &str| problem(StatusCode::BAD_REQUEST, "bad_request", message);
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut length) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|e| bad(&format!("the request body ended early: {e}")))?;
        length += chunk.len();
        if length <= BODY_LIMIT {
            bytes.extend_from_slice(&chunk);
        } else if length > DRAIN_LIMIT {
            break;
        }
    }
    if length > BODY_LIMIT {
        let message = format!("the request body must be at most {BODY_LIMIT} bytes");
        return Err(problem(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &message));
    }
    serde_json::from_slice(&bytes).map_err(|e| bad(&e.to_string()))
}

fn answer<T: Serialize>(
    result: Result<Result<T, TrainerRefusal>, tokio::task::JoinError>,
) -> Response {
    match result {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(refusal)) => refused(&refusal),
        Err(lost) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            &format!("the request was lost: {lost}"),
        ),
    }
}

fn refused(refusal: &TrainerRefusal) -> Response {
    let (status, code) = match refusal {
        TrainerRefusal::Path { .. } => (StatusCode::BAD_REQUEST, "bad_manifest_path"),
        TrainerRefusal::Batch { .. } => (StatusCode::BAD_REQUEST, "bad_batch"),
        TrainerRefusal::Step(_) => (StatusCode::UNPROCESSABLE_ENTITY, "does_not_fit"),
        TrainerRefusal::OtherStep { .. } => (StatusCode::CONFLICT, "other_step"),
        TrainerRefusal::UnknownStep(_) => (StatusCode::NOT_FOUND, "unknown_step"),
        TrainerRefusal::Busy(_) => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
        TrainerRefusal::Down => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
    };
    problem(status, code, &refusal.to_string())
}

fn problem(status: StatusCode, code: &str, message: &str) -> Response {
    let error = ErrorDetail { code: code.to_owned(), message: message.to_owned() };
    (status, Json(ErrorBody { error })).into_response()
}
