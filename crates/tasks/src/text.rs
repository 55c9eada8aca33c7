//! Text as Python reads it (white space, line ends, lines of a log of any size), and text made safe
//! for a terminal.
//!
//! The invariant: a [`Lines`] holds at most a few times [`LINE_BYTES`], however long the log and
//! its lines are.

use orchestrate_types::is_unprintable;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{BufRead, Error, ErrorKind};

/// Number of bytes of a line that are read. Of a longer line, the first and last half of this many
/// bytes are read, and the markers of graders between them, joined by U+FFFD.
pub const LINE_BYTES: usize = 1 << 20;

const HALF: usize = LINE_BYTES / 2;

/// Markers that graders search for anywhere in a line.
const MARKERS: [&str; 7] = [
    ">>>>> Start Test Output",
    ">>>>> End Test Output",
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
    "short test summary info",
];
/// Length of the longest marker.
const MARKER_BYTES: usize = 24;
/// Number of times that each marker is kept from the middle of a line. The third occurrence of one
/// changes no verdict.
const MARKER_REPEATS: usize = 2;

/// A one-line text for a terminal: control characters and characters that are invisible or change the
/// direction of text ([`is_unprintable`]) are escaped, and the text is cut after `limit` characters, marked by `…`.
pub fn printable(text: &str, limit: usize) -> String {
    let mut escaped = String::new();
    for (n, c) in text.chars().enumerate() {
        if n == limit {
            escaped.push('…');
            break;
        }
        push_printable(&mut escaped, c);
    }
    escaped
}

/// A text of several lines for a terminal: as [`printable`], but line feeds and tabs are kept and
/// the length is not limited.
pub fn printable_lines(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '\n' | '\t') { escaped.push(c) } else { push_printable(&mut escaped, c) }
    }
    escaped
}

fn push_printable(text: &mut String, c: char) {
    if is_unprintable(c) {
        let _ = write!(text, "{}", c.escape_default());
    } else {
        text.push(c);
    }
}

/// Whether Python counts `c` as white space: Unicode's white space and the four ASCII separators.
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

/// Which characters end a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// `\n` only.
    Feed,
    /// `\n`, `\r\n` and a lone `\r`, as Python reads a text file.
    Universal,
}

/// How bytes that are not UTF-8 are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// They are an error.
    Strict,
    /// They become U+FFFD.
    Replace,
}

/// Reads a log line by line.
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
    /// Markers from the dropped part of the current line, as indices into [`MARKERS`].
    markers: Vec<usize>,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(log: R, ends: Ends, decoding: Decoding) -> Self {
        Self {
            log,
            ends,
            decoding,
            line: Vec::new(),
            offset: 0,
            after_return: false,
            markers: Vec::new(),
        }
    }

    /// The next line without its end; `None` after the last one.
    ///
    /// # Errors
    /// If reading fails, or (of kind [`ErrorKind::InvalidData`]) at a byte that is not UTF-8 when
    /// decoding is strict.
    pub(crate) fn next(&mut self) -> Result<Option<Cow<'_, str>>, Error> {
        self.line.clear();
        self.markers.clear();
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
                    keep_markers(&self.line, cut, &mut self.markers);
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
            keep_markers(&self.line, cut, &mut self.markers);
            return Ok(Some(Cow::Owned(self.shortened())));
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

    /// The two ends of a line that is too long, with the markers between them. A character that is
    /// cut in half becomes U+FFFD.
    fn shortened(&self) -> String {
        let end =
            |end: Option<&[u8]>| String::from_utf8_lossy(end.unwrap_or_default()).into_owned();
        let mut parts = vec![end(self.line.get(..HALF))];
        let markers = self.markers.iter().filter_map(|&marker| MARKERS.get(marker));
        parts.extend(markers.map(|&marker| marker.to_owned()));
        parts.push(end(self.line.get(self.line.len() - HALF..)));
        parts.join("\u{fffd}")
    }
}

/// Adds the markers that start before the last [`HALF`] bytes of `line` and end after the first
/// ones to `found`, in order. Where the line was `cut` before, its middle does not continue its
/// head.
fn keep_markers(line: &[u8], cut: bool, found: &mut Vec<usize>) {
    let from = if cut { HALF } else { HALF - MARKER_BYTES };
    let to = line.len() - HALF;
    let text = line.get(from..line.len().min(to + MARKER_BYTES)).unwrap_or_default();
    let mut here = Vec::new();
    for (marker, pattern) in MARKERS.iter().enumerate() {
        let places = memchr::memmem::find_iter(text, pattern.as_bytes()).map(|at| from + at);
        let dropped = places.filter(|at| *at < to && at + pattern.len() > HALF);
        here.extend(dropped.take(MARKER_REPEATS).map(|at| (at, marker)));
    }
    here.sort_unstable();
    for (_, marker) in here {
        if found.iter().filter(|known| **known == marker).count() < MARKER_REPEATS {
            found.push(marker);
        }
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
    fn tokens_are_split_as_in_python() {
        let found: Vec<_> = tokens(" a\x1cb\x1f\u{a0}c\u{2003}d\x00e ").collect();
        assert_eq!(found, ["a", "b", "c", "d\0e"]);
        assert_eq!(strip("\x1e \tx y\u{85}"), "x y");
    }

    #[test]
    fn long_lines_keep_markers_from_their_middle() {
        for marker in MARKERS {
            assert!(marker.len() <= MARKER_BYTES);
            for at in [HALF - 3, HALF, LINE_BYTES, 3 * HALF - 7, 2 * LINE_BYTES, 5 * HALF - 1] {
                let mut log = vec![b'x'; 3 * LINE_BYTES];
                log.splice(at..at + marker.len(), marker.bytes());
                for buffer in [4096, 1 << 17, 3 << 20] {
                    let found = lines(&log, Ends::Universal, buffer);
                    assert!(found[0].contains(marker), "{marker} at {at}");
                }
            }
        }
        let log = format!("{0}{1}{0}{2}{0}", "x".repeat(LINE_BYTES), MARKERS[1], MARKERS[0]);
        let found = lines(log.as_bytes(), Ends::Universal, 8192);
        assert!(found[0].find(MARKERS[1]) < found[0].find(MARKERS[0]));
        let log = MARKERS[5].repeat(LINE_BYTES);
        assert!(lines(log.as_bytes(), Ends::Feed, 8192)[0].len() < LINE_BYTES + 200);
    }

    #[test]
    fn printable_text_has_no_control_characters_and_a_limited_length() {
        assert_eq!(printable("a\x1b[31m\n\u{202e}é", 20), "a\\u{1b}[31m\\n\\u{202e}é");
        assert_eq!(printable(&"é".repeat(1000), 3), "ééé…");
        assert_eq!(printable("abc", 3), "abc");
        assert_eq!(printable_lines("a\n\tb\r\x07"), "a\n\tb\\r\\u{7}");
    }

    #[test]
    fn a_long_line_keeps_its_ends() {
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
