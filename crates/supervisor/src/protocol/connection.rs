//! What host and supervisor tell each other about a connection that a command opened to the
//! forwarded port.
//!
//! Each side sends at most [`WINDOW`] bytes of one connection that the other has not reported as
//! taken, so that neither a slow reader nor a slow server makes the other side store more.

use crate::wire::{Reader, Writer};

/// Bytes of one connection and direction that may be on their way, that is, sent and not yet
/// reported as taken.
pub const WINDOW: usize = 256 * 1024;
/// Connections of one command that exist at once. Further ones are closed as soon as they are
/// accepted, and not reported.
pub const MAX_CONNECTIONS: usize = 64;

/// What the supervisor reports about a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentEvent {
    /// A process of the container opened it. Numbers grow from 1 within one command.
    Opened,
    /// Bytes that a process sent, at most [`CHUNK`](super::CHUNK).
    Bytes(Vec<u8>),
    /// So many more bytes of the host were passed on, so that as many may follow.
    Taken(u64),
    /// The process sends no more bytes. It may still receive some.
    Ended,
    /// The connection exists no more.
    Closed,
}

/// What the host reports about a connection. A number that the supervisor does not know is ignored,
/// because the connection may have ended in the meantime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostEvent {
    /// Bytes for the process, at most [`CHUNK`](super::CHUNK).
    Bytes(Vec<u8>),
    /// So many more bytes of the process were passed on, so that as many may follow.
    Taken(u64),
    /// The host sends and takes no more bytes. Those sent before are still passed on.
    Closed,
}

impl AgentEvent {
    pub(super) fn write(&self, w: Writer) -> Writer {
        match self {
            Self::Opened => w.u8(0),
            Self::Bytes(data) => w.u8(1).rest(data),
            Self::Taken(bytes) => w.u8(2).u64(*bytes),
            Self::Ended => w.u8(3),
            Self::Closed => w.u8(4),
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Option<Self> {
        match r.u8()? {
            0 => Some(Self::Opened),
            1 => Some(Self::Bytes(r.rest())),
            2 => r.u64().map(Self::Taken),
            3 => Some(Self::Ended),
            4 => Some(Self::Closed),
            _ => None,
        }
    }
}

impl HostEvent {
    pub(super) fn write(&self, w: Writer) -> Writer {
        match self {
            Self::Bytes(data) => w.u8(0).rest(data),
            Self::Taken(bytes) => w.u8(1).u64(*bytes),
            Self::Closed => w.u8(2),
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Option<Self> {
        match r.u8()? {
            0 => Some(Self::Bytes(r.rest())),
            1 => r.u64().map(Self::Taken),
            2 => Some(Self::Closed),
            _ => None,
        }
    }
}
