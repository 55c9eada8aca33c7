//! Why a request is denied before a handler sees it.

use axum::http::StatusCode;

/// Why a request is denied. The text is sent to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The token is missing or wrong.
    #[error("a valid bearer token is required")]
    Unauthorized,
    /// There is no `host`.
    #[error("the request must name its host")]
    MissingHost,
    /// This host is not one of the server's.
    #[error(
        "host `{0}` is not allowed; use localhost or an IP address, or add it to the server's allowed \
             hosts (gateway.allowed_hosts of a run, --allowed-host of another server)"
    )]
    Host(String),
    /// A browser sends it for a page of another site.
    #[error("requests from pages of other sites are not allowed")]
    CrossSite,
    /// The body is not declared as JSON.
    #[error("a request with a body must have `content-type: application/json`")]
    ContentType,
    /// The body has more than this number of bytes.
    #[error("the request body must be at most {0} bytes")]
    BodyTooLarge(usize),
    /// The body did not arrive in time.
    #[error("the request body did not arrive in time")]
    BodyTimedOut,
    /// The connection broke, for this reason.
    #[error("the request body ended early: {0}")]
    BodyEnded(String),
    /// The bodies in memory are too large together.
    #[error("too many request bodies are being received; try again later")]
    BodiesFull,
}

impl Denial {
    /// HTTP status code of the reply.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::MissingHost | Self::BodyEnded(_) => StatusCode::BAD_REQUEST,
            Self::Host(_) | Self::CrossSite => StatusCode::FORBIDDEN,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimedOut => StatusCode::REQUEST_TIMEOUT,
            Self::BodiesFull => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Code of the reply, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::MissingHost | Self::BodyEnded(_) => "bad_request",
            Self::Host(_) => "host_not_allowed",
            Self::CrossSite => "cross_site",
            Self::ContentType => "content_type",
            Self::BodyTooLarge(_) => "body_too_large",
            Self::BodyTimedOut => "body_timed_out",
            Self::BodiesFull => "busy",
        }
    }
}
