//! The HTTP server: SGLang's routes over one engine thread.

use super::control::{
    abort, flush_cache, health, loads, metrics, model_info, models, pause, ready, resume,
    server_info, update_weight_version, update_weights,
};
use super::engine::{Engine, EngineOptions, EngineServeError};
use super::generate::{generate, health_generate};
use super::loaded::Loaded;
use super::request::{Command, Status};
use super::scheduler::{Limits, Scheduler};
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use orchestrate_http_server::{Denial, HttpServer, Routes};
use orchestrate_types::check_token_ids;
use serde_json::json;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use tokenizers::Tokenizer;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Capacity of the command channel to the engine thread, which drains it at every step. When it is
/// full, handlers wait.
const COMMAND_QUEUE: usize = 1024;

/// Health checks, which need no token: a client that waits for the server has not proved anything yet.
const OPEN: [&str; 3] = ["/health", "/ping", "/ready"];

/// Serves a model on `listener` until `cancel` is cancelled. Running requests are then aborted and
/// answered with their output so far. The model runs on a dedicated thread.
///
/// # Errors
/// If the address is reachable from other hosts without a token or client certificates, a TLS file
/// or the model folder cannot be loaded, an option is invalid, or the engine thread panics.
pub async fn serve_engine(
    options: EngineOptions,
    listener: TcpListener,
    cancel: CancellationToken,
) -> Result<(), EngineServeError> {
    check_options(&options)?;
    let http = HttpServer::new(listener, options.http.clone())?;
    let mut threads = JoinSet::new();
    let (path, format) = (options.model_path.clone(), options.weight_format);
    threads.spawn_blocking(move || Loaded::read(&path, format));
    let loaded = match threads.join_next().await {
        Some(Ok(loaded)) => loaded?,
        Some(Err(e)) => return Err(EngineServeError::Panicked(e.to_string())),
        None => return Err(EngineServeError::Panicked("the loader task was lost".into())),
    };
    let tokenizer = read_tokenizer(&options)?;
    let (engine, scheduler, inbox) = assemble(options, loaded, tokenizer);
    let mut threads = JoinSet::new();
    threads.spawn_blocking(move || scheduler.run(inbox));

    let stop = CancellationToken::new();
    let max_body_bytes = engine.options.max_body_bytes;
    let routes = Routes { open: &OPEN, own: "", max_body_bytes, reply: denied };
    let mut server = Box::pin(http.serve(router(Arc::clone(&engine)), routes, stop.clone()));
    // `cancelled` and `join_next` are cancel-safe; the server is polled again below.
    let ended_early = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        ended = threads.join_next() => ended,
        () = &mut server => None,
    };
    stop.cancel();
    // A closed channel means that the thread has already ended.
    engine.commands.send(Command::Stop).await.ok();
    drop(engine);
    server.await;
    match ended_early.or(threads.join_next().await) {
        Some(Err(e)) => Err(EngineServeError::Panicked(e.to_string())),
        Some(Ok(())) | None => Ok(()),
    }
}

fn check_options(options: &EngineOptions) -> Result<(), EngineServeError> {
    let at_least_one = "must be at least 1";
    for (option, value) in [
        ("max_running", options.max_running),
        ("max_queued", options.max_queued),
        ("max_queued_tokens", options.max_queued_tokens),
        ("cache_tokens", options.cache_tokens),
        ("chunked_prefill", options.chunked_prefill),
        ("context_length", options.context_length.unwrap_or(1)),
    ] {
        if value == 0 {
            return Err(EngineServeError::Option { option, problem: at_least_one });
        }
    }
    if u32::try_from(options.cache_tokens).is_err() {
        let problem = "must fit into 32 bits";
        return Err(EngineServeError::Option { option: "cache_tokens", problem });
    }
    Ok(())
}

fn read_tokenizer(options: &EngineOptions) -> Result<Option<Arc<Tokenizer>>, EngineServeError> {
    let path = options.model_path.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    // A file keeps the limits of the last program that used it; they are not part of the model.
    let read = || -> tokenizers::Result<Tokenizer> {
        let file = fs_err::read(&path)?;
        let mut tokenizer = Tokenizer::from_bytes(&file)?;
        check_token_ids(&file, |token| tokenizer.token_to_id(token))?;
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        Ok(tokenizer)
    };
    let tokenizer = read().map_err(|source| EngineServeError::Tokenizer { path, source })?;
    Ok(Some(Arc::new(tokenizer)))
}

fn assemble(
    options: EngineOptions,
    loaded: Loaded,
    tokenizer: Option<Arc<Tokenizer>>,
) -> (Arc<Engine>, Scheduler, mpsc::Receiver<Command>) {
    let config = loaded.model.config().clone();
    let pool = u32::try_from(options.cache_tokens).unwrap_or(u32::MAX);
    // A sequence of full length must always fit into the pool.
    let context = config
        .max_position_embeddings
        .min(options.context_length.unwrap_or(usize::MAX))
        .min(pool as usize);
    let limits = Limits {
        max_running: options.max_running,
        max_queued: options.max_queued,
        chunked_prefill: options.chunked_prefill,
        cache_tokens: pool,
        random_seed: options.random_seed,
    };
    let (commands, inbox) = mpsc::channel(COMMAND_QUEUE);
    let status = Arc::new(Mutex::new(Status::default()));
    let scheduler = Scheduler::new(
        loaded,
        options.weight_format,
        limits,
        tokenizer.clone(),
        (options.model_path.to_string(), options.weight_version.clone()),
        Arc::clone(&status),
    );
    let engine = Engine {
        commands,
        status,
        live: Mutex::new(HashSet::new()),
        tokenizer,
        architectures: config.architectures,
        vocab: config.vocab_size,
        context,
        pool_tokens: pool as usize,
        token_room: Arc::new(Semaphore::new(options.max_queued_tokens.min(Semaphore::MAX_PERMITS))),
        rids: std::sync::atomic::AtomicU64::new(0),
        options,
    };
    (Arc::new(engine), scheduler, inbox)
}

fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/generate", post(generate).put(generate))
        .route("/flush_cache", get(flush_cache).post(flush_cache))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/abort_request", post(abort))
        .route("/update_weights_from_disk", post(update_weights))
        .route("/update_weight_version", post(update_weight_version))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/models", get(models))
        .route("/v1/loads", get(loads))
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/health_generate", get(health_generate))
        .route("/ready", get(ready))
        .route("/ping", get(health))
        .fallback(async || detail_reply(StatusCode::NOT_FOUND, "Not Found"))
        .method_not_allowed_fallback(async || {
            detail_reply(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        // The guard has read the body, within its own limit.
        .layer(DefaultBodyLimit::disable())
        .with_state(engine)
}

fn detail_reply(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "detail": text }))).into_response()
}

/// The reply to a denied request, as SGLang and the other error replies have it.
fn denied(denial: &Denial) -> Response {
    let text = match denial {
        Denial::Unauthorized => "Unauthorized".to_owned(),
        other => other.to_string(),
    };
    (denial.status(), Json(json!({ "error": text }))).into_response()
}

#[cfg(test)]
mod tests;
