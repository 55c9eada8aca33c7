//! Replies of inference servers in all three dialects: what is accepted has valid tokens,
//! log-probabilities, versions and rows, and an unchanged reply is accepted.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_engine::fuzzing::{CheckedReply, ExpectedReply, chat_reply};
use orchestrate_engine::{Dialect, EngineErrorKind, Sglang, Vllm};
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_types::{ModelShape, PolicyVersion};
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Arbitrary)]
struct Input {
    dialect: u8,
    outputs: u8,
    rows: bool,
    changes: Vec<Change>,
}

const ID: &str = "r.1";
const PROMPT: usize = 3;
const VOCAB: u32 = 9;

fn expected(outputs: usize, rows: bool) -> ExpectedReply {
    ExpectedReply {
        request_id: ID.to_owned(),
        prompt_tokens: PROMPT,
        max_new_tokens: outputs,
        routed_experts_start: rows.then_some(0),
        shape: Arc::new(ModelShape {
            hidden_layers: 2,
            moe_layers: vec![0, 1],
            experts: 4,
            top_k: 2,
            vocab: VOCAB as usize,
            context: 64,
        }),
        serving: PolicyVersion(5),
    }
}

/// Ids `[rows, 2 layers, 2]` for a sequence with `outputs` sampled tokens.
fn ids(outputs: usize) -> Vec<u8> {
    (0..(PROMPT + outputs - 1) * 2).flat_map(|cell| [(cell % 3) as u8, 3]).collect()
}

fn sglang(outputs: usize) -> Value {
    let wide: Vec<u8> = ids(outputs).iter().flat_map(|&id| i32::from(id).to_le_bytes()).collect();
    let tokens: Vec<u32> = (0..outputs as u32).map(|at| at % VOCAB).collect();
    let logprobs: Vec<Value> = tokens.iter().map(|id| json!([-0.5, id, null])).collect();
    json!({"text": "", "output_ids": tokens, "meta_info": {
        "id": ID, "finish_reason": {"type": "length", "length": outputs}, "prompt_tokens": PROMPT,
        "completion_tokens": outputs, "cached_tokens": 1, "weight_version": "5",
        "weight_versions": [{"version": "5", "start": 0, "end": outputs}],
        "output_token_logprobs": logprobs,
        "routed_experts": String::from_utf8(input::base64(&wide)).expect("ASCII"),
    }})
}

fn vllm(outputs: usize) -> Value {
    let rows = PROMPT + outputs - 1;
    let mut header =
        format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, 2, 2), }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.bytes());
    file.extend(ids(outputs));
    let tokens: Vec<u32> = (0..outputs as u32).map(|at| at % VOCAB).collect();
    let logprobs: Vec<Value> =
        tokens.iter().map(|id| json!({"token_id": id, "logprob": -0.5})).collect();
    json!({"request_id": format!("generate-tokens-{ID}"), "output_mode": "tokens",
        "choices": [{"index": 0, "finish_reason": "length", "token_ids": tokens,
            "logprobs": {"content": logprobs},
            "weight_versions": [{"version": "5", "start": 0, "end": outputs}],
            "routed_experts": String::from_utf8(input::base64(&file)).expect("ASCII")}],
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": outputs,
            "prompt_tokens_details": {"cached_tokens": 1}}})
}

fn chat() -> Value {
    json!({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant",
        "content": null, "reasoning": "é", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
}

fn check(reply: Result<CheckedReply, EngineErrorKind>, expected: &ExpectedReply, unchanged: bool) {
    let generation = match reply {
        Ok(reply) => reply.generation,
        Err(error) => {
            assert!(!unchanged, "a valid reply was refused: {error}");
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let outputs = generation.output_ids();
    assert!(outputs.len() <= expected.max_new_tokens);
    assert!(outputs.iter().all(|&id| id < VOCAB));
    assert_eq!(generation.logprobs().len(), outputs.len());
    assert!(generation.logprobs().iter().all(|p| p.is_finite() && *p <= 0.0));
    let mut next = 0;
    for span in generation.versions() {
        assert!(span.start == next && span.end > span.start);
        next = span.end;
    }
    assert_eq!(next, outputs.len());
    if let Some(rows) = &generation.routed_experts {
        assert!(expected.routed_experts_start.is_some());
        assert_eq!(rows.rows(), PROMPT + outputs.len() - 1);
    }
    assert!(generation.cached_tokens <= PROMPT);
}

fuzz_target!(|input: Input| {
    let outputs = 1 + usize::from(input.outputs % 4);
    let expected = expected(outputs, input.rows);
    let reply = match input.dialect % 3 {
        0 => sglang(outputs),
        1 => vllm(outputs),
        _ => chat(),
    };
    let valid = reply.to_string().into_bytes();
    let mut body = valid.clone();
    input::change(&mut body, &input.changes);
    let unchanged = body == valid;
    // An error's path and message have limits of their own; a token list starts with room for 256.
    let cap = 64 * body.len() + (1 << 16);
    match input.dialect % 3 {
        0 => check(bounded(cap, || Sglang::read(&body, &expected)), &expected, unchanged),
        1 => check(bounded(cap, || Vllm::read(&body, &expected)), &expected, unchanged),
        _ => {
            let read = bounded(cap, || chat_reply(&body, 2));
            assert!(read.is_ok() || !unchanged);
        }
    }
});
