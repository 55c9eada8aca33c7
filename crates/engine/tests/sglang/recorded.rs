//! Replies of SGLang 0.5.23 as they were on the wire.

use crate::server::{Reply, options, replay, request, serve, shape};
use orchestrate_engine::{Engine, EngineErrorKind, Finish, GenerateRequest, SglangClient};
use orchestrate_routing::MaskBuilder;
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

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
                full.push(rows.clone(), now, PolicyVersion(0)).unwrap();
            }
            if rows.start() <= delta.rows() && now > total {
                let report = delta.push(rows, now, PolicyVersion(0)).unwrap();
                assert_eq!(report.drift_rows, 0, "cached rows equal computed ones");
                total = now;
            }
        }
        last = Some((full.finish(total).unwrap(), delta.clone().finish(total).unwrap()));
    }
    let (full, delta) = last.unwrap();
    assert_eq!(full, delta);
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
