//! The host's side of connections that a command opens to a forwarded port.

use crate::api::Forward;
use orchestrate_supervisor::protocol::{CHUNK, Request};
use std::collections::HashMap;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf, split};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Bytes that are buffered in each direction of a connection.
const BUFFERED: usize = 256 * 1024;
/// Pieces that wait for a receiver of one connection; one that is further behind loses it.
const PIECES: usize = 1024;
/// Requests to the supervisor that wait to be sent, from all connections.
const REQUESTS: usize = 16;

/// The open connections of one command.
#[derive(Debug)]
pub(super) struct Connections {
    accepted: mpsc::Sender<DuplexStream>,
    /// By number: where bytes of the command go.
    open: HashMap<u64, mpsc::Sender<Vec<u8>>>,
    requests: mpsc::Sender<Request>,
    outgoing: mpsc::Receiver<Request>,
    /// Ends with this.
    tasks: JoinSet<()>,
}

impl Connections {
    pub(super) fn new(forward: &Forward<'_>) -> Self {
        let (requests, outgoing) = mpsc::channel(REQUESTS);
        Self {
            accepted: forward.accepted.clone(),
            open: HashMap::new(),
            requests,
            outgoing,
            tasks: JoinSet::new(),
        }
    }

    /// The next request to send to the supervisor. Cancel-safe.
    pub(super) async fn next_request(&mut self) -> Option<Request> {
        self.outgoing.recv().await
    }

    /// Offers a new connection to the receiver. `Some` is the request that closes it if nobody takes it.
    pub(super) fn opened(&mut self, connection: u64) -> Option<Request> {
        while self.tasks.try_join_next().is_some() {}
        let (near, far) = tokio::io::duplex(BUFFERED);
        if self.accepted.try_send(far).is_err() {
            return Some(Request::CloseConnection { connection });
        }
        let (reader, writer) = split(near);
        let (pieces, received) = mpsc::channel(PIECES);
        self.open.insert(connection, pieces);
        self.tasks.spawn(deliver(received, writer));
        self.tasks.spawn(collect(connection, reader, self.requests.clone()));
        None
    }

    /// Passes bytes of the command on. A receiver that does not keep up loses the connection.
    pub(super) fn bytes(&mut self, connection: u64, data: Vec<u8>) -> Option<Request> {
        let pieces = self.open.get(&connection)?;
        if pieces.try_send(data).is_ok() {
            return None;
        }
        self.open.remove(&connection);
        Some(Request::CloseConnection { connection })
    }

    /// The command has ended its side.
    pub(super) fn closed(&mut self, connection: u64) {
        self.open.remove(&connection);
    }
}

/// Writes the command's bytes, and ends when it ends its side.
async fn deliver(mut received: mpsc::Receiver<Vec<u8>>, mut writer: WriteHalf<DuplexStream>) {
    while let Some(data) = received.recv().await {
        if writer.write_all(&data).await.is_err() {
            return;
        }
    }
    // Fails only if the receiver is gone, which then needs no end.
    writer.shutdown().await.ok();
}

/// Sends what the receiver writes to the command.
async fn collect(
    connection: u64,
    mut reader: ReadHalf<DuplexStream>,
    requests: mpsc::Sender<Request>,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let request = match reader.read(&mut buffer).await {
            Ok(0) | Err(_) => Request::CloseConnection { connection },
            Ok(count) => {
                let data = buffer.get(..count).unwrap_or_default().to_vec();
                Request::Bytes { connection, data }
            }
        };
        let ends = matches!(request, Request::CloseConnection { .. });
        if requests.send(request).await.is_err() || ends {
            return;
        }
    }
}
