//! HTTP over a stream that is not a socket: the connection of an agent in a sandbox.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};

/// Serves the requests that arrive on `stream`, one after the other, until it ends. A client that
/// breaks the protocol or goes away ends it, too.
pub async fn serve_stream<S>(stream: S, routes: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(routes);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "an agent's connection ended early");
    }
}
