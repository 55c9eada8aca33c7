//! File format of a stored mask: `ORMK`, version 2.0. Version 1.x can still be read.
//!
//! All numbers are little-endian. `magic [4] | major u16 | minor u16 | rows u64 | hidden_layers u32 |
//! moe_layers u32 | experts u32 | top_k u32 | vocab u64 | context u64 | version ranges u32 |
//! mixed ranges u32 | moe layer numbers u32 × n | (end u64, version u64) × n |
//! (start u64, end u64) × n | frame of the rows` ([`crate::codec`]), whose checksum covers
//! everything before it. Version 1 had no mixed ranges, uncompressed rows, and the BLAKE3 digest of
//! everything before it at the end.

use crate::blocks::Blocks;
use crate::check::{check_pieces, check_shape};
use crate::codec::{pack, unpack};
use crate::mask::{check_mixed, check_versions};
use crate::{BLOCK_ROWS, RoutingError, RoutingMask, RowVersion};
use orchestrate_types::{ByteReader, EndsEarly, ModelShape, PolicyVersion};
use std::ops::Range;
use std::sync::Arc;

const MAGIC: [u8; 4] = *b"ORMK";
const MAJOR: u16 = 2;
const MINOR: u16 = 0;
const DIGEST_BYTES: usize = 32;
/// Limit on the bytes of rows: more than any trajectory has (a million tokens of 128 layers, top-16).
const MAX_BYTES: usize = 4 << 30;

impl RoutingMask {
    /// Encodes the mask as a self-describing block with a checksum. Equal masks give equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let shape = &*self.shape;
        let wide = |value: usize| (value as u64).to_le_bytes();
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let raw_bytes = self.rows() * self.row_bytes();
        let mut out = Vec::with_capacity(128 + 4 * shape.moe_layers.len() + raw_bytes / 2);
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
        out.extend_from_slice(&narrow(self.mixed.len()));
        for &layer in &shape.moe_layers {
            out.extend_from_slice(&narrow(layer));
        }
        for range in &self.versions {
            out.extend_from_slice(&wide(range.end));
            out.extend_from_slice(&range.version.0.to_le_bytes());
        }
        for range in &self.mixed {
            out.extend_from_slice(&wide(range.start));
            out.extend_from_slice(&wide(range.end));
        }
        let header = out.clone();
        pack(&mut out, self.blocks.iter().map(crate::Block::bytes), raw_bytes, &header);
        out
    }

    /// Decodes the output of [`RoutingMask::to_bytes`], in the current format or in version 1.
    ///
    /// # Errors
    /// [`RoutingError::StoredVersion`] for a newer major version, [`RoutingError::Stored`] if any
    /// byte was changed, removed or added.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RoutingError> {
        let mut reader = Reader(ByteReader::new(bytes));
        if reader.0.take(4)? != MAGIC {
            return Err(RoutingError::Stored("it does not start with ORMK"));
        }
        let (major, minor) = (reader.u16()?, reader.u16()?);
        let (header, pieces) = match major {
            1 => {
                let rest = reader.0.rest();
                let at = rest.len().checked_sub(DIGEST_BYTES).ok_or(EndsEarly)?;
                let (body, digest) = bytes.split_at(bytes.len() - DIGEST_BYTES);
                if blake3::hash(body).as_bytes().as_slice() != digest {
                    return Err(RoutingError::Stored("its checksum does not match"));
                }
                let mut reader = Reader(ByteReader::new(rest.get(..at).unwrap_or_default()));
                let header = Header::read(&mut reader, false)?;
                let rows = reader.0.rest();
                if rows.len() != header.raw_bytes()? {
                    return Err(RoutingError::Stored("its row count does not match its length"));
                }
                let pieces = rows.chunks(header.piece_bytes()).map(<[u8]>::to_vec).collect();
                (header, pieces)
            }
            MAJOR => {
                let header = Header::read(&mut reader, true)?;
                let (before, frame) = bytes.split_at(bytes.len() - reader.0.rest().len());
                let pieces = unpack(frame, before, header.raw_bytes()?, header.piece_bytes())?;
                (header, pieces)
            }
            _ => return Err(RoutingError::StoredVersion { major, minor }),
        };
        header.into_mask(pieces)
    }
}

/// The fields before the rows.
struct Header {
    rows: usize,
    shape: ModelShape,
    versions: Vec<RowVersion>,
    mixed: Vec<Range<usize>>,
}

impl Header {
    fn read(reader: &mut Reader<'_>, has_mixed: bool) -> Result<Self, RoutingError> {
        let rows = reader.wide()?;
        let hidden_layers = reader.narrow()?;
        let moe_count = reader.narrow()?;
        let experts = reader.narrow()?;
        let top_k = reader.narrow()?;
        let vocab = reader.wide()?;
        let context = reader.wide()?;
        let ranges = reader.narrow()?;
        let mixed_ranges = if has_mixed { reader.narrow()? } else { 0 };
        // Reading stops at the end of the bytes, so a large count alone allocates nothing.
        let moe_layers: Vec<usize> =
            (0..moe_count).map(|_| reader.narrow()).collect::<Result<_, _>>()?;
        let mut start = 0;
        let mut versions = Vec::new();
        for _ in 0..ranges {
            let (end, version) = (reader.wide()?, PolicyVersion(reader.u64()?));
            versions.push(RowVersion { start, end, version });
            start = end;
        }
        let mut mixed = Vec::new();
        for _ in 0..mixed_ranges {
            mixed.push(reader.wide()?..reader.wide()?);
        }
        let shape = ModelShape { hidden_layers, moe_layers, experts, top_k, vocab, context };
        check_shape(&shape)?;
        Ok(Self { rows, shape, versions, mixed })
    }

    fn raw_bytes(&self) -> Result<usize, RoutingError> {
        let bytes = self.rows.checked_mul(self.shape.row_bytes());
        bytes.filter(|&bytes| bytes <= MAX_BYTES).ok_or(TOO_LARGE)
    }

    fn piece_bytes(&self) -> usize {
        BLOCK_ROWS * self.shape.row_bytes()
    }

    fn into_mask(self, pieces: Vec<Vec<u8>>) -> Result<RoutingMask, RoutingError> {
        let Self { rows, shape, versions, mixed } = self;
        check_versions(&versions, rows)?;
        check_mixed(&mixed, rows)?;
        let mut blocks = Blocks::new(shape.row_bytes());
        check_pieces(pieces.iter().map(Vec::as_slice), &shape, 0)?;
        for piece in pieces {
            blocks.append(piece, 0);
        }
        Ok(RoutingMask { shape: Arc::new(shape), rows, blocks: blocks.finish(), versions, mixed })
    }
}

/// Reads the numbers of a header.
struct Reader<'a>(ByteReader<'a>);

impl Reader<'_> {
    fn u16(&mut self) -> Result<u16, RoutingError> {
        Ok(u16::from_le_bytes(self.0.array()?))
    }

    fn u64(&mut self) -> Result<u64, RoutingError> {
        Ok(u64::from_le_bytes(self.0.array()?))
    }

    fn narrow(&mut self) -> Result<usize, RoutingError> {
        usize::try_from(u32::from_le_bytes(self.0.array()?)).map_err(|_| TOO_LARGE)
    }

    fn wide(&mut self) -> Result<usize, RoutingError> {
        usize::try_from(self.u64()?).map_err(|_| TOO_LARGE)
    }
}

impl From<EndsEarly> for RoutingError {
    fn from(_: EndsEarly) -> Self {
        Self::Stored("it is truncated")
    }
}

const TOO_LARGE: RoutingError = RoutingError::Stored("a number in it is too large");
