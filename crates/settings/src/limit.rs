//! Limits of a single value: ranges of numbers, durations and sizes, and conditions on text.

use orchestrate_types::{ByteSize, HumanDuration, NOT_SHOWN};
use serde_json::{Map, Value, json};
use std::fmt::{self, Display};

/// A limit that a value of type `T` must respect.
pub trait Limit<T: ?Sized> {
    /// `None` if `value` respects the limit; otherwise the value as it may be shown, and the remedy.
    fn refusal(&self, value: &T) -> Option<(String, String)>;

    /// The limit as the documentation shows it, e.g. `at least 1`.
    fn text(&self) -> String;

    /// Adds the limit to the JSON schema of a key, where JSON schema can express it.
    fn annotate(&self, _schema: &mut Map<String, Value>) {}
}

/// Returns `limit` unchanged. The value type `T` that it applies to fixes the types that would
/// otherwise be ambiguous.
pub fn limited<T: ?Sized, L: Limit<T>>(limit: L) -> L {
    limit
}

/// A type whose values a [`Range`] can limit.
pub trait Number: Copy + PartialOrd + Display {
    /// Whether the value is neither infinite nor NaN.
    fn is_finite(self) -> bool {
        true
    }

    /// The value in a JSON schema; `None` where the schema of the type is text.
    fn json(self) -> Option<Value>;
}

macro_rules! whole {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn json(self) -> Option<Value> {
                Some(json!(self))
            }
        }
    )*};
}
whole!(u16, u32, u64, usize);

macro_rules! real {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn is_finite(self) -> bool {
                <$type>::is_finite(self)
            }
            fn json(self) -> Option<Value> {
                // Converted through text, so that a 32-bit 0.1 stays 0.1.
                self.to_string().parse::<f64>().ok().map(|number| json!(number))
            }
        }
    )*};
}
real!(f32, f64);

impl Number for HumanDuration {
    fn json(self) -> Option<Value> {
        None
    }
}

impl Number for ByteSize {
    fn json(self) -> Option<Value> {
        None
    }
}

/// One end of a range.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bound<T> {
    value: T,
    /// Whether the value itself is part of the range.
    closed: bool,
}

/// A range of finite values, with one or two ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range<T> {
    low: Option<Bound<T>>,
    high: Option<Bound<T>>,
    hint: &'static str,
}

/// Values of `low` or more.
pub fn at_least<T>(low: T) -> Range<T> {
    Range { low: Some(Bound { value: low, closed: true }), high: None, hint: "" }
}

/// Values greater than `low`.
pub fn above<T>(low: T) -> Range<T> {
    Range { low: Some(Bound { value: low, closed: false }), high: None, hint: "" }
}

/// Values of `high` or less.
pub fn at_most<T>(high: T) -> Range<T> {
    Range { low: None, high: Some(Bound { value: high, closed: true }), hint: "" }
}

/// Values from `low` to `high`, both included.
pub fn between<T>(low: T, high: T) -> Range<T> {
    at_least(low).at_most(high)
}

impl<T> Range<T> {
    /// The same range up to `high`, included.
    #[must_use]
    pub fn at_most(self, high: T) -> Self {
        Self { high: Some(Bound { value: high, closed: true }), ..self }
    }

    /// The same range up to `high`, excluded.
    #[must_use]
    pub fn below(self, high: T) -> Self {
        Self { high: Some(Bound { value: high, closed: false }), ..self }
    }

    /// The same range, with a sentence that follows the remedy.
    #[must_use]
    pub fn hint(self, hint: &'static str) -> Self {
        Self { hint, ..self }
    }
}

impl<T: Number> Range<T> {
    /// Whether `value` lies in the range; NaN and infinities never do.
    pub fn contains(&self, value: T) -> bool {
        let above =
            self.low.is_none_or(|low| value > low.value || low.closed && value >= low.value);
        let below =
            self.high.is_none_or(|high| value < high.value || high.closed && value <= high.value);
        value.is_finite() && above && below
    }

    /// Smallest value and whether it is included; `None` without a lower end.
    pub fn low(&self) -> Option<(T, bool)> {
        self.low.map(|bound| (bound.value, bound.closed))
    }

    /// Largest value and whether it is included; `None` without an upper end.
    pub fn high(&self) -> Option<(T, bool)> {
        self.high.map(|bound| (bound.value, bound.closed))
    }

    /// What a value outside of the range must be, e.g. `must be at least 1`.
    pub fn remedy(&self) -> String {
        let hint = if self.hint.is_empty() { "" } else { "; " };
        format!("must be {self}{hint}{}", self.hint)
    }
}

impl<T: Display> Display for Range<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |closed, open: &'static str, included: &'static str| {
            if closed { included } else { open }
        };
        match (&self.low, &self.high) {
            (Some(low), Some(high)) if low.closed && high.closed => {
                write!(f, "from {} to {}", low.value, high.value)
            }
            (low, high) => {
                if let Some(low) = low {
                    write!(f, "{} {}", word(low.closed, "above", "at least"), low.value)?;
                }
                if low.is_some() && high.is_some() {
                    f.write_str(" and ")?;
                }
                if let Some(high) = high {
                    write!(f, "{} {}", word(high.closed, "below", "at most"), high.value)?;
                }
                Ok(())
            }
        }
    }
}

impl<T: Number> Limit<T> for Range<T> {
    fn refusal(&self, value: &T) -> Option<(String, String)> {
        (!self.contains(*value)).then(|| (value.to_string(), self.remedy()))
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn annotate(&self, schema: &mut Map<String, Value>) {
        let ends = [
            (&self.low, ["exclusiveMinimum", "minimum"]),
            (&self.high, ["exclusiveMaximum", "maximum"]),
        ];
        for (end, [open, closed]) in ends {
            if let Some(bound) = end
                && let Some(number) = bound.value.json()
            {
                schema.remove(open);
                schema.remove(closed);
                let name = if bound.closed { closed } else { open };
                schema.insert(name.to_owned(), number);
            }
        }
    }
}

/// A condition on a value that is not a range.
#[derive(Debug, Clone, Copy)]
pub struct Predicate<T: ?Sized> {
    holds: fn(&T) -> bool,
    text: &'static str,
    remedy: &'static str,
    secret: bool,
}

/// Values for which `holds` returns true; `text` describes them in the documentation, e.g.
/// `an http URL`.
pub fn satisfies<T: ?Sized>(
    holds: fn(&T) -> bool,
    text: &'static str,
    remedy: &'static str,
) -> Predicate<T> {
    Predicate { holds, text, remedy, secret: false }
}

/// Text with at least one character that is not white space.
pub fn not_blank(remedy: &'static str) -> Predicate<str> {
    satisfies(|value: &str| !value.trim().is_empty(), "non-empty", remedy)
}

/// The name of an environment variable. A refused value is not shown: it may be the secret itself.
pub fn variable_name(remedy: &'static str) -> Predicate<str> {
    let holds = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    Predicate { holds, text: "the name of an environment variable", remedy, secret: true }
}

impl<T: Display + ?Sized> Limit<T> for Predicate<T> {
    fn refusal(&self, value: &T) -> Option<(String, String)> {
        if (self.holds)(value) {
            return None;
        }
        let shown = if self.secret { NOT_SHOWN.to_owned() } else { value.to_string() };
        let shown = if shown.trim().is_empty() { format!("{shown:?}") } else { shown };
        Some((shown, self.remedy.to_owned()))
    }

    fn text(&self) -> String {
        self.text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_described_as_they_are_checked() {
        for (range, text, inside, outside) in [
            (at_least(1.0), "at least 1", 1.0, 0.9),
            (above(0.0), "above 0", 1e-9, 0.0),
            (at_most(64.0), "at most 64", 64.0, 65.0),
            (between(0.0, 1.0), "from 0 to 1", 1.0, 1.1),
            (above(0.0).at_most(1.0), "above 0 and at most 1", 1.0, 0.0),
            (at_least(0.0).below(1.0), "at least 0 and below 1", 0.0, 1.0),
        ] {
            assert_eq!(range.to_string(), text);
            assert!(range.contains(inside) && !range.contains(outside), "{text}");
            assert!(!range.contains(f64::NAN), "{text}");
        }
        assert!(!at_least(1.0).contains(f64::INFINITY));
        let half = above(HumanDuration::secs(0)).hint("0 would never wait");
        assert_eq!(half.remedy(), "must be above 0s; 0 would never wait");
    }

    #[test]
    fn a_refused_variable_name_is_not_shown() {
        let (shown, _) = variable_name("must be a name").refusal("sk-1!").unwrap();
        assert_eq!(shown, "(not shown)");
        assert_eq!(not_blank("x").refusal(" ").unwrap().0, "\" \"");
    }
}
