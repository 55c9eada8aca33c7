//! What a dialect is made of, and the pieces of an event stream.

use crate::dialect::Dialect;
use crate::problem::Problem;
use crate::responses::StoredResponses;
use crate::sampler::{SampleRequest, Sampled};
use crate::text::{SampledText, Sent};
use bytes::Bytes;
use serde_json::Value;

/// Shortest piece of a streamed text, in bytes, except the last one.
const PIECE_BYTES: usize = 48;

/// Maximum number of pieces of a streamed text.
const MAX_PIECES: usize = 512;

/// A dialect: what a parsed request says about the form of its reply.
pub(crate) trait Wire: Sized + Send + 'static {
    /// Which one.
    const DIALECT: Dialect;

    /// Parses a request to sample, or one to count tokens.
    fn parse(body: &[u8], purpose: Purpose) -> Result<(SampleRequest, Self), Problem>;

    /// Completes a request that continues a stored response.
    fn recall(&self, _: &mut SampleRequest, _: &StoredResponses) -> Result<(), Problem> {
        Ok(())
    }

    /// Stores the response, if later requests may continue it.
    fn store(&self, _: &Envelope, _: &[Sampled], _: &StoredResponses) {}

    /// Whether the client asks for an event stream.
    fn streams(&self) -> bool;

    /// Number of replies.
    fn replies(&self) -> usize {
        1
    }

    /// The reply as one JSON document.
    fn reply(&self, envelope: &Envelope, replies: &[Sampled]) -> Value;

    /// What is sent while nothing else is, after `sent` events.
    fn keep_alive(&self, envelope: &Envelope, sent: usize) -> Bytes;

    /// The events of `text` that the stream does not have yet. It continues what was `sent`, and has
    /// more.
    fn text(&self, envelope: &Envelope, sent: &Sent, text: &SampledText) -> Vec<Bytes>;

    /// The events of a reply that the stream does not have yet. A single reply continues what was
    /// `sent`.
    fn events(&self, envelope: &Envelope, sent: &Sent, replies: &[Sampled]) -> Vec<Bytes>;

    /// An error after the stream has begun.
    fn late_error(&self, envelope: &Envelope, sent: &Sent, problem: &Problem) -> Vec<Bytes>;

    /// The reply to a request to count tokens.
    fn count(tokens: usize) -> Value;
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Sample,
    Count,
}

/// What a reply says about itself.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    /// Unique.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: i64,
    /// Name of the served model.
    pub(crate) model: String,
}

/// An event with a JSON document.
pub(crate) fn event(name: Option<&str>, data: &Value) -> Bytes {
    Bytes::from(match name {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    })
}

/// A text in pieces, none if it is empty.
pub(crate) fn pieces_of_rest(text: &str) -> impl Iterator<Item = &str> {
    pieces(text).filter(|piece| !piece.is_empty())
}

/// A text in pieces: at least one, at most about [`MAX_PIECES`].
pub(crate) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let size = PIECE_BYTES.max(text.len().div_ceil(MAX_PIECES));
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let Some((piece, after)) = text.split_at_checked(text.ceil_char_boundary(size)) else {
            rest = None;
            return Some(text);
        };
        rest = (!after.is_empty()).then_some(after);
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_join_to_the_text(text in "\\PC{0,400}") {
            let parts: Vec<&str> = pieces(&text).collect();
            prop_assert_eq!(parts.concat(), text.clone());
            prop_assert!(!parts.is_empty());
            prop_assert!(text.is_empty() || parts.iter().all(|part| !part.is_empty()));
        }
    }

    #[test]
    fn long_texts_have_a_bounded_number_of_pieces() {
        assert!(pieces(&"é".repeat(1 << 20)).count() <= MAX_PIECES);
    }
}
