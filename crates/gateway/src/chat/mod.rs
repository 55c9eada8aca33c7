//! OpenAI Chat Completions.

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
pub(crate) struct Chat {
    stream: bool,
    replies: usize,
    logprobs: Logprobs,
    /// `stream_options.include_usage`.
    usage_at_end: bool,
}

/// Which log-probabilities a reply has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Logprobs {
    #[default]
    None,
    /// `logprobs`.
    Sampled,
    /// `top_logprobs` above 0, too: the sampled token is listed as its own alternative.
    Listed,
}

impl Wire for Chat {
    const DIALECT: Dialect = Dialect::Chat;

    fn parse(body: &[u8], _: Purpose) -> Result<(SampleRequest, Self), Problem> {
        request::parse(body)
    }

    fn streams(&self) -> bool {
        self.stream
    }

    fn replies(&self) -> usize {
        self.replies
    }

    fn reply(&self, envelope: &Envelope, replies: &[Sampled]) -> Value {
        reply::completion(*self, envelope, replies)
    }

    fn keep_alive(&self, _: &Envelope, _: usize) -> Bytes {
        // A comment: some clients refuse events of another form.
        Bytes::from_static(b": keep-alive\n\n")
    }

    fn text(&self, envelope: &Envelope, sent: &Sent, text: &SampledText) -> Vec<Bytes> {
        reply::text_chunks(*self, envelope, sent, text)
    }

    fn events(&self, envelope: &Envelope, sent: &Sent, replies: &[Sampled]) -> Vec<Bytes> {
        reply::chunks(*self, envelope, sent, replies)
    }

    fn late_error(&self, _: &Envelope, _: &Sent, problem: &Problem) -> Vec<Bytes> {
        vec![event(None, &problem.body(Self::DIALECT))]
    }

    fn count(tokens: usize) -> Value {
        json!({"input_tokens": tokens})
    }
}
