//! Strict parser and writer for the header of the `.npy` files in which vLLM sends routed experts.
//!
//! `\x93NUMPY | major u8 | minor u8 | header length u16 (version 1) or u32 (2 and 3) | header`,
//! where the header is a Python dict of three entries, padded with spaces to a multiple of 64 bytes
//! and terminated by a newline. The data follows.

use crate::RoutingError;
use crate::base64::{self, GROUP_BYTES, GROUP_CHARS};
use crate::kernels::WireId;
use memchr::memchr;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Limit on the header and the bytes before it; real files have 128.
pub(crate) const MAX_HEADER_BYTES: usize = 4096;

/// Location and layout of the data of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NpyHeader {
    /// Byte offset of the data.
    pub(crate) data_at: usize,
    pub(crate) ids: WireId,
    /// Rows, layers and top-k; row-major.
    pub(crate) dims: [usize; 3],
}

/// Parses the header at the start of `file`: its first [`MAX_HEADER_BYTES`] bytes, or all of a shorter
/// file.
pub(crate) fn parse(file: &[u8]) -> Result<NpyHeader, RoutingError> {
    let mut reader = Literal { rest: file };
    reader.expect(MAGIC, "it does not start like a .npy file")?;
    let cut_off = RoutingError::Npy("its header is truncated or longer than 4096 bytes");
    let (version, rest) = reader.rest.split_first_chunk::<2>().ok_or_else(|| cut_off.clone())?;
    let (length, rest) = match *version {
        [1, 0] => rest
            .split_first_chunk()
            .map(|(length, rest)| (u32::from(u16::from_le_bytes(*length)), rest)),
        [2 | 3, 0] => {
            rest.split_first_chunk().map(|(length, rest)| (u32::from_le_bytes(*length), rest))
        }
        _ => return Err(RoutingError::Npy("its version must be 1.0, 2.0 or 3.0")),
    }
    .ok_or_else(|| cut_off.clone())?;
    let header_at = file.len() - rest.len();
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let data_at = header_at.saturating_add(length);
    if data_at > MAX_HEADER_BYTES {
        return Err(cut_off);
    }
    let header = rest.get(..length).ok_or(cut_off)?;
    let (ids, dims) = parse_dict(header)?;
    Ok(NpyHeader { data_at, ids, dims })
}

/// Number of base64 characters of the file at the start of `text`, according to its header. `None` if
/// `text` does not start with a file, or if the next quote is so near that searching is faster.
pub(crate) fn declared_chars(text: &[u8]) -> Option<usize> {
    let head = text.get(..MAX_HEADER_BYTES.div_ceil(GROUP_BYTES) * GROUP_CHARS)?;
    if memchr(b'"', head).is_some() {
        return None;
    }
    let mut file = Vec::new();
    base64::append(head, &mut file)?;
    let NpyHeader { data_at, ids, dims } = parse(&file).ok()?;
    let data = dims.iter().try_fold(ids.bytes(), |bytes, &dim| bytes.checked_mul(dim))?;
    data.checked_add(data_at)?.div_ceil(GROUP_BYTES).checked_mul(GROUP_CHARS)
}

/// Reads `{'descr': '|u1', 'fortran_order': False, 'shape': (78, 4, 2), }`, entries in any order.
fn parse_dict(header: &[u8]) -> Result<(WireId, [usize; 3]), RoutingError> {
    const SYNTAX: &str = "its header is not a dict as NumPy writes it";
    let mut reader = Literal { rest: header };
    let (mut ids, mut order, mut dims) = (None, None, None);
    reader.expect(b"{", SYNTAX)?;
    while !reader.accept(b"}") {
        let twice = match reader.quoted().ok_or(RoutingError::Npy(SYNTAX))? {
            b"descr" => {
                reader.expect(b":", SYNTAX)?;
                let name = reader.quoted();
                ids.replace(id_type(name.ok_or(RoutingError::Npy(SYNTAX))?)?).is_some()
            }
            b"fortran_order" => {
                reader.expect(b":", SYNTAX)?;
                reader.expect(b"False", "its `fortran_order` must be False")?;
                order.replace(()).is_some()
            }
            b"shape" => {
                reader.expect(b":", SYNTAX)?;
                dims.replace(reader.dims()?).is_some()
            }
            _ => return Err(RoutingError::Npy(SYNTAX)),
        };
        if twice {
            return Err(RoutingError::Npy(SYNTAX));
        }
        if !reader.accept(b",") {
            reader.expect(b"}", SYNTAX)?;
            break;
        }
    }
    if !reader.rest.iter().all(|&byte| matches!(byte, b' ' | b'\n')) {
        return Err(RoutingError::Npy(SYNTAX));
    }
    match (ids, order, dims) {
        (Some(ids), Some(()), Some(dims)) => Ok((ids, dims)),
        (None | Some(_), None | Some(()), None | Some(_)) => Err(RoutingError::Npy(SYNTAX)),
    }
}

fn id_type(descr: &[u8]) -> Result<WireId, RoutingError> {
    match descr {
        b"|u1" | b"<u1" => Ok(WireId::U8),
        b"<u2" => Ok(WireId::U16),
        b"<i2" => Ok(WireId::I16),
        b"<i4" => Ok(WireId::I32),
        _ => Err(RoutingError::Npy("its `descr` must be |u1, <u2, <i2 or <i4")),
    }
}

/// Parser for the few Python literals of a header.
struct Literal<'a> {
    rest: &'a [u8],
}

impl<'a> Literal<'a> {
    fn accept(&mut self, token: &[u8]) -> bool {
        let trimmed = self.rest.trim_ascii_start();
        let Some(rest) = trimmed.strip_prefix(token) else { return false };
        self.rest = rest;
        true
    }

    fn expect(&mut self, token: &[u8], otherwise: &'static str) -> Result<(), RoutingError> {
        if self.accept(token) { Ok(()) } else { Err(RoutingError::Npy(otherwise)) }
    }

    /// Parses a string without escapes, in single or double quotes.
    fn quoted(&mut self) -> Option<&'a [u8]> {
        let (&quote, rest) = self.rest.trim_ascii_start().split_first()?;
        if !matches!(quote, b'\'' | b'"') {
            return None;
        }
        let (text, _) = rest.split_at_checked(rest.iter().position(|&byte| byte == quote)?)?;
        self.rest = rest.get(text.len() + 1..)?;
        Some(text)
    }

    fn dims(&mut self) -> Result<[usize; 3], RoutingError> {
        const DIMS: &str = "its `shape` must be (rows, layers, top-k)";
        let mut dims = [0; 3];
        self.expect(b"(", DIMS)?;
        for (index, dim) in dims.iter_mut().enumerate() {
            if index > 0 {
                self.expect(b",", DIMS)?;
            }
            *dim = self.number().ok_or(RoutingError::Npy(DIMS))?;
        }
        self.accept(b",");
        self.expect(b")", DIMS)?;
        Ok(dims)
    }

    fn number(&mut self) -> Option<usize> {
        let text = self.rest.trim_ascii_start();
        let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = text.split_at(digits);
        self.rest = rest;
        // Python writes numbers without leading zeros. Without digits, parsing below fails.
        if digits.len() > 1 && digits.starts_with(b"0") {
            return None;
        }
        std::str::from_utf8(digits).ok()?.parse().ok()
    }
}

/// The bytes before the data of a file of shape `dims`, as `NumPy` writes them.
pub(crate) fn header(width: usize, dims: [usize; 3]) -> Vec<u8> {
    let [rows, layers, top_k] = dims;
    let descr = if width == 1 { "|u1" } else { "<u2" };
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {layers}, {top_k}), }}"
    );
    let before = MAGIC.len() + 4;
    while !(before + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&[1, 0]);
    file.extend_from_slice(&u16::try_from(header.len()).unwrap_or(u16::MAX).to_le_bytes());
    file.extend_from_slice(header.as_bytes());
    file
}
