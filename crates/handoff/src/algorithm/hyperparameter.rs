//! What a hyperparameter is: how its type is written and sent, and what is known about it.

use crate::condition::{Bound, FieldValue};
use orchestrate_settings::Setting;

/// A number that is written as 0 to turn it off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OffAtZero(pub Option<f64>);

impl Setting for OffAtZero {
    type Written = f64;
    type Limited = f64;

    fn from_written(written: f64) -> Self {
        Self(Some(written).filter(|value| value.abs() >= f64::EPSILON))
    }

    fn to_written(&self) -> Option<f64> {
        Some(self.0.unwrap_or(0.0))
    }

    fn limited(&self) -> Option<&f64> {
        self.0.as_ref()
    }
}

/// The type of a hyperparameter in `[algorithm]`, and how it is sent to a trainer.
pub trait Hyperparameter {
    /// The type in a request.
    type Sent;
    /// The type in the PyTorch trainer.
    const PYTHON: &'static str;

    /// The value in a request.
    fn sent(&self) -> Self::Sent;
    /// The value in `[algorithm]` that sends `sent`.
    fn from_sent(sent: Self::Sent) -> Self;
    /// The value for rules.
    fn value(sent: &Self::Sent) -> FieldValue;
    /// Names of the options, if it is a choice.
    fn options() -> Vec<&'static str> {
        Vec::new()
    }
}

macro_rules! sent_as_it_is {
    ($($type:ty, $python:literal, $value:expr;)*) => {$(
        impl Hyperparameter for $type {
            type Sent = Self;
            const PYTHON: &'static str = $python;

            fn sent(&self) -> Self {
                *self
            }

            fn from_sent(sent: Self) -> Self {
                sent
            }

            fn value(sent: &Self) -> FieldValue {
                let value: fn(Self) -> FieldValue = $value;
                value(*sent)
            }
        }
    )*};
}

sent_as_it_is! {
    f64, "float", FieldValue::Number;
    bool, "bool", FieldValue::Flag;
    u32, "int", |value| FieldValue::Whole(value.into());
    usize, "int", |value| FieldValue::Whole(value as u64);
    (f64, f64), "tuple[float, float]", |(one, two)| FieldValue::Pair(one, two);
}

impl Hyperparameter for OffAtZero {
    type Sent = Option<f64>;
    const PYTHON: &'static str = "float | None";

    fn sent(&self) -> Option<f64> {
        self.0
    }

    fn from_sent(sent: Option<f64>) -> Self {
        Self(sent)
    }

    fn value(sent: &Option<f64>) -> FieldValue {
        sent.map_or(FieldValue::Off, FieldValue::Number)
    }
}

/// What is known about a hyperparameter.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "read by the generator of Python, in a test"))]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// Lines of its description.
    pub(crate) description: &'static [&'static str],
    /// Its type in the PyTorch trainer.
    pub(crate) python: &'static str,
    /// Names of the options, if it is a choice.
    pub(crate) options: Vec<&'static str>,
    pub(crate) presence: Presence,
    pub(crate) bounds: Vec<Bound>,
}

/// What a request without a hyperparameter means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It is an error.
    Required,
    /// The default of an empty `[algorithm]`.
    Optional,
    /// The hyperparameter is turned off.
    Nullable,
}

/// A hyperparameter that chooses which others apply.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) key: &'static str,
    pub(crate) options: &'static [ChoiceOption],
}

/// One option of a choice.
#[derive(Debug)]
pub(crate) struct ChoiceOption {
    pub(crate) name: &'static str,
    /// Hyperparameters that apply with it.
    pub(crate) applies: &'static [&'static str],
    /// Hyperparameters with a single possible value.
    pub(crate) fixed: &'static [&'static str],
}
