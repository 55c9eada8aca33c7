//! Git's binary form of a change, which carries contents that are not text byte for byte.
//!
//! The form is ASCII, so a diff of any files remains text. Git applies it only to a file with exactly
//! the named content.

use flate2::Compression;
use flate2::write::ZlibEncoder;
use sha1::{Digest as _, Sha1};
use std::fmt::Write as _;
use std::io::Write as _;

/// Name of the content of a file that does not exist.
const NO_CONTENT: &str = "0000000000000000000000000000000000000000";

/// Bytes in one line of a binary hunk.
const LINE_BYTES: usize = 52;

/// Git's alphabet for numbers to base 85.
const ALPHABET: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

/// Writes the part of a file's diff after the lines with its names and modes; `None` is a file that
/// does not exist.
pub(super) fn write_contents(out: &mut String, old: Option<&[u8]>, new: Option<&[u8]>) {
    let name = |content: Option<&[u8]>| content.map_or_else(|| NO_CONTENT.to_owned(), object_name);
    let _ = writeln!(out, "index {}..{}\nGIT binary patch", name(old), name(new));
    // The second hunk is the way back.
    for content in [new, old] {
        write_literal(out, content.unwrap_or_default());
    }
}

/// The name that git gives to a file's content.
fn object_name(content: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", content.len()));
    hash.update(content);
    hash.finalize().iter().fold(String::with_capacity(40), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

fn write_literal(out: &mut String, content: &[u8]) {
    let _ = writeln!(out, "literal {}", content.len());
    for line in deflated(content).chunks(LINE_BYTES) {
        out.push(length_mark(line.len()));
        for bytes in line.chunks(4) {
            out.extend(base85(bytes));
        }
        out.push('\n');
    }
    out.push('\n');
}

fn deflated(content: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing to memory does not fail.
    let _ = encoder.write_all(content);
    encoder.finish().unwrap_or_default()
}

/// The letter at the start of a line: `A` for 1 byte to `Z`, then `a` to `z` for 52 bytes.
fn length_mark(bytes: usize) -> char {
    let mark = |first: u8, n: usize| char::from(first + u8::try_from(n).unwrap_or_default());
    if bytes <= 26 { mark(b'A', bytes - 1) } else { mark(b'a', bytes - 27) }
}

/// Up to four bytes, the missing ones being zero, as five digits.
fn base85(bytes: &[u8]) -> [char; 5] {
    let mut number = (0..4)
        .fold(0_u32, |sum, at| (sum << 8) | u32::from(bytes.get(at).copied().unwrap_or_default()));
    let mut digits = ['0'; 5];
    for digit in digits.iter_mut().rev() {
        let place = usize::try_from(number % 85).unwrap_or_default();
        *digit = ALPHABET.get(place).map_or('0', |&byte| char::from(byte));
        number /= 85;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_have_the_names_and_digits_of_git() {
        assert_eq!(object_name(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(object_name(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        let empty = [0x78, 0x01, 0x03, 0x00, 0x00, 0x00, 0x00, 0x01];
        let digits: String = empty.chunks(4).flat_map(base85).collect();
        assert_eq!((length_mark(8), digits.as_str()), ('H', "cmV?d00001"));
        assert_eq!([1, 26, 27, 52].map(length_mark), ['A', 'Z', 'a', 'z']);
    }
}
