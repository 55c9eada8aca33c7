//! One HTTP exchange with an engine: bounded in time and bytes, errors in our words.

use crate::EngineErrorKind;
use bytes::Bytes;
use reqwest::RequestBuilder;
use std::time::Duration;

/// Most bytes of an error answer that are read.
const ERROR_LIMIT: usize = 64 << 10;
/// Most characters of a foreign message that are handed on.
const MESSAGE_CHARS: usize = 500;

/// Sends a request and reads a successful answer of at most `limit` bytes, within `timeout`.
/// Dropping the future closes the connection, which aborts the request on the engine.
pub(crate) async fn exchange(
    request: RequestBuilder,
    timeout: Duration,
    limit: usize,
) -> Result<Bytes, EngineErrorKind> {
    tokio::time::timeout(timeout, read(request, limit))
        .await
        .unwrap_or(Err(EngineErrorKind::TimedOut(timeout)))
}

async fn read(request: RequestBuilder, limit: usize) -> Result<Bytes, EngineErrorKind> {
    let mut response = request.send().await.map_err(unreachable)?;
    let status = response.status();
    if status.is_success() {
        let announced = response.content_length().unwrap_or(0);
        if announced > limit as u64 {
            return Err(too_long(limit));
        }
        let mut body = Vec::with_capacity(usize::try_from(announced).unwrap_or(0));
        while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
            if body.len() + chunk.len() > limit {
                return Err(too_long(limit));
            }
            body.extend_from_slice(&chunk);
        }
        return Ok(Bytes::from(body));
    }
    let mut body = Vec::new();
    while body.len() < ERROR_LIMIT {
        match response.chunk().await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            // The status alone says enough when the words are cut off.
            Ok(None) | Err(_) => break,
        }
    }
    let message = error_message(&body).unwrap_or_else(|| excerpt(&body));
    Err(EngineErrorKind::Refused { status: status.as_u16(), message })
}

fn too_long(limit: usize) -> EngineErrorKind {
    let words = format!("its body is longer than the {limit} bytes such a reply can have");
    EngineErrorKind::InvalidReply(words)
}

/// The words of an error body. Engines send `error` as text or as an object with `message`,
/// `message` or `detail` at the top, all with the same meaning.
pub(crate) fn error_message(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = body.get("error");
    let words = error
        .and_then(|error| error.as_str().or_else(|| error.get("message")?.as_str()))
        .or_else(|| body.get("message")?.as_str())
        .or_else(|| body.get("detail")?.as_str())?;
    Some(words.chars().take(MESSAGE_CHARS).collect())
}

/// The beginning of a body, for a person.
pub(crate) fn excerpt(body: &[u8]) -> String {
    let start = body.get(..body.len().min(MESSAGE_CHARS / 2)).unwrap_or_default();
    String::from_utf8_lossy(start).escape_debug().to_string()
}

/// An error with its causes; reqwest's own text names only the URL.
pub(crate) fn unreachable(error: reqwest::Error) -> EngineErrorKind {
    let error = error.without_url();
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        words = format!("{words}: {inner}");
        cause = inner.source();
    }
    EngineErrorKind::Unreachable(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_an_error_body_is_understood() {
        for body in [
            r#"{"error":"too long"}"#,
            r#"{"error":{"message":"too long"}}"#,
            r#"{"object":"error","message":"too long","code":400}"#,
            r#"{"detail":"too long"}"#,
            r#"{"success":false,"message":"too long"}"#,
        ] {
            assert_eq!(error_message(body.as_bytes()).as_deref(), Some("too long"), "{body}");
        }
        for body in ["", "<html>", "[]", "{}", r#"{"error":7}"#] {
            assert_eq!(error_message(body.as_bytes()), None, "{body}");
        }
    }
}
