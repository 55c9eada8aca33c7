//! The checks that every request passes before a handler sees it.

use crate::body::Bodies;
use crate::denial::Denial;
use crate::hosts::{AllowedHosts, check_origin};
use crate::options::HttpOptions;
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::net::SocketAddr;
use std::sync::Arc;

/// What a server has that its guard must know.
#[derive(Clone, Copy)]
pub struct Routes {
    /// Paths of health checks, which need no token. Their requests have no body.
    pub open: &'static [&'static str],
    /// Prefix of the paths whose requests the application authorises and whose bodies it reads by
    /// itself; empty if there are none.
    pub own: &'static str,
    /// Maximum size of a request body, in bytes.
    pub max_body_bytes: usize,
    /// The reply to a denied request, in the server's format.
    pub reply: fn(&Denial) -> Response,
}

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Routes").field("open", &self.open).finish_non_exhaustive()
    }
}

/// Checks requests to one server.
struct Guard {
    token: Option<blake3::Hash>,
    hosts: AllowedHosts,
    bodies: Bodies,
    routes: Routes,
}

/// Puts a guard in front of an application.
pub(crate) fn guarded(
    app: Router,
    options: &HttpOptions,
    address: SocketAddr,
    routes: Routes,
) -> Router {
    let hash = |token: &String| blake3::hash(format!("Bearer {token}").as_bytes());
    let guard = Guard {
        token: options.token.as_ref().map(hash),
        hosts: AllowedHosts::new(options, address),
        bodies: Bodies::new(routes.max_body_bytes, options.limits.body_time),
        routes,
    };
    app.layer(from_fn_with_state(Arc::new(guard), check))
}

async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    match guard.checked(request).await {
        Ok(request) => next.run(request).await,
        Err(denial) => (guard.routes.reply)(&denial),
    }
}

impl Guard {
    /// The request with its body in memory.
    async fn checked(&self, request: Request) -> Result<Request, Denial> {
        let headers = request.headers();
        self.hosts.check(request.uri(), headers)?;
        check_origin(headers)?;
        if self.routes.open.contains(&request.uri().path()) {
            return Ok(request.map(|_| Body::empty()));
        }
        let own = self.routes.own;
        if !own.is_empty() && request.uri().path().starts_with(own) {
            return Ok(request);
        }
        self.authorise(headers)?;
        let empty = request.body().size_hint().exact() == Some(0);
        if empty {
            return Ok(request);
        }
        if !is_json(headers) {
            return Err(Denial::ContentType);
        }
        let (parts, body) = request.into_parts();
        let body = self.bodies.read(body).await?;
        Ok(Request::from_parts(parts, Body::from(body)))
    }

    fn authorise(&self, headers: &HeaderMap) -> Result<(), Denial> {
        let Some(expected) = self.token else { return Ok(()) };
        let sent = headers.get(header::AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        // blake3 hashes are compared in constant time.
        if blake3::hash(sent) == expected { Ok(()) } else { Err(Denial::Unauthorized) }
    }
}

/// Whether the body is declared as JSON. A browser sends no such request for a page of another site
/// without asking the server first.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return false };
    let kind = value.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
}
