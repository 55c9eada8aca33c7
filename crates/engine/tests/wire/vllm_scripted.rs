//! The requests sent to vLLM, and the order of calls in a weight update.

use crate::server::{Reply, options, request, sample, serve};
use camino::Utf8Path;
use orchestrate_engine::{Engine, EngineErrorKind, VllmClient};
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

/// A correct reply of one token to any request without rows.
fn one_token(sent: &Value, version: Option<&str>) -> String {
    let spans = version.map(|version| json!([{"version": version, "start": 0, "end": 1}]));
    json!({
        "request_id": format!("generate-tokens-{}", sent["request_id"].as_str().unwrap()),
        "usage": {"prompt_tokens": sent["token_ids"].as_array().unwrap().len()},
        "choices": [{
            "index": 0, "finish_reason": "length", "token_ids": [5], "weight_versions": spans,
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
        }],
    })
    .to_string()
}

#[tokio::test]
async fn a_request_has_every_field_that_the_server_needs() {
    let mut tasks = JoinSet::new();
    let reply = |_: &str, sent: &Value| Reply::Now(200, one_token(sent, Some("12")));
    let (url, mut seen) = serve(&mut tasks, reply).await;
    let client = VllmClient::new(options(&url)).unwrap();
    let wanted = request(vec![1, 2, 3], 4000, Some(2));
    let id = wanted.request_id.clone();
    sample(&client, wanted).await.unwrap_err(); // the reply has no rows
    let sent = seen.recv().await.unwrap();
    assert_eq!(
        sent.body,
        json!({
            "request_id": id.as_str(),
            "token_ids": [1, 2, 3],
            "sampling_params": {
                "n": 1, "max_tokens": 1021, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "min_p": 0.0, "stop_token_ids": [2], "seed": i64::MAX, "logprobs": 0,
                "detokenize": false, "skip_special_tokens": false,
                "routed_experts_prompt_start": 2,
            },
            "cache_salt": "w12",
            "stream": false,
        })
    );
    assert_eq!(sent.headers["content-type"], "application/json");
    assert_eq!(sent.headers["authorization"], "Bearer key-1");
    assert_eq!(sent.headers["x-session-id"], "t000001.02-a01");
    assert!(!sent.headers.contains_key("x-request-id"), "it would replace the id of the body");
    // Rows cannot be switched off, so as few as possible are requested.
    sample(&client, request(vec![1, 2, 3], 4, None)).await.unwrap();
    let sent = seen.recv().await.unwrap().body;
    assert_eq!(sent["sampling_params"]["routed_experts_prompt_start"], 3);
    // A data-parallel rank is named in a header, because the body has no field for it.
    client.generate_on(&request(vec![1, 2, 3], 4, None), Some(1)).await.unwrap();
    assert_eq!(seen.recv().await.unwrap().headers["x-data-parallel-rank"], "1");
}

#[tokio::test]
async fn a_request_that_times_out_is_aborted_by_the_servers_own_id() {
    for (supported, routes) in [
        ("/inference/v1/abort_requests", &["/inference/v1/abort_requests"][..]),
        ("/abort_requests", &["/inference/v1/abort_requests", "/abort_requests"][..]),
    ] {
        let mut tasks = JoinSet::new();
        let (url, mut seen) = serve(&mut tasks, move |path, _| match path {
            "/inference/v1/generate" => Reply::Never(None),
            _ if path == supported => Reply::Now(200, String::new()),
            _ => Reply::Now(404, "{}".into()),
        })
        .await;
        let client = VllmClient::new(options(&url)).unwrap();
        let mut late = request(vec![1], 4, None);
        // Enough for the request to arrive, on a busy machine too.
        late.deadline = Duration::from_secs(2);
        let id = late.request_id.clone();
        let error = sample(&client, late).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "{error}");
        assert_eq!(seen.recv().await.unwrap().path, "/inference/v1/generate");
        for route in routes {
            let sent = seen.recv().await.unwrap();
            assert_eq!(sent.path, *route);
            assert_eq!(sent.body, json!({"request_ids": [format!("generate-tokens-{id}")]}));
        }
        assert!(seen.try_recv().is_err());
    }
}

/// A server with weights. `broken` is the route that fails; an `unnamed` server has no weight versions.
async fn weights(
    tasks: &mut JoinSet<()>,
    broken: Arc<Mutex<&'static str>>,
    unnamed: bool,
) -> (String, Receiver<crate::server::Seen>) {
    let version = Mutex::new("default".to_owned());
    serve(tasks, move |path, sent| {
        let route = path.split('?').next().unwrap();
        let breaks = *broken.lock().unwrap() == route;
        let mut version = version.lock().unwrap();
        match route {
            "/update_weight_version" | "/weight_info" if unnamed => {
                Reply::Now(404, "{\"detail\":\"Not Found\"}".to_owned())
            }
            "/reset_prefix_cache" => Reply::Now(200, json!({"success": !breaks}).to_string()),
            "/weight_info" => {
                let name = if breaks { "other" } else { version.as_str() };
                Reply::Now(200, json!({"weight_version": name}).to_string())
            }
            _ if breaks => Reply::Now(500, json!({"error": {"message": "boom"}}).to_string()),
            "/update_weight_version" => {
                sent["new_version"].as_str().unwrap().clone_into(&mut version);
                Reply::Now(200, json!({"success": true}).to_string())
            }
            "/inference/v1/generate" => {
                let named = (!unnamed).then_some(version.as_str());
                Reply::Now(200, one_token(sent, named))
            }
            _ => Reply::Now(200, json!({"status": "ok"}).to_string()),
        }
    })
    .await
}

#[tokio::test]
async fn a_weight_update_pauses_clears_the_cache_and_verifies() {
    for unnamed in [false, true] {
        let mut tasks = JoinSet::new();
        let (url, mut seen) = weights(&mut tasks, Arc::default(), unnamed).await;
        let client = VllmClient::new(options(&url)).unwrap();
        client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
        let mut calls = Vec::new();
        while let Ok(call) = seen.try_recv() {
            if call.path == "/collective_rpc" {
                assert_eq!(call.body["method"], "reload_weights");
                assert_eq!(call.body["kwargs"], json!({"weights_path": "/ckpt/7"}));
            }
            calls.push(call.path);
        }
        let mut expected = vec![
            "/pause?mode=abort&clear_cache=true",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/weight_info",
            "/resume",
        ];
        if unnamed {
            expected.remove(4);
        }
        assert_eq!(calls, expected);
        // The version is reported for each token, or is the one that was synced.
        let got = sample(&client, request(vec![1], 4, None)).await.unwrap();
        assert_eq!(got.versions()[0].version, PolicyVersion(7));
    }
}

#[tokio::test]
async fn after_a_failed_sync_nothing_is_sampled_until_one_succeeds() {
    for route in [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/weight_info",
        "/resume",
    ] {
        let mut tasks = JoinSet::new();
        let broken = Arc::new(Mutex::new(route));
        let (url, mut seen) = weights(&mut tasks, Arc::clone(&broken), false).await;
        let client = VllmClient::new(options(&url)).unwrap();
        let folder = Utf8Path::new("/ckpt/7");
        let error = client.sync_weights(folder, PolicyVersion(7)).await.unwrap_err();
        assert_eq!(error.call, route);
        let mut paths = Vec::new();
        while let Ok(call) = seen.try_recv() {
            paths.push(call.path);
        }
        assert_eq!(paths.contains(&"/resume".to_owned()), route != "/pause", "{route}");
        let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
        assert_eq!(error.retry(), Retry::Never);
        assert!(seen.try_recv().is_err(), "nothing was sent");
        *broken.lock().unwrap() = "";
        client.sync_weights(folder, PolicyVersion(7)).await.unwrap();
        sample(&client, request(vec![1], 4, None)).await.unwrap();
    }
}
