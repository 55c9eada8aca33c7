//! The end of a connection, for an application that must know whether its replies were read.
//!
//! A reply that the system has taken may still be lost: the client can close its end before it has read
//! it. The system then sends a reset, which comes at the latest when the bytes arrive.

use axum::http::Extensions;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// How long a client may take to close a connection after its last reply. One that takes longer has read
/// the reply.
const CLOSING_TIME: Duration = Duration::from_secs(1);
/// Pause between two looks at whether a client's system has acknowledged everything.
const ACKNOWLEDGEMENT_PAUSE: Duration = Duration::from_millis(2);

/// Told of one connection. It is dropped with the connection, however that ends.
pub trait ConnectionObserver: Send + Sync {
    /// A request has arrived, so the client has read the replies before it (none pipelines its requests). The
    /// handler sees what is added to the request's extensions.
    fn requested(&self, extensions: &mut Extensions);

    /// The connection has ended, or is about to, and the client has read everything.
    fn all_read(&self);
}

/// The stream of a connection, plain or with TLS.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Whether the server can end its side before the client has ended the other: a client that closes a TLS
    /// connection does not read the server's last record, which looks as if a reply were unread.
    const ENDS_FIRST: bool;

    /// The connection below TLS.
    fn tcp(&mut self) -> &mut TcpStream;
}

impl Socket for TcpStream {
    const ENDS_FIRST: bool = true;

    fn tcp(&mut self) -> &mut TcpStream {
        self
    }
}

/// Ends a connection after its last reply. `ends_reply` says whether the end of the connection is the end
/// of that reply.
///
/// # Errors
/// If the client did not read everything.
pub(crate) async fn close<S: Socket>(mut stream: S, ends_reply: bool) -> io::Result<()> {
    // No peer is left after a reset. The server may have met that as the end of the client's requests.
    stream.tcp().peer_addr()?;
    let ends_first = S::ENDS_FIRST || ends_reply;
    if ends_first {
        stream.shutdown().await?;
    }
    let ended = async {
        let mut discarded = [0; 1024];
        while stream.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    let Ok(ended) = timeout(CLOSING_TIME, ended).await else {
        return if ends_first { Ok(()) } else { stream.shutdown().await };
    };
    ended?;
    let tcp = stream.tcp();
    if !ends_first {
        tcp.shutdown().await?;
    }
    // Both sides have ended. The connection has a peer until that has acknowledged the last byte or reset it.
    let acknowledged = async {
        while tcp.peer_addr().is_ok() {
            sleep(ACKNOWLEDGEMENT_PAUSE).await;
        }
    };
    timeout(CLOSING_TIME, acknowledged).await?;
    tcp.take_error()?.map_or(Ok(()), Err)
}
