//! HTTP server of the trainer: protocol version 1 of `orchestrate_handoff::protocol`.

use super::service::{TrainerHandle, TrainerOptions, TrainerRefusal, start};
use crate::CheckpointError;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use orchestrate_handoff::protocol::{ErrorBody, ErrorDetail, LogprobsRequest, StepRequest};
use orchestrate_http_server::{Denial, HttpServer, HttpSetupError, Routes};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Largest request body in bytes: requests contain paths of files rather than data.
const BODY_LIMIT: usize = 1 << 20;

/// Why a trainer cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeTrainerError {
    /// Checkpoints cannot be read or written.
    #[error("cannot start the trainer")]
    Start(#[from] CheckpointError),
    /// The HTTP server cannot be set up.
    #[error("cannot serve the trainer")]
    Serve(#[from] HttpSetupError),
    /// The task that starts or stops the trainer was cancelled or panicked.
    #[error("starting or stopping the trainer was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
}

#[derive(Clone)]
struct Server {
    trainer: TrainerHandle,
}

/// Serves a trainer on `listener` until `stop` is cancelled. It then accepts no new requests, stops
/// the current step at its next phase, and joins the trainer's thread.
///
/// # Errors
/// If the address is reachable from other hosts without a token or client certificates, a TLS file
/// cannot be used, or the checkpoints cannot be read or written.
pub async fn serve_trainer(
    options: TrainerOptions,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), ServeTrainerError> {
    let http = HttpServer::new(listener, options.http.clone())?;
    let (trainer, thread) = tokio::task::spawn_blocking(move || start(&options)).await??;
    let guard = Routes { open: &[], own: "", max_body_bytes: BODY_LIMIT, reply: denied };
    http.serve(routes(Server { trainer }), guard, stop).await;
    tokio::task::spawn_blocking(move || thread.stop()).await?;
    Ok(())
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
        .with_state(server)
}

fn denied(denial: &Denial) -> Response {
    problem(denial.status(), denial.code(), &denial.to_string())
}

async fn info(State(server): State<Server>) -> Response {
    Json(server.trainer.info()).into_response()
}

async fn submit(State(server): State<Server>, body: Bytes) -> Response {
    let request: StepRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return unexpected(&error),
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

async fn logprobs(State(server): State<Server>, body: Bytes) -> Response {
    let request: LogprobsRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return unexpected(&error),
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

/// Reply to a body that is not what the route expects.
fn unexpected(error: &serde_json::Error) -> Response {
    problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string())
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
