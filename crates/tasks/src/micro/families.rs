//! The structure of a bug family: the shape of a function, its arguments, and the expressions that
//! can appear in its target line, the one that a bug changes.
//!
//! The invariant: the phrase of a choice determines its expression. A bug is another expression
//! of the same family, with or without a phrase of its own. The tables are in `catalog`.

#![expect(
    clippy::unnecessary_wraps,
    reason = "an optional result lets the tables use `?` on arguments and return it directly"
)]

use super::draw::Draw;
use super::value::Value;

pub(crate) use super::catalog::FAMILIES as CATALOG;

/// One expression of a family.
#[derive(Debug)]
pub(crate) struct Choice {
    /// What the issue asks for, in `FN in FILE should PHRASE.`; empty for an expression that occurs
    /// only as a bug.
    pub(crate) phrase: &'static str,
    /// The Python expression; `{0}` and `{1}` stand for the parameters.
    pub(crate) code: &'static str,
    /// What the *function* returns with this expression; `None` if the arguments have the wrong
    /// types.
    pub(crate) run: fn(&[Value]) -> Option<Value>,
}

/// The shape of a function and the expressions of its target line.
#[derive(Debug)]
pub(crate) struct Family {
    /// Name, as in [`crate::Task::family`].
    pub(crate) name: &'static str,
    /// Whether it is reserved for evaluation.
    pub(crate) held_out: bool,
    /// For each parameter, the names that it can have.
    pub(crate) params: &'static [&'static [&'static str]],
    /// Lines between `def` and the target line.
    pub(crate) before: &'static [&'static str],
    /// The target line; `{c}` stands for the expression.
    pub(crate) line: &'static str,
    /// Lines after the target line.
    pub(crate) after: &'static [&'static str],
    /// Draws the arguments of one call.
    pub(crate) args: fn(&mut Draw<'_>) -> Vec<Value>,
    /// The expressions that can appear in the target line.
    pub(crate) choices: &'static [Choice],
}

/// Replaces the placeholders `{0}` and `{1}` of `text` with parameter names.
pub(crate) fn fill(text: &str, names: &[&str]) -> String {
    let mut out = text.to_owned();
    for (mark, name) in ["{0}", "{1}"].iter().zip(names) {
        out = out.replace(mark, name);
    }
    out
}

impl Family {
    /// The family called `name`.
    pub(crate) fn by_name(name: &str) -> Option<&'static Self> {
        CATALOG.iter().find(|family| family.name == name)
    }

    /// Whether the target line is the whole body, so that its result may be assigned to a variable.
    pub(crate) fn is_plain(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// Expressions that have a phrase, so that an issue can ask for them.
    pub(crate) fn phrased(&self) -> impl Iterator<Item = &'static Choice> {
        self.choices.iter().filter(|choice| !choice.phrase.is_empty())
    }
}

/// Argument `n` as an integer; `None` if it is missing or has another type.
pub(crate) fn int(args: &[Value], n: usize) -> Option<i64> {
    match args.get(n)? {
        Value::Int(value) => Some(*value),
        Value::Bool(_) | Value::Text(_) | Value::List(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a string; `None` if it is missing or has another type.
pub(crate) fn text(args: &[Value], n: usize) -> Option<&str> {
    match args.get(n)? {
        Value::Text(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::List(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a list; `None` if it is missing or has another type.
pub(crate) fn list(args: &[Value], n: usize) -> Option<&[Value]> {
    match args.get(n)? {
        Value::List(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::Text(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a list of integers; `None` if it is missing or has another type.
pub(crate) fn nums(args: &[Value], n: usize) -> Option<Vec<i64>> {
    let items = list(args, n)?;
    (0..items.len()).map(|at| int(items, at)).collect()
}

/// Argument `n` as a dictionary; `None` if it is missing or has another type.
pub(crate) fn table(args: &[Value], n: usize) -> Option<&[(String, i64)]> {
    match args.get(n)? {
        Value::Table(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::Text(_) | Value::List(_) => None,
    }
}

/// An integer as a result.
pub(crate) fn i(value: i64) -> Option<Value> {
    Some(Value::Int(value))
}

/// A Boolean as a result.
pub(crate) fn b(value: bool) -> Option<Value> {
    Some(Value::Bool(value))
}

/// A string as a result.
pub(crate) fn s(value: impl Into<String>) -> Option<Value> {
    Some(Value::Text(value.into()))
}

/// A list of integers as a result.
pub(crate) fn ints(values: impl IntoIterator<Item = i64>) -> Option<Value> {
    Some(Value::List(values.into_iter().map(Value::Int).collect()))
}

/// A list of strings as a result.
pub(crate) fn texts<T: Into<String>>(values: impl IntoIterator<Item = T>) -> Option<Value> {
    Some(Value::List(values.into_iter().map(|text| Value::Text(text.into())).collect()))
}

/// Characters `from..to` of an ASCII text; like a Python slice, bounds past the end are clamped.
pub(crate) fn cut(value: &str, from: usize, to: usize) -> Option<Value> {
    let to = to.min(value.len());
    s(value.get(from.min(to)..to)?)
}
