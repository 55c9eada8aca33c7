//! Weight updates of SGLang: generation is paused, the update is verified, and nothing is sampled from
//! unknown weights.

use crate::server::{Reply, Seen, one_token, options, request, sample, serve};
use camino::Utf8Path;
use orchestrate_engine::{Engine, EngineErrorKind, SglangClient};
use orchestrate_types::PolicyVersion;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Starts a server whose weights can be updated; requests to the route `fail` fail. Returns its URL, the
/// requests that it receives, and the version of its weights.
async fn weights(
    tasks: &mut JoinSet<()>,
    fail: Arc<Mutex<&'static str>>,
) -> (String, mpsc::Receiver<Seen>, Arc<Mutex<String>>) {
    let version = Arc::new(Mutex::new("default".to_owned()));
    let held = Arc::clone(&version);
    let (url, seen) = serve(tasks, move |path, sent| {
        let failing = *fail.lock().unwrap() == path;
        match path {
            "/update_weights_from_disk" if failing => {
                Reply::Now(400, json!({"success": false, "message": "no such folder"}).to_string())
            }
            "/update_weights_from_disk" => {
                assert_eq!(sent["flush_cache"], json!(true));
                sent["weight_version"].as_str().unwrap().clone_into(&mut held.lock().unwrap());
                let reply = json!({"success": true, "message": "", "num_paused_requests": 0});
                Reply::Now(200, reply.to_string())
            }
            "/model_info" if failing => {
                Reply::Now(200, json!({"weight_version": "other"}).to_string())
            }
            "/model_info" => {
                Reply::Now(200, json!({"weight_version": *held.lock().unwrap()}).to_string())
            }
            "/generate" => Reply::Now(200, one_token(sent, &held.lock().unwrap())),
            _ if failing => Reply::Now(500, "boom".to_owned()),
            _ => Reply::Now(200, json!({"status": "ok"}).to_string()),
        }
    })
    .await;
    (url, seen, version)
}

#[tokio::test]
async fn a_weight_sync_pauses_updates_and_verifies() {
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
    let got = sample(&client, request(vec![1], 4, None)).await.unwrap();
    assert_eq!(got.versions()[0].version, PolicyVersion(7));
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
        let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
        assert!(seen.try_recv().is_err(), "nothing was sent");
        *fail.lock().unwrap() = "";
        client.sync_weights(Utf8Path::new("/ckpt/7"), version).await.unwrap();
        sample(&client, request(vec![1], 4, None)).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_that_reverts_to_other_weights_is_detected() {
    let mut tasks = JoinSet::new();
    let (url, _, held) = weights(&mut tasks, Arc::default()).await;
    let client = SglangClient::new(options(&url)).unwrap();
    client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
    *held.lock().unwrap() = "default".to_owned(); // restarted
    for _ in 0..2 {
        let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
    }
    client.sync_weights(Utf8Path::new("/ckpt/7"), PolicyVersion(7)).await.unwrap();
    sample(&client, request(vec![1], 4, None)).await.unwrap();
}
