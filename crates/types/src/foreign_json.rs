//! JSON that other programs wrote about text which is not Unicode.

use std::borrow::Cow;

/// The byte order mark in UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// JSON text in which everything that is not Unicode is U+FFFD: bytes that are not UTF-8, and escapes of
/// one half of a surrogate pair. A byte order mark at the beginning is left out. All other text stays as
/// it is, valid JSON or not.
///
/// JavaScript cuts strings between the halves of a pair, and Python writes bytes that are not UTF-8 as
/// halves (`surrogateescape`); both write such strings as JSON without an error. Parsers in Rust refuse the
/// whole document. So parse a document as it is first, and this only after an error.
pub fn mended_json(text: &[u8]) -> Cow<'_, [u8]> {
    let text = text.strip_prefix(MARK).unwrap_or(text);
    let text = match String::from_utf8_lossy(text) {
        Cow::Borrowed(_) => Cow::Borrowed(text),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    };
    match without_halves(&text) {
        Some(mended) => Cow::Owned(mended),
        None => text,
    }
}

/// The text with U+FFFD for each escaped half of a pair; `None` if there is none.
fn without_halves(text: &[u8]) -> Option<Vec<u8>> {
    let mut mended: Option<Vec<u8>> = None;
    let mut done = 0;
    let mut at = 0;
    while let Some(next) = text.get(at..).and_then(|rest| rest.iter().position(|b| *b == b'\\')) {
        at += next;
        let length = match (unit(text, at), unit(text, at + 6)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                let out = mended.get_or_insert_default();
                out.extend_from_slice(text.get(done..at).unwrap_or_default());
                out.extend_from_slice(b"\\ufffd");
                done = at + 6;
                6
            }
            (Some(_), _) => 6,
            // Another escape, of which a second backslash is a part.
            (None, _) => 2,
        };
        at += length;
    }
    if let Some(out) = &mut mended {
        out.extend_from_slice(text.get(done..).unwrap_or_default());
    }
    mended
}

/// The UTF-16 unit that is escaped at a position.
fn unit(text: &[u8], at: usize) -> Option<u16> {
    let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mended(text: &[u8]) -> String {
        String::from_utf8(mended_json(text).into_owned()).unwrap()
    }

    #[test]
    fn halves_of_pairs_become_replacement_characters() {
        for (text, expected) in [
            (r#""a\ud83d""#, r#""a\ufffd""#),
            (r#""\uDCE9b""#, r#""\ufffdb""#),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#),
            (r#""\ude00\ud83d""#, r#""\ufffd\ufffd""#),
            (r#""\ud83dx\ude00""#, r#""\ufffdx\ufffd""#),
            (r#""\\\ud83d\"\ud83d"#, r#""\\\ufffd\"\ufffd"#),
            ("\u{feff}{\"a\": \"\\udfff\"}", r#"{"a": "\ufffd"}"#),
        ] {
            assert_eq!(mended(text.as_bytes()), expected);
        }
        assert_eq!(
            mended(b"\"\xff\xed\xa0\xbd \xc3\""),
            "\"\u{fffd}\u{fffd}\u{fffd}\u{fffd} \u{fffd}\""
        );
    }

    #[test]
    fn other_text_stays_as_it_is() {
        for text in [
            r#""\ud83d\ude00 \u0000 \\ud83d \u+d83 \ud8""#,
            "\"\u{2028}\u{1f600}\u{fffd}\"",
            "",
            "\\",
            r#""\"#,
        ] {
            assert!(matches!(mended_json(text.as_bytes()), Cow::Borrowed(_)), "{text}");
            assert_eq!(mended(text.as_bytes()), text);
        }
    }
}
