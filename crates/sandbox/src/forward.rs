//! The host's side of the connections that a command opens to the forwarded port: each becomes a
//! stream, served by a task of its own.
//!
//! No step here waits for the server of a stream. At most one window of bytes of a connection is
//! kept in each direction, because the supervisor stops reading, and a task stops sending, until the
//! other side has taken the earlier ones.

use crate::api::Forward;
use orchestrate_supervisor::protocol::{AgentEvent, HostEvent, MAX_CONNECTIONS, Request, WINDOW};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};

/// Largest piece that is read from one stream before the others have their turn.
const READ_BYTES: usize = 64 * 1024;
/// Events of all connections that wait for the supervisor's stream.
const QUEUED_EVENTS: usize = 16;

/// An event of the connection with this number.
type Event = (u64, HostEvent);

/// All connections of one command. Dropping it closes them.
pub(crate) struct Carrier<'a> {
    forward: Option<Forward<'a>>,
    connections: BTreeMap<u64, Connection>,
    last_number: u64,
    tasks: JoinSet<()>,
    events: mpsc::Sender<Event>,
    queued: mpsc::Receiver<Event>,
    was_stopped: bool,
    /// The receiver of the streams was dropped.
    has_no_receiver: bool,
}

struct Connection {
    inbox: Arc<Inbox>,
    /// Bytes that may still be sent to the supervisor.
    window: Arc<Semaphore>,
    task: AbortHandle,
}

/// Bytes of a process that were not yet written to the stream.
#[derive(Default)]
struct Inbox {
    state: Mutex<InboxState>,
    changed: Notify,
}

#[derive(Default)]
struct InboxState {
    bytes: Vec<u8>,
    /// Bytes that the supervisor was not yet told to be taken.
    outstanding: usize,
    has_ended: bool,
}

impl<'a> Carrier<'a> {
    /// Carries connections until it is dropped; none if `forward` is `None`.
    pub(crate) fn new(forward: Option<Forward<'a>>) -> Self {
        let (events, queued) = mpsc::channel(QUEUED_EVENTS);
        Self {
            forward,
            connections: BTreeMap::new(),
            last_number: 0,
            tasks: JoinSet::new(),
            events,
            queued,
            was_stopped: false,
            has_no_receiver: false,
        }
    }

    /// Waits for something to tell the supervisor. Cancel-safe. Never ends without a forwarded port.
    pub(crate) async fn requests(&mut self) -> Vec<Request> {
        let Some(forward) = &self.forward else { return std::future::pending().await };
        let mut events = Vec::new();
        loop {
            tokio::select! {
                () = forward.stop.cancelled(), if !self.was_stopped => {
                    self.was_stopped = true;
                    return vec![Request::Stop];
                }
                () = forward.accepted.closed(), if !self.has_no_receiver => {
                    self.has_no_receiver = true;
                    let all = std::mem::take(&mut self.connections);
                    let close = |(number, connection): (u64, Connection)| {
                        connection.task.abort();
                        Request::Connection { number, event: HostEvent::Closed }
                    };
                    return all.into_iter().map(close).collect();
                }
                // Ended tasks are removed from the set.
                Some(_) = self.tasks.join_next() => {}
                _ = self.queued.recv_many(&mut events, QUEUED_EVENTS) => break,
            }
        }
        for (number, event) in &events {
            if *event == HostEvent::Closed {
                self.connections.remove(number);
            }
        }
        let request = |(number, event)| Request::Connection { number, event };
        events.into_iter().map(request).collect()
    }

    /// Carries out what the supervisor reports. Fails, with the problem, if its protocol does not
    /// allow that.
    pub(crate) fn receive(&mut self, number: u64, event: AgentEvent) -> Result<(), &'static str> {
        if event == AgentEvent::Opened {
            return self.open(number);
        }
        if number == 0 || number > self.last_number {
            return Err("an event of a connection that was not opened");
        }
        // This side may have closed it, which the supervisor did not know yet.
        let Some(connection) = self.connections.get(&number) else { return Ok(()) };
        match event {
            // Handled above.
            AgentEvent::Opened => {}
            AgentEvent::Bytes(data) => connection.inbox.push(&data)?,
            AgentEvent::Taken(bytes) => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                if bytes > WINDOW - connection.window.available_permits().min(WINDOW) {
                    return Err("more bytes of a connection taken than sent");
                }
                connection.window.add_permits(bytes);
            }
            AgentEvent::Ended => connection.inbox.end(),
            AgentEvent::Closed => {
                connection.task.abort();
                self.connections.remove(&number);
            }
        }
        Ok(())
    }

    fn open(&mut self, number: u64) -> Result<(), &'static str> {
        let Some(forward) = &self.forward else {
            return Err("a connection although no port is forwarded");
        };
        if number <= self.last_number {
            return Err("a connection was opened twice");
        }
        self.last_number = number;
        // The supervisor forgets a connection no earlier than this side.
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err("more connections than allowed");
        }
        let (stream, served) = tokio::io::duplex(READ_BYTES);
        let inbox = Arc::new(Inbox::default());
        let window = Arc::new(Semaphore::new(WINDOW));
        let events = self.events.clone();
        let task = if forward.accepted.try_send(served).is_ok() {
            self.tasks.spawn(carry(number, stream, Arc::clone(&inbox), Arc::clone(&window), events))
        } else {
            self.tasks.spawn(close(number, events))
        };
        self.connections.insert(number, Connection { inbox, window, task });
        Ok(())
    }
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, data: &[u8]) -> Result<(), &'static str> {
        let mut state = self.state();
        state.outstanding += data.len();
        if state.outstanding > WINDOW {
            return Err("more bytes of a connection than allowed");
        }
        state.bytes.extend_from_slice(data);
        self.changed.notify_one();
        Ok(())
    }

    fn end(&self) {
        self.state().has_ended = true;
        self.changed.notify_one();
    }

    /// Waits for bytes. `None` if no more will come.
    async fn take(&self) -> Option<Vec<u8>> {
        loop {
            {
                let mut state = self.state();
                if !state.bytes.is_empty() {
                    return Some(std::mem::take(&mut state.bytes));
                }
                if state.has_ended {
                    return None;
                }
            }
            self.changed.notified().await;
        }
    }

    /// Counts bytes as taken, before the supervisor is told.
    fn taken(&self, count: usize) {
        let mut state = self.state();
        state.outstanding = state.outstanding.saturating_sub(count);
    }
}

/// Carries one connection until the server of the stream has closed it.
async fn carry(
    number: u64,
    stream: DuplexStream,
    inbox: Arc<Inbox>,
    window: Arc<Semaphore>,
    events: mpsc::Sender<Event>,
) {
    let (reader, writer) = tokio::io::split(stream);
    let to_server = async {
        // An error means that the stream is closed, which the other half notices.
        let _ = write_to_server(number, writer, &inbox, &events).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = to_server => {}
        _ = read_from_server(number, reader, &window, &events) => {}
    }
    close(number, events).await;
}

/// Tells the supervisor that a connection is closed. If the events are not read any more, the command has
/// ended.
async fn close(number: u64, events: mpsc::Sender<Event>) {
    let _ = events.send((number, HostEvent::Closed)).await;
}

async fn write_to_server(
    number: u64,
    mut writer: WriteHalf<DuplexStream>,
    inbox: &Inbox,
    events: &mpsc::Sender<Event>,
) -> io::Result<()> {
    while let Some(bytes) = inbox.take().await {
        for piece in bytes.chunks(READ_BYTES) {
            writer.write_all(piece).await?;
            inbox.taken(piece.len());
            let taken = HostEvent::Taken(piece.len() as u64);
            events.send((number, taken)).await.map_err(io::Error::other)?;
        }
    }
    writer.shutdown().await
}

async fn read_from_server(
    number: u64,
    mut reader: ReadHalf<DuplexStream>,
    window: &Semaphore,
    events: &mpsc::Sender<Event>,
) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let count = reader.read(&mut buffer).await?;
        let Some(data) = buffer.get(..count).filter(|data| !data.is_empty()) else {
            return Ok(());
        };
        let permits = u32::try_from(count).map_err(io::Error::other)?;
        window.acquire_many(permits).await.map_err(io::Error::other)?.forget();
        let bytes = HostEvent::Bytes(data.to_vec());
        events.send((number, bytes)).await.map_err(io::Error::other)?;
    }
}

#[cfg(test)]
mod tests;
