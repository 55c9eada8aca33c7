//! Compares a parsed file with the JSON schema: unknown keys, and values of the wrong type.

use crate::renames::Renames;
use orchestrate_types::{ByteSize, ConfigProblem, HumanDuration, NOT_SHOWN, ParseUnitError};
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use std::fmt::Display;
use std::ops::Range;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Table, Value};

/// Reads values according to the schema, and collects problems with those that do not fit.
pub(crate) struct Reader<'a> {
    pub(crate) schema: &'a Json,
    pub(crate) renames: Renames,
    /// Formats the place of a span of the text, e.g. `run.toml:3:8`.
    pub(crate) place: &'a dyn Fn(Range<usize>) -> String,
    /// Whether a part of the text cannot be read.
    pub(crate) unreadable: &'a dyn Fn(Range<usize>) -> bool,
    /// Whether the value at a path may be a secret.
    pub(crate) is_secret: &'a dyn Fn(&str) -> bool,
    /// Problems, each with its byte offset in the text.
    pub(crate) problems: Vec<(usize, ConfigProblem)>,
    /// Path and place of every value that fits.
    pub(crate) origins: Vec<(String, String)>,
    /// What was read although it is written with an old name, each with its byte offset in the text and the
    /// present name of its key, if it is the key that has another name.
    pub(crate) notices: Vec<(usize, String, String)>,
}

/// What a schema allows.
enum Shape<'a> {
    Table(&'a Map<String, Json>),
    List(&'a Json),
    Pair,
    Choice(Vec<&'a str>),
    Duration,
    Size,
    /// A whole number with its limits.
    Whole(&'a Map<String, Json>),
    Number,
    Text,
    Flag,
}

impl Reader<'_> {
    /// The values of a table that fit the schema.
    pub(crate) fn table(&mut self, table: &DeTable<'_>) -> Table {
        let root = self.schema;
        match self.shape(root) {
            Some(Shape::Table(properties)) => self.entries(table, properties, ""),
            _ => Table::new(),
        }
    }

    fn entries(
        &mut self,
        table: &DeTable<'_>,
        properties: &Map<String, Json>,
        path: &str,
    ) -> Table {
        let mut fitting = Table::new();
        for (name, value) in table {
            let path_of = |key: &str| match path {
                "" => key.to_owned(),
                _ => format!("{path}.{key}"),
            };
            let written = name.get_ref().as_ref();
            let renamed = self.renames.key(&path_of(written));
            let key = renamed.unwrap_or(written);
            let full = path_of(key);
            let is_table = matches!(value.get_ref(), DeValue::Table(_));
            if !is_table
                && (self.unreadable)(name.span().start..name.span().end.max(value.span().end))
            {
                continue;
            }
            let Some(schema) = properties.get(key) else {
                let mut problem = ConfigProblem::unknown(full, self.similar(key, properties, path));
                problem.origin = Some((self.place)(name.span()));
                self.problems.push((name.span().start, problem));
                continue;
            };
            if let Some(new) = renamed {
                let (old, origin) = (path_of(written), (self.place)(name.span()));
                if table.contains_key(new) {
                    let mut problem = ConfigProblem::unknown(old, also_set(&full));
                    problem.origin = Some(origin);
                    self.problems.push((name.span().start, problem));
                    continue;
                }
                let notice = format!("{origin}: `{old}` is called `{full}` now");
                self.notices.push((name.span().start, full.clone(), notice));
            }
            // A table may be spread over several places, so its values have origins instead.
            if !is_table {
                let place = (self.place)(name.span());
                self.origins.push((full.clone(), place));
            }
            if let Some(value) = self.value(value, schema, &full) {
                fitting.insert(key.to_owned(), value);
            }
        }
        fitting
    }

    /// The value, if it has the shape of the schema.
    fn value(&mut self, value: &Spanned<DeValue<'_>>, schema: &Json, path: &str) -> Option<Value> {
        let shape = self.shape(schema)?;
        if let (Shape::Table(properties), DeValue::Table(table)) = (&shape, value.get_ref()) {
            return Some(Value::Table(self.entries(table, properties, path)));
        }
        if let (Shape::List(items), DeValue::Array(list)) = (&shape, value.get_ref()) {
            let values = list
                .iter()
                .enumerate()
                .map(|(index, item)| self.value(item, items, &format!("{path}[{index}]")));
            // A list with an item that does not fit is left out as a whole.
            return values
                .collect::<Vec<_>>()
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .map(Value::Array);
        }
        let plain = Value::deserialize(ValueDeserializer::from(value.clone())).map(|plain| {
            let new = plain.as_str().and_then(|old| self.renames.choice(path, old));
            let Some(new) = new else { return plain };
            let origin = (self.place)(value.span());
            let notice =
                format!("{origin}: the choice {plain} of `{path}` is called \"{new}\" now");
            self.notices.push((value.span().start, String::new(), notice));
            Value::from(new)
        });
        let refused = match &plain {
            Ok(plain) => refusal(plain, &shape),
            // The only valid TOML that cannot be read is a whole number of more than 64 bits.
            Err(_) => Some(match &shape {
                Shape::Whole(limits) => whole_range(limits),
                _ => format!("must be at most {}", i64::MAX),
            }),
        };
        let Some(remedy) = refused else { return plain.ok() };
        let shown = match plain {
            _ if (self.is_secret)(path) => NOT_SHOWN.to_owned(),
            Ok(plain) => plain.to_string(),
            Err(_) => "(too large)".to_owned(),
        };
        let mut problem = ConfigProblem::new(path, shown, remedy);
        problem.origin = Some((self.place)(value.span()));
        self.problems.push((value.span().start, problem));
        None
    }

    /// What a schema allows; `None` if it allows anything.
    fn shape<'s>(&self, schema: &'s Json) -> Option<Shape<'s>>
    where
        Self: 's,
    {
        let schema = self.resolve(schema);
        let choices = choices(schema);
        if !choices.is_empty() {
            return Some(Shape::Choice(choices));
        }
        let object = schema.as_object()?;
        let kind = |name: &str| match object.get("type") {
            Some(Json::String(kind)) => kind == name,
            Some(Json::Array(kinds)) => kinds.iter().any(|kind| kind == name),
            _ => false,
        };
        Some(match object.get("format").and_then(Json::as_str) {
            Some("duration") => Shape::Duration,
            Some("byte-size") => Shape::Size,
            _ if kind("object") => Shape::Table(object.get("properties")?.as_object()?),
            _ if object.contains_key("prefixItems") => Shape::Pair,
            _ if kind("array") => Shape::List(object.get("items")?),
            _ if kind("integer") => Shape::Whole(object),
            _ if kind("number") => Shape::Number,
            _ if kind("string") => Shape::Text,
            _ if kind("boolean") => Shape::Flag,
            _ => return None,
        })
    }

    /// Follows `$ref`.
    fn resolve<'s>(&self, schema: &'s Json) -> &'s Json
    where
        Self: 's,
    {
        let target = schema.get("$ref").and_then(Json::as_str);
        target
            .and_then(|target| self.schema.pointer(target.trim_start_matches('#')))
            .unwrap_or(schema)
    }

    /// A hint for a key that does not exist: a similar key, or the section that has it. Empty if
    /// there is neither.
    fn similar(&self, key: &str, properties: &Map<String, Json>, path: &str) -> String {
        if let Some(name) = closest(key, properties.keys().map(String::as_str)) {
            return format!("did you mean `{name}`?");
        }
        // The key may exist in another section.
        let Some(Shape::Table(sections)) = self.shape(self.schema) else { return String::new() };
        let owner = sections.iter().find(|(name, schema)| {
            let inside = |schema| match self.shape(schema) {
                Some(Shape::Table(properties)) => properties.contains_key(key),
                _ => false,
            };
            *name != path && inside(schema)
        });
        owner.map(|(name, _)| format!("it belongs to [{name}]")).unwrap_or_default()
    }
}

/// What is said about an old name next to the present one.
pub(crate) fn also_set(new: &str) -> String {
    format!("it is the old name of `{new}`, which is set, too")
}

/// The name most similar to `text`, if one is similar enough to suggest it.
pub fn closest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let text = text.to_lowercase();
    let scored = names.map(|name| (strsim::jaro_winkler(&text, name), name));
    let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (best.0 > 0.88).then_some(best.1)
}

/// The names that a schema of a choice allows; none for other schemas.
pub(crate) fn choices(schema: &Json) -> Vec<&str> {
    let mut names = Vec::new();
    let parts = schema.get("oneOf").and_then(Json::as_array).into_iter().flatten();
    for part in parts.chain(std::iter::once(schema)) {
        names.extend(part.get("const").and_then(Json::as_str));
        let list = part.get("enum").and_then(Json::as_array).into_iter().flatten();
        names.extend(list.filter_map(Json::as_str));
    }
    names
}

/// What `value` must be to have the shape; `None` if it already has it.
fn refusal(value: &Value, shape: &Shape<'_>) -> Option<String> {
    if fits(value, shape) {
        return None;
    }
    let expected = match shape {
        Shape::Table(_) => "a table".to_owned(),
        Shape::List(_) => "a list in square brackets".to_owned(),
        Shape::Pair => "two numbers, like [0.9, 0.999]".to_owned(),
        Shape::Choice(names) => {
            let meant = value.as_str().and_then(|text| closest(text, names.iter().copied()));
            let meant = meant.map(|name| format!("; did you mean \"{name}\"?")).unwrap_or_default();
            format!("{}{meant}", one_of(names))
        }
        Shape::Duration => match duration(value) {
            Some(Err(error)) => error.expected().to_owned(),
            Some(Ok(_)) | None => HumanDuration::EXPECTED.to_owned(),
        },
        Shape::Size => ByteSize::EXPECTED.to_owned(),
        Shape::Whole(limits) => match value.as_integer() {
            Some(number) => return out_of_type(number, limits),
            None if is_huge(value) => return Some(whole_range(limits)),
            None => "a whole number".to_owned(),
        },
        Shape::Number => "a number".to_owned(),
        Shape::Text => "text in quotes".to_owned(),
        Shape::Flag => "true or false".to_owned(),
    };
    Some(format!("must be {expected}"))
}

fn fits(value: &Value, shape: &Shape<'_>) -> bool {
    match (shape, value) {
        (Shape::Pair, Value::Array(pair)) => pair.len() == 2 && pair.iter().all(is_number),
        (Shape::Choice(names), Value::String(text)) => names.contains(&text.as_str()),
        (Shape::Duration, value) => duration(value).is_some_and(|read| read.is_ok()),
        (Shape::Size, Value::String(text)) => text.parse::<ByteSize>().is_ok(),
        (Shape::Size, Value::Integer(number)) => *number >= 0,
        (Shape::Whole(limits), Value::Integer(number)) => out_of_type(*number, limits).is_none(),
        (Shape::Number, value) => is_number(value),
        (Shape::Text, Value::String(_)) | (Shape::Flag, Value::Boolean(_)) => true,
        (_, _) => false,
    }
}

/// A value read as a duration; `None` if it is neither text nor a number.
fn duration(value: &Value) -> Option<Result<HumanDuration, ParseUnitError>> {
    match value {
        Value::String(text) => Some(text.parse()),
        Value::Integer(seconds) => Some(HumanDuration::from_seconds(*seconds as f64)),
        Value::Float(seconds) => Some(HumanDuration::from_seconds(*seconds)),
        _ => None,
    }
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Integer(_) | Value::Float(_))
}

/// The remedy for a whole number that its type cannot hold. Narrower limits are checked later.
fn out_of_type(number: i64, limits: &Map<String, Json>) -> Option<String> {
    let largest = largest(limits);
    if (0..=largest).contains(&number) {
        return None;
    }
    let limit = |name: &str| limits.get(name).and_then(Json::as_i64);
    let low = limit("minimum").unwrap_or(0);
    let high = limit("maximum").or((largest < i64::MAX).then_some(largest));
    Some(match high {
        Some(high) if number > largest || limits.contains_key("maximum") => {
            format!("must be from {low} to {high}")
        }
        Some(_) | None => format!("must be at least {low}"),
    })
}

/// The largest number of a whole number's type that can be written.
fn largest(limits: &Map<String, Json>) -> i64 {
    match limits.get("format").and_then(Json::as_str) {
        Some("uint16") => i64::from(u16::MAX),
        Some("uint32") => i64::from(u32::MAX),
        _ => i64::MAX,
    }
}

/// Whether an assignment's value is text because it is a whole number that TOML cannot hold.
fn is_huge(value: &Value) -> bool {
    let digits = value.as_str().map(|text| text.trim_start_matches(['+', '-']));
    digits
        .is_some_and(|digits| digits.len() > 18 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The remedy for a whole number that TOML cannot hold.
fn whole_range(limits: &Map<String, Json>) -> String {
    let limit = |name: &str| limits.get(name).and_then(Json::as_i64);
    let high = limit("maximum").unwrap_or_else(|| largest(limits));
    format!("must be from {} to {high}", limit("minimum").unwrap_or(0))
}

fn one_of(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    list_of(&quoted, "or")
}

/// The items as `a, b or c`, with `word` before the last one.
pub fn list_of(items: &[impl Display], word: &str) -> String {
    match items {
        [] => String::new(),
        [one] => one.to_string(),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("{} {word} {last}", first.join(", "))
        }
    }
}
