//! Connections that a command opens to a port of the container's loopback, carried to the host as
//! frames.
//!
//! The container has no network; this byte stream is all that a command reaches through it. What a
//! command does to its connections cannot make this process grow, spin or wait: their number and the
//! bytes that wait for them are limited, and all sockets are non-blocking.

use crate::protocol::Reply;
use crate::sys::{Interest, Ready};
use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;

/// Open connections; more are closed at once.
const MAX_CONNECTIONS: usize = 64;
/// Bytes that wait for a command to read them; a connection with more is closed.
const MAX_UNSENT: usize = 4 << 20;
/// Bytes read from a connection at a time, so that all of them take turns.
const READ_BYTES: usize = 64 * 1024;

/// A connection of a command.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Bytes from the host that the command has not taken yet.
    unsent: Vec<u8>,
    /// Whether the command has ended its side.
    is_read: bool,
    /// Whether the host has ended its side: the connection is closed once everything is sent.
    is_ending: bool,
}

/// A port on which this process listens, and its connections.
#[derive(Debug)]
pub(crate) struct Forwarder {
    listener: TcpListener,
    connections: BTreeMap<u64, Connection>,
    last: u64,
}

impl Forwarder {
    /// Listens on a port of the loopback.
    pub(crate) fn bind(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: BTreeMap::new(), last: 0 })
    }

    /// What to wait for: the listener, then the connections in the order of their numbers.
    pub(crate) fn interests(&self) -> impl Iterator<Item = Interest<'_>> {
        let listener = Interest { fd: self.listener.as_fd(), reads: true, writes: false };
        let connections = self.connections.values().map(|connection| Interest {
            fd: connection.stream.as_fd(),
            reads: !connection.is_read,
            writes: !connection.unsent.is_empty(),
        });
        std::iter::once(listener).chain(connections)
    }

    /// Takes what is ready, in the order of [`Self::interests`], and sends it to the host.
    pub(crate) fn serve(
        &mut self,
        ready: &[Ready],
        mut send: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some((listener, connections)) = ready.split_first() else { return Ok(()) };
        let mut buffer = vec![0; READ_BYTES];
        let mut gone = Vec::new();
        for ((&number, connection), ready) in self.connections.iter_mut().zip(connections) {
            if ready.readable && !connection.is_read {
                match connection.stream.read(&mut buffer) {
                    Ok(0) => {
                        connection.is_read = true;
                        send(Reply::Closed { connection: number })?;
                    }
                    Ok(count) => {
                        let data = buffer.get(..count).unwrap_or_default().to_vec();
                        send(Reply::Bytes { connection: number, data })?;
                    }
                    Err(error) if is_passing(&error) => {}
                    Err(_) => gone.push(number),
                }
            } else if ready.hung_up {
                // Nothing can be read or written any more.
                gone.push(number);
            }
            if ready.writable && !connection.flush() {
                gone.push(number);
            }
        }
        for number in gone {
            self.drop_connection(number, &mut send)?;
        }
        if listener.readable {
            self.accept(&mut send)?;
        }
        Ok(())
    }

    fn accept(&mut self, mut send: impl FnMut(Reply) -> io::Result<()>) -> io::Result<()> {
        // A bounded number at a time, so that a flood of connections does not hold up the rest.
        for _ in 0..MAX_CONNECTIONS {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // Too many open files, a connection that was reset: later ones may succeed.
                Err(_) => return Ok(()),
            };
            if self.connections.len() >= MAX_CONNECTIONS {
                continue;
            }
            if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            self.last += 1;
            let connection =
                Connection { stream, unsent: Vec::new(), is_read: false, is_ending: false };
            self.connections.insert(self.last, connection);
            send(Reply::Opened { connection: self.last })?;
        }
        Ok(())
    }

    /// Passes bytes of the host on. A connection that is gone ignores them.
    pub(crate) fn write(
        &mut self,
        number: u64,
        data: &[u8],
        send: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        connection.unsent.extend_from_slice(data);
        if connection.flush() && connection.unsent.len() <= MAX_UNSENT {
            return Ok(());
        }
        self.drop_connection(number, send)
    }

    /// Ends the host's side of a connection.
    pub(crate) fn close(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.is_ending = true;
        if connection.unsent.is_empty() {
            self.connections.remove(&number);
        }
    }

    fn drop_connection(
        &mut self,
        number: u64,
        mut send: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.connections.remove(&number) {
            Some(connection) if !connection.is_read => send(Reply::Closed { connection: number }),
            Some(_) | None => Ok(()),
        }
    }
}

impl Connection {
    /// Writes as much as the command takes. `false` once the connection is over.
    fn flush(&mut self) -> bool {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return false,
                Ok(count) => {
                    self.unsent.drain(..count);
                }
                Err(error) if is_passing(&error) => return true,
                Err(_) => return false,
            }
        }
        !self.is_ending
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;
    use std::time::Duration;

    /// Polls and serves until `done`, and collects what the host would get.
    fn pump(forwarder: &mut Forwarder, mut done: impl FnMut(&[Reply]) -> bool) -> Vec<Reply> {
        let mut sent = Vec::new();
        for _ in 0..10_000 {
            if done(&sent) {
                return sent;
            }
            let interests: Vec<_> = forwarder.interests().collect();
            let ready = sys::poll(&interests, Some(Duration::from_millis(20))).unwrap();
            forwarder
                .serve(&ready, |reply| {
                    sent.push(reply);
                    Ok(())
                })
                .unwrap();
        }
        panic!("nothing came: {} replies", sent.len());
    }

    fn forwarder() -> (Forwarder, u16) {
        let forwarder = Forwarder::bind(0).unwrap();
        let port = forwarder.listener.local_addr().unwrap().port();
        (forwarder, port)
    }

    fn connect(port: u16) -> TcpStream {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()
    }

    #[test]
    fn bytes_go_both_ways_and_each_side_ends_for_itself() {
        let (mut forwarder, port) = forwarder();
        let mut command = connect(port);
        command.write_all(b"ask").unwrap();
        let sent = pump(&mut forwarder, |sent| sent.len() == 2);
        let data = b"ask".to_vec();
        assert_eq!(sent, [Reply::Opened { connection: 1 }, Reply::Bytes { connection: 1, data }]);
        forwarder.write(1, b"answer", |_| Ok(())).unwrap();
        command.shutdown(std::net::Shutdown::Write).unwrap();
        let sent = pump(&mut forwarder, |sent| !sent.is_empty());
        assert_eq!(sent, [Reply::Closed { connection: 1 }]);
        // The command has ended its side and still reads.
        forwarder.write(1, b" more", |_| Ok(())).unwrap();
        forwarder.close(1);
        let mut got = String::new();
        command.read_to_string(&mut got).unwrap();
        assert_eq!(got, "answer more");
        assert!(forwarder.connections.is_empty());
        // What comes later for it is ignored.
        forwarder.write(1, b"x", |_| unreachable!()).unwrap();
        forwarder.close(1);
    }

    #[test]
    fn a_command_that_never_reads_loses_its_connection() {
        let (mut forwarder, port) = forwarder();
        let _command = connect(port);
        pump(&mut forwarder, |sent| !sent.is_empty());
        let piece = vec![7; 1 << 20];
        let mut closed = false;
        for _ in 0..40 {
            let note = |reply| {
                closed |= reply == Reply::Closed { connection: 1 };
                Ok(())
            };
            forwarder.write(1, &piece, note).unwrap();
        }
        assert!(closed && forwarder.connections.is_empty());
    }

    #[test]
    fn a_flood_of_connections_is_bounded_and_a_reset_ends_one() {
        let (mut forwarder, port) = forwarder();
        let commands: Vec<TcpStream> = (0..100).map(|_| connect(port)).collect();
        pump(&mut forwarder, |sent| sent.len() == MAX_CONNECTIONS);
        assert_eq!(forwarder.connections.len(), MAX_CONNECTIONS);
        drop(commands);
        let is_closed = |reply: &&Reply| matches!(reply, Reply::Closed { .. });
        pump(&mut forwarder, |sent| sent.iter().filter(is_closed).count() == MAX_CONNECTIONS);
        for number in 1..=MAX_CONNECTIONS as u64 {
            forwarder.close(number);
        }
        assert!(forwarder.connections.is_empty());
        connect(port);
        pump(&mut forwarder, |sent| sent.contains(&Reply::Opened { connection: 65 }));
    }
}
