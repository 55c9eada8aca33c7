//! Anthropic Messages.

mod history;
mod reply;
mod request;

use crate::dialect::Dialect;
use crate::problem::Problem;
use crate::sampler::{SampleRequest, Sampled};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, Purpose, Wire, event};
use bytes::Bytes;
use serde_json::{Value, json};

/// What a request says about its reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Messages {
    stream: bool,
}

impl Wire for Messages {
    const DIALECT: Dialect = Dialect::Messages;

    fn parse(body: &[u8], purpose: Purpose) -> Result<(SampleRequest, Self), Problem> {
        request::parse(body, purpose)
    }

    fn streams(&self) -> bool {
        self.stream
    }

    fn reply(&self, envelope: &Envelope, replies: &[Sampled]) -> Value {
        replies.first().map_or(Value::Null, |reply| reply::message(envelope, reply))
    }

    fn keep_alive(&self, _: &Envelope, _: usize) -> Bytes {
        event(Some("ping"), &json!({"type": "ping"}))
    }

    fn text(&self, envelope: &Envelope, sent: &Sent, text: &SampledText) -> Vec<Bytes> {
        reply::text_events(envelope, sent, text)
    }

    fn events(&self, envelope: &Envelope, sent: &Sent, replies: &[Sampled]) -> Vec<Bytes> {
        replies.first().map_or_else(Vec::new, |reply| reply::events(envelope, sent, reply))
    }

    fn late_error(&self, _: &Envelope, _: &Sent, problem: &Problem) -> Vec<Bytes> {
        vec![event(Some("error"), &problem.body(Self::DIALECT))]
    }

    fn count(tokens: usize) -> Value {
        json!({"input_tokens": tokens})
    }
}
