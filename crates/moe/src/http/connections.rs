//! Accepts connections: a bounded number, plain or with TLS, with a limit on the time of headers.

use super::guard::{Routes, guarded};
use super::options::{HttpLimits, HttpOptions, HttpSetupError};
use super::tls;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Maximum size of the headers of a request, and of what is read of a body at once, in bytes.
const READ_BUFFER: usize = 32 << 10;
/// Maximum number of headers of a request.
const MAX_HEADERS: usize = 64;
/// Time that open connections get to end once the server stops.
const STOP_GRACE: Duration = Duration::from_secs(30);
/// Pause after a connection could not be accepted, e.g. for want of a file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The reply to a connection over the limit.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 0\r\n\r\n";

/// A listener with the options by which it serves.
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    options: HttpOptions,
    tls: Option<TlsAcceptor>,
}

impl std::fmt::Debug for HttpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Checks the options against the listener's address and reads the TLS files.
    ///
    /// # Errors
    /// [`HttpSetupError`] for an address that other hosts reach without a secret, or TLS files
    /// that cannot be used.
    pub fn new(listener: TcpListener, options: HttpOptions) -> Result<Self, HttpSetupError> {
        let address = listener.local_addr().map_err(HttpSetupError::Address)?;
        options.check(address)?;
        let tls = options.tls.as_ref().map(tls::acceptor).transpose()?;
        Ok(Self { listener, address, options, tls })
    }

    /// Serves an application until `stop` is cancelled and its connections have ended.
    pub async fn serve(self, app: Router, routes: Routes, stop: CancellationToken) {
        let app = guarded(app, &self.options, self.address, routes);
        let limits = self.options.limits;
        let mut connections = JoinSet::new();
        loop {
            // All three are cancel-safe.
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(_) = connections.join_next() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) if connections.len() >= limits.max_connections => {
                    refuse(&stream, self.tls.is_some());
                }
                Ok((stream, _)) => {
                    let (app, tls, stop) = (app.clone(), self.tls.clone(), stop.clone());
                    connections.spawn(connection(stream, tls, app, limits, stop));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        let ended = async { while connections.join_next().await.is_some() {} };
        if timeout(STOP_GRACE, ended).await.is_err() {
            tracing::warn!("connections were still open when the server stopped");
        }
    }
}

/// Answers a connection over the limit, as far as that is possible without waiting.
fn refuse(stream: &TcpStream, tls: bool) {
    if !tls {
        // The buffer of a new connection is empty; a client that is gone needs no reply.
        stream.try_write(TOO_MANY).ok();
    }
    tracing::debug!("connection refused: too many are open");
}

async fn connection(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    app: Router,
    limits: HttpLimits,
    stop: CancellationToken,
) {
    // Replies are small; Nagle's algorithm would only delay them.
    stream.set_nodelay(true).ok();
    let Some(tls) = tls else { return exchange(stream, app, limits, stop).await };
    match timeout(limits.header_time, tls.accept(stream)).await {
        Ok(Ok(stream)) => Box::pin(exchange(stream, app, limits, stop)).await,
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake did not end in time"),
    }
}

/// Serves the requests of one connection.
async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    app: Router,
    limits: HttpLimits,
    stop: CancellationToken,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_buf_size(READ_BUFFER)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let mut connection = pin!(connection);
    // The connection is polled again after the token is cancelled.
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended early");
    }
}
