//! How Python writes values: what `{{ … }}` prints and what the filter `tojson` gives.
//!
//! Chat templates are written for Jinja, whose values are Python's.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use std::fmt::Write as _;
use std::io;

/// A value as Python's `str` gives it; nothing if it is undefined.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => {
            let mut out = String::new();
            write_repr(&mut out, value);
            out
        }
    }
}

/// Whether Python can iterate over a value: not over `None`, numbers and truth values.
pub(super) fn is_iterable(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Undefined
            | ValueKind::String
            | ValueKind::Seq
            | ValueKind::Map
            | ValueKind::Iterable
    )
}

/// Appends a value as Python's `repr` gives it.
fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Appends a string in quotes: single ones, unless it has these and no double ones.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let code = u32::from(c);
        // Writing to a string does not fail.
        let _ = match c {
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => out.write_char(c),
            _ if code <= 0xff => write!(out, "\\x{code:02x}"),
            _ if code <= 0xffff => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
}

fn is_printable(c: char) -> bool {
    // Combining characters are escaped at the start of a text only.
    matches!(c, '"' | '\'') || ['x', c].iter().collect::<String>().escape_debug().count() == 2
}

/// A floating-point number as Python writes it.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        // The exponent has a sign and at least two digits.
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => text,
    }
}

/// The filter `tojson` of chat templates: Python's `json.dumps` with `ensure_ascii=False`. Jinja's own
/// filter escapes `<`, `>`, `&` and `'` for HTML, which no model has seen in training.
pub(super) fn json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let fail = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
    if value.is_undefined() {
        return Err(fail("`tojson` of a value that is not defined".to_owned()));
    }
    let (item, key) = match options.get::<Option<Value>>("separators")? {
        Some(both) if !both.is_none() => {
            let part = |index: usize| both.get_item_by_index(index).map(|part| text(&part));
            (part(0)?, part(1)?)
        }
        _ => (String::new(), ": ".to_owned()),
    };
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(none) if none.is_none() => None,
        Some(width) => Some(match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?),
        }),
    };
    let item = match (item.is_empty(), &indent) {
        (false, _) => item,
        (true, Some(_)) => ",".to_owned(),
        (true, None) => ", ".to_owned(),
    };
    let formatter = PythonFormatter {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        item,
        key,
        indent,
        depth: 0,
        has_items: false,
    };
    let sorts = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
    let written = if sorts {
        let sorted = serde_json::to_value(value).map(|mut value| {
            value.sort_all_objects();
            value
        });
        sorted.and_then(|value| value.serialize(&mut serializer))
    } else {
        value.serialize(&mut serializer)
    };
    written.map_err(|error| fail(error.to_string()))?;
    String::from_utf8(out).map_err(|error| fail(error.to_string()))
}

/// Formats JSON as Python does.
struct PythonFormatter {
    ascii: bool,
    /// Between items, without the line end of indented JSON.
    item: String,
    /// Between a key and its value.
    key: String,
    /// One level of indentation.
    indent: Option<String>,
    depth: usize,
    has_items: bool,
}

impl PythonFormatter {
    fn open<W: ?Sized + io::Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        w.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.new_line(w)?;
        }
        w.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&self, w: &mut W, first: bool) -> io::Result<()> {
        if !first {
            w.write_all(self.item.as_bytes())?;
        }
        self.new_line(w)
    }

    fn new_line<W: ?Sized + io::Write>(&self, w: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        w.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| w.write_all(indent.as_bytes()))
    }
}

impl serde_json::ser::Formatter for PythonFormatter {
    fn write_f64<W: ?Sized + io::Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        w.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ascii {
            return w.write_all(fragment.as_bytes());
        }
        fragment.chars().try_for_each(|c| match c {
            ' '..='~' => write!(w, "{c}"),
            c => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(w, "\\u{unit:04x}")),
        })
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(w, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(w, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}
