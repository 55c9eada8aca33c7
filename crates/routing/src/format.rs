//! A mask at rest: `ORMK`, version 1.0.
//!
//! All numbers little-endian. `magic [4] | major u16 | minor u16 | rows u64 | hidden_layers u32 |
//! moe_layers u32 | experts u32 | top_k u32 | vocab u64 | context u64 | version ranges u32 |
//! moe layer numbers u32 × n | (end u64, version u64) × n | rows | blake3 of all before [32]`.

use crate::{RoutingError, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::sync::Arc;

const MAGIC: [u8; 4] = *b"ORMK";
const MAJOR: u16 = 1;
const MINOR: u16 = 0;
const DIGEST_BYTES: usize = 32;

impl RoutingMask {
    /// The mask as a self-describing block with a checksum; equal masks give equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let shape = &*self.shape;
        let wide = |value: usize| (value as u64).to_le_bytes();
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let mut out = Vec::with_capacity(
            self.data.len() + 64 + 4 * shape.moe_layers.len() + 16 * self.versions.len() + 32,
        );
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&MAJOR.to_le_bytes());
        out.extend_from_slice(&MINOR.to_le_bytes());
        out.extend_from_slice(&wide(self.rows()));
        for value in [shape.hidden_layers, shape.moe_layers.len(), shape.experts, shape.top_k] {
            out.extend_from_slice(&narrow(value));
        }
        out.extend_from_slice(&wide(shape.vocab));
        out.extend_from_slice(&wide(shape.context));
        out.extend_from_slice(&narrow(self.versions.len()));
        for &layer in &shape.moe_layers {
            out.extend_from_slice(&narrow(layer));
        }
        for range in &self.versions {
            out.extend_from_slice(&wide(range.end));
            out.extend_from_slice(&range.version.0.to_le_bytes());
        }
        out.extend_from_slice(&self.data);
        let digest = blake3::hash(&out);
        out.extend_from_slice(digest.as_bytes());
        out
    }

    /// Reads what [`RoutingMask::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`RoutingError::StoredVersion`] for a newer major version, [`RoutingError::Stored`] when
    /// any byte was changed, cut off or added.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RoutingError> {
        let short = RoutingError::Stored("it is cut off");
        let at = bytes.len().checked_sub(DIGEST_BYTES).ok_or_else(|| short.clone())?;
        let (body, digest) = bytes.split_at(at);
        let mut reader = Reader { rest: body };
        if reader.take(4)? != MAGIC {
            return Err(RoutingError::Stored("it does not begin with ORMK"));
        }
        let (major, minor) = (reader.u16()?, reader.u16()?);
        if major != MAJOR {
            return Err(RoutingError::StoredVersion { major, minor });
        }
        if blake3::hash(body).as_bytes().as_slice() != digest {
            return Err(RoutingError::Stored("its checksum does not match"));
        }
        let rows = reader.wide()?;
        let hidden_layers = reader.narrow()?;
        let moe_count = reader.narrow()?;
        let experts = reader.narrow()?;
        let top_k = reader.narrow()?;
        let vocab = reader.wide()?;
        let context = reader.wide()?;
        let ranges = reader.narrow()?;
        // Collecting stops at the end of the bytes, so a count alone allocates nothing.
        let moe_layers: Vec<usize> =
            (0..moe_count).map(|_| reader.narrow()).collect::<Result<_, _>>()?;
        let mut start = 0;
        let mut versions = Vec::new();
        for _ in 0..ranges {
            let (end, version) = (reader.wide()?, PolicyVersion(reader.u64()?));
            versions.push(RowVersion { start, end, version });
            start = end;
        }
        let shape = ModelShape { hidden_layers, moe_layers, experts, top_k, vocab, context };
        let mask = Self::new(Arc::new(shape), reader.rest.to_vec(), versions)?;
        if mask.rows() != rows {
            return Err(RoutingError::Stored("its row count does not match its length"));
        }
        Ok(mask)
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], RoutingError> {
        let (taken, rest) =
            self.rest.split_at_checked(count).ok_or(RoutingError::Stored("it is cut off"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], RoutingError> {
        let (taken, rest) =
            self.rest.split_first_chunk().ok_or(RoutingError::Stored("it is cut off"))?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, RoutingError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, RoutingError> {
        self.array().map(u64::from_le_bytes)
    }

    fn narrow(&mut self) -> Result<usize, RoutingError> {
        usize::try_from(u32::from_le_bytes(self.array()?)).map_err(|_| TOO_LARGE)
    }

    fn wide(&mut self) -> Result<usize, RoutingError> {
        usize::try_from(self.u64()?).map_err(|_| TOO_LARGE)
    }
}

const TOO_LARGE: RoutingError = RoutingError::Stored("a number in it is too large");
