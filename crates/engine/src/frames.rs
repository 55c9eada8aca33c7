//! Event streams of engines: a reply that is read while the engine samples it.
//!
//! SGLang repeats everything that was sampled so far in each frame, so that the last frame is the
//! whole reply and is checked like one that was not streamed. Of the other frames only the new token
//! ids are read: frames grow with the reply, and parsing all of each would take quadratic time.

use crate::error::EngineErrorKind;
use crate::http::error_message;
use orchestrate_types::TokenId;
use serde::Deserialize;

/// Beginning of a line with data.
const DATA: &[u8] = b"data:";

/// The data after the last reply.
const END: &[u8] = b"[DONE]";

/// Beginning of the list of sampled tokens. Within a JSON string its quotes would be escaped.
const OUTPUT_IDS: &[u8] = br#""output_ids":["#;

/// Splits an event stream into frames and keeps the newest one.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// A line whose end has not arrived yet.
    line: Vec<u8>,
    newest: Vec<u8>,
}

impl Frames {
    /// Adds bytes of the stream. Returns whether there is a new frame.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let (mut is_new, mut rest) = (false, bytes);
        while let Some((line, after)) = memchr::memchr(b'\n', rest)
            .and_then(|end| Some((rest.get(..end)?, rest.get(end + 1..)?)))
        {
            is_new |= if self.line.is_empty() {
                self.take(line)
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.take(&whole)
            };
            rest = after;
        }
        self.line.extend_from_slice(rest);
        is_new
    }

    /// Takes a whole line. Returns whether it is a frame.
    fn take(&mut self, line: &[u8]) -> bool {
        let data = line.strip_prefix(DATA).map(<[u8]>::trim_ascii).unwrap_or_default();
        if data.is_empty() || data == END {
            return false;
        }
        self.newest.clear();
        self.newest.extend_from_slice(data);
        true
    }

    /// Number of bytes that are held.
    pub(crate) fn held(&self) -> usize {
        self.line.len() + self.newest.len()
    }

    /// The newest frame; empty before the first.
    pub(crate) fn newest(&self) -> &[u8] {
        &self.newest
    }

    /// The last frame.
    pub(crate) fn into_last(self) -> Vec<u8> {
        self.newest
    }
}

/// The sampled tokens of a frame after the first `known` ones.
pub(crate) fn new_tokens(frame: &[u8], known: usize) -> Vec<TokenId> {
    let Some(start) = memchr::memmem::find(frame, OUTPUT_IDS) else { return Vec::new() };
    let list = frame.get(start + OUTPUT_IDS.len()..).unwrap_or_default();
    let list = memchr::memchr(b']', list).and_then(|end| list.get(..end)).unwrap_or_default();
    let skipped = match known.checked_sub(1) {
        None => Some(list),
        Some(last) => memchr::memchr_iter(b',', list).nth(last).and_then(|at| list.get(at + 1..)),
    };
    let id = |text: &[u8]| std::str::from_utf8(text.trim_ascii()).ok()?.parse().ok();
    skipped.unwrap_or_default().split(|byte| *byte == b',').map_while(id).collect()
}

/// The error that a server sends as a frame after status 200, if this is one.
pub(crate) fn error_of(frame: &[u8]) -> Option<EngineErrorKind> {
    #[derive(Deserialize)]
    struct ErrorFrame {
        error: ErrorCode,
    }
    #[derive(Deserialize)]
    struct ErrorCode {
        code: Option<u16>,
    }
    // Replies are long, and never begin like this.
    if !frame.starts_with(br#"{"error""#) {
        return None;
    }
    let ErrorFrame { error } = serde_json::from_slice(frame).ok()?;
    let message = error_message(frame).unwrap_or_default();
    Some(EngineErrorKind::refused(error.code.unwrap_or(500), message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(ids: &[TokenId]) -> String {
        let text = r#"x \"output_ids\":[7] é"#;
        format!(r#"{{"text":"{text}","output_ids":{},"meta_info":{{}}}}"#, serde_json::json!(ids))
    }

    proptest! {
        #[test]
        fn prop_tokens_of_a_stream_are_found_however_it_is_split(
            ids in prop::collection::vec(any::<TokenId>(), 0..40),
            step in 1_usize..5,
            cuts in prop::collection::vec(1_usize..300, 1..20),
        ) {
            let ends = (0..ids.len()).step_by(step).chain([ids.len()]);
            let data: Vec<String> =
                ends.map(|end| format!("data: {}\r\n\n", frame(&ids[..end]))).collect();
            let stream = [": comment\n\n", &data.concat(), "data: [DONE]\n\n"].concat();
            let (mut frames, mut seen) = (Frames::default(), Vec::new());
            let (mut rest, mut cuts) = (stream.as_bytes(), cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                if frames.push(piece) {
                    seen.extend(new_tokens(frames.newest(), seen.len()));
                }
                prop_assert!(seen == ids[..seen.len()]);
                rest = after;
            }
            prop_assert_eq!(&seen, &ids);
            prop_assert_eq!(String::from_utf8(frames.into_last()).unwrap(), frame(&ids));
        }
    }

    #[test]
    fn what_is_not_a_list_of_tokens_has_none() {
        for frame in
            ["", "{}", r#"{"output_ids":[]}"#, r#"{"output_ids":["a"]}"#, r#"{"output_ids":[1"#]
        {
            assert!(new_tokens(frame.as_bytes(), 0).is_empty(), "{frame}");
        }
        assert!(new_tokens(br#"{"output_ids":[1,2]}"#, 5).is_empty());
        assert_eq!(new_tokens(br#"{"output_ids":[1, 2 ,-3]}"#, 0), [1, 2]);
    }

    #[test]
    fn errors_in_a_stream_have_their_status() {
        let frame = br#"{"error":{"message":"The request queue is full.","type":"server_error","code":503,"retryable":true}}"#;
        let Some(EngineErrorKind::Refused { status, message, .. }) = error_of(frame) else {
            panic!("no error");
        };
        assert_eq!((status, message.as_str()), (503, "The request queue is full."));
        assert!(error_of(br#"{"output_ids":[]}"#).is_none());
    }
}
