//! Replies.

use crate::message::ToolCall;
use crate::opaque::signature;
use crate::sampler::{Finish, Sampled, Usage};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, event, pieces, pieces_of_rest};
use bytes::Bytes;
use serde_json::{Value, json};

/// A block of a reply.
enum Block<'a> {
    /// With the number of its reply.
    Thinking(&'a str, u32),
    Text(&'a str),
    ToolUse(&'a ToolCall),
}

fn blocks(reply: &Sampled) -> Vec<Block<'_>> {
    let thinking = reply.reasoning.iter().map(|text| Block::Thinking(text, reply.number));
    let text = (!reply.content.is_empty()).then_some(Block::Text(&reply.content));
    thinking.chain(text).chain(reply.tool_calls.iter().map(Block::ToolUse)).collect()
}

/// The reply as one document.
pub(super) fn message(envelope: &Envelope, reply: &Sampled) -> Value {
    let blocks = blocks(reply);
    let mut message = head(envelope, reply.usage, reply.usage.completion);
    if let Some(map) = message.as_object_mut() {
        map.insert("content".into(), blocks.iter().map(Block::whole).collect());
        let (reason, sequence) = stop(&reply.finish);
        map.insert("stop_reason".into(), json!(reason));
        map.insert("stop_sequence".into(), json!(sequence));
    }
    message
}

/// A message without content.
fn head(envelope: &Envelope, counts: Usage, output_tokens: usize) -> Value {
    json!({
        "id": format!("msg_{}", envelope.id),
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(counts, output_tokens),
    })
}

fn usage(counts: Usage, output_tokens: usize) -> Value {
    json!({
        "input_tokens": counts.prompt.saturating_sub(counts.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": output_tokens,
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
            Self::Thinking(text, reply) => {
                json!({"type": "thinking", "thinking": text, "signature": signature(*reply)})
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
            Self::Thinking(..) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Self::Text(_) => json!({"type": "text", "text": ""}),
            Self::ToolUse(call) => {
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            }
        }
    }

    /// The deltas of a block. `more` is the part of its text that was not sent yet.
    fn deltas(&self, more: &str) -> Vec<Value> {
        match self {
            Self::Thinking(_, reply) => {
                pieces_of_rest(more).map(thinking_delta).chain([signature_delta(*reply)]).collect()
            }
            Self::Text(_) => pieces_of_rest(more).map(text_delta).collect(),
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

fn thinking_delta(piece: &str) -> Value {
    json!({"type": "thinking_delta", "thinking": piece})
}

fn signature_delta(reply: u32) -> Value {
    json!({"type": "signature_delta", "signature": signature(reply)})
}

fn text_delta(piece: &str) -> Value {
    json!({"type": "text_delta", "text": piece})
}

/// The events with the text that was sampled after what was `sent`.
pub(super) fn text_events(envelope: &Envelope, sent: &Sent, text: &SampledText) -> Vec<Bytes> {
    let mut out = Events::default();
    let usage = Usage { prompt: text.prompt, ..Usage::default() };
    out.begin(envelope, sent, usage);
    let (reasoning, content) =
        (sent.more_reasoning(&text.reasoning), sent.more_content(&text.content));
    if !reasoning.is_empty() {
        if sent.reasoning.is_empty() {
            out.open(0, &Block::Thinking("", text.number));
        }
        pieces(reasoning).for_each(|piece| out.delta(0, &thinking_delta(piece)));
    }
    if !content.is_empty() {
        let index = usize::from(!text.reasoning.is_empty());
        if sent.content.is_empty() {
            if index > 0 {
                out.delta(0, &signature_delta(text.number));
                out.close(0);
            }
            out.open(index, &Block::Text(""));
        }
        pieces(content).for_each(|piece| out.delta(index, &text_delta(piece)));
    }
    out.events
}

/// The events of a reply after what was `sent`.
pub(super) fn events(envelope: &Envelope, sent: &Sent, reply: &Sampled) -> Vec<Bytes> {
    let mut out = Events::default();
    out.begin(envelope, sent, reply.usage);
    for (index, block) in blocks(reply).iter().enumerate() {
        let (is_open, is_closed, more) = match block {
            Block::Thinking(text, _) => {
                let is_open = !sent.reasoning.is_empty();
                (is_open, is_open && !sent.content.is_empty(), sent.more_reasoning(text))
            }
            Block::Text(text) => (!sent.content.is_empty(), false, sent.more_content(text)),
            Block::ToolUse(_) => (false, false, ""),
        };
        if is_closed {
            continue;
        }
        if !is_open {
            out.open(index, block);
        }
        block.deltas(more).iter().for_each(|delta| out.delta(index, delta));
        out.close(index);
    }
    let (reason, sequence) = stop(&reply.finish);
    let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
    // All of them: a stream that began early did not know which tokens were cached.
    let usage = usage(reply.usage, reply.usage.completion);
    out.push("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
    out.push("message_stop", &json!({"type": "message_stop"}));
    out.events
}

#[derive(Default)]
struct Events {
    events: Vec<Bytes>,
}

impl Events {
    fn push(&mut self, name: &str, data: &Value) {
        self.events.push(event(Some(name), data));
    }

    fn begin(&mut self, envelope: &Envelope, sent: &Sent, usage: Usage) {
        if !sent.has_text() {
            let begin = json!({"type": "message_start", "message": head(envelope, usage, 1)});
            self.push("message_start", &begin);
            self.push("ping", &json!({"type": "ping"}));
        }
    }

    fn open(&mut self, index: usize, block: &Block<'_>) {
        let name = "content_block_start";
        self.push(name, &json!({"type": name, "index": index, "content_block": block.opened()}));
    }

    fn delta(&mut self, index: usize, delta: &Value) {
        let name = "content_block_delta";
        self.push(name, &json!({"type": name, "index": index, "delta": delta}));
    }

    fn close(&mut self, index: usize) {
        let name = "content_block_stop";
        self.push(name, &json!({"type": name, "index": index}));
    }
}
