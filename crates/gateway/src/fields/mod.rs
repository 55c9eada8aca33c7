//! Every field of a client's request, and what is done with it.
//!
//! One table per dialect ([`CHAT`], [`RESPONSES`], [`MESSAGES`], [`TOKENS`]) decides it, and the page
//! `docs/src/fields.md` is generated from them. A field is honoured, overridden or refused. Overridden
//! ones are named in the reply's header [`HEADER`], and so are fields that no table has: nothing that a
//! client asks for is dropped without a word.

#[cfg(test)]
mod page;
mod tables;
#[cfg(test)]
mod tests;

use crate::problem::{Kind, Problem};
use orchestrate_types::mended_json;
use serde::Deserialize as _;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::LazyLock;
pub(crate) use tables::{CHAT, MESSAGES, RESPONSES, TOKENS};

/// The header of a reply that lists the overridden fields of its request.
pub(crate) const HEADER: &str = "x-overridden-fields";

/// Maximum number of overridden fields of a request, and of characters of one that is listed.
const MAX_LISTED: usize = 64;
const MAX_PATH: usize = 96;

/// What is done with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// It is read, and decides.
    Honoured,
    /// It is read, and decides, with a remark.
    HonouredAs(&'static str),
    /// It is accepted, and something else decides: why.
    Overridden(&'static str),
    /// In evaluations it is honoured; in training it is accepted, and something else decides: why.
    InEvaluations(&'static str),
    /// These values are honoured; others are overridden: why.
    Partly(&'static [&'static str], &'static str),
    /// One of several words. The first are honoured, and the second overridden: why; others are refused.
    Words(&'static [&'static str], &'static [&'static str], &'static str),
    /// A value other than null, false, zero and empty ones is refused: why.
    Refused(&'static str),
    /// Types of tools. The first are honoured; the second are accepted, and the tool is left out; others are
    /// refused: why. `…` at the end of a type stands for any date.
    Types(&'static [&'static str], &'static [&'static str], &'static str),
    /// Values other than these are refused: why.
    Only(&'static [&'static str], &'static str),
    /// A format other than text is refused: why.
    TextFormat(&'static str),
}

/// A field of a request: its path (`tools[].function.name`) and what is done with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field(pub(crate) &'static str, pub(crate) Treatment);

/// The fields of a dialect, in the order of the documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub(crate) name: &'static str,
    pub(crate) fields: &'static [Field],
}

/// Paths of the overridden fields of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overridden(BTreeSet<String>);

impl Overridden {
    /// The paths, in order; `[]` stands for any index.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// The value of [`HEADER`]; `None` if nothing was overridden.
    pub(crate) fn header(&self) -> Option<String> {
        let listed: Vec<&str> = self.paths().collect();
        (!listed.is_empty()).then(|| listed.join(", "))
    }

    /// Removes the fields that decide in evaluations.
    pub(crate) fn honour_sampling(&mut self) {
        let fields = [CHAT, RESPONSES, MESSAGES, TOKENS].into_iter().flat_map(|table| table.fields);
        for Field(path, _) in fields.filter(|field| matches!(field.1, Treatment::InEvaluations(_)))
        {
            self.0.remove(*path);
        }
    }

    /// Adds that the wish for thinking does not decide.
    pub(crate) fn add_thinking(&mut self) {
        self.add("thinking");
    }

    /// Adds that the policy does not see the tools.
    pub(crate) fn add_tools(&mut self) {
        self.add("tools");
    }

    /// Adds a path. Characters that headers cannot have are replaced.
    fn add(&mut self, path: &str) {
        let allowed = |c: char| c.is_ascii_graphic() && c != ',';
        let shown = path.chars().take(MAX_PATH).map(|c| if allowed(c) { c } else { '?' });
        self.0.insert(shown.collect());
    }
}

/// Walks through a body, field by field.
///
/// # Errors
/// Names the first field that is refused.
pub(crate) fn check(body: &[u8], table: &Table) -> Result<Overridden, Problem> {
    let mut found = Found::default();
    let walk = Walk { node: Some(table.tree()), inherited: UNKNOWN, found: &mut found };
    // As where the body is parsed; otherwise the walk would end at text that is not Unicode.
    let body = mended_json(body);
    let walked = walk.deserialize(&mut serde_json::Deserializer::from_slice(&body));
    if let Some(problem) = found.refused {
        return Err(problem);
    }
    // Parsing skips what it does not read: numbers that are too large and lists that are too deep are met
    // here first. What follows them has not been looked at.
    walked.map_err(|error| {
        Problem::new(Kind::Invalid, format!("a field that is not read: {error}"))
    })?;
    Ok(found.overridden)
}

/// Of fields that no table has.
const UNKNOWN: Treatment = Treatment::Overridden("");

#[derive(Default)]
struct Found {
    /// Of the field that is being read, with `[]` for any index, and with its own indices.
    path: String,
    place: String,
    overridden: Overridden,
    refused: Option<Problem>,
}

impl Found {
    /// Goes to a field inside of this one. Returns what [`Self::leave`] needs to come back.
    fn enter(&mut self, path: &str, place: &str) -> [usize; 2] {
        let before = [self.path.len(), self.place.len()];
        for (all, part) in [(&mut self.path, path), (&mut self.place, place)] {
            if !all.is_empty() && !part.starts_with('[') {
                all.push('.');
            }
            all.push_str(part);
        }
        before
    }

    fn leave(&mut self, [path, place]: [usize; 2]) {
        self.path.truncate(path);
        self.place.truncate(place);
    }

    /// Refuses this field, unless one before it is refused.
    fn refuse(&mut self, why: impl fmt::Display) {
        self.refused.get_or_insert_with(|| Problem::field(&self.place, why));
    }

    /// Lists this field. All of them fit into the header and the record, or the request is refused.
    fn list(&mut self) {
        self.overridden.add(&self.path);
        if self.overridden.0.len() > MAX_LISTED {
            self.refuse(format!(
                "the request has more than {MAX_LISTED} fields that are not honoured; leave out those that the \
                 documentation does not list as honoured"
            ));
        }
    }

    fn apply(&mut self, treatment: Treatment, value: &Value) {
        let is_one_of = |values: &[&str]| match value {
            Value::String(text) => values.contains(&text.as_str()),
            other => values.contains(&other.to_string().as_str()),
        };
        let why = match treatment {
            Treatment::Honoured | Treatment::HonouredAs(_) => return,
            Treatment::Overridden(_) | Treatment::InEvaluations(_) | Treatment::Partly(..)
                if is_unset(value) =>
            {
                return;
            }
            Treatment::Refused(_) if is_off(value) => return,
            Treatment::Partly(values, _) | Treatment::Only(values, _) if is_one_of(values) => {
                return;
            }
            Treatment::Only(..) | Treatment::Types(..) | Treatment::Words(..)
                if value.is_null() =>
            {
                return;
            }
            Treatment::Types(own, ..) | Treatment::Words(own, ..) if is_word(own, value) => return,
            Treatment::Types(_, others, _) | Treatment::Words(_, others, _)
                if is_word(others, value) =>
            {
                self.list();
                return;
            }
            Treatment::Words(own, others, _) => {
                self.refuse(one_of(&[own, others].concat()));
                return;
            }
            Treatment::TextFormat(_) if !structured(value) => return,
            Treatment::Overridden(_) | Treatment::InEvaluations(_) | Treatment::Partly(..) => {
                self.list();
                return;
            }
            Treatment::Refused(why)
            | Treatment::Only(_, why)
            | Treatment::Types(_, _, why)
            | Treatment::TextFormat(why) => why,
        };
        let what = match treatment {
            Treatment::Only([_, ..], _) => "this value",
            Treatment::Types(..) => "this type of tool",
            Treatment::TextFormat(_) => "a format other than text",
            _ => "this field",
        };
        let place = &self.place;
        self.refused.get_or_insert_with(|| Problem::unsupported(place, what, why));
    }
}

/// Whether a value is one of these words, of which those that end in `…` stand for any date.
fn is_word(words: &[&str], value: &Value) -> bool {
    let is_date = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_')
    };
    let is = |word: &str, known: &str| match known.strip_suffix('…') {
        Some(beginning) => word.strip_prefix(beginning).is_some_and(is_date),
        None => word == known,
    };
    value.as_str().is_some_and(|word| words.iter().any(|known| is(word, known)))
}

/// What a field with one of these words must be.
fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => format!("must be {last}"),
        Some((last, others)) => format!("must be {} or {last}", others.join(", ")),
        None => "must not be set".to_owned(),
    }
}

/// Whether a value is as good as none: null or empty.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether a value asks for nothing: unset, false or zero.
fn is_off(value: &Value) -> bool {
    is_unset(value) || *value == Value::Bool(false) || value.as_f64() == Some(0.0)
}

/// A table as a tree: the fields inside of a field, by name; `[]` stands for the items of a list.
#[derive(Debug, Default)]
struct Node {
    treatment: Option<Treatment>,
    inner: BTreeMap<&'static str, Node>,
}

/// Whether a format asks for anything but text.
fn structured(format: &Value) -> bool {
    !is_off(format) && format.get("type").is_none_or(|kind| kind != "text")
}

impl Table {
    fn tree(&self) -> &'static Node {
        static TREES: LazyLock<[(&str, Node); 4]> = LazyLock::new(|| {
            [CHAT, RESPONSES, MESSAGES, TOKENS].map(|table| (table.name, Node::of(table.fields)))
        });
        static NONE: LazyLock<Node> = LazyLock::new(Node::default);
        let found = TREES.iter().find(|(name, _)| *name == self.name);
        found.map_or(&*NONE, |(_, node)| node)
    }
}

impl Node {
    fn of(fields: &[Field]) -> Self {
        let mut root = Self::default();
        for Field(path, treatment) in fields {
            let mut node = &mut root;
            for name in path.split('.') {
                let items = name.matches("[]").count();
                node = node.inner.entry(name.trim_end_matches("[]")).or_default();
                for _ in 0..items {
                    node = node.inner.entry("[]").or_default();
                }
            }
            node.treatment = Some(*treatment);
        }
        root
    }
}

/// The place in a body.
struct Walk<'a> {
    /// `None` if no table has the field.
    node: Option<&'static Node>,
    /// Treatment of a field that no table has.
    inherited: Treatment,
    found: &'a mut Found,
}

impl Walk<'_> {
    /// The place of a field inside of this one, or of its items.
    fn inner(&mut self, name: &str) -> Walk<'_> {
        let node = self.node.and_then(|node| node.inner.get(name));
        let treatment = self.node.and_then(|node| node.treatment);
        let inherited = match treatment {
            Some(treatment @ (Treatment::Overridden(_) | Treatment::Refused(_))) => treatment,
            Some(_) | None => UNKNOWN,
        };
        Walk { node, inherited, found: self.found }
    }

    /// A single value in place of fields or items.
    fn single(self, value: &Value) {
        let treatment = self.node.and_then(|node| node.treatment).unwrap_or(self.inherited);
        self.found.apply(treatment, value);
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.node.is_some_and(|node| !node.inner.is_empty()) {
            return deserializer.deserialize_any(self);
        }
        match self.node.and_then(|node| node.treatment).unwrap_or(self.inherited) {
            Treatment::Honoured | Treatment::HonouredAs(_) => {
                deserializer.deserialize_ignored_any(IgnoredAny)?;
            }
            treatment => {
                let value = Value::deserialize(deserializer)?;
                self.found.apply(treatment, &value);
            }
        }
        Ok(())
    }
}

/// Methods of a visitor that give a value of their type to [`Walk::single`].
macro_rules! scalars {
    ($($method:ident: $kind:ty),+) => {
        $(fn $method<E>(self, value: $kind) -> Result<(), E> {
            self.single(&Value::from(value));
            Ok(())
        })+
    };
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            let before = self.found.enter(&name, &name);
            map.next_value_seed(self.inner(&name))?;
            self.found.leave(before);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        // Parsing reads such a list as the fields in the order of the code.
        if self.node.is_some_and(|node| !node.inner.contains_key("[]")) {
            self.found.refuse("must be an object, not a list");
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        for index in 0_usize.. {
            let before = self.found.enter("[]", &format!("[{index}]"));
            let item = list.next_element_seed(self.inner("[]"))?;
            self.found.leave(before);
            if item.is_none() {
                break;
            }
        }
        Ok(())
    }

    scalars! { visit_str: &str, visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64 }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}
