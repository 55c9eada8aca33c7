//! Cuts the routed experts out of a JSON reply without parsing it.
//!
//! Why a search for `"routed_experts"`, quotes included, finds keys and nothing else: inside a
//! JSON string every quote has a backslash before it. So where the byte before the first quote is
//! no backslash, that quote begins or ends a string. If it ended one, a bare `routed_experts`
//! would follow, which is no JSON, and stays in the rest for the parser to refuse. If it begins
//! one, the string is exactly `routed_experts`, since the byte before its last quote is no
//! backslash either; and a string before a colon is a key. The payload ends at the next quote:
//! base64 has neither quotes nor backslashes, and a quote with a backslash before it is refused.
//!
//! A payload that is a `.npy` file says itself how long it is. Where a quote stands just there, the
//! bytes before it are not searched for one: of a whole sequence sent again with every turn this is
//! nearly all there is to read. The decoder refuses a quote among the rows that it takes, and of
//! those before them nobody reads any.

use crate::{RoutingError, npy};
use memchr::memchr;
use memchr::memmem::Finder;
use std::ops::Range;

const KEY: &[u8] = b"\"routed_experts\"";

/// More samples than this in one reply are no reply to us.
const MAX_PAYLOADS: usize = 1024;

/// A JSON reply without its routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitBody {
    /// The reply with every string under a key `routed_experts` replaced by the empty one; as
    /// valid, or not, as the body was. Other values under that key (`null`) are left as they are.
    pub json: Vec<u8>,
    /// The bytes of the body between the quotes of these strings, in order; the n-th belongs to
    /// the n-th string under such a key in `json`.
    pub payloads: Vec<Range<usize>>,
}

/// Cuts every string under a key `routed_experts`, at whatever depth, out of a JSON text. The
/// strings are passed at most once, in search of their end, and neither copied nor looked at.
///
/// # Errors
/// [`RoutingError::Body`] when such a string does not end, ends in an escaped quote, or when
/// there are more than 1024 of them. Whether the rest is JSON is for its parser to say.
pub fn split_body(body: &[u8]) -> Result<SplitBody, RoutingError> {
    let finder = Finder::new(KEY);
    let mut split = SplitBody { json: Vec::new(), payloads: Vec::new() };
    // Up to where the body is copied, and up to where it was searched.
    let (mut copied, mut searched) = (0, 0);
    while let Some(found) = finder.find(body.get(searched..).unwrap_or_default()) {
        let key = searched + found;
        searched = key + KEY.len();
        if key.checked_sub(1).and_then(|before| body.get(before)) == Some(&b'\\') {
            continue;
        }
        let Some(begin) = string_value(body, searched) else { continue };
        let text = body.get(begin..).unwrap_or_default();
        let length = length(text).ok_or(RoutingError::Body("it ends inside them"))?;
        let end = begin + length;
        if body.get(begin..end).is_some_and(|text| text.last() == Some(&b'\\')) {
            return Err(RoutingError::Body("a backslash is in them"));
        }
        if split.payloads.len() == MAX_PAYLOADS {
            return Err(RoutingError::Body("there are more than 1024 of them"));
        }
        split.json.extend_from_slice(body.get(copied..begin).unwrap_or_default());
        split.payloads.push(begin..end);
        (copied, searched) = (end, end + 1);
    }
    split.json.extend_from_slice(body.get(copied..).unwrap_or_default());
    Ok(split)
}

/// Where the text of the string begins that is the value of the key ending at `at`, if it is one.
fn string_value(body: &[u8], at: usize) -> Option<usize> {
    let colon = at + blanks(body.get(at..)?);
    let value = match body.get(colon)? {
        b':' => colon + 1 + blanks(body.get(colon + 1..)?),
        _ => return None,
    };
    (body.get(value) == Some(&b'"')).then_some(value + 1)
}

/// How many bytes of `text` are before the quote that ends the string it begins with.
fn length(text: &[u8]) -> Option<usize> {
    let said = npy::chars(text).filter(|&chars| text.get(chars) == Some(&b'"'));
    said.or_else(|| memchr(b'"', text))
}

/// White space, as JSON defines it, at the begin of `text`.
fn blanks(text: &[u8]) -> usize {
    text.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count()
}
