use super::*;
use crate::checkpoint::{StoredType, save_checkpoint};
use crate::infer::WeightFormat;
use crate::infer::model::tests::small_config;
use crate::{CheckpointError, ModelConfig, Weights};
use camino::Utf8PathBuf;
use reqwest::Client;
use serde_json::Value;
use std::collections::BTreeSet;

/// Output tokens of a request that still runs when this thread, delayed by others, does what interrupts it.
const LONG: usize = 60_000;

/// A running engine server; dropping it cancels the server.
struct TestServer {
    url: String,
    client: Client,
    cancel: CancellationToken,
    tasks: JoinSet<Result<(), EngineServeError>>,
    folder: tempfile::TempDir,
}

fn folder(root: &tempfile::TempDir, name: &str) -> Utf8PathBuf {
    Utf8PathBuf::try_from(root.path().join(name)).unwrap()
}

async fn serve(change: impl FnOnce(&mut EngineOptions)) -> TestServer {
    let root = tempfile::tempdir().unwrap();
    for (name, seed) in [("a", 1), ("b", 2)] {
        let config = ModelConfig { max_position_embeddings: 1 << 16, ..small_config(2) };
        let weights = Weights::random(config, seed);
        save_checkpoint(&folder(&root, name), &weights, StoredType::F32, None).unwrap();
    }
    let mut options = EngineOptions::new(folder(&root, "a"));
    options.context_length = Some(1024);
    change(&mut options);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let cancel = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(serve_engine(options, listener, cancel.clone()));
    let _ = rustls::crypto::ring::default_provider().install_default();
    TestServer { url, client: Client::new(), cancel, tasks, folder: root }
}

impl TestServer {
    async fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let request = self.client.post(format!("{}{path}", self.url)).json(body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn generate(&self, body: Value) -> Value {
        let (status, text) = self.post("/generate", &body).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    async fn stop(mut self) -> Result<(), EngineServeError> {
        self.cancel.cancel();
        self.tasks.join_next().await.unwrap().unwrap()
    }
}

fn body(tokens: usize) -> Value {
    let ids: Vec<usize> = (1..40).map(|i| i * 7 % 1024).collect();
    json!({
        "input_ids": ids, "return_logprob": true, "return_routed_experts": true,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": 3}
    })
}

/// Exchanges recorded with SGLang; `None`, reported as a skip, if the recordings are absent.
fn recorded(name: &str) -> Option<Vec<Value>> {
    let path = orchestrate_e2e::skip::data(&format!("captures/sglang-0.5.23/{name}.json"))?;
    let text = fs_err::read_to_string(path).unwrap();
    let recording: Value = serde_json::from_str(&text).unwrap();
    recording["exchanges"].as_array().cloned()
}

async fn replay(server: &TestServer, exchange: &Value) -> (u16, String) {
    let request = &exchange["request"];
    let method = request["method"].as_str().unwrap().parse().unwrap();
    let url = format!("{}{}", server.url, request["path"].as_str().unwrap());
    let mut builder = server.client.request(method, url);
    if let Some(body) = request["body_raw"].as_str() {
        builder = builder.header("content-type", "application/json").body(body.to_owned());
    }
    let response = builder.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test]
async fn error_replies_have_recorded_status_and_body() {
    let server = serve(|_| {}).await;
    for name in ["bad_requests", "overlong", "flush_cache", "abort_unknown_rid", "info_get_load"] {
        let Some(exchanges) = recorded(name) else { return };
        for exchange in exchanges {
            let (status, text) = replay(&server, &exchange).await;
            let expected = &exchange["response"];
            let what = exchange["request"]["body_raw"].as_str().unwrap_or("").len();
            assert_eq!(json!(status), expected["status"], "{name} {what}: {text}");
            if let Some(lines) = expected["stream_lines"].as_array() {
                let lines: String = lines.iter().filter_map(|l| l[1].as_str()).collect();
                assert_eq!(text, lines);
                continue;
            }
            let expected = expected["body_raw"].as_str().unwrap();
            let Ok(expected) = serde_json::from_str::<Value>(expected) else {
                assert_eq!(text, expected);
                continue;
            };
            let got: Value = serde_json::from_str(&text).unwrap();
            if expected["type"] == "Bad Request" {
                // SGLang names its source files in the message.
                let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
                assert_eq!(keys(&got), keys(&expected));
            } else if status != 200 {
                assert_eq!(got, expected, "{name}");
            }
        }
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn replies_have_recorded_fields() {
    /// Timings of components that this engine does not have.
    const ABSENT_TIMINGS: [&str; 5] = [
        "storage_prefetch_wait",
        "storage_staging_wait",
        "forward_entry_time",
        "prefill_finished_time",
        "api_server_dispatch_finish_ts",
    ];
    let server = serve(|_| {}).await;
    for (name, index) in [("turn1", 0), ("max_new_tokens_0_1", 0), ("max_new_tokens_0_1", 1)] {
        let Some(exchanges) = recorded(name) else { return };
        let exchange = &exchanges[index];
        let (status, text) = replay(&server, exchange).await;
        assert_eq!(status, 200, "{text}");
        let got: Value = serde_json::from_str(&text).unwrap();
        let expected = exchange["response"]["body_raw"].as_str().unwrap();
        let expected: Value = serde_json::from_str(expected).unwrap();
        let keys = |v: &Value| -> BTreeSet<String> {
            v["meta_info"].as_object().unwrap().keys().cloned().collect()
        };
        let (mine, theirs) = (keys(&got), keys(&expected));
        let missing: Vec<_> =
            theirs.difference(&mine).filter(|k| !ABSENT_TIMINGS.contains(&k.as_str())).collect();
        assert!(missing.is_empty() || missing == ["decode_throughput"], "{missing:?}");
        let extra: Vec<_> = mine.difference(&theirs).collect();
        assert!(extra.is_empty(), "{extra:?}");
        for key in ["finish_reason", "prompt_tokens", "completion_tokens"] {
            assert_eq!(got["meta_info"][key], expected["meta_info"][key]);
        }
        let rows = got["meta_info"]["routed_experts"].as_str().unwrap();
        let bytes = base64_simd::STANDARD.decode_to_vec(rows).unwrap();
        let prompt = got["meta_info"]["prompt_tokens"].as_u64().unwrap();
        let outputs = got["meta_info"]["completion_tokens"].as_u64().unwrap();
        assert_eq!(bytes.len() as u64, (prompt + outputs - 1) * 2 * 2 * 4);
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn stream_is_cumulative_and_ends_with_the_plain_reply() {
    let server = serve(|_| {}).await;
    let plain = server.generate(body(8)).await;
    let mut asked = body(8);
    asked["stream"] = json!(true);
    let (status, text) = server.post("/generate", &asked).await;
    assert_eq!(status, 200);
    let events: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let last = events.last().unwrap();
    assert_eq!(events.len(), 9);
    assert!(events[2]["meta_info"].get("routed_experts").is_none());
    assert_eq!(events[2]["output_ids"].as_array().unwrap().len(), 3);
    for key in ["finish_reason", "output_token_logprobs", "routed_experts"] {
        assert_eq!(last["meta_info"][key], plain["meta_info"][key]);
    }
    assert_eq!(last["output_ids"], plain["output_ids"]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn batches_and_samples_are_served_and_duplicate_ids_rejected() {
    let server = serve(|_| {}).await;
    let batch = server.generate(json!({
        "input_ids": [[1, 2, 3], [4, 5]], "rid": ["x", "y"],
        "sampling_params": {"max_new_tokens": 2}
    }));
    let batch = batch.await;
    assert_eq!(batch[1]["meta_info"]["id"], "y");
    assert_eq!(batch[1]["meta_info"]["prompt_tokens"], 2);
    let mut asked = body(6);
    asked["sampling_params"]["n"] = json!(2);
    let samples = server.generate(asked).await;
    assert_ne!(samples[0]["output_ids"], samples[1]["output_ids"]);
    let twice = json!({"input_ids": [[1], [2]], "rid": ["same", "same"]});
    let (status, text) = server.post("/generate", &twice).await;
    assert_eq!(status, 400);
    assert!(text.contains("Duplicate request ID"), "{text}");
    // The error released the id.
    server.generate(json!({"input_ids": [1], "rid": "same"})).await;
    let (status, text) = server.post("/generate", &json!({"input_ids": [5000, 3]})).await;
    assert_eq!(status, 400);
    assert!(text.contains("token id 5000 is outside the vocabulary"), "{text}");
    let unknown = json!({"input_ids": [1], "sampling_params": {"seed": 1}});
    let (status, text) = server.post("/generate", &unknown).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert!(status == 400 && error["error"].is_string(), "{text}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn weights_are_updated_from_disk_or_stay_unchanged() {
    let server = serve(|o| o.weight_version = "1".into()).await;
    let before = server.generate(body(4)).await;
    assert_eq!(before["meta_info"]["weight_version"], "1");
    let path = "/update_weights_from_disk";
    let (status, text) = server.post(path, &json!({"model_path": "no-such-dir"})).await;
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &reply["success"]), (400, &json!(false)));
    let again = server.generate(body(4)).await;
    assert_eq!(again["meta_info"]["cached_tokens"], 38);
    let folder = folder(&server.folder, "b");
    let asked = json!({"model_path": folder, "weight_version": "2"});
    let (status, text) = server.post(path, &asked).await;
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &reply["success"]), (200, &json!(true)));
    let (_, info) = server.get("/server_info").await;
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!((&info["weight_version"], &info["model_path"]), (&json!("2"), &json!(folder)));
    assert_eq!(info["enable_return_routed_experts"], true);
    let after = server.generate(body(4)).await;
    assert_eq!(after["meta_info"]["cached_tokens"], 0);
    assert_ne!(after["meta_info"]["routed_experts"], before["meta_info"]["routed_experts"]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn paused_engine_is_healthy_but_not_ready() {
    let server = serve(|_| {}).await;
    assert_eq!(server.get("/health_generate").await, (200, String::new()));
    let (_, text) = server.post("/pause_generation", &json!({"mode": "in_place"})).await;
    assert_eq!(text, r#"{"message":"Generation paused successfully.","status":"ok"}"#);
    assert_eq!(server.get("/health").await.0, 200);
    assert_eq!(server.get("/ready").await.0, 503);
    let (status, _) = server.post("/pause_generation", &json!({"mode": "sideways"})).await;
    assert_eq!(status, 400);
    server.post("/continue_generation", &json!({})).await;
    assert_eq!(server.get("/ready").await.0, 200);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn all_routes_except_health_require_the_key() {
    let server = serve(|o| o.http.token = Some("secret".into())).await;
    assert_eq!(server.get("/health").await.0, 200);
    let (status, text) = server.get("/server_info").await;
    assert_eq!((status, text.as_str()), (401, r#"{"error":"Unauthorized"}"#));
    assert_eq!(server.post("/generate", &body(1)).await.0, 401);
    let request = server.client.get(format!("{}/server_info", server.url)).bearer_auth("secret");
    assert_eq!(request.send().await.unwrap().status(), 200);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn disconnected_client_aborts_its_request() {
    let server = serve(|options| options.context_length = None).await;
    let mut asked = body(LONG);
    asked["stream"] = json!(true);
    let request = server.client.post(format!("{}/generate", server.url)).json(&asked);
    let mut response = request.send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    drop(response);
    // A flush fails until the request has ended.
    while server.get("/flush_cache").await.0 != 200 {}
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains("sglang:num_running_reqs{"), "{metrics}");
    let aborted = metrics.lines().find(|l| l.starts_with("sglang:num_aborted_requests_total{"));
    assert!(aborted.unwrap().ends_with(" 1"));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn cancelling_answers_running_requests_and_stops() {
    let server = serve(|options| options.context_length = None).await;
    let url = format!("{}/generate", server.url);
    let mut asked = body(LONG);
    asked["stream"] = json!(true);
    let request = server.client.post(url).json(&asked);
    let mut response = request.send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    let (ended, text) = tokio::join!(server.stop(), response.text());
    ended.unwrap();
    assert!(text.unwrap().contains(r#""finish_reason":{"type":"abort""#));
}

#[tokio::test]
async fn missing_model_error_names_the_folder() {
    let mut server = serve(|o| o.model_path = "/no/such/model".into()).await;
    let error = server.tasks.join_next().await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, EngineServeError::Model(CheckpointError { ref path, .. })
        if path.contains("/no/such/model")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "a measurement without assertions"]
#[expect(clippy::print_stderr, reason = "prints what it measured")]
async fn measure_turns_over_http() {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let root = tempfile::tempdir().unwrap();
        let weights = Weights::random(small_config(4), 1);
        save_checkpoint(&folder(&root, "m"), &weights, StoredType::F32, None).unwrap();
        let server = serve(|o| {
            o.weight_format = format;
            o.model_path = folder(&root, "m");
        });
        let server = server.await;
        let started = std::time::Instant::now();
        let mut tasks = JoinSet::new();
        for seed in 0..16u32 {
            let (client, url) = (server.client.clone(), format!("{}/generate", server.url));
            tasks.spawn(async move {
                let (mut tokens, mut have, mut sampled) = (vec![seed + 1; 100], 0, 0);
                for _ in 0..4 {
                    let asked = json!({
                        "input_ids": tokens, "return_logprob": true,
                        "return_routed_experts": true, "routed_experts_start_len": have,
                        "sampling_params": {"max_new_tokens": 25, "sampling_seed": seed},
                    });
                    let sent = client.post(&url).json(&asked).send().await;
                    let reply: Value =
                        serde_json::from_str(&sent.unwrap().text().await.unwrap()).unwrap();
                    let ids: Vec<u32> =
                        serde_json::from_value(reply["output_ids"].clone()).unwrap();
                    sampled += ids.len();
                    tokens.extend(ids);
                    have = tokens.len() - 1;
                    tokens.extend([seed + 2; 30]);
                }
                sampled
            });
        }
        let sampled: usize = tasks.join_all().await.into_iter().sum();
        let rate = sampled as f64 / started.elapsed().as_secs_f64();
        eprintln!("{format:?}, 16 episodes of 4 turns: {rate:.0} sampled tokens/s");
        server.stop().await.unwrap();
    }
}

#[test]
fn a_tokenizer_that_gives_a_token_or_an_id_twice_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model_path = Utf8PathBuf::try_from(folder.path().to_owned()).unwrap();
    let options = EngineOptions::new(model_path.clone());
    for (vocabulary, problem) in [
        (r#"{"a": 0, "b": 1, "a": 2}"#, r#"the vocabulary has "a" twice"#),
        (r#"{"a": 0, "b": 0}"#, "the vocabulary has the id 0 twice"),
    ] {
        let file = format!(
            r#"{{"version": "1.0", "added_tokens": [], "model":
                {{"type": "WordLevel", "vocab": {vocabulary}, "unk_token": "a"}}}}"#
        );
        fs_err::write(model_path.join("tokenizer.json"), file).unwrap();
        let error = read_tokenizer(&options).unwrap_err();
        let EngineServeError::Tokenizer { source, .. } = &error else { panic!("{error}") };
        assert!(source.to_string().contains(problem), "{source}");
    }
}

#[tokio::test]
async fn text_is_accepted_and_returned_with_a_tokenizer() {
    let vocab: serde_json::Map<String, Value> =
        (0..1024).map(|i| (format!("t{i}"), json!(i))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    });
    let server = serve(|o| {
        fs_err::write(o.model_path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    });
    let server = server.await;
    let asked = |more: Value| {
        let mut sampling = json!({"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 1});
        sampling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"text": "t5 t6", "sampling_params": sampling})
    };
    let plain = server.generate(asked(json!({}))).await;
    assert_eq!(plain["meta_info"]["prompt_tokens"], 2);
    let words: Vec<&str> = plain["text"].as_str().unwrap().split(' ').collect();
    assert_eq!(words.len(), 6);
    let stopped = server.generate(asked(json!({"stop": words[2]}))).await;
    let finish = json!({"type": "stop", "matched": words[2]});
    assert_eq!(stopped["meta_info"]["finish_reason"], finish);
    assert_eq!(stopped["text"], format!("{} {} ", words[0], words[1]));
    assert_eq!(stopped["output_ids"].as_array().unwrap().len(), 3);
    let id = plain["output_ids"][1].clone();
    let stopped = server.generate(asked(json!({"stop_token_ids": [id]}))).await;
    assert_eq!(stopped["text"], words[0]);
    let ignored = server.generate(asked(json!({"stop_token_ids": [id], "ignore_eos": true}))).await;
    assert_eq!(ignored["output_ids"], plain["output_ids"]);
    server.stop().await.unwrap();
}
