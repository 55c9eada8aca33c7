//! How Python writes values: what `{{ … }}` prints and what the filter `tojson` gives.
//!
//! Chat templates are written for Jinja, whose values are Python's.

use minijinja::value::{Kwargs, Object, ObjectRepr, Serde, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::{self, Write as _};
use std::sync::Arc;

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

/// A method of a value, as in Python. Those of texts that treat spaces and line ends are here, because
/// Python counts more characters among them.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let (Some(text), []) = (value.as_str(), args) {
        match name {
            "strip" => return Ok(text.trim_matches(is_space).into()),
            "lstrip" => return Ok(text.trim_start_matches(is_space).into()),
            "rstrip" => return Ok(text.trim_end_matches(is_space).into()),
            "split" => {
                let words = text.split(is_space).filter(|word| !word.is_empty());
                return Ok(words.collect());
            }
            "splitlines" => return Ok(lines(text).into_iter().collect()),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The filter `trim`: Python's `strip`.
pub(super) fn trim(value: &Value, chars: Option<&str>) -> String {
    let shown = text(value);
    match chars {
        None => shown.trim_matches(is_space),
        Some(chars) => shown.trim_matches(|c| chars.contains(c)),
    }
    .to_owned()
}

/// Jinja's filter `indent`.
#[expect(clippy::needless_pass_by_value, reason = "the form of filters")]
pub(super) fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.or(options.get("width")?);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let indentation = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?),
        },
    };
    let text = text(value) + "\n";
    let mut out = String::new();
    for (index, line) in lines(&text).into_iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "\n" });
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// What Python's `str.isspace` counts as a space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Python's `str.splitlines`.
fn lines(text: &str) -> Vec<&str> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let (line, after) = rest.split_at(at);
        lines.push(line);
        rest = after.strip_prefix("\r\n").unwrap_or_else(|| {
            let mut chars = after.chars();
            chars.next();
            chars.as_str()
        });
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
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
    let (item, key) = match options.get::<Option<Value>>("separators")? {
        Some(both) if !both.is_none() => {
            let part = |index: usize| both.get_item_by_index(index).map(|part| text(&part));
            (Some(part(0)?), part(1)?)
        }
        _ => (None, ": ".to_owned()),
    };
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(none) if none.is_none() => None,
        Some(width) => Some(match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?),
        }),
    };
    let usual = if indent.is_some() { "," } else { ", " };
    let mut writer = JsonWriter {
        out: String::new(),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorts: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item: item.unwrap_or_else(|| usual.to_owned()),
        key,
        indent,
        depth: 0,
    };
    options.assert_all_used()?;
    writer.write(value)?;
    Ok(writer.out)
}

/// Writes JSON as Python does.
struct JsonWriter {
    out: String,
    /// Escapes everything that is not ASCII.
    ascii: bool,
    /// Writes the keys of objects in order.
    sorts: bool,
    /// Between items, without the line end of indented JSON.
    item: String,
    /// Between a key and its value.
    key: String,
    /// One level of indentation.
    indent: Option<String>,
    depth: usize,
}

impl JsonWriter {
    fn write(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_repr(&mut self.out, value),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all("[]", &items, Self::write)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorts {
                    keys.sort();
                }
                self.write_all("{}", &keys, |writer, key| {
                    writer.write_key(key)?;
                    writer.write(&value.get_item(key)?)
                })?;
            }
            _ if value.downcast_object_ref::<Float>().is_some() => {
                write_repr(&mut self.out, value);
            }
            kind => {
                let problem = format!("`tojson` cannot write a value of type {kind}");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(())
    }

    fn write_all(
        &mut self,
        brackets: &str,
        items: &[Value],
        write: impl Fn(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (open, close) = brackets.split_at(1);
        self.out.push_str(open);
        self.depth += 1;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.item);
            }
            self.new_line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.new_line();
        }
        self.out.push_str(close);
        Ok(())
    }

    /// Writes a key, which is always text in JSON.
    fn write_key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.write_string(text);
        } else {
            self.out.push('"');
            self.write(key)?;
            self.out.push('"');
        }
        self.out.push_str(&self.key);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), self.depth));
        }
    }

    fn write_string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            // Writing to a string does not fail.
            let _ = match c {
                '"' => self.out.write_str("\\\""),
                '\\' => self.out.write_str("\\\\"),
                '\n' => self.out.write_str("\\n"),
                '\r' => self.out.write_str("\\r"),
                '\t' => self.out.write_str("\\t"),
                '\u{8}' => self.out.write_str("\\b"),
                '\u{c}' => self.out.write_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => c
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .try_for_each(|unit| write!(self.out, "\\u{unit:04x}")),
                c => self.out.write_char(c),
            };
        }
        self.out.push('"');
    }
}

/// A floating-point number that Python writes with an exponent. Joined with text (`~`) it must look as in
/// Python, which a number of the template engine does not.
#[derive(Debug)]
struct Float(f64);

impl Object for Float {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&float(self.0))
    }
}

/// A JSON value for templates.
pub(super) fn of_json(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Array(all) => all.iter().map(of_json).collect(),
        serde_json::Value::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), of_json(value))))
        }
        serde_json::Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or_default();
            let has_exponent = format!("{number:?}").contains('e');
            if has_exponent { Value::from_object(Float(number)) } else { Value::from(number) }
        }
        other => Value::from(Serde(other)),
    }
}

/// Whether a value is a number, for the tests `number` and `float`.
pub(super) fn is_number(value: &Value) -> bool {
    value.is_number() || value.downcast_object_ref::<Float>().is_some()
}

/// Whether a value is a number with a fraction.
pub(super) fn is_float(value: &Value) -> bool {
    is_number(value) && !value.is_integer()
}
