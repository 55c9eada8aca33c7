//! What a bug family is: a function shape, its arguments, and the expressions that can stand in
//! its one interesting line.
//!
//! The invariant: the phrase of a choice determines its expression. A bug is another expression
//! of the same family, with or without a phrase of its own. The tables are in `catalog`.

#![expect(
    clippy::unnecessary_wraps,
    reason = "results are optional so that the tables can use `?` on arguments and return in one word"
)]

use super::draw::Draw;
use super::value::Value;

pub(crate) use super::catalog::FAMILIES as CATALOG;

/// One expression of a family.
#[derive(Debug)]
pub(crate) struct Choice {
    /// `FN in FILE should PHRASE.`; empty for an expression that only occurs as a bug.
    pub(crate) phrase: &'static str,
    /// The expression; `{0}` and `{1}` are the parameters.
    pub(crate) code: &'static str,
    /// What the *function* returns with this expression; `None` if the arguments do not fit.
    pub(crate) run: fn(&[Value]) -> Option<Value>,
}

/// A shape of function with its expressions.
#[derive(Debug)]
pub(crate) struct Family {
    /// Name, for reports.
    pub(crate) name: &'static str,
    /// Evaluation only.
    pub(crate) held_out: bool,
    /// Pools of parameter names.
    pub(crate) params: &'static [&'static [&'static str]],
    /// Lines between `def` and the interesting line.
    pub(crate) before: &'static [&'static str],
    /// The interesting line; `{c}` is the expression.
    pub(crate) line: &'static str,
    /// Lines after it.
    pub(crate) after: &'static [&'static str],
    /// Draws arguments.
    pub(crate) args: fn(&mut Draw<'_>) -> Vec<Value>,
    /// Expressions.
    pub(crate) choices: &'static [Choice],
}

/// `text` with the names of the parameters put in.
pub(crate) fn fill(text: &str, names: &[&str]) -> String {
    let mut out = text.to_owned();
    for (mark, name) in ["{0}", "{1}"].iter().zip(names) {
        out = out.replace(mark, name);
    }
    out
}

impl Family {
    /// The family with this name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        CATALOG.iter().find(|family| family.name == name)
    }

    /// Whether the function is a single `return`, which may also be written with a variable.
    pub(crate) fn is_plain(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// Expressions that have a phrase.
    pub(crate) fn phrased(&self) -> impl Iterator<Item = &'static Choice> {
        self.choices.iter().filter(|choice| !choice.phrase.is_empty())
    }
}

/// Argument `n` as a number.
pub(crate) fn int(args: &[Value], n: usize) -> Option<i64> {
    match args.get(n)? {
        Value::Int(value) => Some(*value),
        Value::Bool(_) | Value::Text(_) | Value::List(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a text.
pub(crate) fn text(args: &[Value], n: usize) -> Option<&str> {
    match args.get(n)? {
        Value::Text(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::List(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a list.
pub(crate) fn list(args: &[Value], n: usize) -> Option<&[Value]> {
    match args.get(n)? {
        Value::List(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::Text(_) | Value::Table(_) => None,
    }
}

/// Argument `n` as a list of numbers.
pub(crate) fn nums(args: &[Value], n: usize) -> Option<Vec<i64>> {
    let items = list(args, n)?;
    (0..items.len()).map(|at| int(items, at)).collect()
}

/// Argument `n` as a table.
pub(crate) fn table(args: &[Value], n: usize) -> Option<&[(String, i64)]> {
    match args.get(n)? {
        Value::Table(value) => Some(value),
        Value::Bool(_) | Value::Int(_) | Value::Text(_) | Value::List(_) => None,
    }
}

/// A number as a result.
pub(crate) fn i(value: i64) -> Option<Value> {
    Some(Value::Int(value))
}

/// A truth value as a result.
pub(crate) fn b(value: bool) -> Option<Value> {
    Some(Value::Bool(value))
}

/// A text as a result.
pub(crate) fn s(value: impl Into<String>) -> Option<Value> {
    Some(Value::Text(value.into()))
}

/// Numbers as a result.
pub(crate) fn ints(values: impl IntoIterator<Item = i64>) -> Option<Value> {
    Some(Value::List(values.into_iter().map(Value::Int).collect()))
}

/// Texts as a result.
pub(crate) fn texts<T: Into<String>>(values: impl IntoIterator<Item = T>) -> Option<Value> {
    Some(Value::List(values.into_iter().map(|text| Value::Text(text.into())).collect()))
}

/// Characters `from..to` of an ASCII text, cut like a Python slice.
pub(crate) fn cut(value: &str, from: usize, to: usize) -> Option<Value> {
    let to = to.min(value.len());
    s(value.get(from.min(to)..to)?)
}
