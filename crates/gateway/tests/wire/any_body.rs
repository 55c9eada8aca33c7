//! No body makes the gateway panic, and every answer has the dialect's form.

use crate::http::{is_error_of, requests};
use crate::scripted::ScriptedSampler;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use orchestrate_gateway::{GatewayOptions, router};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Words that mean something to some dialect.
const WORDS: &[&str] = &[
    "messages",
    "input",
    "content",
    "role",
    "type",
    "text",
    "user",
    "assistant",
    "tool",
    "system",
    "tools",
    "tool_calls",
    "tool_call_id",
    "id",
    "name",
    "function",
    "arguments",
    "parameters",
    "tool_choice",
    "stop",
    "n",
    "max_tokens",
    "max_output_tokens",
    "stream",
    "thinking",
    "tool_use",
    "tool_result",
    "tool_use_id",
    "input_schema",
    "summary",
    "reasoning",
    "function_call",
    "call_id",
    "function_call_output",
    "output",
    "custom",
    "namespace",
    "encrypted_content",
    "message",
    "format",
    "logprobs",
    "top_logprobs",
    "stop_sequences",
    "instructions",
    "include",
    "custom_tool_call",
    "image",
    "required",
    "auto",
    "any",
    "none",
    "stream_options",
    "include_usage",
    "metadata",
];

fn word() -> impl Strategy<Value = String> {
    prop_oneof![4 => prop::sample::select(WORDS).prop_map(str::to_owned), 1 => "\\PC{0,8}"]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2_i64..200).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::hash_map(word(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Replaces the value at the `place`-th node, counted in depth.
fn replace(node: &mut Value, place: &mut usize, with: &Value) {
    if *place == 0 {
        *node = with.clone();
    }
    *place = place.wrapping_sub(1);
    match node {
        Value::Array(list) => list.iter_mut().for_each(|node| replace(node, place, with)),
        Value::Object(map) => map.values_mut().for_each(|node| replace(node, place, with)),
        _ => {}
    }
}

/// A request that uses all that a dialect has.
fn rich(path: &str) -> Value {
    let schema = json!({"type": "object"});
    match path {
        "chat/completions" => json!({
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": null, "reasoning_content": "b", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "d"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}}, "stop": ["x"], "n": 2,
            "logprobs": true, "stream_options": {"include_usage": true}, "max_tokens": 5,
        }),
        "responses" => json!({
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]}],
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "custom", "name": "p", "format": {"syntax": "lark", "definition": "x"}}],
            "tool_choice": {"type": "custom", "name": "p"}, "include": ["x"], "metadata": {"a": "b"},
        }),
        _ => json!({
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "b", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"k": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                    "content": [{"type": "text", "text": "d"}]}]}],
            "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 5,
        }),
    }
}

/// Sends a body without a connection; the status and the document or stream.
async fn answer(path: &str, body: Vec<u8>) -> (u16, String) {
    let routes = router(ScriptedSampler::writing("hello"), GatewayOptions::default());
    let request = Request::post(format!("/v1/{path}")).body(Body::from(body)).unwrap();
    let reply = TowerToHyperService::new(routes).call(request).await.unwrap();
    let status = reply.status().as_u16();
    let bytes = to_bytes(reply.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

fn check(path: &str, body: Vec<u8>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (status, text) = runtime.block_on(answer(path, body));
    match status {
        200 => assert!(text.contains("hello"), "{text}"),
        400 => assert!(is_error_of(path, &serde_json::from_str(&text).unwrap()), "{text}"),
        _ => panic!("status {status}: {text}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn of_any_json_is_answered(body in value()) {
        for (path, _) in requests() {
            check(path, body.to_string().into_bytes());
        }
    }

    #[test]
    fn of_a_request_with_a_wrong_part_is_answered(place in 0_usize..50, with in value(), stream: bool) {
        for (path, _) in requests() {
            let mut body = rich(path);
            replace(&mut body, &mut place.clone(), &with);
            if let Some(body) = body.as_object_mut() {
                body.insert("stream".into(), json!(stream));
            }
            check(path, body.to_string().into_bytes());
        }
    }

    #[test]
    fn of_any_bytes_is_answered(body: Vec<u8>, cut in 0_usize..600) {
        for (path, _) in requests() {
            check(path, body.clone());
            let text = rich(path).to_string();
            check(path, text.as_bytes()[..cut.min(text.len() - 1)].to_vec());
        }
    }
}

#[test]
fn requests_that_use_everything_and_deep_ones_are_answered() {
    for (path, _) in requests() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (status, text) = runtime.block_on(answer(path, rich(path).to_string().into_bytes()));
        assert_eq!(status, 200, "{path}: {text}");
        check(path, "[".repeat(100_000).into_bytes());
        check(path, format!("{{\"messages\": {}", "{\"a\":".repeat(100_000)).into_bytes());
    }
}
