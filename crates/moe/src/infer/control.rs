//! All routes except `/generate`: health, information, cache, pause, abort and weight updates.

use super::engine::{Engine, ErrorReply, parse};
use super::matrix::WeightFormat;
use super::reply::now_seconds;
use super::request::{AbortTarget, Command, PauseMode, Status, Update};
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use camino::Utf8PathBuf;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

pub(super) async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.commands.is_closed() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

pub(super) async fn ready(State(engine): State<Arc<Engine>>) -> StatusCode {
    let serving = !engine.commands.is_closed() && !engine.status().paused;
    if serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

pub(super) async fn flush_cache(
    State(engine): State<Arc<Engine>>,
) -> Result<(StatusCode, String), ErrorReply> {
    const DETAIL: &str = "Please check backend logs for more details. (When there are running or \
                          waiting requests, the operation will not be performed.)\n";
    Ok(if engine.request(Command::Flush).await? {
        (StatusCode::OK, format!("Cache flushed.\n{DETAIL}"))
    } else {
        (StatusCode::BAD_REQUEST, format!("Flush cache failed.\n{DETAIL}"))
    })
}

#[derive(Deserialize)]
struct PauseBody {
    mode: Option<PauseMode>,
}

pub(super) async fn pause(
    State(engine): State<Arc<Engine>>,
    body: Bytes,
) -> Result<Json<Value>, ErrorReply> {
    let mode = parse::<PauseBody>(&body)?.mode.unwrap_or(PauseMode::Abort);
    engine.request(|reply| Command::Pause(mode, reply)).await?;
    Ok(Json(json!({ "message": "Generation paused successfully.", "status": "ok" })))
}

pub(super) async fn resume(State(engine): State<Arc<Engine>>) -> Result<Json<Value>, ErrorReply> {
    engine.request(Command::Continue).await?;
    Ok(Json(json!({ "message": "Generation continued successfully.", "status": "ok" })))
}

#[derive(Deserialize)]
struct AbortBody {
    #[serde(default)]
    rid: String,
    #[serde(default)]
    abort_all: bool,
}

/// Aborts all requests whose id starts with `rid`, but only if `rid` itself is a running request,
/// as SGLang does.
pub(super) async fn abort(
    State(engine): State<Arc<Engine>>,
    body: Bytes,
) -> Result<StatusCode, ErrorReply> {
    let body: AbortBody = parse(&body)?;
    let known = engine.live().contains(&body.rid);
    if body.abort_all || known {
        let target = if body.abort_all { AbortTarget::All } else { AbortTarget::Prefix(body.rid) };
        engine.commands.send(Command::Abort(target)).await.map_err(|_| ErrorReply::Stopped)?;
    }
    Ok(StatusCode::OK)
}

fn default_true() -> bool {
    true
}

#[derive(Deserialize)]
struct UpdateBody {
    model_path: Utf8PathBuf,
    weight_version: Option<String>,
    #[serde(default)]
    abort_all_requests: bool,
    #[serde(default = "default_true")]
    flush_cache: bool,
}

pub(super) async fn update_weights(
    State(engine): State<Arc<Engine>>,
    body: Bytes,
) -> Result<(StatusCode, Json<Value>), ErrorReply> {
    let body: UpdateBody = parse(&body)?;
    let (roots, path) = (engine.options.checkpoint_roots.clone(), body.model_path.clone());
    let allowed = tokio::task::spawn_blocking(move || roots.folder(&path));
    let allowed = allowed.await.map_err(|error| ErrorReply::Internal(error.to_string()))?;
    if let Err(refusal) = allowed {
        // The same reply whether or not the folder exists.
        let message = format!("model_path {}: {refusal}; see --checkpoint-root", body.model_path);
        tracing::warn!(message, "weights not updated");
        return Ok(update_reply(false, &message));
    }
    let result = engine
        .request(|reply| {
            Command::Update(Update {
                model_path: body.model_path,
                version: body.weight_version,
                abort_all: body.abort_all_requests,
                flush: body.flush_cache,
                reply,
            })
        })
        .await?;
    Ok(update_reply(result.success, &result.message))
}

fn update_reply(success: bool, message: &str) -> (StatusCode, Json<Value>) {
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let body = json!({ "success": success, "message": message, "num_paused_requests": 0 });
    (status, Json(body))
}

#[derive(Deserialize)]
struct VersionBody {
    new_version: String,
    #[serde(default = "default_true")]
    abort_all_requests: bool,
}

pub(super) async fn update_weight_version(
    State(engine): State<Arc<Engine>>,
    body: Bytes,
) -> Result<Json<Value>, ErrorReply> {
    let VersionBody { new_version, abort_all_requests: abort_all } = parse(&body)?;
    let version = new_version.clone();
    engine.request(|reply| Command::SetVersion { version, abort_all, reply }).await?;
    let message = format!("Weight version updated to {new_version}");
    Ok(Json(json!({ "success": true, "message": message, "new_version": new_version })))
}

pub(super) async fn model_info(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let status = engine.status();
    Json(json!({
        "model_path": status.model_path,
        "served_model_name": status.model_path,
        "tokenizer_path": engine.options.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": status.weight_version,
        "load_format": "auto",
        "reasoning_parser": null,
        "tool_call_parser": null,
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen3_moe",
        "architectures": engine.architectures,
    }))
}

pub(super) async fn server_info(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let (status, options) = (engine.status(), &engine.options);
    let quantization = match options.weight_format {
        WeightFormat::F32 => Value::Null,
        WeightFormat::Q8_0 => "q8_0".into(),
        WeightFormat::Q4_0 => "q4_0".into(),
    };
    Json(json!({
        "engine": "orchestrate",
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": status.model_path,
        "tokenizer_path": options.model_path,
        "served_model_name": status.model_path,
        "skip_tokenizer_init": engine.tokenizer.is_none(),
        "load_format": "auto",
        "context_length": engine.context,
        "dtype": "float32",
        "quantization": quantization,
        "device": "cpu",
        "max_running_requests": options.max_running,
        "max_queued_requests": options.max_queued,
        "max_total_tokens": engine.pool_tokens,
        "chunked_prefill_size": options.chunked_prefill,
        "page_size": 1,
        "random_seed": options.random_seed,
        "disable_radix_cache": false,
        "radix_eviction_policy": "lru",
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "weight_version": status.weight_version,
        "enable_metrics": true,
        "enable_priority_scheduling": true,
        "enable_return_routed_experts": true,
        "moe_runner_backend": "cpu",
        "status": if status.paused { "paused" } else { "ready" },
        "max_total_num_tokens": engine.pool_tokens,
        "max_req_input_len": engine.context - 1,
        "internal_states": [{
            "weight_version": status.weight_version,
            "last_gen_throughput": status.throughput,
        }],
    }))
}

pub(super) async fn models(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let path = engine.status().model_path;
    let model = json!({
        "id": path, "object": "model", "owned_by": "orchestrate", "root": path, "parent": null,
        "created": orchestrate_types::unix_micros() / 1_000_000, "max_model_len": engine.context,
    });
    Json(json!({ "object": "list", "data": [model] }))
}

pub(super) async fn loads(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let (status, now) = (engine.status(), now_seconds());
    Json(json!({
        "timestamp": now,
        "version": env!("CARGO_PKG_VERSION"),
        "loads": [{
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": status.running,
            "num_waiting_reqs": status.waiting,
            "num_used_tokens": status.active_tokens,
            "num_total_tokens": status.held_tokens,
            "max_total_num_tokens": engine.pool_tokens,
            "max_running_requests": engine.options.max_running,
            "token_usage": status.active_tokens as f64 / engine.pool_tokens as f64,
            "gen_throughput": status.throughput,
            "cache_hit_rate": hit_rate(&status),
        }],
    }))
}

fn hit_rate(status: &Status) -> f64 {
    let all = status.cached_tokens_total + status.prefilled_tokens_total;
    if all == 0 { 0.0 } else { status.cached_tokens_total as f64 / all as f64 }
}

pub(super) async fn metrics(State(engine): State<Arc<Engine>>) -> impl IntoResponse {
    let status = engine.status();
    let pool = engine.pool_tokens as f64;
    let usage = status.active_tokens as f64 / pool;
    let mut text = String::new();
    let rows: [(&str, &str, &str, f64); 17] = [
        ("num_running_reqs", "gauge", "Running requests.", status.running as f64),
        ("num_queue_reqs", "gauge", "Waiting requests.", status.waiting as f64),
        ("num_used_tokens", "gauge", "Tokens of running requests.", status.active_tokens as f64),
        ("token_usage", "gauge", "Share of the KV pool in use by requests.", usage),
        ("max_total_num_tokens", "gauge", "Capacity of the KV pool in tokens.", pool),
        ("context_len", "gauge", "Longest sequence in tokens.", engine.context as f64),
        ("page_size", "gauge", "Tokens per page.", 1.0),
        ("gen_throughput", "gauge", "Sampled tokens per second.", status.throughput),
        ("cache_hit_rate", "gauge", "Cached share of prompt tokens.", hit_rate(&status)),
        ("is_paused", "gauge", "1 while generation is paused.", f64::from(status.paused)),
        ("num_requests_total", "counter", "Requests received.", status.requests_total as f64),
        ("num_aborted_requests_total", "counter", "Aborted requests.", status.aborted_total as f64),
        (
            "num_retractions_total",
            "counter",
            "Requests retracted to the queue.",
            status.retracted_total as f64,
        ),
        ("prompt_tokens_total", "counter", "Prompt tokens.", status.prompt_tokens_total as f64),
        (
            "cached_tokens_total",
            "counter",
            "Prompt tokens found in the cache.",
            status.cached_tokens_total as f64,
        ),
        (
            "prefill_effective_tokens_total",
            "counter",
            "Prompt tokens run through the model.",
            status.prefilled_tokens_total as f64,
        ),
        (
            "generation_tokens_total",
            "counter",
            "Sampled tokens.",
            status.generated_tokens_total as f64,
        ),
    ];
    let label = status.model_path.replace('\\', "\\\\").replace('"', "\\\"");
    for (name, kind, help, value) in rows {
        // Writing to a string cannot fail.
        write!(
            text,
            "# HELP sglang:{name} {help}\n# TYPE sglang:{name} {kind}\n\
             sglang:{name}{{model_name=\"{label}\"}} {value}\n"
        )
        .ok();
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}
