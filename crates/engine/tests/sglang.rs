//! The client against a scripted server, and against recorded replies of SGLang 0.5.23.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests")]

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineErrorKind, Finish, GenerateRequest, Sampling, SglangClient, SglangOptions,
};
use orchestrate_routing::MaskBuilder;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, Retry, RunId};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 4,
        moe_layers: vec![0, 1, 2, 3],
        experts: 8,
        top_k: 2,
        vocab: 1024,
        context: 1024,
    }
}

/// What the server saw.
#[derive(Debug)]
struct Seen {
    path: String,
    headers: HeaderMap,
    body: Value,
}

type Script = dyn Fn(&str, &Value) -> Reply + Send + Sync;

enum Reply {
    Now(u16, String),
    /// Answers when the sender is used; dropped connections are told to `closed`.
    When(oneshot::Receiver<String>, Option<mpsc::Sender<()>>),
    Never(Option<mpsc::Sender<()>>),
}

#[derive(Clone)]
struct Server {
    script: Arc<Script>,
    seen: mpsc::Sender<Seen>,
}

/// A server on a free port; it ends with the set.
async fn serve(
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

/// Tells when the handler is dropped because the client went away.
struct OnDrop(Option<mpsc::Sender<()>>);

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
    let path = parts.uri.path().to_owned();
    let reply = (server.script)(&path, &body);
    server.seen.try_send(Seen { path, headers: parts.headers, body }).ok();
    match reply {
        Reply::Now(status, text) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
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

fn options(url: &str) -> SglangOptions {
    SglangOptions {
        url: format!("{url}/"),
        api_key: Some("key-1".to_owned()),
        shape: shape(),
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: Duration::from_secs(10),
    }
}

fn request(token_ids: Vec<u32>, max_new_tokens: usize, start: Option<usize>) -> GenerateRequest {
    let attempt = "t000001.02-a01".parse().unwrap();
    GenerateRequest {
        request_id: RequestId::new(RunId::generate(), attempt, 3, 0),
        session: "t000001.02-a01".to_owned(),
        token_ids,
        sampling: Sampling {
            temperature: 1.0,
            top_p: 1.0,
            max_new_tokens,
            stop_token_ids: vec![2],
            seed: u64::MAX,
        },
        routed_experts_start: start,
        cache_namespace: PolicyVersion(12),
        priority: 3,
        deadline: Duration::from_secs(10),
    }
}

/// A right reply of one token to any request without rows.
fn one_token(request: &Value, version: &str) -> String {
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

fn server_info() -> Value {
    json!({
        "version": "0.5.23", "model_path": "m", "page_size": 1, "pp_size": 1,
        "context_length": 1024, "enable_return_routed_experts": true,
        "enable_priority_scheduling": true, "enable_hierarchical_cache": false,
        "moe_runner_backend": "auto",
    })
}

fn capture(name: &str) -> Option<Vec<Value>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/captures/sglang-0.5.23");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).ok();
    let Some(text) = text else {
        skip();
        return None;
    };
    let mut capture: Value = serde_json::from_str(&text).unwrap();
    Some(capture["exchanges"].as_array_mut().unwrap().drain(..).collect())
}

#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn skip() {
    eprintln!("skipped: test data absent");
}

/// The captured request as ours, and the captured body.
fn recorded(exchange: &Value) -> (GenerateRequest, u16, String) {
    let body: Value =
        serde_json::from_str(exchange["request"]["body_raw"].as_str().unwrap()).unwrap();
    let ids = body["input_ids"].as_array().unwrap();
    let ids = ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let count = |value: &Value| value.as_u64().map(|n| usize::try_from(n).unwrap());
    let wants = body["return_routed_experts"] == json!(true);
    let start = wants.then(|| count(&body["routed_experts_start_len"]).unwrap_or(0));
    let max_new_tokens = count(&body["sampling_params"]["max_new_tokens"]).unwrap();
    let status = u16::try_from(exchange["response"]["status"].as_u64().unwrap()).unwrap();
    let text = exchange["response"]["body_raw"].as_str().unwrap_or_default().to_owned();
    (request(ids, max_new_tokens, start), status, text)
}

/// A server that answers `/generate` with a recorded body under the asker's request id.
async fn replay(tasks: &mut JoinSet<()>, status: u16, body: String) -> SglangClient {
    let (url, _) = serve(tasks, move |path, asked| {
        assert_eq!(path, "/generate");
        let id = serde_json::from_str::<Value>(&body)
            .ok()
            .and_then(|body| Some(body["meta_info"]["id"].as_str()?.to_owned()));
        let text = match id {
            Some(id) => body.replace(&id, asked["rid"].as_str().unwrap()),
            None => body.clone(),
        };
        Reply::Now(status, text)
    })
    .await;
    SglangClient::new(options(&url)).unwrap()
}

#[tokio::test]
async fn recorded_turns_join_into_one_mask_however_the_rows_were_asked_for() {
    let mut tasks = JoinSet::new();
    let shape = Arc::new(shape());
    let mut delta = MaskBuilder::new(shape.clone()).unwrap();
    let mut total = 0;
    let mut last = None;
    for name in ["turn1", "turn2", "turn3", "turn4"] {
        let Some(exchanges) = capture(name) else { return };
        let mut full = MaskBuilder::new(shape.clone()).unwrap();
        for (index, exchange) in exchanges.iter().enumerate() {
            let (mut request, status, body) = recorded(exchange);
            if name == "turn1" && index == 1 {
                request.routed_experts_start = Some(0);
            }
            let prompt = request.token_ids.len();
            let wants = request.routed_experts_start;
            let client = replay(&mut tasks, status, body).await;
            let got = client.generate(request).await.unwrap();
            assert_eq!((got.output_ids.len(), &got.finish), (16, &Finish::Length));
            assert_eq!(got.versions[0].version, PolicyVersion(0), "`default`");
            let now = prompt + got.output_ids.len();
            assert_eq!(got.routed_experts.is_some(), wants.is_some());
            let Some(rows) = got.routed_experts else { continue };
            if rows.start() <= full.rows() {
                full.push(&rows, now, PolicyVersion(0)).unwrap();
            }
            if rows.start() <= delta.rows() && now > total {
                let report = delta.push(&rows, now, PolicyVersion(0)).unwrap();
                assert_eq!(report.drift_rows, 0, "cached rows equal computed ones");
                total = now;
            }
        }
        last = Some((full.finish(total).unwrap(), delta.clone().finish(total).unwrap()));
    }
    let (full, delta) = last.unwrap();
    assert_eq!(full.data(), delta.data());
    assert_eq!(full.rows(), total - 1);
}

#[tokio::test]
async fn recorded_aborts_stops_and_short_replies_are_normal_results() {
    let mut tasks = JoinSet::new();
    for (name, index, finish) in [
        ("abort_by_rid", 0, Finish::Abort),
        ("pause_abort", 0, Finish::Abort),
        ("stop", 2, Finish::Stop),
        ("max_new_tokens_0_1", 1, Finish::Length),
        ("chunked_prefill", 0, Finish::Length),
    ] {
        let Some(exchanges) = capture(name) else { return };
        let (request, status, body) = recorded(&exchanges[index]);
        let prompt = request.token_ids.len();
        let start = request.routed_experts_start.unwrap();
        let client = replay(&mut tasks, status, body).await;
        let got = client.generate(request).await.unwrap();
        assert_eq!(got.finish, finish, "{name}");
        let rows = got.routed_experts.unwrap();
        assert_eq!(rows.rows(), prompt + got.output_ids.len() - 1 - start, "{name}");
    }
}

#[tokio::test]
async fn recorded_refusals_are_typed_and_never_retried() {
    let mut tasks = JoinSet::new();
    for name in ["bad_requests", "overlong"] {
        let Some(exchanges) = capture(name) else { return };
        for exchange in exchanges {
            let status = exchange["response"]["status"].as_u64().unwrap();
            let Some(body) = exchange["response"]["body_raw"].as_str() else { continue };
            if status == 200 || body.is_empty() {
                continue;
            }
            let status = u16::try_from(status).unwrap();
            let client = replay(&mut tasks, status, body.to_owned()).await;
            let error = client.generate(request(vec![1, 2, 3], 4, Some(0))).await.unwrap_err();
            assert_eq!(error.retry(), Retry::Never, "{error}");
            match &error.kind {
                EngineErrorKind::Refused { status: found, message } => {
                    assert_eq!(*found, status);
                    assert!(!message.is_empty() && !message.starts_with('{'), "{message}");
                }
                other => panic!("{other}"),
            }
        }
    }
}

#[tokio::test]
async fn recorded_server_info_is_understood() {
    let (Some(server), Some(model)) = (capture("info_server_info"), capture("info_model_info"))
    else {
        return;
    };
    let text = |exchange: &Value| exchange["response"]["body_raw"].as_str().unwrap().to_owned();
    let (server, model) = (text(&server[0]), text(&model[0]));
    let mut tasks = JoinSet::new();
    let (url, _) = serve(&mut tasks, move |path, _| match path {
        "/server_info" => Reply::Now(200, server.clone()),
        _ => Reply::Now(200, model.clone()),
    })
    .await;
    let patience = Duration::from_secs(5);
    let (_, info) = SglangClient::connect(options(&url), patience).await.unwrap();
    assert_eq!((info.engine.as_str(), info.model_path.as_str()), ("sglang 0.5.23", "model-a"));
    assert_eq!(info.policy_version, Some(PolicyVersion(0)));
    assert!(info.routed_experts);
    assert_eq!((info.page_size, info.context), (1, None));
}

#[tokio::test]
async fn a_request_says_all_that_the_server_must_know() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, asked| match path {
        "/server_info" => Reply::Now(200, server_info().to_string()),
        "/model_info" => Reply::Now(200, json!({"weight_version": "12"}).to_string()),
        _ => Reply::Now(200, one_token(asked, "12")),
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    // Priorities are sent only where the server said that it takes them.
    client.generate(request(vec![1, 2, 3], 4, None)).await.unwrap();
    let first = seen.recv().await.unwrap().body;
    assert!(first.get("priority").is_none());
    assert_eq!(first["return_routed_experts"], json!(false));
    assert!(first.get("routed_experts_start_len").is_none(), "an explicit null is refused");

    client.info().await.unwrap();
    let mut asked = request(vec![1, 2, 3], 4000, Some(2));
    asked.sampling.stop_token_ids.clear();
    let id = asked.request_id.clone();
    client.generate(asked).await.unwrap_err(); // no rows in the answer
    let second = loop {
        let seen = seen.recv().await.unwrap();
        if seen.path == "/generate" {
            break seen;
        }
    };
    assert_eq!(
        second.body,
        json!({
            "rid": id.as_str(),
            "input_ids": [1, 2, 3],
            "sampling_params": {
                "max_new_tokens": 1021, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
                "min_p": 0.0, "skip_special_tokens": false, "sampling_seed": i64::MAX,
            },
            "return_logprob": true,
            "logprob_start_len": -1,
            "return_routed_experts": true,
            "routed_experts_start_len": 2,
            "session_id": "t000001.02-a01",
            "extra_key": "w12",
            "priority": 3,
            "stream": false,
        })
    );
    assert_eq!(second.headers["authorization"], "Bearer key-1");
    assert_eq!(second.headers["x-smg-routing-key"], "t000001.02-a01");
    assert_eq!(second.headers["x-session-id"], "t000001.02-a01");
    assert!(!format!("{client:?}").contains("key-1"));
}

#[tokio::test]
async fn prompts_that_would_hurt_the_server_are_not_sent() {
    let client = SglangClient::new(options("http://127.0.0.1:9")).unwrap();
    for ids in [vec![], vec![1024], vec![1; 1024]] {
        let error = client.generate(request(ids, 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Refused { status: 400, .. }), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_is_unfit_for_replay_is_refused_with_the_flag_to_change() {
    for (key, value, flag) in [
        ("enable_return_routed_experts", json!(false), "--enable-return-routed-experts"),
        ("pp_size", json!(2), "--pp-size"),
        ("enable_hierarchical_cache", json!(true), "--enable-hierarchical-cache"),
        ("moe_runner_backend", json!("flashinfer_trtllm"), "--moe-runner-backend"),
    ] {
        let mut tasks = JoinSet::new();
        let (url, _) = serve(&mut tasks, move |path, _| {
            let mut info = server_info();
            info[key] = value.clone();
            let info = if path == "/server_info" { info } else { json!({}) };
            Reply::Now(200, info.to_string())
        })
        .await;
        let refused = SglangClient::connect(options(&url), Duration::from_secs(5)).await;
        let error = refused.unwrap_err();
        assert!(matches!(&error.kind, EngineErrorKind::Unfit(words) if words.contains(flag)));
        assert_eq!(error.retry(), Retry::Never);
        let relaxed = SglangOptions { require_routed_experts: false, ..options(&url) };
        SglangClient::connect(relaxed, Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test]
async fn e1_no_server_and_a_broken_connection_are_unreachable() {
    let client = SglangClient::new(options("http://127.0.0.1:9")).unwrap();
    let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
    assert!(matches!(error.retry(), Retry::After(_)));
    assert!(SglangClient::connect(options("http://127.0.0.1:9"), Duration::ZERO).await.is_err());

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.read_buf(&mut Vec::with_capacity(1 << 16)).await.unwrap();
        let half = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"output_ids\":";
        socket.write_all(half).await.unwrap();
    });
    let client = SglangClient::new(options(&url)).unwrap();
    let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
}

#[tokio::test]
async fn e2_a_server_that_never_answers_is_timed_out_and_told_to_abort() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, _| match path {
        "/generate" => Reply::Never(None),
        _ => Reply::Now(200, String::new()),
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    let mut asked = request(vec![1], 4, None);
    asked.deadline = Duration::from_millis(50);
    let id = asked.request_id.clone();
    let error = client.generate(asked).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "{error}");
    assert_eq!(seen.recv().await.unwrap().path, "/generate");
    let abort = seen.recv().await.unwrap();
    assert_eq!(
        (abort.path.as_str(), &abort.body),
        ("/abort_request", &json!({"rid": id.as_str()}))
    );
}

#[tokio::test]
async fn e4_status_classes_decide_about_a_retry() {
    for (status, again) in [
        (400, false),
        (401, false),
        (404, false),
        (413, false),
        (429, true),
        (500, true),
        (503, true),
    ] {
        let mut tasks = JoinSet::new();
        let body = json!({"error": "busy"}).to_string();
        let client = replay(&mut tasks, status, body).await;
        let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
        assert_eq!(error.retry() != Retry::Never, again, "{status}");
        assert!(error.to_string().contains("busy"), "{error}");
    }
}

#[tokio::test]
async fn e6_a_body_beyond_what_the_reply_can_have_is_refused() {
    let mut tasks = JoinSet::new();
    let client = replay(&mut tasks, 200, " ".repeat(6 << 20)).await;
    let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(&error.kind, EngineErrorKind::InvalidReply(w) if w.contains("longer")));
}

#[tokio::test]
async fn dropping_a_generation_closes_its_connection_and_frees_its_permit() {
    let mut tasks = JoinSet::new();
    let (closed, mut was_closed) = mpsc::channel(1);
    let first = Mutex::new(Some(closed));
    let (url, mut seen) = serve(&mut tasks, move |_, asked| match first.lock().unwrap().take() {
        Some(closed) => Reply::Never(Some(closed)),
        None => Reply::Now(200, one_token(asked, "0")),
    })
    .await;
    let client = SglangClient::new(SglangOptions { max_in_flight: 1, ..options(&url) }).unwrap();
    let mut generation = Box::pin(client.generate(request(vec![1], 4, None)));
    tokio::select! {
        _ = &mut generation => panic!("the server does not answer"),
        _ = seen.recv() => {}
    }
    drop(generation);
    was_closed.recv().await.unwrap();
    client.generate(request(vec![1], 4, None)).await.unwrap();
}

#[tokio::test]
async fn no_more_than_the_permitted_generations_are_under_way() {
    let mut tasks = JoinSet::new();
    let (open, gate) = oneshot::channel();
    let gate = Mutex::new(Some(gate));
    let (url, mut seen) = serve(&mut tasks, move |_, asked| match gate.lock().unwrap().take() {
        Some(gate) => Reply::When(gate, None),
        None => Reply::Now(200, one_token(asked, "0")),
    })
    .await;
    let client = SglangClient::new(SglangOptions { max_in_flight: 1, ..options(&url) }).unwrap();
    let (a, b) = (request(vec![1], 4, None), request(vec![1, 2], 4, None));
    let answer = one_token(&json!({"rid": a.request_id.as_str(), "input_ids": [1]}), "0");
    let both = futures_of(&client, a, b);
    tokio::pin!(both);
    tokio::select! {
        () = &mut both => panic!("the gate is closed"),
        first = seen.recv() => assert_eq!(first.unwrap().body["input_ids"], json!([1])),
    }
    assert!(seen.try_recv().is_err(), "the second one waits for the permit");
    open.send(answer).unwrap();
    both.await;
    assert_eq!(seen.recv().await.unwrap().body["input_ids"], json!([1, 2]));
}

async fn futures_of(client: &SglangClient, a: GenerateRequest, b: GenerateRequest) {
    let (a, b) = tokio::join!(client.generate(a), client.generate(b));
    a.unwrap();
    b.unwrap();
}

/// A server with weights; `fail` names the route that fails.
async fn weights(
    tasks: &mut JoinSet<()>,
    fail: Arc<Mutex<&'static str>>,
) -> (String, mpsc::Receiver<Seen>, Arc<Mutex<String>>) {
    let version = Arc::new(Mutex::new("default".to_owned()));
    let held = Arc::clone(&version);
    let (url, seen) = serve(tasks, move |path, asked| {
        let failing = *fail.lock().unwrap() == path;
        match path {
            "/update_weights_from_disk" if failing => {
                Reply::Now(400, json!({"success": false, "message": "no such folder"}).to_string())
            }
            "/update_weights_from_disk" => {
                assert_eq!(asked["flush_cache"], json!(true));
                asked["weight_version"].as_str().unwrap().clone_into(&mut held.lock().unwrap());
                let reply = json!({"success": true, "message": "", "num_paused_requests": 0});
                Reply::Now(200, reply.to_string())
            }
            "/model_info" if failing => {
                Reply::Now(200, json!({"weight_version": "other"}).to_string())
            }
            "/model_info" => {
                Reply::Now(200, json!({"weight_version": *held.lock().unwrap()}).to_string())
            }
            "/generate" => Reply::Now(200, one_token(asked, &held.lock().unwrap())),
            _ if failing => Reply::Now(500, "boom".to_owned()),
            _ => Reply::Now(200, json!({"status": "ok"}).to_string()),
        }
    })
    .await;
    (url, seen, version)
}

#[tokio::test]
async fn weights_are_synced_by_a_clean_cut_and_verified() {
    let mut tasks = JoinSet::new();
    let (url, mut seen, _) = weights(&mut tasks, Arc::default()).await;
    let client = SglangClient::new(options(&url)).unwrap();
    client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
    let mut calls = Vec::new();
    while let Ok(call) = seen.try_recv() {
        calls.push((call.path, call.body));
    }
    assert_eq!(
        calls,
        [
            ("/pause_generation".to_owned(), json!({"mode": "abort"})),
            (
                "/update_weights_from_disk".to_owned(),
                json!({"model_path": "/ckpt/7", "weight_version": "7", "flush_cache": true})
            ),
            ("/model_info".to_owned(), Value::Null),
            ("/continue_generation".to_owned(), json!({})),
        ]
    );
    let got = client.generate(request(vec![1], 4, None)).await.unwrap();
    assert_eq!(got.versions[0].version, PolicyVersion(7));
}

#[tokio::test]
async fn after_a_failed_sync_nothing_is_sampled_until_one_succeeds() {
    for route in
        ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]
    {
        let mut tasks = JoinSet::new();
        let fail = Arc::new(Mutex::new(route));
        let (url, mut seen, _) = weights(&mut tasks, Arc::clone(&fail)).await;
        let client = SglangClient::new(options(&url)).unwrap();
        let version = PolicyVersion(7);
        let error = client.sync_weights(Utf8Path::new("/ckpt/7"), version).await.unwrap_err();
        assert_eq!(error.call, route);
        while seen.try_recv().is_ok() {}
        let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unfit(_)), "{error}");
        assert!(seen.try_recv().is_err(), "nothing was sent");
        *fail.lock().unwrap() = "";
        client.sync_weights(Utf8Path::new("/ckpt/7"), version).await.unwrap();
        client.generate(request(vec![1], 4, None)).await.unwrap();
    }
}

#[tokio::test]
async fn e15_a_server_that_went_back_to_other_weights_is_noticed() {
    let mut tasks = JoinSet::new();
    let (url, _, held) = weights(&mut tasks, Arc::default()).await;
    let client = SglangClient::new(options(&url)).unwrap();
    client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
    *held.lock().unwrap() = "default".to_owned(); // restarted
    for _ in 0..2 {
        let error = client.generate(request(vec![1], 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unfit(_)), "{error}");
    }
    client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
    client.generate(request(vec![1], 4, None)).await.unwrap();
}

#[tokio::test]
async fn a_long_reply_is_checked_like_a_short_one() {
    let mut tasks = JoinSet::new();
    let (url, _) = serve(&mut tasks, |_, asked| {
        let mut reply: Value = serde_json::from_str(&one_token(asked, "0")).unwrap();
        reply["text"] = json!("x".repeat(1 << 20));
        if asked["input_ids"] == json!([2]) {
            reply["output_ids"] = json!([4000]);
        }
        Reply::Now(200, reply.to_string())
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    assert_eq!(client.generate(request(vec![1], 4, None)).await.unwrap().output_ids, [5]);
    let error = client.generate(request(vec![2], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
}
