//! Replies.

use crate::message::ToolCall;
use crate::sampler::{Finish, Sampled};
use crate::wire::{Envelope, event, pieces};
use bytes::Bytes;
use serde_json::{Value, json};

/// The signature of every thinking block. Clients keep it and send it back; nothing is verified,
/// as clients may rewrite a history.
const SIGNATURE: &str = "b3JjaGVzdHJhdGU=";

/// A block of a reply.
enum Block<'a> {
    Thinking(&'a str),
    Text(&'a str),
    ToolUse(&'a ToolCall),
}

fn blocks(reply: &Sampled) -> Vec<Block<'_>> {
    let thinking = reply.reasoning.iter().map(|text| Block::Thinking(text));
    let text = (!reply.content.is_empty()).then_some(Block::Text(&reply.content));
    thinking.chain(text).chain(reply.tool_calls.iter().map(Block::ToolUse)).collect()
}

/// The reply as one document.
pub(super) fn message(envelope: &Envelope, reply: &Sampled) -> Value {
    let blocks = blocks(reply);
    let mut message = head(envelope, reply, reply.usage.completion);
    if let Some(map) = message.as_object_mut() {
        map.insert("content".into(), blocks.iter().map(Block::whole).collect());
        let (reason, sequence) = stop(&reply.finish);
        map.insert("stop_reason".into(), json!(reason));
        map.insert("stop_sequence".into(), json!(sequence));
    }
    message
}

/// A message without content.
fn head(envelope: &Envelope, reply: &Sampled, output_tokens: usize) -> Value {
    json!({
        "id": format!("msg_{}", envelope.id),
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": {
            "input_tokens": reply.usage.prompt.saturating_sub(reply.usage.cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.usage.cached,
            "output_tokens": output_tokens,
        },
    })
}

fn stop(finish: &Finish) -> (&'static str, Option<&str>) {
    match finish {
        Finish::Stop => ("end_turn", None),
        Finish::StopString(text) => ("stop_sequence", Some(text)),
        Finish::Length => ("max_tokens", None),
        Finish::ToolCalls => ("tool_use", None),
    }
}

/// The text of a call's input: an object, as the dialect needs one. Arguments that are not an
/// object are its only field.
fn input(call: &ToolCall) -> (String, Value) {
    match call.parsed() {
        Some(object @ Value::Object(_)) if call.arguments.trim().is_empty() => {
            ("{}".into(), object)
        }
        Some(object @ Value::Object(_)) => (call.arguments.clone(), object),
        _ => {
            let object = json!({"arguments": call.arguments});
            (object.to_string(), object)
        }
    }
}

impl Block<'_> {
    fn whole(&self) -> Value {
        match self {
            Self::Thinking(text) => {
                json!({"type": "thinking", "thinking": text, "signature": SIGNATURE})
            }
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::ToolUse(call) => {
                let (_, input) = input(call);
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
            }
        }
    }

    /// The block before its deltas.
    fn opened(&self) -> Value {
        match self {
            Self::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Self::Text(_) => json!({"type": "text", "text": ""}),
            Self::ToolUse(call) => {
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            }
        }
    }

    fn deltas(&self) -> Vec<Value> {
        match self {
            Self::Thinking(text) => pieces(text)
                .map(|piece| json!({"type": "thinking_delta", "thinking": piece}))
                .chain([json!({"type": "signature_delta", "signature": SIGNATURE})])
                .collect(),
            Self::Text(text) => {
                pieces(text).map(|piece| json!({"type": "text_delta", "text": piece})).collect()
            }
            Self::ToolUse(call) => {
                let (text, _) = input(call);
                let deltas = pieces(&text);
                deltas
                    .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}))
                    .collect()
            }
        }
    }
}

/// The reply as events.
pub(super) fn events(envelope: &Envelope, reply: &Sampled) -> Vec<Bytes> {
    let mut events = Vec::new();
    let mut push = |name: &str, data: Value| events.push(event(Some(name), &data));
    let begin = json!({"type": "message_start", "message": head(envelope, reply, 1)});
    push("message_start", begin);
    push("ping", json!({"type": "ping"}));
    for (index, block) in blocks(reply).iter().enumerate() {
        let name = "content_block_start";
        push(name, json!({"type": name, "index": index, "content_block": block.opened()}));
        for delta in block.deltas() {
            let name = "content_block_delta";
            push(name, json!({"type": name, "index": index, "delta": delta}));
        }
        let name = "content_block_stop";
        push(name, json!({"type": name, "index": index}));
    }
    let (reason, sequence) = stop(&reply.finish);
    let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
    let usage = json!({"output_tokens": reply.usage.completion});
    push("message_delta", json!({"type": "message_delta", "delta": delta, "usage": usage}));
    push("message_stop", json!({"type": "message_stop"}));
    events
}
