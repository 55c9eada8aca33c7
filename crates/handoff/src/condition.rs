//! Conditions on hyperparameters, as data, and the rules and bounds that are made of them.

use orchestrate_settings::Range;
use std::fmt;
use std::ops::{Add, BitAnd, Neg, Not, Sub};

/// A hyperparameter that is refused under a condition.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) field: &'static str,
    pub(crate) refused: Condition,
    pub(crate) remedy: String,
}

/// Refuses `field` where `refused` holds.
pub(crate) fn rule(field: &'static str, refused: Condition, remedy: &str) -> Rule {
    Rule { field, refused, remedy: remedy.to_owned() }
}

/// The bound of one hyperparameter.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) range: Range<f64>,
    /// A condition in addition to that the hyperparameter applies.
    pub(crate) when: Option<Condition>,
    /// Whether the bound holds even where the hyperparameter does not apply.
    pub(crate) always: bool,
}

impl From<Range<f64>> for Bound {
    fn from(range: Range<f64>) -> Self {
        Self { range, when: None, always: false }
    }
}

/// A bound where `condition` holds.
pub(crate) fn when(condition: Condition, range: Range<f64>) -> Bound {
    Bound { range, when: Some(condition), always: false }
}

/// A bound that holds even where the hyperparameter does not apply.
pub(crate) fn always(range: Range<f64>) -> Bound {
    Bound { range, when: None, always: true }
}

/// The value of a hyperparameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FieldValue {
    /// The name of an option.
    Choice(&'static str),
    /// A number.
    Number(f64),
    /// A whole number.
    Whole(u64),
    /// Two numbers.
    Pair(f64, f64),
    /// True or false.
    Flag(bool),
    /// No value: turned off.
    Off,
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choice(name) => f.write_str(name),
            Self::Number(number) => write!(f, "{number}"),
            Self::Whole(number) => write!(f, "{number}"),
            Self::Pair(one, two) => write!(f, "[{one}, {two}]"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Off => f.write_str("off"),
        }
    }
}

impl FieldValue {
    /// The value as a number; NaN for others.
    pub(crate) fn number(self) -> f64 {
        match self {
            Self::Number(number) => number,
            Self::Whole(number) => number as f64,
            Self::Choice(_) | Self::Pair(..) | Self::Flag(_) | Self::Off => f64::NAN,
        }
    }

    /// Whether the value is a flag that is set, or a number that is not turned off.
    pub(crate) fn is_on(self) -> bool {
        match self {
            Self::Flag(flag) => flag,
            Self::Off => false,
            Self::Choice(_) | Self::Number(_) | Self::Whole(_) | Self::Pair(..) => true,
        }
    }
}

/// A condition on hyperparameters.
#[derive(Debug, Clone)]
pub(crate) enum Condition {
    /// The option is one of these.
    Is(&'static str, Vec<&'static str>),
    /// The flag is set, or the number is not turned off.
    IsOn(&'static str),
    /// Every number of the value lies in the range; a value that is turned off does.
    Within(&'static str, Range<f64>),
    /// The first number is greater than the second.
    Above(Number, Number),
    Not(Box<Self>),
    All(Vec<Self>),
    Any(Vec<Self>),
}

/// A number computed from hyperparameters.
#[derive(Debug, Clone)]
pub(crate) enum Number {
    Field(&'static str),
    Constant(f64),
    Sum(Box<Self>, Box<Self>),
    Difference(Box<Self>, Box<Self>),
    Negative(Box<Self>),
    Logarithm(Box<Self>),
}

/// Whether the option `field` is one of `names`.
pub(crate) fn is(field: &'static str, names: &[&'static str]) -> Condition {
    Condition::Is(field, names.to_vec())
}

/// Whether the flag `field` is set, or the number is not turned off.
pub(crate) fn is_on(field: &'static str) -> Condition {
    Condition::IsOn(field)
}

/// Whether every number of `field` lies in `range`.
pub(crate) fn within(field: &'static str, range: Range<f64>) -> Condition {
    Condition::Within(field, range)
}

/// The number in `field`.
pub(crate) fn number(field: &'static str) -> Number {
    Number::Field(field)
}

/// A constant.
pub(crate) fn constant(value: f64) -> Number {
    Number::Constant(value)
}

impl Condition {
    pub(crate) fn all(mut parts: Vec<Self>) -> Self {
        match parts.pop() {
            Some(only) if parts.is_empty() => only,
            Some(last) => {
                parts.push(last);
                Self::All(parts)
            }
            None => Self::All(parts),
        }
    }
}

impl Number {
    /// The condition that this number is greater than `other`.
    pub(crate) fn exceeds(self, other: Self) -> Condition {
        Condition::Above(self, other)
    }

    /// The natural logarithm.
    pub(crate) fn ln(self) -> Self {
        Self::Logarithm(Box::new(self))
    }
}

impl BitAnd for Condition {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        let mut parts = match self {
            Self::All(parts) => parts,
            other => vec![other],
        };
        parts.push(other);
        Self::All(parts)
    }
}

impl Not for Condition {
    type Output = Self;

    fn not(self) -> Self {
        Self::Not(Box::new(self))
    }
}

impl Add for Number {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self::Sum(Box::new(self), Box::new(other))
    }
}

impl Sub for Number {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self::Difference(Box::new(self), Box::new(other))
    }
}

impl Neg for Number {
    type Output = Self;

    fn neg(self) -> Self {
        Self::Negative(Box::new(self))
    }
}
