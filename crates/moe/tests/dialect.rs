//! The embedded engine implements SGLang's API: requests recorded with SGLang, replayed on the same
//! model, give the recorded replies, including tokens and experts.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_e2e::skip;
use orchestrate_moe::infer::{EngineOptions, WeightFormat, serve_engine};
use reqwest::Client;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Creates the models of the recordings; `None`, reported as a skip, if that is not possible.
fn models(root: &Utf8Path) -> Option<()> {
    let maker = skip::data("captures/tools/mkmodel.py")?;
    let python = std::env::var("ORCHESTRATE_PYTHON").unwrap_or("python3".into());
    let able = Command::new(&python).args(["-c", "import torch, transformers"]).output();
    if !able.is_ok_and(|output| output.status.success()) {
        let why = "ORCHESTRATE_PYTHON is not a Python with torch and transformers";
        skip::skip("torch", why);
        return None;
    }
    for (name, seed) in [("model-a", "1"), ("model-b", "2")] {
        let made =
            Command::new(&python).arg(&maker).args([root.join(name).as_str(), seed]).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    Some(())
}

struct TestServer {
    url: String,
    client: Client,
    root: Utf8PathBuf,
    _folder: tempfile::TempDir,
    _tasks: JoinSet<()>,
    _stop: DropGuard,
}

async fn serve() -> Option<TestServer> {
    let folder = tempfile::tempdir().unwrap();
    let root = Utf8PathBuf::try_from(folder.path().to_owned()).unwrap();
    models(&root)?;
    let options = EngineOptions {
        weight_format: WeightFormat::F32,
        max_running: 8,
        cache_tokens: 8192,
        ..EngineOptions::new(root.join("model-a"))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let server = serve_engine(options, listener, stop.clone());
    tasks.spawn(async move { server.await.unwrap() });
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::new();
    let guard = stop.drop_guard();
    Some(TestServer { url, client, root, _folder: folder, _tasks: tasks, _stop: guard })
}

fn recording(name: &str) -> Vec<Value> {
    let path = skip::data(&format!("captures/sglang-0.5.23/{name}.json")).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let recording: Value = serde_json::from_str(&text).unwrap();
    recording["exchanges"].as_array().unwrap().clone()
}

impl TestServer {
    /// Sends a recorded request, with the paths of the models replaced by the local ones.
    async fn replay(&self, exchange: &Value) -> (u16, String) {
        let request = &exchange["request"];
        let url = format!("{}{}", self.url, request["path"].as_str().unwrap());
        let mut builder =
            self.client.request(request["method"].as_str().unwrap().parse().unwrap(), url);
        if let Some(body) = request["body_raw"].as_str() {
            let path = |name: &str| format!("\"{}\"", self.root.join(name));
            let body = body.replace("\"model-a\"", &path("model-a"));
            let body = body.replace("\"model-b\"", &path("model-b"));
            builder = builder.header("content-type", "application/json").body(body);
        }
        let response = builder.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }
}

/// The replies in a body: one per sequence.
fn sequences(body: &Value) -> Vec<&Value> {
    body.as_array().map_or_else(|| vec![body], |list| list.iter().collect())
}

/// Compares one reply with the recorded one, including all experts.
fn compare(what: &str, got: &Value, expected: &Value) {
    assert_eq!(got["output_ids"], expected["output_ids"], "{what}");
    assert_eq!(got["text"], expected["text"], "{what}");
    let (meta, wanted) = (&got["meta_info"], &expected["meta_info"]);
    for key in [
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "weight_version",
        "weight_versions",
        "output_token_logprobs_length",
        "routed_experts",
    ] {
        assert_eq!(meta.get(key), wanted.get(key), "{what}: {key}");
    }
    for (triple, wanted) in meta["output_token_logprobs"]
        .as_array()
        .unwrap()
        .iter()
        .zip(wanted["output_token_logprobs"].as_array().unwrap())
    {
        assert_eq!(triple[1], wanted[1], "{what}");
        let difference = triple[0].as_f64().unwrap() - wanted[0].as_f64().unwrap();
        assert!(difference.abs() < 1e-4, "{what}: {triple} {wanted}");
    }
    // Timings of components that this engine does not have, and fields that only some replies have.
    let foreign = [
        "storage_prefetch_wait",
        "storage_staging_wait",
        "forward_entry_time",
        "prefill_finished_time",
        "api_server_dispatch_finish_ts",
        "decode_throughput",
        "output_top_logprobs",
        "input_top_logprobs",
        "num_retractions",
    ];
    let keys = |meta: &Value| -> BTreeSet<String> {
        let keys = meta.as_object().unwrap().keys().cloned();
        keys.filter(|key| !foreign.contains(&key.as_str())).collect()
    };
    assert_eq!(keys(meta), keys(wanted), "{what}");
}

#[tokio::test]
async fn recorded_requests_give_recorded_tokens_and_experts() {
    let Some(served) = serve().await else { return };
    let mut compared = 0;
    for name in [
        "turn1",
        "turn2",
        "turn3",
        "turn4",
        "cold_turn1",
        "cold_turn2",
        "cold_turn3",
        "cold_turn4",
        "max_new_tokens_0_1",
        "chunked_prefill",
        "concurrent8",
        "stop",
        "stop_no_ignore_eos",
        "bad_requests",
        "overlong",
        "pause_in_place",
        "pause_retract",
        "retraction_kv_pressure",
        "flush_cache",
        "abort_unknown_rid",
        "n2_batch_text",
        "logprob_start_len",
    ] {
        for (index, exchange) in recording(name).iter().enumerate() {
            let what = format!("{name} {index}");
            let asked = exchange["request"]["body_raw"].as_str().unwrap_or_default();
            // Skip samples that depend on SGLang's random generator, and parameters that this
            // engine rejects.
            if asked.contains("\"n\": 2")
                || asked.contains("top_logprobs_num")
                || asked.contains("return_text_in_logprobs")
            {
                continue;
            }
            let (status, text) = served.replay(exchange).await;
            let response = &exchange["response"];
            assert_eq!(json!(status), response["status"], "{what}: {text}");
            if exchange["request"]["path"] != "/generate" || status != 200 {
                continue;
            }
            let Some(expected) = response["body_raw"].as_str() else { continue };
            let expected: Value = serde_json::from_str(expected).unwrap();
            let got: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(sequences(&got).len(), sequences(&expected).len(), "{what}");
            for (got, expected) in sequences(&got).into_iter().zip(sequences(&expected)) {
                compare(&what, got, expected);
                compared += 1;
            }
        }
    }
    assert!(compared > 40, "{compared}");
}

#[tokio::test]
async fn conversation_is_cached_to_the_same_token_as_in_sglang() {
    let Some(served) = serve().await else { return };
    for name in ["turn1", "turn2", "turn3", "turn4"] {
        for (index, exchange) in recording(name).iter().enumerate() {
            let (_, text) = served.replay(exchange).await;
            let got: Value = serde_json::from_str(&text).unwrap();
            let expected = exchange["response"]["body_raw"].as_str().unwrap();
            let expected: Value = serde_json::from_str(expected).unwrap();
            let cached = |reply: &Value| reply["meta_info"]["cached_tokens"].as_u64().unwrap();
            // The server's cache before the first recorded turn is unknown.
            if (name, index) != ("turn1", 0) {
                assert_eq!(cached(&got), cached(&expected), "{name} {index}");
            }
        }
    }
}

#[tokio::test]
async fn new_weights_give_recorded_tokens_with_and_without_flush() {
    let Some(served) = serve().await else { return };
    for (index, exchange) in recording("weight_update").iter().enumerate() {
        let (status, text) = served.replay(exchange).await;
        let response = &exchange["response"];
        assert_eq!(json!(status), response["status"], "{index}: {text}");
        if exchange["request"]["path"] != "/generate" {
            continue;
        }
        let got: Value = serde_json::from_str(&text).unwrap();
        let expected: Value = serde_json::from_str(response["body_raw"].as_str().unwrap()).unwrap();
        if index != 2 {
            compare(&format!("weight_update {index}"), &got, &expected);
            continue;
        }
        // New weights with the cache of the old ones, which a run never requests. In both engines
        // the rows of cached tokens come from the old weights. SGLang also keeps the old KV and row
        // of the prompt's last token although it recomputes that token; this engine uses the new
        // ones, so later tokens differ.
        let rows = |reply: &Value| {
            let text = reply["meta_info"]["routed_experts"].as_str().unwrap();
            base64_simd::STANDARD.decode_to_vec(text).unwrap()
        };
        let cached = usize::try_from(got["meta_info"]["cached_tokens"].as_u64().unwrap()).unwrap();
        let (mine, theirs) = (rows(&got), rows(&expected));
        assert_eq!(mine[..cached * 32], theirs[..cached * 32]);
        assert_eq!(mine.len(), theirs.len());
        assert_eq!(got["output_ids"][0], expected["output_ids"][0]);
        for key in ["cached_tokens", "weight_version", "weight_versions"] {
            assert_eq!(got["meta_info"][key], expected["meta_info"][key], "{key}");
        }
    }
}
