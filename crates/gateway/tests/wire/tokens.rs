//! Token-level sampling, with the client of the Python package `renderers`, which `verifiers` uses.
//! `ORCHESTRATE_VERIFIERS_PYTHON` names a Python that has it.

use crate::scripted::ScriptedSampler;
use crate::server::{Server, quick};
use orchestrate_e2e::skip;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::process::Command;

const PATH: &str = "/inference/v1/generate";

#[tokio::test]
async fn tokenised_prompts_get_tokens_and_rows() {
    let sampler = ScriptedSampler::writing("unused");
    let server = Server::start(sampler.clone(), quick()).await;
    let parameters = json!({
        "max_tokens": 2, "temperature": 0.3, "stop_token_ids": [9], "logprobs": 1,
        "routed_experts_prompt_start": 2,
    });
    let body = json!({
        "model": "any", "token_ids": [5, 6, 7], "sampling_params": parameters, "cache_salt": "x",
    });
    let text = server.post(PATH, &body).await.text().await.unwrap();
    // Clients search for these bytes.
    assert!(text.contains(r#""routed_experts":{"data":""#), "{text}");
    let reply: Value = serde_json::from_str(&text).unwrap();
    let choice = &reply["choices"][0];
    assert_eq!(choice["token_ids"], json!([8, 9]));
    assert_eq!(choice["finish_reason"], "stop");
    let content = &choice["logprobs"]["content"];
    assert_eq!(content[1], json!({"token": "token_id:9", "logprob": -0.5}));
    // Rows 2 and 3 of a model with two layers and top-1, of 256 experts or fewer.
    let rows = json!({"data": "AgIDAw==", "shape": [2, 2, 1], "dtype": "uint8", "start": 2});
    assert_eq!(choice["routed_experts"], rows);
    assert_eq!(reply["usage"]["prompt_tokens"], 3);
    assert_eq!(sampler.delivered().await, [true]);
}

#[tokio::test]
async fn token_requests_that_cannot_be_honoured_are_refused_by_field() {
    let server = Server::start(ScriptedSampler::writing("unused"), quick()).await;
    for (body, field) in [
        (json!({}), "token_ids"),
        (json!({"token_ids": []}), "token_ids"),
        (json!({"token_ids": [-1]}), "token_ids[0]"),
        (json!({"token_ids": [1], "stream": true}), "stream"),
        (json!({"token_ids": [1], "features": {}}), "features"),
        (json!({"token_ids": [1], "content_parts": []}), "content_parts"),
        (json!({"token_ids": [1], "sampling_params": {"n": 2}}), "sampling_params.n"),
        (json!({"token_ids": [1], "sampling_params": {"max_tokens": 0}}), "max_tokens"),
        (json!({"token_ids": [1], "sampling_params": 3}), "sampling_params"),
        (json!([1]), "token_ids"),
    ] {
        let reply = server.post(PATH, &body).await;
        assert_eq!(reply.status(), 400, "{body}");
        let error: Value = reply.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(field), "{body}: {message}");
    }
}

#[tokio::test]
async fn verifiers_client_gets_tokens_and_rows() {
    let python = std::env::var("ORCHESTRATE_VERIFIERS_PYTHON").unwrap_or("python3".into());
    let able = std::process::Command::new(&python).args(["-c", "import renderers"]).output();
    if !able.is_ok_and(|output| output.status.success()) {
        let why = "ORCHESTRATE_VERIFIERS_PYTHON is not a Python with verifiers";
        skip::skip("verifiers-python", why);
        return;
    }
    let sampler = ScriptedSampler::writing("unused");
    let server = Server::start(sampler.clone(), quick()).await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire/tokens.py");
    let mut command = Command::new(python);
    command.arg(script).arg(server.url("/v1")).kill_on_drop(true).env("NO_PROXY", "*");
    let output = tokio::time::timeout(Duration::from_mins(2), command.output());
    let output = output.await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(seen["completion_ids"], json!([8, 9]));
    assert_eq!(seen["completion_logprobs"], json!([-0.5, -0.5]));
    assert_eq!(seen["finish_reason"], "stop");
    assert_eq!(seen["rows"], json!([[0, 0], [1, 1], [2, 2], [3, 3]]));
    assert_eq!(seen["too_long"], true);
    assert_eq!(sampler.delivered().await, [true]);
}
