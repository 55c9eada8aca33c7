//! OpenAI Responses.

mod history;
mod reply;
mod request;
mod stored;
mod stream;
mod tools;

use crate::dialect::Dialect;
use crate::message::{Message, answered};
use crate::problem::{Kind, Problem};
use crate::sampler::{SampleRequest, Sampled};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, Purpose, Wire};
use bytes::Bytes;
use serde_json::{Number, Value, json};
pub(crate) use stored::StoredResponses;
use tools::ToolNames;

/// What a request says about its reply.
#[derive(Clone, Debug, Default)]
pub(crate) struct Responses {
    stream: bool,
    /// `include` has `reasoning.encrypted_content`.
    encrypted_reasoning: bool,
    /// The response that the request continues.
    previous: Option<String>,
    /// Whether later requests may continue the response.
    stores: bool,
    /// The messages of the request, without its instructions, if the response is to be stored.
    asked: Vec<Message>,
    /// What the reply repeats of the request.
    echo: Echo,
    /// The client's names of the tools.
    names: ToolNames,
}

/// What a reply repeats of its request.
#[derive(Clone, Debug, Default)]
struct Echo {
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    temperature: Option<Number>,
    top_p: Option<Number>,
    parallel_tool_calls: bool,
    metadata: Value,
    tool_choice: Value,
}

/// The id of a response.
fn response_id(envelope: &Envelope) -> String {
    format!("resp_{}", envelope.id)
}

impl Wire for Responses {
    const DIALECT: Dialect = Dialect::Responses;

    fn parse(body: &[u8], purpose: Purpose) -> Result<(SampleRequest, Self), Problem> {
        request::parse(body, purpose)
    }

    fn recall(&self, request: &mut SampleRequest, stored: &StoredResponses) -> Result<(), Problem> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let unknown = || {
            let id: String = previous.chars().take(80).collect();
            let message = format!(
                "Previous response with id '{id}' not found: it is of another episode, or was not stored. \
                 Send the whole conversation."
            );
            let field = Some("previous_response_id".to_owned());
            Problem { field, ..Problem::new(Kind::PreviousResponse, message) }
        };
        let conversation = stored.conversation(previous).ok_or_else(unknown)?;
        // After the instructions, if there are any.
        let at = usize::from(self.echo.instructions.as_ref().is_some_and(|text| !text.is_empty()));
        request.messages.splice(at..at, conversation);
        request.messages = answered(std::mem::take(&mut request.messages), "input")?;
        Ok(())
    }

    fn store(&self, envelope: &Envelope, replies: &[Sampled], stored: &StoredResponses) {
        if let (true, Some(reply)) = (self.stores, replies.first()) {
            stored.store(response_id(envelope), self.previous.as_deref(), &self.asked, reply);
        }
    }

    fn streams(&self) -> bool {
        self.stream
    }

    fn reply(&self, envelope: &Envelope, replies: &[Sampled]) -> Value {
        replies.first().map_or(Value::Null, |reply| reply::response(self, envelope, reply))
    }

    fn keep_alive(&self, envelope: &Envelope, sent: usize) -> Bytes {
        // Events: Codex ends a stream without any for a time, and does not count comments.
        stream::keep_alive(self, envelope, sent)
    }

    fn text(&self, envelope: &Envelope, sent: &Sent, text: &SampledText) -> Vec<Bytes> {
        stream::text_events(self, envelope, sent, text)
    }

    fn events(&self, envelope: &Envelope, sent: &Sent, replies: &[Sampled]) -> Vec<Bytes> {
        let reply = replies.first();
        reply.map_or_else(Vec::new, |reply| stream::events(self, envelope, sent, reply))
    }

    fn late_error(&self, envelope: &Envelope, sent: &Sent, problem: &Problem) -> Vec<Bytes> {
        stream::failed(self, envelope, sent.events, problem)
    }

    fn count(tokens: usize) -> Value {
        json!({"object": "response.input_tokens", "input_tokens": tokens})
    }
}
