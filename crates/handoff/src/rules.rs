//! Rules that hyperparameters must follow, as data.
//!
//! They are declared with the hyperparameters and evaluated here: for configurations, and for every
//! request that reaches a trainer. The PyTorch trainer's `rules.py` is generated from the same data.

use crate::algorithm::{CHOICES, Hyperparameters, rules as declared};
use orchestrate_settings::Range;
use std::fmt;
use std::ops::{Add, BitAnd, Neg, Not, Sub};
use std::sync::LazyLock;

/// A hyperparameter that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its name.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What it must be, and why.
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` = {}: {}", self.field, self.value, self.remedy)
    }
}

/// Every hyperparameter in `h` that is refused; empty if `h` can be used.
pub fn refusals(h: &Hyperparameters) -> Vec<Refusal> {
    let broken = all_rules().iter().filter(|rule| rule.refused.holds(h));
    let refusal = |rule: &Rule| Refusal {
        field: rule.field,
        value: h.value(rule.field).to_string(),
        remedy: rule.remedy.clone(),
    };
    broken.map(refusal).collect()
}

/// The bounds of every hyperparameter and the rules between them, in the order of declaration.
pub(crate) fn all_rules() -> &'static [Rule] {
    static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
        let fields = Hyperparameters::fields();
        let position = |name: &str| fields.iter().position(|field| field.name == name);
        let bounds =
            fields.iter().flat_map(|field| field.bounds.iter().map(|bound| bound.rule(field.name)));
        let mut rules: Vec<Rule> = bounds.chain(declared()).collect();
        rules.sort_by_key(|rule| position(rule.field));
        rules
    });
    &RULES
}

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
    always: bool,
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

impl Bound {
    fn rule(&self, field: &'static str) -> Rule {
        let applies = match (applies(field), &self.when) {
            _ if self.always => None,
            // The bound's own condition says more.
            (Some(Condition::Is(one, _)), Some(Condition::Is(two, _))) if one == *two => None,
            (applies, _) => applies,
        };
        let outside = !within(field, self.range);
        let parts: Vec<Condition> =
            [applies, self.when.clone()].into_iter().flatten().chain([outside]).collect();
        Rule { field, refused: Condition::all(parts), remedy: self.range.remedy() }
    }
}

/// The options with which the hyperparameter applies; `None` if it always does.
pub(crate) fn applies(field: &str) -> Option<Condition> {
    let mut any = Vec::new();
    for choice in CHOICES {
        let with = choice.options.iter().filter(|option| option.applies.contains(&field));
        let names: Vec<&'static str> = with.map(|option| option.name).collect();
        if !names.is_empty() {
            any.push(Condition::Is(choice.key, names));
        }
    }
    match any.len() {
        0 => None,
        1 => any.pop(),
        _ => Some(Condition::Any(any)),
    }
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
    fn all(mut parts: Vec<Self>) -> Self {
        match parts.pop() {
            Some(only) if parts.is_empty() => only,
            Some(last) => {
                parts.push(last);
                Self::All(parts)
            }
            None => Self::All(parts),
        }
    }

    /// Whether the condition holds for `h`.
    pub(crate) fn holds(&self, h: &Hyperparameters) -> bool {
        match self {
            Self::Is(field, names) => {
                names.iter().any(|name| h.value(field) == FieldValue::Choice(name))
            }
            Self::IsOn(field) => h.value(field).is_on(),
            Self::Within(field, range) => match h.value(field) {
                FieldValue::Pair(one, two) => range.contains(one) && range.contains(two),
                FieldValue::Off => true,
                value => range.contains(value.number()),
            },
            Self::Above(one, two) => one.of(h) > two.of(h),
            Self::Not(condition) => !condition.holds(h),
            Self::All(conditions) => conditions.iter().all(|condition| condition.holds(h)),
            Self::Any(conditions) => conditions.iter().any(|condition| condition.holds(h)),
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

    fn of(&self, h: &Hyperparameters) -> f64 {
        match self {
            Self::Field(field) => h.value(field).number(),
            Self::Constant(value) => *value,
            Self::Sum(one, two) => one.of(h) + two.of(h),
            Self::Difference(one, two) => one.of(h) - two.of(h),
            Self::Negative(number) => -number.of(h),
            Self::Logarithm(number) => number.of(h).ln(),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields and options that a condition names.
    fn named(condition: &Condition, found: &mut Vec<(&'static str, Vec<&'static str>)>) {
        match condition {
            Condition::Is(field, names) => found.push((field, names.clone())),
            Condition::IsOn(field) | Condition::Within(field, _) => found.push((field, vec![])),
            Condition::Above(one, two) => {
                numbers(one, found);
                numbers(two, found);
            }
            Condition::Not(condition) => named(condition, found),
            Condition::All(conditions) | Condition::Any(conditions) => {
                for condition in conditions {
                    named(condition, found);
                }
            }
        }
    }

    fn numbers(number: &Number, found: &mut Vec<(&'static str, Vec<&'static str>)>) {
        match number {
            Number::Field(field) => found.push((field, vec![])),
            Number::Constant(_) => {}
            Number::Sum(one, two) | Number::Difference(one, two) => {
                numbers(one, found);
                numbers(two, found);
            }
            Number::Negative(number) | Number::Logarithm(number) => numbers(number, found),
        }
    }

    #[test]
    fn rules_name_existing_hyperparameters_and_options() {
        let fields: Vec<&str> = Hyperparameters::fields().iter().map(|field| field.name).collect();
        for rule in all_rules() {
            let mut found = vec![(rule.field, vec![])];
            named(&rule.refused, &mut found);
            for (field, names) in found {
                assert!(fields.contains(&field), "{field} of {rule:?}");
                let options = crate::algorithm::options(field);
                assert!(names.iter().all(|name| options.contains(name)), "{names:?} of {rule:?}");
            }
            assert!(rule.remedy.starts_with("must be "), "{rule:?}");
        }
    }

    #[test]
    fn defaults_are_not_refused() {
        assert_eq!(refusals(&Hyperparameters::default()), []);
    }
}
