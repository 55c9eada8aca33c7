//! Replies: the response object and its output items.

use super::tools::custom_input;
use super::{Responses, response_id};
use crate::message::ToolCall;
use crate::opaque::encoded;
use crate::sampler::{Finish, Sampled};
use crate::wire::Envelope;
use serde_json::{Map, Value, json};

/// An output item of a reply.
#[derive(Clone, Copy, Debug)]
pub(super) enum Output<'a> {
    /// With the number of its reply.
    Reasoning(&'a str, u32),
    Message(&'a str),
    /// With its position among the calls.
    Call(usize, &'a ToolCall),
}

/// The items of a reply: at least one.
pub(super) fn outputs(reply: &Sampled) -> Vec<Output<'_>> {
    let reasoning = reply.reasoning.iter().map(|text| Output::Reasoning(text, reply.number));
    let is_shown = !reply.content.is_empty() || reply.tool_calls.is_empty();
    let message = is_shown.then_some(Output::Message(&reply.content));
    let calls = reply.tool_calls.iter().enumerate();
    reasoning.chain(message).chain(calls.map(|(at, call)| Output::Call(at, call))).collect()
}

/// The reply as one document.
pub(super) fn response(form: &Responses, envelope: &Envelope, reply: &Sampled) -> Value {
    let (status, reason) = match reply.finish {
        Finish::Length => ("incomplete", Some("max_output_tokens")),
        Finish::Stop | Finish::StopString(_) | Finish::ToolCalls => ("completed", None),
    };
    let items = outputs(reply).into_iter().map(|output| output.whole(form, envelope));
    let usage = json!({
        "input_tokens": reply.usage.prompt,
        "input_tokens_details": {"cached_tokens": reply.usage.cached, "cache_write_tokens": 0},
        "output_tokens": reply.usage.completion,
        "output_tokens_details": {"reasoning_tokens": reply.usage.reasoning},
        "total_tokens": reply.usage.prompt.saturating_add(reply.usage.completion),
    });
    with(
        head(form, envelope, status),
        [
            ("output", items.collect()),
            ("usage", usage),
            ("incomplete_details", reason.map_or(Value::Null, |reason| json!({"reason": reason}))),
        ],
    )
}

/// A response without output.
pub(super) fn head(form: &Responses, envelope: &Envelope, status: &str) -> Value {
    let echo = &form.echo;
    json!({
        "id": response_id(envelope),
        "object": "response",
        "created_at": envelope.created,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": echo.instructions,
        "max_output_tokens": echo.max_output_tokens,
        "metadata": echo.metadata,
        "model": envelope.model,
        "output": [],
        "parallel_tool_calls": echo.parallel_tool_calls,
        "previous_response_id": form.previous,
        "store": form.stores,
        "temperature": echo.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": echo.tool_choice,
        "tools": [],
        "top_p": echo.top_p,
        "truncation": "disabled",
        "usage": null,
    })
}

/// `document` with other fields.
pub(super) fn with<const N: usize>(mut document: Value, fields: [(&str, Value); N]) -> Value {
    if let Some(map) = document.as_object_mut() {
        map.extend(fields.map(|(name, value)| (name.to_owned(), value)));
    }
    document
}

impl Output<'_> {
    pub(super) fn id(self, form: &Responses, envelope: &Envelope) -> String {
        match self {
            Self::Reasoning(..) => format!("rs_{}", envelope.id),
            Self::Message(_) => format!("msg_{}", envelope.id),
            Self::Call(at, call) => {
                let prefix = if form.names.of(&call.name).is_custom { "ctc" } else { "fc" };
                format!("{prefix}_{}_{at}", envelope.id)
            }
        }
    }

    /// The finished item.
    pub(super) fn whole(self, form: &Responses, envelope: &Envelope) -> Value {
        let item = self.opened(form, envelope);
        match self {
            Self::Reasoning(text, reply) => {
                let opaque = form.encrypted_reasoning.then(|| encoded(reply, text));
                let summary = json!([{"type": "summary_text", "text": text}]);
                with(item, [("summary", summary), ("encrypted_content", json!(opaque))])
            }
            Self::Message(text) => {
                with(item, [("status", json!("completed")), ("content", json!([text_part(text)]))])
            }
            Self::Call(_, call) => {
                let (field, text) = call_text(form, call);
                with(item, [("status", json!("completed")), (field, json!(text))])
            }
        }
    }

    /// The item before its deltas.
    pub(super) fn opened(self, form: &Responses, envelope: &Envelope) -> Value {
        let id = self.id(form, envelope);
        match self {
            Self::Reasoning(..) => json!({"id": id, "type": "reasoning", "summary": []}),
            Self::Message(_) => json!({
                "id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": [],
            }),
            Self::Call(_, call) => {
                let name = form.names.of(&call.name);
                let kind = if name.is_custom { "custom_tool_call" } else { "function_call" };
                let field = if name.is_custom { "input" } else { "arguments" };
                let mut item = Map::new();
                item.insert("id".into(), json!(id));
                item.insert("type".into(), json!(kind));
                item.insert("status".into(), json!("in_progress"));
                item.insert("call_id".into(), json!(call.id));
                if let Some(namespace) = name.namespace {
                    item.insert("namespace".into(), json!(namespace));
                }
                item.insert("name".into(), json!(name.name));
                item.insert(field.into(), json!(""));
                Value::Object(item)
            }
        }
    }
}

/// The field that holds a call's arguments, and its text.
pub(super) fn call_text(form: &Responses, call: &ToolCall) -> (&'static str, String) {
    if form.names.of(&call.name).is_custom {
        ("input", custom_input(&call.arguments))
    } else {
        ("arguments", call.arguments.clone())
    }
}

/// The part of a message with its text.
pub(super) fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}
