//! Accepts connections: a bounded number, plain or with TLS, with a limit on the time of headers.

use crate::closing::{ConnectionObserver, Socket, close};
use crate::guard::{Routes, guarded};
use crate::options::{HttpLimits, HttpOptions, HttpSetupError};
use crate::tls::{self, TlsSocket};
use axum::Router;
use axum::extract::Request;
use axum::http::Version;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
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
    observer: Option<OpenObserver>,
}

/// Begins to observe a connection.
type OpenObserver = Arc<dyn Fn() -> Arc<dyn ConnectionObserver> + Send + Sync>;

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
        Ok(Self { listener, address, options, tls, observer: None })
    }

    /// Has each connection observed. Replies are then followed to their end: a connection stays open until
    /// its client has closed it, or for a second.
    #[must_use]
    pub fn observed_by(
        self,
        observer: impl Fn() -> Arc<dyn ConnectionObserver> + Send + Sync + 'static,
    ) -> Self {
        Self { observer: Some(Arc::new(observer)), ..self }
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
                    let observer = self.observer.as_ref().map(|open| open());
                    let served = Served { app, observer, limits, stop };
                    connections.spawn(connection(stream, tls, served));
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

/// What a connection is served with.
struct Served {
    app: Router,
    observer: Option<Arc<dyn ConnectionObserver>>,
    limits: HttpLimits,
    stop: CancellationToken,
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, served: Served) {
    // Replies are small; Nagle's algorithm would only delay them.
    stream.set_nodelay(true).ok();
    let Some(tls) = tls else { return served.exchange(stream).await };
    match timeout(served.limits.header_time, tls.accept(stream)).await {
        Ok(Ok(stream)) => Box::pin(served.exchange(TlsSocket(stream))).await,
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake did not end in time"),
    }
}

impl Served {
    /// Serves the requests of one connection.
    async fn exchange<S: Socket>(self, stream: S) {
        let Self { app, observer, limits, stop } = self;
        let ends_reply = Arc::new(AtomicBool::new(false));
        let app = TowerToHyperService::new(app);
        let service = {
            let (observer, ends_reply) = (observer.clone(), Arc::clone(&ends_reply));
            service_fn(move |mut request: Request<Incoming>| {
                ends_reply.store(request.version() == Version::HTTP_10, Ordering::Relaxed);
                if let Some(observer) = &observer {
                    observer.requested(request.extensions_mut());
                }
                Box::pin(app.call(request))
            })
        };
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_buf_size(READ_BUFFER)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        let mut is_stopping = false;
        let ended = loop {
            tokio::select! {
                biased;
                ended = poll_fn(|context| connection.poll_without_shutdown(context)) => break ended,
                () = stop.cancelled(), if !is_stopping => {}
            }
            is_stopping = true;
            Pin::new(&mut connection).graceful_shutdown();
        };
        // A client that sends no other request in time has had more than enough time to read its replies.
        if let Err(error) =
            ended.or_else(|error| if error.is_timeout() { Ok(()) } else { Err(error) })
        {
            tracing::debug!(%error, "connection ended early");
            return;
        }
        let mut stream = connection.into_parts().io.into_inner();
        let closed = match observer {
            None => stream.shutdown().await,
            Some(observer) => {
                let closed = close(stream, ends_reply.load(Ordering::Relaxed)).await;
                closed.inspect(|()| observer.all_read())
            }
        };
        if let Err(error) = closed {
            tracing::debug!(%error, "connection ended early");
        }
    }
}
