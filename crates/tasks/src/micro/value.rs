//! The Python values that micro tasks compute with: printed like `repr`, and parsed back.
//!
//! The invariant: [`Value::parse_list`] of a printed argument list gives the same values, and a
//! printed value is byte for byte what `CPython`'s `repr` gives. This holds for texts without
//! quotes, backslashes and control characters; others are not used.

use std::fmt;

/// A plain Python value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    /// `True` or `False`.
    Bool(bool),
    /// An `int`.
    Int(i64),
    /// A `str`.
    Text(String),
    /// A `list`.
    List(Vec<Value>),
    /// A `dict` from `str` to `int`, in insertion order.
    Table(Vec<(String, i64)>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(true) => f.write_str("True"),
            Self::Bool(false) => f.write_str("False"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "'{value}'"),
            Self::List(items) => write!(f, "[{}]", Self::join(items)),
            Self::Table(pairs) => {
                f.write_str("{")?;
                for (n, (key, value)) in pairs.iter().enumerate() {
                    let comma = if n == 0 { "" } else { ", " };
                    write!(f, "{comma}'{key}': {value}")?;
                }
                f.write_str("}")
            }
        }
    }
}

impl Value {
    /// Values as the arguments of a call: `'a', 3`.
    pub(crate) fn join(values: &[Self]) -> String {
        values.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Parses a printed argument list; `None` if it is not one.
    pub(crate) fn parse_list(text: &str) -> Option<Vec<Self>> {
        let mut cursor = Cursor { rest: text };
        let values = cursor.items(None)?;
        cursor.rest.is_empty().then_some(values)
    }
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Parses values up to `close`, or up to the end of the text if it is `None`.
    fn items(&mut self, close: Option<&str>) -> Option<Vec<Value>> {
        let mut items = Vec::new();
        loop {
            if close.map_or(self.rest.is_empty(), |close| self.eat(close)) {
                return Some(items);
            }
            if !items.is_empty() && !self.eat(", ") {
                return None;
            }
            items.push(self.value()?);
        }
    }

    fn value(&mut self) -> Option<Value> {
        if self.eat("True") {
            Some(Value::Bool(true))
        } else if self.eat("False") {
            Some(Value::Bool(false))
        } else if self.eat("'") {
            self.text().map(|text| Value::Text(text.to_owned()))
        } else if self.eat("[") {
            self.items(Some("]")).map(Value::List)
        } else if self.eat("{") {
            self.pairs().map(Value::Table)
        } else {
            self.int().map(Value::Int)
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        let (text, rest) = self.rest.split_once('\'')?;
        self.rest = rest;
        Some(text)
    }

    fn pairs(&mut self) -> Option<Vec<(String, i64)>> {
        let mut pairs = Vec::new();
        while !self.eat("}") {
            if !pairs.is_empty() && !self.eat(", ") || !self.eat("'") {
                return None;
            }
            let key = self.text()?.to_owned();
            if !self.eat(": ") {
                return None;
            }
            pairs.push((key, self.int()?));
        }
        Some(pairs)
    }

    fn int(&mut self) -> Option<i64> {
        let digits = self.rest.strip_prefix('-').unwrap_or(self.rest);
        let sign = self.rest.len() - digits.len();
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let (number, rest) = self.rest.split_at_checked(sign + end)?;
        self.rest = rest;
        number.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_arguments_parse_to_the_same_values() {
        let values = vec![
            Value::Text("red, cat".into()),
            Value::Int(-3),
            Value::List(vec![Value::Int(1), Value::Text(String::new())]),
            Value::List(vec![]),
            Value::Table(vec![("a".into(), 1), ("b".into(), -2)]),
            Value::Bool(true),
        ];
        let text = Value::join(&values);
        assert_eq!(text, "'red, cat', -3, [1, ''], [], {'a': 1, 'b': -2}, True");
        assert_eq!(Value::parse_list(&text), Some(values));
    }

    #[test]
    fn invalid_argument_lists_are_refused() {
        for text in ["1,2", "[1", "'a", "x", "{'a' 1}", "1 2", "--1"] {
            assert_eq!(Value::parse_list(text), None, "{text}");
        }
    }
}
