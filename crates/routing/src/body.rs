//! Cuts the routed experts out of a JSON reply without parsing it.
//!
//! Why a search for `"routed_experts"`, including the quotes, finds only keys: inside a JSON string
//! every quote follows a backslash. So if the byte before the first quote is not a backslash, that
//! quote starts or ends a string. If it ends one, a bare `routed_experts` follows, which is not valid
//! JSON and stays in the rest for the parser to reject. If it starts one, the string is exactly
//! `routed_experts`, because the byte before its last quote is not a backslash either; and a string
//! before a colon is a key. The payload ends at the next quote: base64 contains neither quotes nor
//! backslashes, and a quote after a backslash is an error.
//!
//! A payload that is a `.npy` file states its own length. If a quote stands exactly at that end, the
//! bytes before it are not searched: when the whole sequence is sent again with every turn, this is
//! nearly all of the body. The decoder rejects a quote among the rows it decodes, and rows before
//! those are never read.

use crate::{RoutingError, npy};
use memchr::memchr;
use memchr::memmem::Finder;
use std::ops::Range;

const KEY: &[u8] = b"\"routed_experts\"";

/// Limit on the samples of one reply; more than this is not a plausible reply.
const MAX_PAYLOADS: usize = 1024;

/// A JSON reply without its routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitBody {
    /// The reply with every string under a key `routed_experts` replaced by an empty string. It is
    /// valid JSON if and only if the body is. Other values under that key (`null`) are unchanged.
    pub json: Vec<u8>,
    /// Byte ranges in the body of the text between the quotes of these strings, in order. The n-th
    /// belongs to the n-th string under such a key in `json`.
    pub payloads: Vec<Range<usize>>,
}

/// Cuts every string under a key `routed_experts`, at any depth, out of a JSON text. The strings are
/// scanned at most once, to find their end, and never copied.
///
/// # Errors
/// [`RoutingError::Body`] when such a string does not end, ends in an escaped quote, or when
/// there are more than 1024 of them. The rest is not parsed, so it may be invalid JSON.
pub fn split_body(body: &[u8]) -> Result<SplitBody, RoutingError> {
    let finder = Finder::new(KEY);
    let mut split = SplitBody { json: Vec::new(), payloads: Vec::new() };
    // The body is copied up to `copied` and searched up to `searched`.
    let (mut copied, mut searched) = (0, 0);
    while let Some(found) = finder.find(body.get(searched..).unwrap_or_default()) {
        let key = searched + found;
        searched = key + KEY.len();
        if key.checked_sub(1).and_then(|before| body.get(before)) == Some(&b'\\') {
            continue;
        }
        let Some(begin) = string_value(body, searched) else { continue };
        let text = body.get(begin..).unwrap_or_default();
        let length = length(text).ok_or(RoutingError::Body("the body ends inside the string"))?;
        let end = begin + length;
        if body.get(begin..end).is_some_and(|text| text.last() == Some(&b'\\')) {
            return Err(RoutingError::Body("the string contains a backslash"));
        }
        if split.payloads.len() == MAX_PAYLOADS {
            return Err(RoutingError::Body("the reply has more than 1024 of them"));
        }
        split.json.extend_from_slice(body.get(copied..begin).unwrap_or_default());
        split.payloads.push(begin..end);
        (copied, searched) = (end, end + 1);
    }
    split.json.extend_from_slice(body.get(copied..).unwrap_or_default());
    Ok(split)
}

/// Start of the string value of the key that ends at `at`; `None` if the value is not a string.
fn string_value(body: &[u8], at: usize) -> Option<usize> {
    let colon = at + blanks(body.get(at..)?);
    let value = match body.get(colon)? {
        b':' => colon + 1 + blanks(body.get(colon + 1..)?),
        _ => return None,
    };
    (body.get(value) == Some(&b'"')).then_some(value + 1)
}

/// Number of bytes in `text` before the quote that ends the string.
fn length(text: &[u8]) -> Option<usize> {
    let declared = npy::declared_chars(text).filter(|&chars| text.get(chars) == Some(&b'"'));
    declared.or_else(|| memchr(b'"', text))
}

/// Number of leading JSON white-space bytes of `text`.
fn blanks(text: &[u8]) -> usize {
    text.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count()
}
