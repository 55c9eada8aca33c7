//! Text as Python reads it: its white space, its line ends, and lines of a log of any size.
//!
//! The invariant: a [`Lines`] holds no more than a few [`LINE_BYTES`], however long the log and
//! its lines are.

use std::borrow::Cow;
use std::io::{BufRead, Error, ErrorKind};

/// Bytes of a line that are read. A longer one is read as its first and its last half, with
/// U+FFFD between them: what graders look for stands at the ends of lines.
pub const LINE_BYTES: usize = 1 << 20;

const HALF: usize = LINE_BYTES / 2;

/// Python counts the four ASCII separators as white space, beside Unicode's.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.split()`.
pub(crate) fn tokens(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|token| !token.is_empty())
}

/// `str.strip()`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// What ends a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// `\n` only.
    Feed,
    /// `\n`, `\r\n` and a lone `\r`, as a file opened as text.
    Universal,
}

/// How bytes become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// A byte that is not UTF-8 is an error.
    Strict,
    /// It becomes U+FFFD.
    Replace,
}

/// Lines of a log, one after the other.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    log: R,
    ends: Ends,
    decoding: Decoding,
    line: Vec<u8>,
    /// Bytes of the log before `line`.
    offset: u64,
    /// The last line ended with `\r`; a `\n` that follows belongs to it.
    after_return: bool,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(log: R, ends: Ends, decoding: Decoding) -> Self {
        Self { log, ends, decoding, line: Vec::new(), offset: 0, after_return: false }
    }

    /// The next line without its end; `None` after the last one.
    ///
    /// # Errors
    /// If reading fails, or (of kind [`ErrorKind::InvalidData`]) at a byte that is not UTF-8 when
    /// decoding is strict.
    pub(crate) fn next(&mut self) -> Result<Option<Cow<'_, str>>, Error> {
        self.line.clear();
        let (mut read, mut cut, mut ended) = (0_u64, false, false);
        while !ended {
            let part = match self.log.fill_buf() {
                Ok(part) => part,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if std::mem::take(&mut self.after_return) && part.first() == Some(&b'\n') {
                self.log.consume(1);
                self.offset += 1;
                continue;
            }
            if part.is_empty() {
                break;
            }
            let end = match self.ends {
                Ends::Feed => memchr::memchr(b'\n', part),
                Ends::Universal => memchr::memchr2(b'\n', b'\r', part),
            };
            let content = end.and_then(|end| part.get(..end)).unwrap_or(part);
            for piece in content.chunks(HALF) {
                self.line.extend_from_slice(piece);
                if self.line.len() > 2 * LINE_BYTES {
                    self.line.drain(HALF..self.line.len() - HALF);
                    cut = true;
                }
            }
            self.after_return = end.is_some_and(|end| part.get(end) == Some(&b'\r'));
            ended = end.is_some();
            let used = content.len() + usize::from(ended);
            self.log.consume(used);
            read += used as u64;
        }
        let start = self.offset;
        self.offset += read;
        if read == 0 {
            return Ok(None);
        }
        if cut || self.line.len() > LINE_BYTES {
            return Ok(Some(Cow::Owned(self.ends_of_line())));
        }
        match self.decoding {
            Decoding::Replace => Ok(Some(String::from_utf8_lossy(&self.line))),
            Decoding::Strict => match std::str::from_utf8(&self.line) {
                Ok(line) => Ok(Some(Cow::Borrowed(line))),
                Err(error) => {
                    let at = start + error.valid_up_to() as u64;
                    let message = format!("byte {at} of the log is not UTF-8");
                    Err(Error::new(ErrorKind::InvalidData, message))
                }
            },
        }
    }

    /// The two ends of a line that is too long; a character cut through becomes U+FFFD.
    fn ends_of_line(&self) -> String {
        let ends = [self.line.get(..HALF), self.line.get(self.line.len() - HALF..)];
        ends.map(|end| String::from_utf8_lossy(end.unwrap_or_default())).join("\u{fffd}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::BufReader;

    fn lines(log: &[u8], ends: Ends, buffer: usize) -> Vec<String> {
        let reader = BufReader::with_capacity(buffer, log);
        let mut lines = Lines::new(reader, ends, Decoding::Replace);
        let mut all = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            all.push(line.into_owned());
        }
        all
    }

    #[test]
    fn tokens_are_split_where_python_splits_them() {
        let found: Vec<_> = tokens(" a\x1cb\x1f\u{a0}c\u{2003}d\x00e ").collect();
        assert_eq!(found, ["a", "b", "c", "d\0e"]);
        assert_eq!(strip("\x1e \tx y\u{85}"), "x y");
    }

    #[test]
    fn a_line_that_is_too_long_keeps_its_ends() {
        let mut log = b"head".to_vec();
        log.resize(5 * LINE_BYTES, b'x');
        log.extend_from_slice(b"tail\nnext");
        for buffer in [64, 8 << 10, 3 << 20] {
            let found = lines(&log, Ends::Feed, buffer);
            assert_eq!(found.len(), 2);
            assert_eq!(found[0].len(), LINE_BYTES + '\u{fffd}'.len_utf8());
            assert!(found[0].starts_with("headx") && found[0].ends_with("xtail"));
            assert_eq!(found[1], "next");
        }
    }

    #[test]
    fn strict_decoding_names_the_byte() {
        let mut lines = Lines::new(&b"ab\ncd\xff"[..], Ends::Universal, Decoding::Strict);
        assert_eq!(lines.next().unwrap().unwrap(), "ab");
        let error = lines.next().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("byte 5 "), "{error}");
    }

    proptest! {
        #[test]
        fn prop_lines_are_those_of_the_whole_text(
            text in "[ab\r\n]{0,40}", buffer in 1_usize..9,
        ) {
            let universal = text.replace("\r\n", "\n").replace('\r', "\n");
            for (ends, whole) in [(Ends::Feed, &text), (Ends::Universal, &universal)] {
                let mut want: Vec<_> = whole.split('\n').map(ToOwned::to_owned).collect();
                want.pop_if(|last| last.is_empty());
                prop_assert_eq!(lines(text.as_bytes(), ends, buffer), want);
            }
        }
    }
}
