//! Routes for workers. The server that mounts them checks the workers' secret first.
//!
//! | Route | Body | Reply |
//! |---|---|---|
//! | `POST /v1/episodes/take` | `worker`, `take_id`, `wait_s` | 200 with the episode, or 204 if none was offered in time |
//! | `POST /v1/episodes/{lease}/heartbeat` | | 200, or 410 if the lease is over |
//! | `POST /v1/episodes/{lease}/finish` | `reward` and `metrics`, or `failure` | 200 once the result is stored |
//! | `POST /v1/episodes/{lease}/abandon` | | 200 |
//! | `GET /v1/episodes` | | `waiting` offers and `leased` episodes, as numbers |

use super::Offers;
use super::wire::{Finish, Problem, Take, parsed};
use crate::secret::SecretDigest;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// Maximum time that a request waits for an episode.
const MAX_WAIT: Duration = Duration::from_mins(1);
/// Maximum time that a request waits until its result is stored.
const RECORD_TIMEOUT: Duration = Duration::from_mins(1);
/// Reason for refusing a result that arrived but will not be stored.
const NEVER_STORED: &str = "the run ended before it stored the result";
/// Maximum size of a body.
const BODY_BYTES: usize = 256 << 10;

pub(super) fn router(offers: Offers) -> Router {
    let agents = offers.registry.router();
    let workers = Router::new()
        .route("/v1/episodes", get(counts))
        .route("/v1/episodes/take", post(take))
        .route("/v1/episodes/{lease}/heartbeat", post(heartbeat))
        .route("/v1/episodes/{lease}/finish", post(finish))
        .route("/v1/episodes/{lease}/abandon", post(abandon))
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .with_state(offers);
    let unknown = Router::new().route("/v1/{*rest}", axum::routing::any(async || Problem::NoRoute));
    agents.merge(workers).merge(unknown)
}

async fn counts(State(offers): State<Offers>) -> Json<Value> {
    let (waiting, leased) = offers.leases().counts();
    Json(json!({"waiting": waiting, "leased": leased}))
}

async fn take(State(offers): State<Offers>, body: Bytes) -> Result<Response, Problem> {
    let take: Take = parsed(&body)?;
    take.check()?;
    drop(body);
    let wait = Duration::try_from_secs_f64(take.wait_s).unwrap_or_default().min(MAX_WAIT);
    let end = Instant::now() + wait;
    let mut changes = offers.changes.subscribe();
    loop {
        changes.mark_unchanged();
        if offers.closed.is_cancelled() {
            return Err(Problem::RunOver);
        }
        let who = (take.worker.as_str(), take.take_id.as_str());
        let time = (Instant::now(), offers.lease);
        let taken = offers.leases().take(&offers.registry, who, time);
        if let Some(taken) = taken {
            tracing::debug!(worker = take.worker, attempt = taken.attempt, "episode taken");
            return Ok(Json(&*taken).into_response());
        }
        tokio::select! {
            // The sender is part of `offers`.
            _ = changes.changed() => {}
            () = offers.closed.cancelled() => {}
            () = sleep_until(end) => return Ok(StatusCode::NO_CONTENT.into_response()),
        }
    }
}

/// The digest of a lease, once it is known whether the lease is restored.
async fn settled(offers: &Offers, lease: &str) -> Result<SecretDigest, Problem> {
    let lease = SecretDigest::of(lease.as_bytes());
    let is_settled = offers.registry.is_settled(lease).await;
    is_settled.then_some(lease).ok_or(Problem::NotRestored)
}

async fn heartbeat(
    State(offers): State<Offers>,
    Path(lease): Path<String>,
) -> Result<Json<Value>, Problem> {
    let lease = settled(&offers, &lease).await?;
    offers.leases().heartbeat(lease, Instant::now(), offers.lease)?;
    Ok(Json(json!({"lease_s": offers.lease.as_secs_f64()})))
}

async fn finish(
    State(offers): State<Offers>,
    Path(lease): Path<String>,
    body: Bytes,
) -> Result<Json<Value>, Problem> {
    let returned = parsed::<Finish>(&body)?.check()?;
    drop(body);
    let lease = settled(&offers, &lease).await?;
    let mut recorded = offers.leases().finish(lease, returned, Instant::now())?;
    let stored = tokio::select! {
        biased;
        stored = recorded.wait_for(Option::is_some) => stored.ok().and_then(|outcome| *outcome),
        () = offers.closed.cancelled() => return Err(Problem::Over(NEVER_STORED.to_owned())),
        () = sleep(RECORD_TIMEOUT) => None,
    };
    stored.map(|outcome| Json(json!({"outcome": outcome}))).ok_or(Problem::NotStored)
}

async fn abandon(
    State(offers): State<Offers>,
    Path(lease): Path<String>,
) -> Result<Json<Value>, Problem> {
    let lease = settled(&offers, &lease).await?;
    offers.leases().abandon(lease, Instant::now())?;
    Ok(Json(json!({})))
}
