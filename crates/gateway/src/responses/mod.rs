//! OpenAI Responses.

mod history;
mod opaque;
mod reply;
mod request;
mod stream;
mod tools;

use crate::dialect::Dialect;
use crate::problem::Problem;
use crate::sampler::{SampleRequest, Sampled};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, Purpose, Wire};
use bytes::Bytes;
#[cfg(test)]
pub(crate) use opaque::encoded;
use serde_json::{Value, json};
use tools::ToolNames;

/// What a request says about its reply.
#[derive(Clone, Debug, Default)]
pub(crate) struct Responses {
    stream: bool,
    /// `include` has `reasoning.encrypted_content`.
    encrypted_reasoning: bool,
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
    temperature: Option<f32>,
    top_p: Option<f32>,
    parallel_tool_calls: bool,
    metadata: Value,
    tool_choice: Value,
}

impl Wire for Responses {
    const DIALECT: Dialect = Dialect::Responses;

    fn parse(body: &[u8], purpose: Purpose) -> Result<(SampleRequest, Self), Problem> {
        request::parse(body, purpose)
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
