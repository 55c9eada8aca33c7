//! Errors, in the form of each dialect.

use crate::code::ErrorCode;
use crate::dialect::Dialect;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

/// An error for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    /// The field of the request, e.g. `messages[2].content`.
    pub(crate) field: Option<String>,
}

/// What kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Invalid,
    TooLong {
        prompt: usize,
        context: usize,
    },
    Ended,
    /// The client asks the server to hold the history.
    Thread,
    /// The response that the request continues is not known.
    PreviousResponse,
    TooLarge,
    Encoding,
    Key,
    /// There is no episode at the base URL.
    Episode,
    Route,
    Model,
    Method,
    Unavailable,
    Failed,
}

impl Problem {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), field: None }
    }

    /// An invalid field; the message names it.
    pub(crate) fn field(field: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let field = field.into();
        let message = format!("{field}: {message}");
        Self { kind: Kind::Invalid, message, field: Some(field) }
    }

    /// A field whose meaning the gateway cannot honour.
    pub(crate) fn unsupported(field: impl Into<String>, what: &str, why: &str) -> Self {
        Self::field(field, format!("{what} is not supported: {why}"))
    }

    fn status(&self, dialect: Dialect) -> u16 {
        match self.kind {
            Kind::Invalid
            | Kind::TooLong { .. }
            | Kind::Ended
            | Kind::Thread
            | Kind::PreviousResponse => 400,
            Kind::Key => 401,
            Kind::Episode | Kind::Route | Kind::Model => 404,
            Kind::Method => 405,
            Kind::TooLarge => 413,
            Kind::Encoding => 415,
            Kind::Unavailable if dialect == Dialect::Messages => 529,
            Kind::Unavailable => 503,
            Kind::Failed => 500,
        }
    }

    /// The code, by which the error is attributed.
    pub(crate) fn code(&self) -> ErrorCode {
        match self.kind {
            Kind::Invalid => ErrorCode::InvalidRequest,
            Kind::TooLong { .. } => ErrorCode::ContextFull,
            Kind::Ended => ErrorCode::EpisodeEnded,
            Kind::Thread => ErrorCode::ThreadUnsupported,
            Kind::PreviousResponse => ErrorCode::UnknownResponse,
            Kind::TooLarge => ErrorCode::RequestTooLarge,
            Kind::Encoding => ErrorCode::EncodingUnsupported,
            Kind::Key => ErrorCode::InvalidKey,
            Kind::Episode => ErrorCode::UnknownEpisode,
            Kind::Route => ErrorCode::UnknownRoute,
            Kind::Model => ErrorCode::UnknownModel,
            Kind::Method => ErrorCode::WrongMethod,
            Kind::Unavailable => ErrorCode::Overloaded,
            Kind::Failed => ErrorCode::ServerError,
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.kind {
            Kind::Unavailable | Kind::Failed => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.kind {
            Kind::Invalid
            | Kind::TooLong { .. }
            | Kind::Ended
            | Kind::Thread
            | Kind::PreviousResponse
            | Kind::Encoding => "invalid_request_error",
            Kind::Key => "authentication_error",
            Kind::Episode | Kind::Route | Kind::Model | Kind::Method => "not_found_error",
            Kind::TooLarge => "request_too_large",
            Kind::Unavailable => "overloaded_error",
            Kind::Failed => "api_error",
        }
    }

    /// The message, in the words by which the dialect's clients recognise it.
    pub(crate) fn message(&self, dialect: Dialect) -> String {
        match (self.kind, dialect) {
            (Kind::TooLong { prompt, context }, Dialect::Messages) => {
                format!("prompt is too long: {prompt} tokens > {context} maximum")
            }
            (Kind::TooLong { prompt, context }, _) => format!(
                "This model's maximum context length is {context} tokens. However, your messages \
                 resulted in {prompt} tokens. Please reduce the length of the messages."
            ),
            _ => self.message.clone(),
        }
    }

    /// The JSON body of an error reply.
    pub(crate) fn body(&self, dialect: Dialect) -> Value {
        let message = self.message(dialect);
        if dialect == Dialect::Messages {
            let mut error = json!({
                "type": self.anthropic_type(),
                "message": message,
                // Not a field of this dialect, whose clients ignore it: programs read it.
                "code": self.code().as_str(),
            });
            if let (Kind::Thread, Some(error)) = (self.kind, error.as_object_mut()) {
                // The vendor's library then sends whole histories.
                let details =
                    json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
                error.insert("details".into(), details);
            }
            return json!({"type": "error", "error": error});
        }
        json!({"error": {
            "message": message,
            "type": self.openai_type(),
            "param": self.field,
            "code": self.code().as_str(),
        }})
    }

    /// The reply.
    pub(crate) fn response(&self, dialect: Dialect) -> Response {
        let status = StatusCode::from_u16(self.status(dialect));
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = Body::from(self.body(dialect).to_string());
        let retry = if self.kind == Kind::Unavailable { "true" } else { "false" };
        let headers = [
            (header::CONTENT_TYPE, "application/json"),
            // Read by the vendors' libraries, before they look at the status.
            (HeaderName::from_static("x-should-retry"), retry),
        ];
        let mut reply = (status, headers, body).into_response();
        if self.kind == Kind::Unavailable {
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SampleError;

    #[test]
    fn a_long_prompt_is_reported_in_the_words_that_clients_look_for() {
        let problem = Problem::from(SampleError::TooLong { prompt: 20, context: 10 });
        let text = problem.body(Dialect::Messages).to_string();
        assert!(text.contains("prompt is too long: 20 tokens > 10 maximum"), "{text}");
        let text = problem.body(Dialect::Chat).to_string();
        assert!(text.contains("maximum context length is 10 tokens"), "{text}");
        assert!(text.contains(r#""code":"context_length_exceeded""#), "{text}");
    }

    #[test]
    fn only_a_passing_failure_is_to_be_retried() {
        for (error, statuses, retry) in [
            (SampleError::Refused("no".into()), [400, 400], "false"),
            (SampleError::Ended("turns".into()), [400, 400], "false"),
            (SampleError::Unavailable("later".into()), [503, 529], "true"),
            (SampleError::Failed("broken".into()), [500, 500], "false"),
        ] {
            let problem = Problem::from(error);
            for (dialect, status) in
                [Dialect::Responses, Dialect::Messages].into_iter().zip(statuses)
            {
                let reply = problem.response(dialect);
                assert_eq!(reply.status().as_u16(), status);
                assert_eq!(reply.headers()["x-should-retry"], retry);
            }
        }
    }
}
