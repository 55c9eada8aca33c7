//! Numbers, strings and frames as bytes: little-endian, every length before the data it counts.

use std::error::Error;
use std::fmt;

/// Largest payload of one frame, in bytes. Longer data is split over several frames.
pub const MAX_FRAME: usize = 1 << 20;

/// Bytes of the frame header: payload length, id and kind.
pub(crate) const HEADER: usize = 13;

/// Why bytes are not a valid frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// A payload of this many bytes, more than [`MAX_FRAME`].
    TooLong(usize),
    /// A kind that this version does not know.
    UnknownKind(u8),
    /// The payload of this kind is truncated, has trailing bytes or contains invalid text.
    Malformed(u8),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(bytes) => {
                write!(f, "a frame of {bytes} bytes exceeds the limit of {MAX_FRAME}")
            }
            Self::UnknownKind(kind) => write!(f, "unknown frame kind {kind}"),
            Self::Malformed(kind) => write!(f, "malformed frame of kind {kind}"),
        }
    }
}

impl Error for ProtocolError {}

/// Builds one frame.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new() -> Self {
        Self(vec![0; HEADER])
    }
    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }
    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    pub(crate) fn rest(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
    pub(crate) fn text(self, text: &str) -> Self {
        self.u64(text.len() as u64).rest(text.as_bytes())
    }
    pub(crate) fn texts(self, texts: &[String]) -> Self {
        texts.iter().fold(self.u64(texts.len() as u64), |writer, text| writer.text(text))
    }
    pub(crate) fn frame(mut self, id: u64, kind: u8) -> Result<Vec<u8>, ProtocolError> {
        let length = self.0.len() - HEADER;
        let wire = u32::try_from(length).map_err(|_| ProtocolError::TooLong(length))?;
        if length > MAX_FRAME {
            return Err(ProtocolError::TooLong(length));
        }
        let header = wire.to_le_bytes().into_iter().chain(id.to_le_bytes()).chain([kind]);
        for (slot, byte) in self.0.iter_mut().zip(header) {
            *slot = byte;
        }
        Ok(self.0)
    }
}

/// Reads a payload from the front; every method returns `None` if the payload is too short.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(payload: &'a [u8]) -> Self {
        Self(payload)
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub(crate) fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(head)
    }
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(crate) fn i32(&mut self) -> Option<i32> {
        self.array().map(i32::from_le_bytes)
    }
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(crate) fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
    pub(crate) fn text(&mut self) -> Option<String> {
        let length = self.u64()?;
        String::from_utf8(self.take(length)?.to_vec()).ok()
    }
    /// Every element has its own length, so an excessive count fails at the end of the payload.
    pub(crate) fn texts(&mut self) -> Option<Vec<String>> {
        (0..self.u64()?).map(|_| self.text()).collect()
    }
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
}
