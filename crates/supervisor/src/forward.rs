//! The connections of a command's processes to one port of the loopback interface, which process 1
//! carries to the host.
//!
//! What a process can cause is bounded: the number of connections, how often they are opened, and
//! the bytes that are read before the host has taken the earlier ones.

use crate::protocol::{AgentEvent, HostEvent, MAX_CONNECTIONS, WINDOW};
use crate::sys::{Ready, Watched};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

/// Largest piece that is read from one connection before the others have their turn.
const READ_BYTES: usize = 64 * 1024;
/// Connections that are accepted in one [`ACCEPT_INTERVAL`]; the rest waits in the kernel's queue.
const ACCEPTS: usize = 200;
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);
/// How long a connection that the host has closed waits for the process to close it, too. Closing it
/// at once would discard what the process has not read yet.
const LINGER: Duration = Duration::from_secs(1);

/// Takes an event of the connection with this number to the host.
type Send<'a> = &'a mut dyn FnMut(u64, AgentEvent) -> io::Result<()>;

struct Connection {
    stream: TcpStream,
    /// Bytes of the host that the process has not received yet.
    unsent: VecDeque<u8>,
    /// Bytes that may be read before the host reports that it has taken some.
    window: usize,
    /// The process sends no more bytes.
    has_ended: bool,
    /// The host sends and takes no more bytes.
    is_closed: bool,
    /// Set when the host has closed the connection and everything was passed on.
    linger_until: Option<Instant>,
}

/// How a step of a connection went.
#[derive(PartialEq, Eq)]
enum Step {
    Open,
    Gone,
}

/// The port and its connections. Dropping it closes all of them.
pub(crate) struct Forwarder {
    /// `None` if no port is forwarded.
    listener: Option<TcpListener>,
    connections: BTreeMap<u64, Connection>,
    last_number: u64,
    /// When the current interval of [`ACCEPTS`] began, and the connections accepted in it.
    accepted: (Instant, usize),
    buffer: Vec<u8>,
}

impl Forwarder {
    /// Listens on `port`; on none if it is 0.
    ///
    /// Nothing else can hold the port, because no process of an earlier command is alive. Connections
    /// that such a command closed do not prevent it: the standard library sets `SO_REUSEADDR`.
    pub(crate) fn bind(port: u16) -> io::Result<Self> {
        let listener = if port == 0 {
            None
        } else {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
            listener.set_nonblocking(true)?;
            Some(listener)
        };
        Ok(Self {
            buffer: if listener.is_some() { vec![0; READ_BYTES] } else { Vec::new() },
            listener,
            connections: BTreeMap::new(),
            last_number: 0,
            accepted: (Instant::now(), 0),
        })
    }

    /// The descriptors to wait for: first the connections, in the order of their numbers, then the
    /// listener.
    pub(crate) fn watched(&self, now: Instant) -> impl Iterator<Item = Watched<'_>> {
        let accepts = self.accepts_at(now).is_none();
        let connections = self.connections.values().map(Connection::watched);
        let listener = self.listener.iter();
        connections.chain(listener.map(move |listener| Watched {
            fd: listener.as_fd(),
            read: accepts,
            write: false,
        }))
    }

    /// When something must be done even if no descriptor is ready.
    pub(crate) fn next_check(&self, now: Instant) -> Option<Instant> {
        let lingering = self.connections.values().filter_map(|c| c.linger_until);
        lingering.chain(self.accepts_at(now)).min()
    }

    /// When connections are accepted again, if not now.
    fn accepts_at(&self, now: Instant) -> Option<Instant> {
        let (since, count) = self.accepted;
        let until = since + ACCEPT_INTERVAL;
        (count >= ACCEPTS && now < until).then_some(until)
    }

    /// Reads, writes and accepts what the descriptors of [`Forwarder::watched`] are ready for. Fails
    /// only if `send` does.
    pub(crate) fn advance(
        &mut self,
        ready: &[Ready],
        now: Instant,
        send: Send<'_>,
    ) -> io::Result<()> {
        let mut ready = ready.iter().copied();
        let mut gone = Vec::new();
        for (&number, connection) in &mut self.connections {
            let ready = ready.next().unwrap_or_default();
            let step = connection.advance(number, ready, now, &mut self.buffer, send)?;
            if step == Step::Gone {
                gone.push(number);
            }
        }
        for number in gone {
            self.remove(number, send)?;
        }
        if ready.next().unwrap_or_default().read {
            self.accept(now, send)?;
        }
        Ok(())
    }

    fn remove(&mut self, number: u64, send: Send<'_>) -> io::Result<()> {
        match self.connections.remove(&number) {
            Some(connection) if !connection.is_closed => send(number, AgentEvent::Closed),
            Some(_) | None => Ok(()),
        }
    }

    fn accept(&mut self, now: Instant, send: Send<'_>) -> io::Result<()> {
        let Some(listener) = &self.listener else { return Ok(()) };
        if now >= self.accepted.0 + ACCEPT_INTERVAL {
            self.accepted = (now, 0);
        }
        while self.accepted.1 < ACCEPTS {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Without descriptors or memory, the next attempt would fail at once, too.
                Err(_) => {
                    self.accepted = (now, ACCEPTS);
                    break;
                }
            };
            self.accepted.1 += 1;
            let is_full = self.connections.len() >= MAX_CONNECTIONS;
            if is_full || stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err()
            {
                continue;
            }
            self.last_number += 1;
            self.connections.insert(self.last_number, Connection::new(stream));
            send(self.last_number, AgentEvent::Opened)?;
        }
        Ok(())
    }

    /// Carries out what the host reports about a connection. Unknown numbers are ignored.
    pub(crate) fn handle(
        &mut self,
        number: u64,
        event: HostEvent,
        now: Instant,
        send: Send<'_>,
    ) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let step = match event {
            HostEvent::Bytes(data) if connection.unsent.len() + data.len() <= WINDOW => {
                connection.unsent.extend(data);
                connection.write(number, now, send)?
            }
            // More than the host may send.
            HostEvent::Bytes(_) => Step::Gone,
            HostEvent::Taken(bytes) => {
                let bytes = usize::try_from(bytes).unwrap_or(WINDOW);
                connection.window = connection.window.saturating_add(bytes).min(WINDOW);
                Step::Open
            }
            HostEvent::Closed => {
                connection.is_closed = true;
                connection.write(number, now, send)?
            }
        };
        if step == Step::Gone { self.remove(number, send) } else { Ok(()) }
    }
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            unsent: VecDeque::new(),
            window: WINDOW,
            has_ended: false,
            is_closed: false,
            linger_until: None,
        }
    }

    fn watched(&self) -> Watched<'_> {
        Watched {
            fd: self.stream.as_fd(),
            read: !self.has_ended && (self.window > 0 || self.is_closed),
            write: !self.unsent.is_empty(),
        }
    }

    fn advance(
        &mut self,
        number: u64,
        ready: Ready,
        now: Instant,
        buffer: &mut [u8],
        send: Send<'_>,
    ) -> io::Result<Step> {
        if self.linger_until.is_some_and(|until| now >= until) {
            return Ok(Step::Gone);
        }
        if ready.write && self.write(number, now, send)? == Step::Gone {
            return Ok(Step::Gone);
        }
        if ready.read { self.read(number, buffer, send) } else { Ok(Step::Open) }
    }

    /// Reads once. What arrives after the host has closed the connection is discarded.
    fn read(&mut self, number: u64, buffer: &mut [u8], send: Send<'_>) -> io::Result<Step> {
        let limit = if self.is_closed { buffer.len() } else { self.window.min(buffer.len()) };
        let buffer = buffer.get_mut(..limit).unwrap_or_default();
        match self.stream.read(buffer) {
            Ok(0) => {
                self.has_ended = true;
                if self.is_closed {
                    let is_done = self.unsent.is_empty();
                    return Ok(if is_done { Step::Gone } else { Step::Open });
                }
                send(number, AgentEvent::Ended)?;
            }
            Ok(_) if self.is_closed => {}
            Ok(count) => {
                self.window -= count;
                let data = buffer.get(..count).unwrap_or_default().to_vec();
                send(number, AgentEvent::Bytes(data))?;
            }
            Err(error) if is_temporary(&error) => {}
            Err(_) => return Ok(Step::Gone),
        }
        Ok(Step::Open)
    }

    /// Writes as much as the process takes, then ends the connection if the host has closed it.
    fn write(&mut self, number: u64, now: Instant, send: Send<'_>) -> io::Result<Step> {
        let mut taken = 0;
        while !self.unsent.is_empty() {
            match self.stream.write(self.unsent.as_slices().0) {
                Ok(0) => break,
                Ok(count) => {
                    self.unsent.drain(..count);
                    taken += count as u64;
                }
                Err(error) if is_temporary(&error) => break,
                Err(_) => return Ok(Step::Gone),
            }
        }
        if taken > 0 && !self.is_closed {
            send(number, AgentEvent::Taken(taken))?;
        }
        if self.is_closed && self.unsent.is_empty() && self.linger_until.is_none() {
            if self.has_ended || self.stream.shutdown(Shutdown::Write).is_err() {
                return Ok(Step::Gone);
            }
            self.linger_until = Some(now + LINGER);
        }
        Ok(Step::Open)
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests;
