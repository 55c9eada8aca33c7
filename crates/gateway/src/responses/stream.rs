//! Event streams.

use super::Responses;
use super::reply::{Output, call_text, head, outputs, response, text_part, with};
use crate::problem::{Kind, Problem};
use crate::sampler::{Dialect, Sampled};
use crate::wire::{Envelope, event, pieces};
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

/// The reply as events.
pub(super) fn events(
    form: &Responses,
    envelope: &Envelope,
    sent: usize,
    reply: &Sampled,
) -> Vec<Bytes> {
    let mut out = Sequence { form, envelope, sent, events: Vec::new() };
    out.begin();
    for (index, output) in outputs(reply).into_iter().enumerate() {
        out.item(index, output);
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

    fn item(&mut self, index: usize, output: Output<'_>) {
        let item = output.opened(self.form, self.envelope);
        self.push("response.output_item.added", json!({"output_index": index, "item": item}));
        let place = Place { index, id: output.id(self.form, self.envelope) };
        match output {
            Output::Reasoning(text) => self.reasoning(&place, text),
            Output::Message(text) => self.message(&place, text),
            Output::Call(_, call) => {
                let (field, text) = call_text(self.form, call);
                let name = match field {
                    "input" => "response.custom_tool_call_input",
                    _ => "response.function_call_arguments",
                };
                self.deltas(&place, name, &text, []);
                self.push(&format!("{name}.done"), place.with([(field, json!(text))]));
            }
        }
        let item = output.whole(self.form, self.envelope);
        self.push("response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn reasoning(&mut self, place: &Place, text: &str) {
        let part = |text: &str| json!({"type": "summary_text", "text": text});
        let at = || ("summary_index", json!(0));
        let added = place.with([at(), ("part", part(""))]);
        self.push("response.reasoning_summary_part.added", added);
        let name = "response.reasoning_summary_text";
        self.deltas(place, name, text, [at()]);
        self.push(&format!("{name}.done"), place.with([at(), ("text", json!(text))]));
        let done = place.with([at(), ("part", part(text))]);
        self.push("response.reasoning_summary_part.done", done);
    }

    fn message(&mut self, place: &Place, text: &str) {
        let at = || ("content_index", json!(0));
        let logprobs = || ("logprobs", json!([]));
        let added = place.with([at(), ("part", text_part(""))]);
        self.push("response.content_part.added", added);
        let name = "response.output_text";
        self.deltas(place, name, text, [at(), logprobs()]);
        let done = place.with([at(), ("text", json!(text)), logprobs()]);
        self.push(&format!("{name}.done"), done);
        let done = place.with([at(), ("part", text_part(text))]);
        self.push("response.content_part.done", done);
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
        for piece in pieces(text).filter(|piece| !piece.is_empty()) {
            self.push(&name, with(fields.clone(), [("delta", json!(piece))]));
        }
    }
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
