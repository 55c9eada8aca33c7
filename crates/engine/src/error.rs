//! Errors of engine calls: which engine, which call, what happened, and the error behind it.

use orchestrate_routing::RoutingError;
use orchestrate_types::{Attribution, Retry};
use reqwest::header::InvalidHeaderValue;
use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

/// An engine call that failed.
#[derive(Debug, thiserror::Error)]
#[error("engine {engine} ({call}): {kind}")]
pub struct EngineError {
    /// Base URL of the server, or a description of the fleet.
    pub engine: String,
    /// The HTTP route, or the name of the step for steps without one.
    pub call: &'static str,
    /// The kind of failure, with its details.
    #[source]
    pub kind: EngineErrorKind,
}

impl EngineError {
    /// Whether the same call may be made again.
    pub fn retry(&self) -> Retry {
        self.kind.retry()
    }
}

/// The reason for an [`EngineError`].
#[derive(Debug, thiserror::Error)]
pub enum EngineErrorKind {
    /// There was no connection, or it broke before the reply was complete.
    #[error("unreachable: {0}")]
    Unreachable(#[source] ErrorDetail),
    /// There was no complete reply within this time.
    #[error("did not answer within {0:?}")]
    TimedOut(Duration),
    /// The server answered with an HTTP error.
    #[error("answered HTTP {status}: {message}")]
    Refused {
        /// HTTP status code.
        status: u16,
        /// The server's own message.
        message: String,
        /// What the codes in the error body mean.
        meaning: Refusal,
        /// The pause that the server requested (`Retry-After`).
        retry_after: Option<Duration>,
    },
    /// The conversation leaves no room for a reply in the model's context.
    #[error("the context is full: {0}")]
    ContextFull(String),
    /// The reply failed a check. Nothing of it was used.
    #[error("sent an invalid reply: {0}")]
    InvalidReply(#[source] ErrorDetail),
    /// The server answered that it failed while it sampled, as an overloaded one does.
    #[error("failed during the generation: {0}")]
    GenerationFailed(#[source] ErrorDetail),
    /// The engine cannot do what the run requires of it, or must not be used before its weights are
    /// synced.
    #[error("{0}")]
    Unsupported(#[source] ErrorDetail),
}

impl EngineErrorKind {
    /// Whether the same call may be made again.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Unreachable(_) => Retry::After(Duration::from_millis(500)),
            Self::TimedOut(_) | Self::InvalidReply(_) => Retry::Now,
            Self::Refused { status, retry_after, .. } => match status {
                408 | 429 | 500 | 502 | 503 | 504 => {
                    Retry::After(retry_after.unwrap_or(Duration::from_secs(1)))
                }
                _ => Retry::Never,
            },
            Self::GenerationFailed(_) => Retry::After(Duration::from_secs(1)),
            Self::ContextFull(_) | Self::Unsupported(_) => Retry::Never,
        }
    }

    /// [`EngineErrorKind::Unreachable`] for this reason.
    pub fn unreachable(detail: impl Into<ErrorDetail>) -> Self {
        Self::Unreachable(detail.into())
    }

    /// [`EngineErrorKind::Refused`] without a code or a requested pause.
    pub fn refused(status: u16, message: impl Into<String>) -> Self {
        let (message, meaning) = (message.into(), Refusal::Unexplained);
        Self::Refused { status, message, meaning, retry_after: None }
    }

    /// Who caused the failure, which decides the outcome of an episode that gets no reply because of it.
    /// A refusal is ours, whatever it says: the client made the request.
    pub const fn attribution(&self) -> Attribution {
        match self {
            Self::ContextFull(_) => Attribution::Policy,
            Self::Unreachable(_)
            | Self::TimedOut(_)
            | Self::Refused { .. }
            | Self::InvalidReply(_)
            | Self::GenerationFailed(_)
            | Self::Unsupported(_) => Attribution::Infrastructure,
        }
    }

    /// [`EngineErrorKind::InvalidReply`] for this reason.
    pub fn invalid_reply(detail: impl Into<ErrorDetail>) -> Self {
        Self::InvalidReply(detail.into())
    }

    /// [`EngineErrorKind::GenerationFailed`] for this reason.
    pub(crate) fn generation_failed(detail: impl Into<ErrorDetail>) -> Self {
        Self::GenerationFailed(detail.into())
    }

    /// [`EngineErrorKind::Unsupported`] for this reason.
    pub fn unsupported(detail: impl Into<ErrorDetail>) -> Self {
        Self::Unsupported(detail.into())
    }

    /// The error of the routing rows, if they made a reply invalid.
    pub(crate) fn routing(&self) -> Option<&RoutingError> {
        let Self::InvalidReply(detail) = self else { return None };
        match detail.cause.as_deref() {
            Some(Cause::Routing(error)) => Some(error),
            Some(_) | None => None,
        }
    }
}

/// What the codes in the body of an HTTP error say about the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt, or the prompt with the tokens to sample, is longer than the context.
    TooLong,
    /// Nothing that is known: there is no code, or another one.
    Unexplained,
}

/// The fields of error bodies, and their values, that mean [`Refusal::TooLong`].
const TOO_LONG: &[(&str, &str)] = &[
    // OpenAI's, and that of many servers that follow it.
    ("code", "context_length_exceeded"),
    // OpenAI's for one text that is too long by itself.
    ("code", "string_above_max_length"),
    // Baidu Qianfan's.
    ("code", "tokens_too_long"),
    ("code", "characters_too_long"),
    // llama.cpp's.
    ("type", "exceed_context_size_error"),
    // Anthropic's for a body that is larger than any prompt may be.
    ("type", "request_too_large"),
    // vLLM's name of the prompt's length. Its `code` is the status.
    ("param", "input_tokens"),
];

impl Refusal {
    /// The meaning of an error body: of the fields of its `error`, or of its own, where there is none.
    pub(crate) fn of(body: &[u8]) -> Self {
        let Ok(body) = serde_json::from_slice::<serde_json::Value>(body) else {
            return Self::Unexplained;
        };
        let error = body.get("error").filter(|error| error.is_object()).unwrap_or(&body);
        let says = |(field, value): &(&str, &str)| {
            error.get(field).and_then(serde_json::Value::as_str) == Some(value)
        };
        if TOO_LONG.iter().any(says) { Self::TooLong } else { Self::Unexplained }
    }
}

/// A message, and the error that caused it, if there is one.
///
/// Displayed with all of its causes: journals and logs keep only this text.
#[derive(Debug)]
pub struct ErrorDetail {
    message: String,
    /// Boxed, because it is larger than everything else in an error.
    cause: Option<Box<Cause>>,
}

/// Errors of other crates that cause engine errors.
#[derive(Debug)]
pub(crate) enum Cause {
    Http(reqwest::Error),
    Header(InvalidHeaderValue),
    Io(io::Error),
    Json(serde_json::Error),
    Routing(RoutingError),
    Task(tokio::task::JoinError),
}

impl Cause {
    fn error(&self) -> &(dyn Error + 'static) {
        match self {
            Self::Http(error) => error,
            Self::Header(error) => error,
            Self::Io(error) => error,
            Self::Json(error) => error,
            Self::Routing(error) => error,
            Self::Task(error) => error,
        }
    }
}

macro_rules! cause_from {
    ($($error:ty => $variant:ident),+ $(,)?) => {
        $(impl From<$error> for Cause {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        })+
    };
}

cause_from! {
    reqwest::Error => Http,
    InvalidHeaderValue => Header,
    io::Error => Io,
    serde_json::Error => Json,
    RoutingError => Routing,
    tokio::task::JoinError => Task,
}

impl ErrorDetail {
    /// A message about `cause`, which is displayed after it. The message may be empty.
    pub(crate) fn caused_by(message: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self { message: message.into(), cause: Some(Box::new(cause.into())) }
    }
}

impl From<String> for ErrorDetail {
    fn from(message: String) -> Self {
        Self { message, cause: None }
    }
}

impl From<&str> for ErrorDetail {
    fn from(message: &str) -> Self {
        message.to_owned().into()
    }
}

impl fmt::Display for ErrorDetail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        let mut separator = if self.message.is_empty() { "" } else { ": " };
        let mut next = self.source();
        while let Some(error) = next {
            write!(f, "{separator}{error}")?;
            separator = ": ";
            next = error.source();
        }
        Ok(())
    }
}

impl Error for ErrorDetail {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(Cause::error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_its_causes_and_keeps_them_as_sources() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let detail = ErrorDetail::caused_by("cannot resolve `a`", refused);
        let error = EngineError {
            engine: "http://a:1".to_owned(),
            call: "discover",
            kind: EngineErrorKind::Unreachable(detail),
        };
        let text =
            "engine http://a:1 (discover): unreachable: cannot resolve `a`: connection refused";
        assert_eq!(error.to_string(), text);
        let detail = error.source().and_then(Error::source);
        let io = detail.and_then(Error::source).and_then(<dyn Error>::downcast_ref::<io::Error>);
        assert_eq!(io.unwrap().kind(), io::ErrorKind::ConnectionRefused);
        let plain = EngineErrorKind::invalid_reply("`choices`: missing");
        assert_eq!(plain.to_string(), "sent an invalid reply: `choices`: missing");
        assert!(plain.routing().is_none());
    }
    /// The kind after this one, for each kind once; the match is to list every kind.
    fn next(kind: &EngineErrorKind) -> Option<EngineErrorKind> {
        Some(match kind {
            EngineErrorKind::Unreachable(_) => EngineErrorKind::TimedOut(Duration::ZERO),
            EngineErrorKind::TimedOut(_) => EngineErrorKind::refused(400, "no"),
            EngineErrorKind::Refused { .. } => EngineErrorKind::ContextFull("full".to_owned()),
            EngineErrorKind::ContextFull(_) => EngineErrorKind::invalid_reply("bad"),
            EngineErrorKind::InvalidReply(_) => EngineErrorKind::generation_failed("busy"),
            EngineErrorKind::GenerationFailed(_) => EngineErrorKind::unsupported("old"),
            EngineErrorKind::Unsupported(_) => return None,
        })
    }

    #[test]
    fn every_kind_is_documented_with_whose_doing_it_is_and_only_a_full_context_is_the_policys() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/outcomes.md");
        let page = std::fs::read_to_string(path).unwrap();
        let first = EngineErrorKind::unreachable("gone");
        let kinds: Vec<_> = std::iter::successors(Some(first), next).collect();
        for kind in &kinds {
            let variant = format!("{kind:?}");
            let name = variant.split([' ', '(', '{']).next().unwrap();
            let is_full = matches!(kind, EngineErrorKind::ContextFull(_));
            let expected = if is_full { Attribution::Policy } else { Attribution::Infrastructure };
            assert_eq!(kind.attribution(), expected, "{name}");
            let row = format!("| `{name}` | {} |", kind.attribution().name());
            assert!(page.contains(&row), "docs/src/outcomes.md lacks {row}");
        }
        assert_eq!(kinds.len(), 7);
    }

    #[test]
    fn every_code_for_a_full_context_is_read_where_servers_put_it_and_documented() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/outcomes.md");
        let page = std::fs::read_to_string(path).unwrap();
        for (field, value) in TOO_LONG {
            let fields = serde_json::json!({"message": "no", *field: value});
            for body in [&fields, &serde_json::json!({"type": "error", "error": fields})] {
                let body = body.to_string();
                assert_eq!(Refusal::of(body.as_bytes()), Refusal::TooLong, "{body}");
            }
            let row = format!("| `{field}` | `{value}` |");
            assert!(page.contains(&row), "docs/src/outcomes.md lacks {row}");
        }
        for body in [
            r#"{"error": {"message": "context_length_exceeded", "code": 400}}"#,
            r#"{"error": {"code": null, "type": "BadRequestError", "param": "temperature"}}"#,
            r#"{"error": "maximum context length"}"#,
            r#"{"code": {"context_length_exceeded": 1}}"#,
            "context_length_exceeded",
            "",
        ] {
            assert_eq!(Refusal::of(body.as_bytes()), Refusal::Unexplained, "{body}");
        }
    }
}
