//! Values of a `task.toml`, converted by the rules of Harbor's data model.

use crate::keys;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// Names that other tools give to keys, with Harbor's.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("timeout", "timeout_sec"),
    ("timeout_s", "timeout_sec"),
    ("timeout_seconds", "timeout_sec"),
    ("build_timeout", "build_timeout_sec"),
    ("build_timeout_s", "build_timeout_sec"),
    ("image", "docker_image"),
    ("image_name", "docker_image"),
];

/// Why a task folder is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HarborProblem {
    /// Harbor itself refuses it.
    #[error("{0}")]
    Invalid(String),
    /// Harbor can run it, and this program cannot.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// Harbor would run it, but not as its author means.
    #[error("{0}")]
    Mistake(String),
}

impl HarborProblem {
    pub(super) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }

    pub(super) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported(what.into())
    }
}

/// One table of a `task.toml`, with the name that messages use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section<'a> {
    table: &'a Table,
    name: &'a str,
}

impl<'a> Section<'a> {
    pub(super) fn new(table: &'a Table, name: &'a str) -> Self {
        Self { table, name }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.table.get(key)
    }

    pub(super) fn wrong(&self, key: &str, what: &str) -> HarborProblem {
        let place =
            if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) };
        HarborProblem::invalid(format!("task.toml: {place} {what}"))
    }

    /// Fails for an unknown key that looks like one of `known`. Harbor ignores it, and takes the
    /// default for the one that is meant.
    pub(super) fn check_keys(&self, known: &[&str]) -> Result<(), HarborProblem> {
        let is_known = |key: &&str| known.contains(key);
        let other_names = OTHER_NAMES.iter().copied().filter(|(_, name)| is_known(name));
        let other_names: Vec<(&str, &str)> = other_names.collect();
        // Only the keys matter, and whether a known one has a text.
        let fields = self.table.iter().map(|(key, value)| {
            let text = value.as_str().unwrap_or_else(|| value.type_str());
            (key.clone(), serde_json::Value::from(text))
        });
        keys::check(&fields.collect(), known, &other_names).map_err(|reason| {
            let place = match self.name {
                "" => String::new(),
                name => format!(" [{name}]"),
            };
            HarborProblem::Mistake(format!("task.toml:{place} {reason}"))
        })
    }

    /// Fails if the value of `key` is a time limit of 0, which always runs out.
    pub(super) fn check_limit(&self, key: &str) -> Result<(), HarborProblem> {
        let is_zero = self.get(key).and_then(number).is_some_and(|seconds| seconds.abs() <= 0.0);
        if is_zero {
            let problem = self.wrong(key, "is 0, a time limit that always runs out");
            return Err(HarborProblem::Mistake(problem.to_string()));
        }
        Ok(())
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, HarborProblem> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "must be a string")),
        }
    }

    /// A number. A string that contains one is accepted, and so is a boolean.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, HarborProblem> {
        let Some(value) = self.get(key) else { return Ok(None) };
        number(value).map(Some).ok_or_else(|| self.wrong(key, "must be a number"))
    }

    /// A whole number, which may be written as a float or in a string.
    pub(super) fn whole(&self, key: &str) -> Result<Option<i64>, HarborProblem> {
        let Some(value) = self.get(key) else { return Ok(None) };
        whole(value).map(Some).ok_or_else(|| self.wrong(key, "must be a whole number"))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, HarborProblem> {
        let Some(value) = self.get(key) else { return Ok(None) };
        flag(value).map(Some).ok_or_else(|| self.wrong(key, "must be a boolean"))
    }

    pub(super) fn section(&self, key: &'a str) -> Result<Option<Section<'a>>, HarborProblem> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(Section { table, name: key })),
            Some(_) => Err(self.wrong(key, "must be a table")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<&'a [Value], HarborProblem> {
        match self.get(key) {
            None => Ok(&[]),
            Some(Value::Array(list)) => Ok(list),
            Some(_) => Err(self.wrong(key, "must be a list")),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, HarborProblem> {
        if !self.has(key) {
            return Ok(None);
        }
        let texts = self.list(key)?.iter().map(|value| value.as_str().map(ToOwned::to_owned));
        texts.collect::<Option<_>>().map(Some).ok_or_else(|| self.wrong(key, "must be strings"))
    }

    pub(super) fn text_map(&self, key: &'a str) -> Result<BTreeMap<String, String>, HarborProblem> {
        let Some(section) = self.section(key)? else { return Ok(BTreeMap::new()) };
        let entries = section.table.iter().map(|(name, value)| {
            let text = value.as_str().ok_or_else(|| section.wrong(name, "must be a string"))?;
            Ok((name.clone(), text.to_owned()))
        });
        entries.collect()
    }
}

pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        #[expect(clippy::cast_precision_loss, reason = "seconds and thresholds are far below 2^53")]
        Value::Integer(number) => Some(*number as f64),
        Value::Boolean(flag) => Some(f64::from(u8::from(*flag))),
        Value::String(text) => python_float(text),
        _ => None,
    }
}

fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::Integer(number) => Some(*number),
        Value::Boolean(flag) => Some(i64::from(*flag)),
        Value::Float(number) => whole_float(*number),
        Value::String(text) => {
            let text = text.trim();
            let text = text.strip_suffix(".0").unwrap_or(text);
            text.replace('_', "").parse().ok()
        }
        _ => None,
    }
}

fn whole_float(number: f64) -> Option<i64> {
    let is_whole = number.is_finite() && number.fract().abs() < f64::EPSILON && number.abs() < 9e15;
    is_whole.then(|| format!("{number:.0}").parse().ok()).flatten()
}

fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Boolean(flag) => Some(*flag),
        Value::Integer(0) => Some(false),
        Value::Integer(1) => Some(true),
        Value::Float(number) => match whole_float(*number)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
        Value::String(text) => match text.to_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
            "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// A number as Python's `float()` reads it: spaces around it and `_` between digits are allowed.
pub(super) fn python_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '\x1c'..='\x1f'));
    let characters: Vec<char> = text.chars().collect();
    for (at, _) in characters.iter().enumerate().filter(|(_, c)| **c == '_') {
        let is_digit = |place: Option<usize>| {
            place.and_then(|at| characters.get(at)).is_some_and(char::is_ascii_digit)
        };
        if !is_digit(at.checked_sub(1)) || !is_digit(at.checked_add(1)) {
            return None;
        }
    }
    text.replace('_', "").parse().ok()
}
