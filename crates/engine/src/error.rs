//! Errors of engine calls: which engine, which call, what happened, and the error behind it.

use orchestrate_routing::RoutingError;
use orchestrate_types::Retry;
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
        match &self.kind {
            EngineErrorKind::Unreachable(_) => Retry::After(Duration::from_millis(500)),
            EngineErrorKind::TimedOut(_) | EngineErrorKind::InvalidReply(_) => Retry::Now,
            EngineErrorKind::Refused { status, retry_after, .. } => match status {
                408 | 429 | 500 | 502 | 503 | 504 => {
                    Retry::After(retry_after.unwrap_or(Duration::from_secs(1)))
                }
                _ => Retry::Never,
            },
            EngineErrorKind::GenerationFailed(_) => Retry::After(Duration::from_secs(1)),
            EngineErrorKind::Unsupported(_) => Retry::Never,
        }
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
        /// The pause that the server requested (`Retry-After`).
        retry_after: Option<Duration>,
    },
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
    /// [`EngineErrorKind::Unreachable`] for this reason.
    pub fn unreachable(detail: impl Into<ErrorDetail>) -> Self {
        Self::Unreachable(detail.into())
    }

    /// [`EngineErrorKind::Refused`] without a requested pause.
    pub fn refused(status: u16, message: impl Into<String>) -> Self {
        Self::Refused { status, message: message.into(), retry_after: None }
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
}
