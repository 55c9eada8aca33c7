//! Event streams.

use super::Responses;
use super::reply::{Output, call_text, head, outputs, response, text_part, with};
use crate::dialect::Dialect;
use crate::message::ToolCall;
use crate::problem::{Kind, Problem};
use crate::sampler::Sampled;
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, event, pieces_of_rest};
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// The first events; the last of them is repeated while the model samples.
const BEGIN: [&str; 2] = ["response.created", "response.in_progress"];

/// The event number `sent` of a stream whose reply is not there yet.
pub(super) fn keep_alive(form: &Responses, envelope: &Envelope, sent: usize) -> Bytes {
    let mut out = Sequence { form, envelope, sent, events: Vec::new() };
    let name = if sent == 0 { BEGIN[0] } else { BEGIN[1] };
    out.push(name, json!({"response": head(form, envelope, "in_progress")}));
    out.events.pop().unwrap_or_default()
}

/// The events with the text that was sampled after what was `sent`.
pub(super) fn text_events(
    form: &Responses,
    envelope: &Envelope,
    sent: &Sent,
    text: &SampledText,
) -> Vec<Bytes> {
    let mut out = Sequence { form, envelope, sent: sent.events, events: Vec::new() };
    out.begin();
    let thinking = Output::Reasoning(&text.reasoning, text.number);
    let more = sent.more_reasoning(&text.reasoning);
    if !more.is_empty() {
        if sent.reasoning.is_empty() {
            out.open(0, thinking);
        }
        out.more(0, thinking, more);
    }
    let more = sent.more_content(&text.content);
    if !more.is_empty() {
        let index = usize::from(!text.reasoning.is_empty());
        let message = Output::Message(&text.content);
        if sent.content.is_empty() {
            if index > 0 {
                out.close(0, thinking);
            }
            out.open(index, message);
        }
        out.more(index, message, more);
    }
    out.events
}

/// The events of a reply after what was `sent`.
pub(super) fn events(
    form: &Responses,
    envelope: &Envelope,
    sent: &Sent,
    reply: &Sampled,
) -> Vec<Bytes> {
    let mut out = Sequence { form, envelope, sent: sent.events, events: Vec::new() };
    out.begin();
    for (index, output) in outputs(reply).into_iter().enumerate() {
        let (is_open, is_closed) = match output {
            Output::Reasoning(..) => {
                let is_open = !sent.reasoning.is_empty();
                (is_open, is_open && !sent.content.is_empty())
            }
            Output::Message(_) => (!sent.content.is_empty(), false),
            Output::Call(..) => (false, false),
        };
        if is_closed {
            continue;
        }
        if !is_open {
            out.open(index, output);
        }
        match output {
            Output::Reasoning(text, _) => out.more(index, output, sent.more_reasoning(text)),
            Output::Message(text) => out.more(index, output, sent.more_content(text)),
            Output::Call(_, call) => out.more(index, output, &call_text(form, call).1),
        }
        out.close(index, output);
    }
    let response = response(form, envelope, reply);
    let is_complete = response.get("status").is_some_and(|status| status == "completed");
    let name = if is_complete { "response.completed" } else { "response.incomplete" };
    out.push(name, json!({"response": response}));
    out.events
}

/// The end of a stream without a reply.
pub(super) fn failed(
    form: &Responses,
    envelope: &Envelope,
    sent: usize,
    problem: &Problem,
) -> Vec<Bytes> {
    let mut out = Sequence { form, envelope, sent, events: Vec::new() };
    out.begin();
    // Clients repeat the request after other codes than these two.
    let code = match problem.kind {
        Kind::TooLong { .. } => "context_length_exceeded",
        Kind::Invalid | Kind::Ended => "invalid_prompt",
        _ => "server_error",
    };
    let error = json!({"code": code, "message": problem.message(Dialect::Responses)});
    let response = with(head(form, envelope, "failed"), [("error", error)]);
    out.push("response.failed", json!({"response": response}));
    out.events
}

struct Sequence<'a> {
    form: &'a Responses,
    envelope: &'a Envelope,
    /// Events that the stream already has.
    sent: usize,
    events: Vec<Bytes>,
}

impl Sequence<'_> {
    /// Adds an event with its type and number.
    fn push(&mut self, name: &str, fields: Value) {
        let mut data = Map::new();
        data.insert("type".into(), json!(name));
        data.insert("sequence_number".into(), json!(self.sent + self.events.len()));
        if let Value::Object(fields) = fields {
            data.extend(fields);
        }
        self.events.push(event(Some(name), &Value::Object(data)));
    }

    /// Adds what the beginning of the stream lacks.
    fn begin(&mut self) {
        for name in BEGIN.iter().skip(self.sent) {
            self.push(name, json!({"response": head(self.form, self.envelope, "in_progress")}));
        }
    }

    /// Opens an item.
    fn open(&mut self, index: usize, output: Output<'_>) {
        let item = output.opened(self.form, self.envelope);
        self.push("response.output_item.added", json!({"output_index": index, "item": item}));
        let place = self.place(index, output);
        match output {
            Output::Reasoning(..) => {
                let added = place.with([summary_index(), ("part", summary_part(""))]);
                self.push("response.reasoning_summary_part.added", added);
            }
            Output::Message(_) => {
                let added = place.with([content_index(), ("part", text_part(""))]);
                self.push("response.content_part.added", added);
            }
            Output::Call(..) => {}
        }
    }

    /// Adds text to an open item.
    fn more(&mut self, index: usize, output: Output<'_>, text: &str) {
        let place = self.place(index, output);
        match output {
            Output::Reasoning(..) => {
                self.deltas(&place, "response.reasoning_summary_text", text, [summary_index()]);
            }
            Output::Message(_) => {
                let fields = [content_index(), ("logprobs", json!([]))];
                self.deltas(&place, "response.output_text", text, fields);
            }
            Output::Call(_, call) => {
                let (name, _) = self.call_event(call);
                self.deltas(&place, name, text, []);
            }
        }
    }

    /// Closes an item, which has all of its text.
    fn close(&mut self, index: usize, output: Output<'_>) {
        let place = self.place(index, output);
        match output {
            Output::Reasoning(text, _) => {
                let done = place.with([summary_index(), ("text", json!(text))]);
                self.push("response.reasoning_summary_text.done", done);
                let done = place.with([summary_index(), ("part", summary_part(text))]);
                self.push("response.reasoning_summary_part.done", done);
            }
            Output::Message(text) => {
                let logprobs = ("logprobs", json!([]));
                let done = place.with([content_index(), ("text", json!(text)), logprobs]);
                self.push("response.output_text.done", done);
                let done = place.with([content_index(), ("part", text_part(text))]);
                self.push("response.content_part.done", done);
            }
            Output::Call(_, call) => {
                let (name, field) = self.call_event(call);
                let (_, text) = call_text(self.form, call);
                self.push(&format!("{name}.done"), place.with([(field, json!(text))]));
            }
        }
        let item = output.whole(self.form, self.envelope);
        self.push("response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn place(&self, index: usize, output: Output<'_>) -> Place {
        Place { index, id: output.id(self.form, self.envelope) }
    }

    /// The events of a call's text, and the field that holds it.
    fn call_event(&self, call: &ToolCall) -> (&'static str, &'static str) {
        match call_text(self.form, call).0 {
            "input" => ("response.custom_tool_call_input", "input"),
            field => ("response.function_call_arguments", field),
        }
    }

    fn deltas<const N: usize>(
        &mut self,
        place: &Place,
        name: &str,
        text: &str,
        fields: [(&str, Value); N],
    ) {
        let name = format!("{name}.delta");
        let fields = place.with(fields);
        for piece in pieces_of_rest(text) {
            self.push(&name, with(fields.clone(), [("delta", json!(piece))]));
        }
    }
}

fn summary_index() -> (&'static str, Value) {
    ("summary_index", json!(0))
}

fn summary_part(text: &str) -> Value {
    json!({"type": "summary_text", "text": text})
}

fn content_index() -> (&'static str, Value) {
    ("content_index", json!(0))
}

/// An output item of the response.
struct Place {
    index: usize,
    id: String,
}

impl Place {
    /// The place and other fields.
    fn with<const N: usize>(&self, fields: [(&str, Value); N]) -> Value {
        with(json!({"item_id": self.id, "output_index": self.index}), fields)
    }
}
