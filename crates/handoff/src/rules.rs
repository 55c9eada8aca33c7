//! Rules that hyperparameters must follow, as data.
//!
//! They are declared with the hyperparameters and evaluated here: for configurations, and for every
//! request that reaches a trainer. The PyTorch trainer's `rules.py` is generated from the same data.

use crate::algorithm::{Hyperparameters, applies, rules as declared};
use crate::condition::{Bound, Condition, Number, Rule, within};
use std::fmt;
use std::sync::LazyLock;

pub use crate::condition::FieldValue;

/// A hyperparameter that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its name.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// Allowed values, and why.
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

impl Condition {
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
    fn of(&self, h: &Hyperparameters) -> f64 {
        match self {
            Self::Field(field) => h.value(field).number(),
            Self::Constant(value) => *value,
            Self::Sum(one, two) => one.of(h) + two.of(h),
            Self::Difference(one, two) => one.of(h) - two.of(h),
            Self::Negative(number) => -number.of(h),
            #[expect(clippy::disallowed_methods, reason = "compared with a tolerance")]
            Self::Logarithm(number) => number.of(h).ln(),
        }
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
