//! JSON that other programs wrote: about text which is not Unicode, and with numbers of more than 64 bits.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;

/// The byte order mark in UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";
/// Number of digits of the shortest whole numbers with more than 64 bits.
const LONG: usize = 19;

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

/// The first whole number of a JSON text that a parser in Rust would round to a float: it has more than 64
/// bits. Python writes and reads such numbers exactly.
pub fn rounded_integer(json: &str) -> Option<&str> {
    if !has_long_number(json.as_bytes()) {
        return None;
    }
    let mut rest = json;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = rest.get(at..)?;
        if let Some(string) = rest.strip_prefix('"') {
            let mut is_escaped = false;
            let end = string.find(|c| {
                let is_end = c == '"' && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                is_end
            })?;
            rest = string.get(end + 1..)?;
            continue;
        }
        let is_part = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (number, after) = rest.split_at(end);
        let is_whole = number.len() >= LONG && !number.contains(['.', 'e', 'E']);
        if is_whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
            return Some(number);
        }
        rest = after;
    }
    None
}

/// JSON text in which the whole number `-0` is written ` 0`. Python reads it as 0, which is what was meant;
/// a parser in Rust would read the float -0.0, which is written `-0.0`. No byte moves. All other text stays as it
/// is, valid JSON or not.
pub fn whole_zeros(text: &[u8]) -> Cow<'_, [u8]> {
    let byte = |at: Option<usize>| at.and_then(|at| text.get(at)).copied().unwrap_or(b' ');
    // Rows have many dates, whose `-0` follows a digit.
    let stands_alone = |at: &usize| {
        let (before, after) = (byte(at.checked_sub(1)), byte(Some(at + 2)));
        let starts = before.is_ascii_whitespace() || b"[{,:".contains(&before);
        starts && !after.is_ascii_digit() && !b".eE".contains(&after)
    };
    let mut found: Option<Vec<u8>> = None;
    let (mut is_string, mut read) = (false, 0);
    for at in memchr::memmem::find_iter(text, b"-0").filter(stands_alone) {
        while let Some(mark) = text
            .get(read..at)
            .and_then(|part| memchr::memchr2(b'"', b'\\', part))
            .map(|found| read + found)
        {
            let is_escape = byte(Some(mark)) == b'\\';
            is_string ^= !is_escape;
            // What follows a backslash ends no string.
            read = mark + if is_escape { 2 } else { 1 };
        }
        read = read.max(at);
        if !is_string && let Some(sign) = found.get_or_insert_with(|| text.to_vec()).get_mut(at) {
            *sign = b' ';
        }
    }
    found.map_or(Cow::Borrowed(text), Cow::Owned)
}

/// Reads a JSON text whose value is exactly what was written: no repeated keys, no rounded whole numbers.
///
/// # Errors
/// What would be lost, or why the text is not JSON.
pub fn exact_json(text: &[u8]) -> Result<Value, String> {
    let UniqueKeys(value) =
        serde_json::from_slice(&whole_zeros(text)).map_err(|error| error.to_string())?;
    match std::str::from_utf8(text).ok().and_then(rounded_integer) {
        None => Ok(value),
        Some(number) => Err(format!("the number {number:.60} has more than 64 bits")),
    }
}

/// A JSON value without repeated keys, of which one would have to be dropped.
#[derive(Debug)]
pub struct UniqueKeys(pub Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;
        impl<'de> Visitor<'de> for AnyValue {
            type Value = UniqueKeys;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(Value::Null))
            }

            fn visit_bool<E>(self, value: bool) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_string<E>(self, value: String) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys(value.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<UniqueKeys, A::Error> {
                let mut values = Vec::new();
                while let Some(UniqueKeys(value)) = list.next_element()? {
                    values.push(value);
                }
                Ok(UniqueKeys(values.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<UniqueKeys, A::Error> {
                let mut map = Map::new();
                while let Some((key, UniqueKeys(value))) = entries.next_entry::<String, _>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format!("the key {key:?} occurs twice")));
                    }
                    map.insert(key, value);
                }
                Ok(UniqueKeys(map.into()))
            }
        }
        deserializer.deserialize_any(AnyValue)
    }
}

/// Whether [`LONG`] digits follow each other anywhere. One of them is at a multiple of [`LONG`].
fn has_long_number(text: &[u8]) -> bool {
    let digits =
        |bytes: &mut dyn Iterator<Item = &u8>| bytes.take_while(|b| b.is_ascii_digit()).count();
    (0..text.len()).step_by(LONG).any(|at| {
        let (before, after) = text.split_at(at);
        let number = digits(&mut after.iter());
        number > 0 && number + digits(&mut before.iter().rev()) >= LONG
    })
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
    fn negative_zero_is_what_python_reads() {
        // What json.dumps(json.loads(text)) gives.
        for (text, expected) in [
            ("-0", "0"),
            (" -0 ", "0"),
            ("[-0,-0 ,[-0]]", "[0,0,[0]]"),
            (r#"{"a":-0,"-0":"[-0]","b":"\\","c":-0}"#, r#"{"a":0,"-0":"[-0]","b":"\\","c":0}"#),
            (r#"["\"-0", -0]"#, r#"["\"-0",0]"#),
            ("[-0.0, -0e1, 1e-0, -1, 0]", "[-0.0,-0.0,1.0,-1,0]"),
        ] {
            assert_eq!(exact_json(text.as_bytes()).unwrap().to_string(), expected, "{text}");
        }
        for text in ["1-0", "[1-0]", "-01", "--0", "-0-0", "\"-0", "-0\""] {
            assert!(exact_json(text.as_bytes()).is_err(), "{text}");
        }
        assert!(matches!(whole_zeros(br#"["2024-01", -0.5]"#), Cow::Borrowed(_)));
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
    fn whole_numbers_of_more_than_64_bits_are_found_wherever_they_are() {
        let [wide, negative] = ["18446744073709551616", "-9223372036854775809"];
        for number in [wide, negative, "123456789012345678901234567890"] {
            for before in 0..40 {
                let text = format!("{{\"a\\\"\": [{}1.5, {number}]}}", " ".repeat(before));
                assert_eq!(rounded_integer(&text), Some(number), "{text}");
            }
        }
        for text in [
            "18446744073709551615",
            "[-9223372036854775808, 9223372036854775807]",
            "123456789012345678901234567890.0",
            "1e300",
            r#""18446744073709551616 \"18446744073709551616""#,
            "",
        ] {
            assert_eq!(rounded_integer(text), None, "{text}");
        }
    }

    #[test]
    fn what_would_be_dropped_or_rounded_is_named() {
        for (text, part) in [
            (r#"{"a": 1, "a": 1}"#, "the key \"a\" occurs twice"),
            (r#"[{"b": {"a": 1, "\u0061": 2}}]"#, "the key \"a\" occurs twice"),
            ("[18446744073709551616]", "the number 18446744073709551616 has more than 64 bits"),
            ("NaN", "expected value"),
            ("1e999", "out of range"),
            ("1 2", "trailing characters"),
        ] {
            let error = exact_json(text.as_bytes()).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let text = r#"{"a":[1,-2,0.5,1e300,null,true,"x"],"b":{"a":18446744073709551615}}"#;
        let value: Value = serde_json::from_str(text).unwrap();
        assert_eq!(exact_json(text.as_bytes()), Ok(value));
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
