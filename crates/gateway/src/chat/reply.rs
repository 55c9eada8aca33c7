//! Replies.

use super::{Chat, Logprobs};
use crate::sampler::{Finish, Sampled, SampledToken, Usage};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, event, pieces, pieces_of_rest};
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// Tokens whose log-probabilities one chunk carries.
const LOGPROBS_PER_CHUNK: usize = 128;

/// The reply as one document.
pub(super) fn completion(form: Chat, envelope: &Envelope, replies: &[Sampled]) -> Value {
    let choice = |(index, reply): (usize, &Sampled)| {
        let logprobs = (form.logprobs != Logprobs::None).then(|| logprobs(form, &reply.tokens));
        json!({
            "index": index,
            "message": message(reply),
            "logprobs": logprobs,
            "finish_reason": finish_reason(&reply.finish),
        })
    };
    json!({
        "id": format!("chatcmpl-{}", envelope.id),
        "object": "chat.completion",
        "created": envelope.created,
        "model": envelope.model,
        "choices": replies.iter().enumerate().map(choice).collect::<Vec<_>>(),
        "usage": usage(replies),
    })
}

fn message(reply: &Sampled) -> Value {
    let content =
        (!reply.content.is_empty() || reply.tool_calls.is_empty()).then_some(&reply.content);
    let mut message = Map::new();
    message.insert("role".into(), json!("assistant"));
    message.insert("content".into(), json!(content));
    message.insert("refusal".into(), Value::Null);
    if let Some(reasoning) = &reply.reasoning {
        message.insert("reasoning_content".into(), json!(reasoning));
    }
    if !reply.tool_calls.is_empty() {
        let calls = reply.tool_calls.iter().map(|call| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": call.id, "type": "function", "function": function})
        });
        message.insert("tool_calls".into(), calls.collect());
    }
    Value::Object(message)
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopString(_) => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    }
}

/// Of all replies: the prompt counts once.
fn usage(replies: &[Sampled]) -> Value {
    let first = replies.first().map_or(Usage::default(), |reply| reply.usage);
    let completion: usize = replies.iter().map(|reply| reply.usage.completion).sum();
    let reasoning: usize = replies.iter().map(|reply| reply.usage.reasoning).sum();
    json!({
        "prompt_tokens": first.prompt,
        "completion_tokens": completion,
        "total_tokens": first.prompt.saturating_add(completion),
        "prompt_tokens_details": {"cached_tokens": first.cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

/// Every sampled token, including those of thinking and calls.
fn logprobs(form: Chat, tokens: &[SampledToken]) -> Value {
    let of_token = |token: &SampledToken| {
        let one = json!({"token": token.text, "logprob": token.logprob, "bytes": token.bytes});
        let mut with = one.clone();
        if let Some(map) = with.as_object_mut() {
            let top = if form.logprobs == Logprobs::Listed { vec![one] } else { Vec::new() };
            map.insert("top_logprobs".into(), Value::Array(top));
        }
        with
    };
    json!({"content": tokens.iter().map(of_token).collect::<Vec<_>>(), "refusal": null})
}

/// Chunks with the text that was sampled after what was `sent`.
pub(super) fn text_chunks(
    form: Chat,
    envelope: &Envelope,
    sent: &Sent,
    text: &SampledText,
) -> Vec<Bytes> {
    let mut out = Chunks { form, envelope, events: Vec::new() };
    out.begin(0, sent);
    for piece in pieces_of_rest(sent.more_reasoning(&text.reasoning)) {
        out.delta(0, &json!({"reasoning_content": piece}));
    }
    for piece in pieces_of_rest(sent.more_content(&text.content)) {
        out.delta(0, &json!({"content": piece}));
    }
    out.events
}

/// The chunks of a reply after what was `sent`. Choices follow each other.
pub(super) fn chunks(
    form: Chat,
    envelope: &Envelope,
    sent: &Sent,
    replies: &[Sampled],
) -> Vec<Bytes> {
    let mut out = Chunks { form, envelope, events: Vec::new() };
    for (index, reply) in replies.iter().enumerate() {
        out.choice(index, sent, reply);
    }
    if form.usage_at_end {
        let usage = usage(replies);
        out.chunk(&json!([]), &usage);
    }
    out.events.push(Bytes::from_static(b"data: [DONE]\n\n"));
    out.events
}

struct Chunks<'a> {
    form: Chat,
    envelope: &'a Envelope,
    events: Vec<Bytes>,
}

impl Chunks<'_> {
    fn begin(&mut self, index: usize, sent: &Sent) {
        if !sent.has_text() {
            self.delta(index, &json!({"role": "assistant", "content": ""}));
        }
    }

    fn choice(&mut self, index: usize, sent: &Sent, reply: &Sampled) {
        self.begin(index, sent);
        let reasoning = reply.reasoning.as_deref().unwrap_or_default();
        for piece in pieces_of_rest(sent.more_reasoning(reasoning)) {
            self.delta(index, &json!({"reasoning_content": piece}));
        }
        for piece in pieces_of_rest(sent.more_content(&reply.content)) {
            self.delta(index, &json!({"content": piece}));
        }
        for (position, call) in reply.tool_calls.iter().enumerate() {
            let function = json!({"name": call.name, "arguments": ""});
            let begin =
                json!({"index": position, "id": call.id, "type": "function", "function": function});
            self.delta(index, &json!({"tool_calls": [begin]}));
            for piece in pieces(&call.arguments) {
                let more = json!({"index": position, "function": {"arguments": piece}});
                self.delta(index, &json!({"tool_calls": [more]}));
            }
        }
        if self.form.logprobs != Logprobs::None {
            for tokens in reply.tokens.chunks(LOGPROBS_PER_CHUNK) {
                let logprobs = logprobs(self.form, tokens);
                self.choice_chunk(index, &json!({}), &logprobs, &Value::Null);
            }
        }
        let finish = json!(finish_reason(&reply.finish));
        self.choice_chunk(index, &json!({}), &Value::Null, &finish);
    }

    fn delta(&mut self, index: usize, delta: &Value) {
        self.choice_chunk(index, delta, &Value::Null, &Value::Null);
    }

    fn choice_chunk(&mut self, index: usize, delta: &Value, logprobs: &Value, finish: &Value) {
        let choice =
            json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        self.chunk(&json!([choice]), &Value::Null);
    }

    fn chunk(&mut self, choices: &Value, usage: &Value) {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", self.envelope.id),
            "object": "chat.completion.chunk",
            "created": self.envelope.created,
            "model": self.envelope.model,
            "choices": choices,
        });
        if let (true, Some(map)) = (self.form.usage_at_end, chunk.as_object_mut()) {
            map.insert("usage".into(), usage.clone());
        }
        self.events.push(event(None, &chunk));
    }
}
