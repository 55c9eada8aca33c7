//! Reading request bodies, bounded in time, in bytes, and in the memory of all together.

use crate::denial::Denial;
use axum::body::{Body, Bytes};
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Number of bytes of a larger body that are read and discarded before the reply: a client that is
/// still sending when the connection closes would not see the error.
const DRAIN_LIMIT: usize = 64 << 20;

/// Reads bodies. All bodies that are in memory at the same time have at most the size of one of
/// the largest that is permitted.
#[derive(Debug)]
pub(crate) struct Bodies {
    limit: usize,
    time: Duration,
    /// Bytes that may still be held.
    room: Arc<Semaphore>,
}

/// A body; its bytes count as held until it is dropped.
struct Held {
    bytes: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Bodies {
    /// Bodies of at most `limit` bytes, each received within `time`.
    pub(crate) fn new(limit: usize, time: Duration) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self { limit, time, room: Arc::new(Semaphore::new(limit)) }
    }

    /// Reads a whole body.
    pub(crate) async fn read(&self, body: Body) -> Result<Bytes, Denial> {
        timeout(self.time, self.collect(body)).await.unwrap_or(Err(Denial::BodyTimedOut))
    }

    async fn collect(&self, body: Body) -> Result<Bytes, Denial> {
        let mut chunks = body.into_data_stream();
        let (mut bytes, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| Denial::BodyEnded(error.to_string()))?;
            let length = bytes.len() + chunk.len();
            if length > self.limit {
                drop((bytes, room));
                drain(&mut chunks, length).await;
                return Err(Denial::BodyTooLarge(self.limit));
            }
            let count = u32::try_from(chunk.len()).map_err(|_| Denial::BodiesFull)?;
            let more = Arc::clone(&self.room).try_acquire_many_owned(count);
            let more = more.map_err(|_| Denial::BodiesFull)?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(Bytes::from_owner(Held { bytes, _room: room }))
    }
}

/// Reads and discards the rest of a body of which `length` bytes have arrived.
async fn drain(chunks: &mut axum::body::BodyDataStream, mut length: usize) {
    while let Some(Ok(chunk)) = chunks.next().await {
        length += chunk.len();
        if length > DRAIN_LIMIT {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_bodies_together_are_bounded() {
        let bodies = Bodies::new(10, Duration::from_secs(5));
        let first = bodies.read(Body::from("123456")).await.unwrap();
        assert_eq!(first.as_ref(), b"123456");
        assert_eq!(bodies.read(Body::from("12345")).await, Err(Denial::BodiesFull));
        assert!(bodies.read(Body::from("1234")).await.is_ok());
        drop(first);
        assert!(bodies.read(Body::from("1234567890")).await.is_ok());
        let large = bodies.read(Body::from("12345678901")).await;
        assert_eq!(large, Err(Denial::BodyTooLarge(10)));
    }

    #[tokio::test]
    async fn a_body_that_does_not_end_is_given_up() {
        let bodies = Bodies::new(10, Duration::from_millis(50));
        let never = futures::stream::pending::<Result<Bytes, std::io::Error>>();
        let slow = bodies.read(Body::from_stream(never)).await;
        assert_eq!(slow, Err(Denial::BodyTimedOut));
        assert!(bodies.read(Body::from("1234567890")).await.is_ok(), "its room is free again");
    }
}
