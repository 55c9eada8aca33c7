//! Hundreds of hostile replies: correct replies, hand-written or recorded, with one error each.
//! Each is refused with an error that names the field at fault; none panics, none is accepted.

use crate::server::{
    Recorded, Reply, SGLANG, VLLM, options, recorded, recording, request, sample, serve, shape,
    tokens,
};
use orchestrate_engine::{Client, Dialect, EngineErrorKind, GenerateRequest, Sglang, Vllm};
use orchestrate_routing::{RoutedRows, encode_npy, encode_sglang};
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;

/// Corrupts a reply in one way. Returns the field that the error must name; `None` if this reply cannot
/// be corrupted like this.
type Corruption = fn(&mut Value) -> Option<&'static str>;

fn set(reply: &mut Value, path: &str, value: Value) -> Option<()> {
    *reply.pointer_mut(path)? = value;
    Some(())
}

fn remove(reply: &mut Value, path: &str, key: &str) -> Option<()> {
    let object: &mut Map<String, Value> = reply.pointer_mut(path)?.as_object_mut()?;
    object.remove(key).map(|_| ())
}

/// Changes the text at a path; `None` if there is none or it stays the same.
fn recode(reply: &mut Value, path: &str, change: impl FnOnce(&str) -> String) -> Option<()> {
    let text = reply.pointer(path)?.as_str()?.to_owned();
    let changed = change(&text);
    if changed == text {
        return None;
    }
    set(reply, path, json!(changed))
}

/// Changes the bytes of the base64 payload at a path, like [`recode`].
fn rebyte(reply: &mut Value, path: &str, change: impl FnOnce(&mut Vec<u8>)) -> Option<()> {
    recode(reply, path, |text| {
        let mut bytes = base64_simd::STANDARD.decode_to_vec(text).unwrap();
        change(&mut bytes);
        base64_simd::STANDARD.encode_to_string(&bytes)
    })
}

/// Creates a list of corruptions from closures over one reply.
macro_rules! corruptions {
    ($($field:literal: |$reply:ident| $change:expr;)*) => {
        vec![$(
            (|$reply: &mut Value| -> Option<&'static str> { $change?; Some($field) }) as Corruption
        ),*]
    };
}

const S_IDS: &str = "/output_ids";
const S_LOG: &str = "/meta_info/output_token_logprobs";
const S_ROW: &str = "/meta_info/routed_experts";
const S_FIN: &str = "/meta_info/finish_reason";
const S_VER: &str = "/meta_info/weight_versions";

fn sglang_corruptions() -> Vec<Corruption> {
    corruptions! {
        "id": |r| set(r, "/meta_info/id", json!("another"));
        "id": |r| set(r, "/meta_info/id", json!(""));
        "id": |r| set(r, "/meta_info/id", json!(7));
        "id": |r| remove(r, "/meta_info", "id");
        "meta_info": |r| remove(r, "", "meta_info");
        "meta_info": |r| set(r, "/meta_info", json!(null));
        "meta_info": |r| set(r, "/meta_info", json!([]));
        "output_ids": |r| remove(r, "", "output_ids");
        "output_ids": |r| set(r, S_IDS, json!(null));
        "output_ids": |r| set(r, S_IDS, json!("1,2,3"));
        "output_ids": |r| set(r, "/output_ids/0", json!(-1));
        "output_ids": |r| set(r, "/output_ids/0", json!(1.5));
        "output_ids": |r| set(r, "/output_ids/0", json!(4_294_967_296_u64));
        "output_ids": |r| set(r, "/output_ids/0", json!(null));
        "output_ids": |r| set(r, "/output_ids/0", json!([1]));
        "output_ids": |r| set(r, "/output_ids/0", json!(1024));
        "output_ids": |r| set(r, "/output_ids/0", json!(u32::MAX));
        "completion_tokens": |r| r.pointer_mut(S_IDS)?.as_array_mut()?.pop().map(|_| ());
        "completion_tokens": |r| { r.pointer_mut(S_IDS)?.as_array_mut()?.push(json!(1)); Some(()) };
        "completion_tokens": |r| set(r, "/meta_info/completion_tokens", json!(0));
        "completion_tokens": |r| set(r, "/meta_info/completion_tokens", json!(-1));
        "completion_tokens": |r| set(r, "/meta_info/completion_tokens", json!("8"));
        "prompt_tokens": |r| set(r, "/meta_info/prompt_tokens", json!(1));
        "prompt_tokens": |r| set(r, "/meta_info/prompt_tokens", json!(null));
        "prompt_tokens": |r| set(r, "/meta_info/prompt_tokens", json!(u64::MAX));
        "prompt_tokens": |r| remove(r, "/meta_info", "prompt_tokens");
        "cached_tokens": |r| set(r, "/meta_info/cached_tokens", json!(100_000));
        "cached_tokens": |r| set(r, "/meta_info/cached_tokens", json!(-1));
        "num_retractions": |r| set(r, "/meta_info/num_retractions", json!(-1));
        "num_retractions": |r| set(r, "/meta_info/num_retractions", json!("many"));
        "finish_reason": |r| set(r, S_FIN, json!(null));
        "finish_reason": |r| set(r, S_FIN, json!("stop"));
        "finish_reason": |r| set(r, S_FIN, json!({}));
        "finish_reason": |r| set(r, S_FIN, json!({"type": "unknown"}));
        "finish_reason": |r| set(r, S_FIN, json!({"type": "stop", "matched": "NaN happened"}));
        "finish_reason": |r| remove(r, "/meta_info", "finish_reason");
        "output_token_logprobs": |r| remove(r, "/meta_info", "output_token_logprobs");
        "output_token_logprobs": |r| set(r, S_LOG, json!([]));
        "output_token_logprobs": |r| set(r, S_LOG, json!({}));
        "output_token_logprobs": |r| r.pointer_mut(S_LOG)?.as_array_mut()?.pop().map(|_| ());
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/0", json!(0.25));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/0", json!(-9999.0));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/0", json!(-1e30));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/0", json!(null));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/0", json!("NaN"));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0/1", json!(1023));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0", json!([-0.5]));
        "output_token_logprobs": |r| set(r, "/meta_info/output_token_logprobs/0", json!(-0.5));
        "routed_experts": |r| remove(r, "/meta_info", "routed_experts");
        "routed_experts": |r| set(r, S_ROW, json!(null));
        "routed_experts": |r| set(r, S_ROW, json!(""));
        "routed_experts": |r| set(r, S_ROW, json!(1));
        "routed_experts": |r| set(r, S_ROW, json!([[0, 1]]));
        "routed_experts": |r| set(r, S_ROW, json!({"data": "", "dtype": "uint8"}));
        "routed_experts": |r| recode(r, S_ROW, |text| format!(" {text}"));
        "routed_experts": |r| recode(r, S_ROW, |text| text[..text.len() - 1].to_owned());
        "routed_experts": |r| recode(r, S_ROW, |text| text[4..].to_owned());
        "routed_experts": |r| recode(r, S_ROW, |text| format!("{text}AAAA"));
        "routed_experts": |r| recode(r, S_ROW, |text| format!("{text}{text}{text}"));
        "routed_experts": |r| recode(r, S_ROW, |text| text.replacen('A', "-", 1));
        "routed_experts": |r| recode(r, S_ROW, |text| text.replacen('A', "=", 1));
        "routed_experts": |r| recode(r, S_ROW, |text| text.replacen('A', "\u{e9}", 1));
        "routed_experts": |r| recode(r, S_ROW, |text| "A".repeat(text.len()));
        "routed_experts": |r| recode(r, S_ROW, |text| text.chars().rev().collect());
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes[0] = 8);
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes[0] = 255);
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes[3] = 0x80);
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes.copy_within(0..4, 4));
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes[..32].fill(0));
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes.iter_mut().for_each(|b| *b = 1));
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| {
            let row = bytes[..32].to_vec();
            bytes.extend_from_slice(&row);
            bytes.extend_from_slice(&row);
        });
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes.truncate(bytes.len() - 32));
        "routed_experts": |r| rebyte(r, S_ROW, |bytes| bytes.truncate(bytes.len() - 4));
        "weight_versions": |r| set(r, S_VER, json!([]));
        "weight_versions": |r| set(r, S_VER, json!("12"));
        "weight_versions": |r| set(r, S_VER, json!([{"version": "12", "start": 0}]));
        "weight_versions": |r| set(r, S_VER, json!([{"version": 12, "start": 0, "end": 1}]));
        "weight_versions": |r| set(r, "/meta_info/weight_versions/0/version", json!("main"));
        "weight_versions": |r| set(r, "/meta_info/weight_versions/0/version", json!("-1"));
        "weight_versions": |r| set(r, "/meta_info/weight_versions/0/start", json!(1));
        "weight_versions": |r| set(r, "/meta_info/weight_versions/0/end", json!(100_000));
        "weight_versions": |r| set(r, "/meta_info/weight_versions/0/end", json!(-1));
    }
}

const V_IDS: &str = "/choices/0/token_ids";
const V_LOG: &str = "/choices/0/logprobs/content";
const V_ROW: &str = "/choices/0/routed_experts";
const V_VER: &str = "/choices/0/weight_versions";

fn vllm_corruptions() -> Vec<Corruption> {
    corruptions! {
        "request_id": |r| set(r, "/request_id", json!("generate-tokens-another"));
        "request_id": |r| recode(r, "/request_id", |id| id.replace("generate-tokens-", ""));
        "request_id": |r| set(r, "/request_id", json!(null));
        "request_id": |r| remove(r, "", "request_id");
        "output_mode": |r| set(r, "/output_mode", json!("text"));
        "output_mode": |r| set(r, "/output_mode", json!(1));
        "choices": |r| remove(r, "", "choices");
        "choices": |r| set(r, "/choices", json!([]));
        "choices": |r| set(r, "/choices", json!({}));
        "choices[0]": |r| set(r, "/choices/0", json!(null));
        "routed_experts": |r| {
            let choice = r.pointer("/choices/0")?.clone();
            r.pointer_mut("/choices")?.as_array_mut()?.push(choice);
            Some(())
        };
        "choices": |r| {
            let mut choice = r.pointer("/choices/0")?.clone();
            choice["routed_experts"] = json!(null);
            r.pointer_mut("/choices")?.as_array_mut()?.push(choice);
            Some(())
        };
        "index": |r| set(r, "/choices/0/index", json!(1));
        "index": |r| remove(r, "/choices/0", "index");
        "finish_reason": |r| set(r, "/choices/0/finish_reason", json!(null));
        "finish_reason": |r| set(r, "/choices/0/finish_reason", json!({"type": "stop"}));
        "finish_reason": |r| set(r, "/choices/0/finish_reason", json!("repetition"));
        "finish_reason": |r| set(r, "/choices/0/finish_reason", json!(""));
        "token_ids": |r| remove(r, "/choices/0", "token_ids");
        "token_ids": |r| set(r, V_IDS, json!(null));
        "token_ids": |r| set(r, V_IDS, json!("1,2"));
        "token_ids": |r| set(r, "/choices/0/token_ids/0", json!(-1));
        "token_ids": |r| set(r, "/choices/0/token_ids/0", json!(1.5));
        "token_ids": |r| set(r, "/choices/0/token_ids/0", json!(1024));
        "token_ids": |r| set(r, "/choices/0/token_ids/0", json!(4_294_967_296_u64));
        "token_ids": |r| set(r, "/choices/0/token_ids/0", json!(null));
        "completion_tokens": |r| r.pointer_mut(V_IDS)?.as_array_mut()?.pop().map(|_| ());
        "completion_tokens": |r| { r.pointer_mut(V_IDS)?.as_array_mut()?.push(json!(1)); Some(()) };
        "completion_tokens": |r| set(r, "/usage/completion_tokens", json!(0));
        "completion_tokens": |r| set(r, "/usage/completion_tokens", json!("8"));
        "prompt_tokens": |r| set(r, "/usage", json!(null));
        "prompt_tokens": |r| set(r, "/usage/prompt_tokens", json!(1));
        "prompt_tokens": |r| remove(r, "/usage", "prompt_tokens");
        "cached_tokens": |r| {
            set(r, "/usage/prompt_tokens_details", json!({"cached_tokens": 100_000}))
        };
        "cached_tokens": |r| set(r, "/usage/prompt_tokens_details", json!({"cached_tokens": -1}));
        "logprobs": |r| set(r, "/choices/0/logprobs", json!(null));
        "logprobs": |r| set(r, V_LOG, json!(null));
        "logprobs": |r| set(r, V_LOG, json!([]));
        "logprobs": |r| r.pointer_mut(V_LOG)?.as_array_mut()?.pop().map(|_| ());
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0/logprob", json!(0.25));
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0/logprob", json!(-9999.0));
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0/logprob", json!(null));
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0/logprob", json!("-0.5"));
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0/token_id", json!(1023));
        "logprobs": |r| remove(r, "/choices/0/logprobs/content/0", "token_id");
        "logprobs": |r| set(r, "/choices/0/logprobs/content/0", json!([-0.5, 1, null]));
        "routed_experts": |r| remove(r, "/choices/0", "routed_experts");
        "routed_experts": |r| set(r, V_ROW, json!(null));
        "routed_experts": |r| set(r, V_ROW, json!(""));
        "routed_experts": |r| set(r, V_ROW, json!(1));
        "routed_experts": |r| set(r, V_ROW, json!({"data": "", "shape": [1, 4, 2]}));
        "routed_experts": |r| recode(r, V_ROW, |text| format!(" {text}"));
        "routed_experts": |r| recode(r, V_ROW, |text| text[..text.len() - 1].to_owned());
        "routed_experts": |r| recode(r, V_ROW, |text| text[4..].to_owned());
        "routed_experts": |r| recode(r, V_ROW, |text| format!("{text}AAAA"));
        "routed_experts": |r| recode(r, V_ROW, |text| "A".repeat(text.len()));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[0] = 0);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[6] = 9);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[8] = 255);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[9] = 255);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b"|u1", b"|O1"));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b"|u1", b"<f4"));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b"|u1", b">u2"));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b"False", b"True "));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b", 4, 2)", b", 2, 4)"));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| replace(bytes, b"'shape': (", b"'shape': (9"));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| { bytes.pop(); });
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes.push(1));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes.truncate(40));
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[128] = 8);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[129] = bytes[128]);
        "routed_experts": |r| rebyte(r, V_ROW, |bytes| bytes[128..].fill(0));
        "weight_versions": |r| set(r, V_VER, json!([]));
        "weight_versions": |r| set(r, V_VER, json!("12"));
        "weight_versions": |r| set(r, "/choices/0/weight_versions/0/version", json!("main"));
        "weight_versions": |r| set(r, "/choices/0/weight_versions/0/start", json!(1));
        "weight_versions": |r| set(r, "/choices/0/weight_versions/0/end", json!(100_000));
    }
}

/// Overwrites the start of the first occurrence of `old` with `new`.
fn replace(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
}

/// A correct reply with its request.
struct Base {
    request: GenerateRequest,
    reply: Value,
}

/// Rows of `count` positions from `start` that pass every check.
fn rows(start: usize, count: usize) -> RoutedRows {
    let cell = |seed: usize| [seed % 8, (seed + 1 + seed / 8 % 7) % 8];
    let ids: Vec<u16> = (start..start + count)
        .flat_map(|position| (0..4).flat_map(move |layer| cell(position * 5 + layer * 3)))
        .map(|id| u16::try_from(id).unwrap())
        .collect();
    RoutedRows::from_ids(&shape(), start, &ids).unwrap()
}

fn hand_written(vllm: bool) -> Vec<Base> {
    let mut bases = Vec::new();
    for (prompt, outputs, start, finish) in
        [(6, 3, 0, "length"), (9, 8, 4, "stop"), (20, 1, 3, "length"), (12, 5, 9, "abort")]
    {
        let request = request((1..=prompt).collect(), 8, Some(start));
        let id = request.request_id.as_str();
        let ids: Vec<u32> = (10..10 + outputs).collect();
        let rows = rows(start, usize::try_from(prompt + outputs).unwrap() - 1 - start);
        let spans = json!([{"version": "12", "start": 0, "end": outputs}]);
        let reply = if vllm {
            let content: Vec<Value> =
                ids.iter().map(|id| json!({"token_id": id, "logprob": -0.5})).collect();
            json!({
                "request_id": format!("generate-tokens-{id}"), "output_mode": "tokens",
                "usage": {"prompt_tokens": prompt, "completion_tokens": outputs,
                          "prompt_tokens_details": {"cached_tokens": 0}},
                "choices": [{
                    "index": 0, "finish_reason": finish, "token_ids": ids,
                    "routed_experts": encode_npy(&rows, &shape()).unwrap(),
                    "weight_versions": spans, "logprobs": {"content": content},
                }],
            })
        } else {
            let triples: Vec<Value> = ids.iter().map(|id| json!([-0.5, id, null])).collect();
            json!({
                "text": "", "output_ids": ids,
                "meta_info": {
                    "id": id, "finish_reason": {"type": finish}, "prompt_tokens": prompt,
                    "completion_tokens": outputs, "cached_tokens": 0, "num_retractions": 0,
                    "weight_version": "12", "weight_versions": spans,
                    "output_token_logprobs": triples,
                    "routed_experts": encode_sglang(&rows, &shape()).unwrap(),
                },
            })
        };
        bases.push(Base { request, reply });
    }
    bases
}

fn from_recordings(engine: &str) -> Vec<Base> {
    let mut bases = Vec::new();
    for name in ["turn1", "turn2", "turn4", "chunked_prefill", "concurrent8", "abort_all", "stop"] {
        for exchange in recording(engine, name).unwrap_or_default() {
            let Some(Recorded { request, status: 200, body }) = recorded(&exchange) else {
                continue;
            };
            if tokens(&request).routed_experts_start.is_none() {
                continue;
            }
            let mut reply: Value = serde_json::from_str(&body).unwrap();
            let id = request.request_id.as_str();
            if engine == SGLANG {
                reply["meta_info"]["id"] = json!(id);
            } else {
                reply["request_id"] = json!(format!("generate-tokens-{id}"));
            }
            bases.push(Base { request, reply });
        }
    }
    bases
}

/// Asserts that a client refuses every corrupted form of every base. Returns how many there were.
async fn refuse_all<D: Dialect>(bases: Vec<Base>, corruptions: &[Corruption]) -> usize {
    let mut tasks = JoinSet::new();
    let body = Arc::new(Mutex::new(String::new()));
    let served = Arc::clone(&body);
    let script = move |_: &str, _: &Value| Reply::Now(200, served.lock().unwrap().clone());
    let (url, _) = serve(&mut tasks, script).await;
    let client = Client::<D>::new(options(&url)).unwrap();
    let mut count = 0;
    for Base { request, reply } in bases {
        *body.lock().unwrap() = reply.to_string();
        sample(&client, request.clone()).await.unwrap();
        for (index, corruption) in corruptions.iter().enumerate() {
            let mut corrupted = reply.clone();
            let Some(field) = corruption(&mut corrupted) else { continue };
            count += 1;
            *body.lock().unwrap() = corrupted.to_string();
            let accepted =
                sample(&client, request.clone()).await.map(|got| got.output_ids().to_vec());
            assert!(accepted.is_err(), "{index} {field}: {accepted:?}");
            let error = accepted.unwrap_err();
            assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{index}: {error}");
            assert!(error.to_string().contains(field), "{index} {field}: {error}");
        }
    }
    count
}

#[tokio::test]
async fn three_hundred_hand_written_replies_are_refused_by_field() {
    let sglang = refuse_all::<Sglang>(hand_written(false), &sglang_corruptions()).await;
    let vllm = refuse_all::<Vllm>(hand_written(true), &vllm_corruptions()).await;
    assert!(sglang >= 300 && vllm >= 300, "{sglang} and {vllm}");
}

#[tokio::test]
async fn corrupted_recorded_replies_are_refused_by_field() {
    for (bases, vllm) in [(from_recordings(SGLANG), false), (from_recordings(VLLM), true)] {
        let recordings = bases.len();
        let count = if vllm {
            refuse_all::<Vllm>(bases, &vllm_corruptions()).await
        } else {
            refuse_all::<Sglang>(bases, &sglang_corruptions()).await
        };
        // Absent recordings were reported when they were loaded.
        assert!(recordings == 0 || count > 60 * recordings, "{count} of {recordings}");
    }
}

#[tokio::test]
async fn malformed_bodies_are_refused() {
    let base = &hand_written(false)[0];
    let text = base.reply.to_string();
    let mut bodies: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"{}".to_vec(),
        b"<html><body>Bad Gateway</body></html>".to_vec(),
        b"\x1f\x8b\x08\x00\x00".to_vec(),
        b"\xff\xfe{\x00".to_vec(),
        b"data: {\"output_ids\":[1]}\n\ndata: [DONE]\n\n".to_vec(),
        br#"{"error":{"message":"out of memory"}}"#.to_vec(),
        format!("{{\"meta_info\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000)).into_bytes(),
        format!("{}{}", "{\"a\":".repeat(10_000), "}".repeat(10_000)).into_bytes(),
        text.replace("-0.5", "NaN").into_bytes(),
        text.replace("-0.5", "-Infinity").into_bytes(),
        text.replace("-0.5", "-1e400").into_bytes(),
        text.replace("\"output_ids\"", "\"output_ids\":[1],\"output_ids\"").into_bytes(),
        text.replace("\"meta_info\":", "\"meta_info\":null,\"meta_info\":").into_bytes(),
        text.replace("\"id\":\"", "\"id\":\"\\ud800").into_bytes(),
        text.replace("\"id\":\"", "\"id\":\"\u{0}").into_bytes(),
        format!("{text}{text}").into_bytes(),
        format!("\u{feff}{text}").into_bytes(),
    ];
    let step = text.len() / 40;
    bodies.extend((0..40).map(|part| text.as_bytes()[..part * step].to_vec()));
    let mut invalid_utf8 = text.clone().into_bytes();
    invalid_utf8[2] = 0xff;
    bodies.push(invalid_utf8);
    for vllm in [false, true] {
        for body in &bodies {
            let error = raw(body.clone(), vllm, base.request.clone()).await;
            let shown = error.to_string();
            assert!(matches!(error.kind, EngineErrorKind::InvalidReply(_)), "{shown}");
            assert!(shown.len() < 2000, "errors quote only the start of a body");
        }
    }
}

/// The error of a client that receives these bytes.
async fn raw(
    body: Vec<u8>,
    vllm: bool,
    request: GenerateRequest,
) -> orchestrate_engine::EngineError {
    use axum::Router;
    use axum::body::Bytes;
    let mut tasks = JoinSet::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let body = Bytes::from(body);
    let app: Router = Router::new().fallback(move || std::future::ready(body.clone()));
    tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
    let request = GenerateRequest { deadline: Duration::from_mins(1), ..request };
    if vllm {
        sample(&Client::<Vllm>::new(options(&url)).unwrap(), request).await.unwrap_err()
    } else {
        sample(&Client::<Sglang>::new(options(&url)).unwrap(), request).await.unwrap_err()
    }
}
