//! The engine process: SGLang's HTTP routes over a page cache, a script and a latency model.

use crate::cache::PageCache;
use crate::latency::Latency;
use crate::rows::expected_rows;
use crate::script::Script;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use orchestrate_routing::encode_sglang;
use orchestrate_types::{ModelShape, PolicyVersion, TokenId, unix_micros};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;

/// Largest request body in bytes; token ids are sent as text.
const BODY_LIMIT: usize = 16 << 20;

/// Settings of a synthetic engine. All engines of a fleet read the same file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnginePlan {
    /// Shape of the model whose routing rows it returns.
    pub shape: ModelShape,
    /// The policy that it samples from.
    pub script: Script,
    /// How long generations take.
    pub latency: Latency,
    /// Page size of the prefix cache, in tokens.
    pub page_tokens: usize,
    /// Capacity of the prefix cache, in tokens; 0 = unbounded.
    pub cache_tokens: usize,
    /// Duration of a weight update, in milliseconds.
    pub update_ms: u64,
    /// Whether a streamed reply begins with the time at which it was begun, in microseconds since 1970,
    /// written with the script's ten `drawn` tokens as digits.
    #[serde(default)]
    pub tells_time: bool,
}

/// Tokens between two frames of a streamed reply.
const TOKENS_PER_FRAME: usize = 8;

/// Measurements of an engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Number of generations that it answered.
    pub answered: u64,
    /// Times from handing out a reply until the next request of the same conversation was read, in
    /// microseconds: what the client and HTTP on both sides add to a turn.
    pub gaps_us: Vec<u32>,
}

#[derive(Debug)]
struct Engine {
    plan: EnginePlan,
    state: Mutex<EngineState>,
    /// Whether generation is paused, and how often it was paused so far. A pause aborts running
    /// generations.
    pause: watch::Sender<(bool, u64)>,
}

#[derive(Debug)]
struct EngineState {
    version: String,
    cache: PageCache,
    /// When the last reply of each conversation was handed out, by session.
    replied: HashMap<String, Instant>,
    stats: EngineStats,
}

#[derive(Deserialize)]
struct GenerateBody<'a> {
    #[serde(borrow)]
    rid: Cow<'a, str>,
    input_ids: Vec<TokenId>,
    sampling_params: SamplingParams,
    #[serde(default)]
    return_routed_experts: bool,
    #[serde(default)]
    routed_experts_start_len: usize,
    #[serde(borrow, default)]
    session_id: Cow<'a, str>,
    #[serde(borrow, default)]
    extra_key: Cow<'a, str>,
    #[serde(default)]
    stream: bool,
}

#[derive(Deserialize)]
struct SamplingParams {
    max_new_tokens: usize,
    #[serde(default)]
    sampling_seed: u64,
}

/// Serves until dropped. The initial weight version is `default`, as in SGLang.
///
/// # Errors
/// Any error of the listener.
pub async fn serve(plan: EnginePlan, listener: TcpListener) -> std::io::Result<()> {
    let state = EngineState {
        version: "default".to_owned(),
        cache: PageCache::new(plan.page_tokens, plan.cache_tokens),
        replied: HashMap::new(),
        stats: EngineStats::default(),
    };
    let engine = Engine { plan, state: Mutex::new(state), pause: watch::Sender::new((false, 0)) };
    let app = Router::new()
        .route("/generate", post(generate))
        .route("/server_info", get(server_info))
        .route("/model_info", get(model_info))
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/abort_request", post(|| async { StatusCode::OK }))
        .route("/flush_cache", post(flush))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/update_weights_from_disk", post(update))
        .route("/synthetic/stats", get(stats))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(Arc::new(engine));
    axum::serve(listener, app).await
}

impl Engine {
    fn lock(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(status: StatusCode, message: impl std::fmt::Display) -> Response {
    (status, Json(json!({"error": {"message": message.to_string()}}))).into_response()
}

async fn generate(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let arrived = Instant::now();
    let request: GenerateBody<'_> = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return refused(StatusCode::BAD_REQUEST, error),
    };
    let plan = &engine.plan;
    let prompt = request.input_ids.len();
    if prompt + request.sampling_params.max_new_tokens > plan.shape.context {
        return refused(StatusCode::BAD_REQUEST, "Requested token count exceeds the context");
    }
    let cached = {
        let mut state = engine.lock();
        if let Some(before) = state.replied.remove(request.session_id.as_ref()) {
            let gap = arrived.saturating_duration_since(before).as_micros();
            state.stats.gaps_us.push(u32::try_from(gap).unwrap_or(u32::MAX));
        }
        state.cache.cached_tokens(&request.extra_key, &request.input_ids)
    };
    let SamplingParams { max_new_tokens, sampling_seed } = request.sampling_params;
    let mut output = plan.script.continuation(&request.input_ids, sampling_seed);
    let is_finished = output.len() <= max_new_tokens;
    output.truncate(max_new_tokens);

    let mut pauses = engine.pause.subscribe();
    // A paused engine starts nothing. The sender lives as long as the engine.
    let Ok((_, before)) = pauses.wait_for(|(paused, _)| !paused).await.map(|state| *state) else {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "the engine is shutting down");
    };
    let version = engine.lock().version.clone();
    let time = plan.latency.time(prompt - cached, output.len(), sampling_seed);
    if request.stream {
        let first = plan.latency.time(prompt - cached, 0, sampling_seed).min(time);
        tokio::time::sleep(first).await;
        let clock = if plan.tells_time { plan.script.digits(unix_micros()) } else { Vec::new() };
        let first_frame = clock.len().max(TOKENS_PER_FRAME);
        output.splice(0..0, clock);
        let rest = (first_frame, time.saturating_sub(first));
        return streamed(&engine, &request, &output, &version, cached, rest);
    }
    let started = Instant::now();
    let is_aborted = tokio::select! {
        biased;
        () = tokio::time::sleep(time) => false,
        _ = pauses.wait_for(|(_, count)| *count != before) => true,
    };
    if is_aborted {
        let share = started.elapsed().as_secs_f64() / time.as_secs_f64().max(f64::MIN_POSITIVE);
        output.truncate(part(output.len(), share));
    }
    let finish = match (is_aborted, is_finished) {
        (true, _) => json!({"type": "abort", "message": "Aborted", "status_code": null}),
        (false, true) => json!({"type": "stop", "matched": output.last()}),
        (false, false) => json!({"type": "length", "length": output.len()}),
    };
    match reply(&engine, &request, &output, &version, &finish, cached) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(refusal) => *refusal,
    }
}

/// A reply as an event stream, whose first frame has `first` tokens, over the time `rest`. It is never
/// aborted.
fn streamed(
    engine: &Arc<Engine>,
    request: &GenerateBody<'_>,
    output: &[TokenId],
    version: &str,
    cached: usize,
    (first, rest): (usize, Duration),
) -> Response {
    let finish = json!({"type": "stop", "matched": output.last()});
    let last = match reply(engine, request, output, version, &finish, cached) {
        Ok(last) => last,
        Err(refusal) => return *refusal,
    };
    let ends = (first..output.len()).step_by(TOKENS_PER_FRAME);
    let mut frames: Vec<Bytes> = ends
        .map(|end| {
            let ids = output.get(..end).unwrap_or_default();
            let meta = json!({"id": request.rid, "finish_reason": null, "output_token_logprobs": triples(ids)});
            frame(&json!({"output_ids": ids, "meta_info": meta}).to_string())
        })
        .collect();
    frames.push(Bytes::from([frame(&last), Bytes::from_static(b"data: [DONE]\n\n")].concat()));
    let pause = rest / u32::try_from(frames.len()).unwrap_or(u32::MAX);
    let (engine, session) = (Arc::clone(engine), request.session_id.clone().into_owned());
    let frames = stream::iter(frames.into_iter().enumerate()).then(move |(index, frame)| {
        let (engine, session) = (Arc::clone(&engine), session.clone());
        async move {
            if index > 0 {
                tokio::time::sleep(pause).await;
            }
            engine.lock().replied.insert(session, Instant::now());
            Ok::<_, Infallible>(frame)
        }
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(frames)).into_response()
}

fn frame(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

fn triples(ids: &[TokenId]) -> Vec<(f64, TokenId, Value)> {
    ids.iter().map(|id| (-0.5, *id, Value::Null)).collect()
}

/// `share` of `whole`, rounded down.
fn part(whole: usize, share: f64) -> usize {
    (0..whole).take_while(|done| ((*done + 1) as f64) <= whole as f64 * share).count()
}

fn reply(
    engine: &Engine,
    request: &GenerateBody<'_>,
    output: &[TokenId],
    version: &str,
    finish: &Value,
    cached: usize,
) -> Result<String, Box<Response>> {
    let plan = &engine.plan;
    let prompt = request.input_ids.len();
    let mut tokens = request.input_ids.clone();
    tokens.extend(output);
    let computed = tokens.len().saturating_sub(1);
    let number = PolicyVersion(version.parse().unwrap_or(0));
    let mut meta = json!({
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": prompt,
        "completion_tokens": output.len(),
        "cached_tokens": cached,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": output.len()}],
        "num_retractions": 0,
        "output_token_logprobs": triples(output),
    });
    if request.return_routed_experts {
        let start = request.routed_experts_start_len;
        if start > prompt {
            let problem = "routed_experts_start_len is beyond the prompt";
            return Err(Box::new(refused(StatusCode::BAD_REQUEST, problem)));
        }
        let rows = expected_rows(&plan.shape, number, &tokens, start..computed)
            .and_then(|rows| encode_sglang(&rows, &plan.shape));
        match (rows, meta.as_object_mut()) {
            (Ok(text), Some(meta)) => {
                meta.insert("routed_experts".to_owned(), Value::String(text));
            }
            (Err(error), _) => {
                return Err(Box::new(refused(StatusCode::INTERNAL_SERVER_ERROR, error)));
            }
            (Ok(_), None) => {}
        }
    }
    let body = json!({"output_ids": output, "meta_info": meta}).to_string();
    let mut state = engine.lock();
    // Tokens computed under older weights are not cached, even if the weights changed during the call.
    if state.version == version {
        state.cache.insert(&request.extra_key, tokens.get(..computed).unwrap_or_default());
    }
    state.stats.answered += 1;
    state.replied.insert(request.session_id.clone().into_owned(), Instant::now());
    Ok(body)
}

async fn server_info(State(engine): State<Arc<Engine>>) -> Json<Value> {
    Json(json!({
        "engine": "synthetic",
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": "synthetic",
        "context_length": engine.plan.shape.context,
        "page_size": engine.plan.page_tokens,
        "pp_size": 1,
        "enable_return_routed_experts": true,
        "enable_priority_scheduling": true,
    }))
}

async fn model_info(State(engine): State<Arc<Engine>>) -> Json<Value> {
    Json(json!({"model_path": "synthetic", "weight_version": engine.lock().version}))
}

async fn flush(State(engine): State<Arc<Engine>>) -> StatusCode {
    engine.lock().cache.clear();
    StatusCode::OK
}

async fn pause(State(engine): State<Arc<Engine>>) -> Json<Value> {
    engine.pause.send_modify(|(paused, count)| {
        *paused = true;
        *count += 1;
    });
    Json(json!({"status": "ok"}))
}

async fn resume(State(engine): State<Arc<Engine>>) -> Json<Value> {
    engine.pause.send_modify(|(paused, _)| *paused = false);
    Json(json!({"status": "ok"}))
}

#[derive(Deserialize)]
struct UpdateBody {
    weight_version: String,
}

async fn update(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let update: UpdateBody = match serde_json::from_slice(&body) {
        Ok(update) => update,
        Err(error) => return refused(StatusCode::BAD_REQUEST, error),
    };
    tokio::time::sleep(Duration::from_millis(engine.plan.update_ms)).await;
    let mut state = engine.lock();
    state.version = update.weight_version;
    state.cache.clear();
    drop(state);
    Json(json!({"success": true, "message": "Succeeded to update model weights."})).into_response()
}

async fn stats(State(engine): State<Arc<Engine>>) -> Json<EngineStats> {
    Json(engine.lock().stats.clone())
}
