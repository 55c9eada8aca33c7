//! Which replies of a connection have arrived, and HTTP over a stream that is not a socket: the
//! connection of an agent in a sandbox.
//!
//! A reply that was written is not yet a reply that arrived: the bytes may be in a buffer when the client
//! closes its end. [`Unconfirmed`] holds the receipts of what a connection has sent until the client
//! shows that it has read it.

use crate::sampler::Receipt;
use axum::Router;
use axum::extract::Request;
use axum::http::Version;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

/// How long a client may take to close a connection after its last reply. One that takes longer has read
/// the reply.
const CLOSING_TIME: Duration = Duration::from_secs(1);

/// The receipts of replies that a connection has sent, and that its client may not have read. Dropped with
/// the connection, those that are left were not delivered.
///
/// A server has one per connection, adds it to the extensions of each request, and confirms it when the
/// next request arrives and when the connection has ended after its client had read everything.
#[derive(Clone, Debug, Default)]
pub struct Unconfirmed(Arc<Mutex<Vec<Receipt>>>);

impl Unconfirmed {
    fn receipts(&self) -> MutexGuard<'_, Vec<Receipt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the receipt of a reply that was written as a whole.
    pub(crate) fn hold(&self, mut receipt: Receipt) {
        receipt.sent();
        self.receipts().push(receipt);
    }

    /// The client has read what was sent.
    pub fn confirm(&self) {
        self.receipts().drain(..).for_each(Receipt::delivered);
    }
}

/// Serves the requests that arrive on `stream`, one after the other, until it ends. A client that
/// breaks the protocol or goes away ends it, too.
///
/// A reply is delivered once the client sends another request on the stream, or ends the stream after it
/// has read everything. A stream that breaks, or ends with unread bytes, loses its last reply.
pub async fn serve_stream<S>(stream: S, routes: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let unconfirmed = Unconfirmed::default();
    let ends_with_close = Arc::new(AtomicBool::new(false));
    let routes = TowerToHyperService::new(routes);
    let service = {
        let (unconfirmed, ends_with_close) = (unconfirmed.clone(), Arc::clone(&ends_with_close));
        service_fn(move |mut request: Request<Incoming>| {
            unconfirmed.confirm();
            ends_with_close.store(request.version() == Version::HTTP_10, Ordering::Relaxed);
            request.extensions_mut().insert(unconfirmed.clone());
            Box::pin(routes.call(request))
        })
    };
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service)
        .without_shutdown()
        .await;
    let ended = match served {
        Ok(parts) => {
            let ends_with_close = ends_with_close.load(Ordering::Relaxed);
            close(parts.io.into_inner(), ends_with_close).await.map_err(|error| error.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    match ended {
        Ok(()) => unconfirmed.confirm(),
        Err(error) => tracing::debug!(error, "an agent's connection ended early"),
    }
}

/// Waits until the client has ended the stream. Fails if it has not read everything. `is_first` says
/// whether this side has to end the stream first, because that is the end of the reply.
async fn close<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, is_first: bool) -> io::Result<()> {
    if is_first {
        stream.shutdown().await?;
    }
    let ended = async {
        let mut discarded = [0; 1024];
        while stream.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    if let Ok(ended) = timeout(CLOSING_TIME, ended).await {
        ended?;
        if !is_first {
            // The other end discards bytes that it was sent, and its error comes with the next write.
            let _: usize = stream.write(&[]).await?;
        }
    }
    if !is_first {
        stream.shutdown().await?;
    }
    Ok(())
}
