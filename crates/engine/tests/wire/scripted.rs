//! The requests sent to SGLang, and how faults are reported.

use crate::server::{Reply, one_token, options, replay, request, sample, serve, server_info};
use orchestrate_engine::{
    ClientOptions, Engine as _, EngineErrorKind, GenerateRequest, Sglang, SglangClient,
};
use orchestrate_types::Retry;
use serde_json::{Value, json};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

#[tokio::test]
async fn a_request_has_every_field_that_the_server_needs() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, sent| match path {
        "/server_info" => Reply::Now(200, server_info().to_string()),
        "/model_info" => Reply::Now(200, json!({"weight_version": "12"}).to_string()),
        "/abort_request" => Reply::Now(200, String::new()),
        _ => Reply::Now(200, one_token(sent, "12")),
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    // Priorities are sent only after the server reported that it supports them.
    sample(&client, request(vec![1, 2, 3], 4, None)).await.unwrap();
    let first = seen.recv().await.unwrap().body;
    assert!(first.get("priority").is_none());
    assert_eq!(first["return_routed_experts"], json!(false));
    assert!(first.get("routed_experts_start_len").is_none(), "an explicit null is refused");

    client.info().await.unwrap();
    let mut wanted = request(vec![1, 2, 3], 4000, Some(2));
    wanted.sampling.stop_token_ids.clear();
    let id = wanted.request_id.clone();
    sample(&client, wanted).await.unwrap_err(); // the reply has no rows
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
async fn a_request_can_name_a_data_parallel_rank() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, sent| match path {
        "/server_info" => {
            let mut info = server_info();
            info["dp_size"] = json!(2);
            info["enable_dp_attention"] = json!(true);
            Reply::Now(200, info.to_string())
        }
        "/model_info" => Reply::Now(200, json!({"weight_version": "12"}).to_string()),
        _ => Reply::Now(200, one_token(sent, "12")),
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    assert_eq!(client.data_parallel_ranks(), 1, "not known before the first call");
    client.info().await.unwrap();
    assert_eq!(client.data_parallel_ranks(), 2);
    for (rank, sent) in [(Some(1), json!(1)), (None, Value::Null)] {
        client.generate_on(&request(vec![1, 2, 3], 4, None), rank).await.unwrap();
        let body = loop {
            let seen = seen.recv().await.unwrap();
            if seen.path == "/generate" {
                break seen.body;
            }
        };
        assert_eq!(body["routed_dp_rank"], sent);
    }
}

#[tokio::test]
async fn the_retry_delay_of_a_busy_server_is_respected() {
    let second = Retry::After(Duration::from_secs(1));
    for (status, pause, expected) in [
        (503, "7", Retry::After(Duration::from_secs(7))),
        (429, " 0 ", Retry::After(Duration::ZERO)),
        (503, "Fri, 31 Dec 1999 23:59:59 GMT", second),
        (503, "-1", second),
        (400, "7", Retry::Never),
    ] {
        let mut tasks = JoinSet::new();
        let (url, _seen) = serve(&mut tasks, move |_, _| Reply::Busy(status, pause)).await;
        let client = SglangClient::new(options(&url)).unwrap();
        let error = sample(&client, request(vec![1, 2, 3], 4, None)).await.unwrap_err();
        assert_eq!(error.retry(), expected, "{status} {pause}: {error}");
    }
}

#[tokio::test]
async fn prompts_that_would_harm_the_server_are_not_sent() {
    let client = SglangClient::new(options("http://127.0.0.1:9")).unwrap();
    for ids in [vec![], vec![1024]] {
        let error = sample(&client, request(ids, 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Refused { status: 400, .. }), "{error}");
    }
    let error = sample(&client, request(vec![1; 1024], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::ContextFull(_)), "{error}");
}

#[tokio::test]
async fn a_server_unsupported_for_replay_is_refused_with_the_flag_to_change() {
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
        let refused = SglangClient::connect(options(&url), Duration::from_mins(1)).await;
        let error = refused.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
        assert!(error.to_string().contains(flag), "{error}");
        assert_eq!(error.retry(), Retry::Never);
        let relaxed = ClientOptions { require_routed_experts: false, ..options(&url) };
        SglangClient::connect(relaxed, Duration::from_mins(1)).await.unwrap();
    }
}

#[tokio::test]
async fn a_missing_server_and_a_broken_connection_are_unreachable() {
    let client = SglangClient::new(options("http://127.0.0.1:9")).unwrap();
    let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
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
    let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
}

#[tokio::test]
async fn a_request_that_times_out_is_aborted() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, _| match path {
        "/generate" => Reply::Never(None),
        _ => Reply::Now(200, String::new()),
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    let mut late = request(vec![1], 4, None);
    // Enough for the request to arrive, on a busy machine too.
    late.deadline = Duration::from_secs(2);
    let id = late.request_id.clone();
    let error = sample(&client, late).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "{error}");
    assert_eq!(seen.recv().await.unwrap().path, "/generate");
    let abort = seen.recv().await.unwrap();
    assert_eq!(
        (abort.path.as_str(), &abort.body),
        ("/abort_request", &json!({"rid": id.as_str()}))
    );
}

#[tokio::test]
async fn the_status_decides_whether_to_retry() {
    for (status, retried) in [
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
        let client = replay::<Sglang>(&mut tasks, status, body).await;
        let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
        assert_eq!(error.retry() != Retry::Never, retried, "{status}");
        assert!(error.to_string().contains("busy"), "{error}");
    }
}

#[tokio::test]
async fn a_body_longer_than_any_valid_reply_is_refused() {
    let mut tasks = JoinSet::new();
    let client = replay::<Sglang>(&mut tasks, 200, " ".repeat(6 << 20)).await;
    let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
    assert!(error.to_string().contains("longer"), "{error}");
}

#[tokio::test]
async fn a_dropped_generation_closes_its_connection_and_frees_its_permit() {
    let mut tasks = JoinSet::new();
    let (closed, mut was_closed) = mpsc::channel(1);
    let first = Mutex::new(Some(closed));
    let (url, mut seen) = serve(&mut tasks, move |_, sent| match first.lock().unwrap().take() {
        Some(closed) => Reply::Never(Some(closed)),
        None => Reply::Now(200, one_token(sent, "0")),
    })
    .await;
    let client = SglangClient::new(ClientOptions { max_in_flight: 1, ..options(&url) }).unwrap();
    let mut generation = Box::pin(sample(&client, request(vec![1], 4, None)));
    tokio::select! {
        _ = &mut generation => panic!("the server does not answer"),
        _ = seen.recv() => {}
    }
    drop(generation);
    was_closed.recv().await.unwrap();
    sample(&client, request(vec![1], 4, None)).await.unwrap();
}

#[tokio::test]
async fn concurrent_generations_are_limited_by_permits() {
    let mut tasks = JoinSet::new();
    let (open, gate) = oneshot::channel();
    let gate = Mutex::new(Some(gate));
    let (url, mut seen) = serve(&mut tasks, move |_, sent| match gate.lock().unwrap().take() {
        Some(gate) => Reply::When(gate, None),
        None => Reply::Now(200, one_token(sent, "0")),
    })
    .await;
    let client = SglangClient::new(ClientOptions { max_in_flight: 1, ..options(&url) }).unwrap();
    let (a, b) = (request(vec![1], 4, None), request(vec![1, 2], 4, None));
    let reply = one_token(&json!({"rid": a.request_id.as_str(), "input_ids": [1]}), "0");
    let both = sample_both(&client, a, b);
    tokio::pin!(both);
    tokio::select! {
        () = &mut both => panic!("the gate is closed"),
        first = seen.recv() => assert_eq!(first.unwrap().body["input_ids"], json!([1])),
    }
    assert!(seen.try_recv().is_err(), "the second request waits for the permit");
    open.send(reply).unwrap();
    both.await;
    assert_eq!(seen.recv().await.unwrap().body["input_ids"], json!([1, 2]));
}

async fn sample_both(client: &SglangClient, a: GenerateRequest, b: GenerateRequest) {
    let (a, b) = tokio::join!(sample(client, a), sample(client, b));
    a.unwrap();
    b.unwrap();
}

#[tokio::test]
async fn a_long_reply_is_checked_like_a_short_one() {
    let mut tasks = JoinSet::new();
    let (url, _) = serve(&mut tasks, |_, sent| {
        let mut reply: Value = serde_json::from_str(&one_token(sent, "0")).unwrap();
        reply["text"] = json!("x".repeat(1 << 20));
        if sent["input_ids"] == json!([2]) {
            reply["output_ids"] = json!([4000]);
        }
        Reply::Now(200, reply.to_string())
    })
    .await;
    let client = SglangClient::new(options(&url)).unwrap();
    assert_eq!(sample(&client, request(vec![1], 4, None)).await.unwrap().output_ids(), [5]);
    let error = sample(&client, request(vec![2], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{error}");
}
