//! The description of the keys of `[algorithm]`: when they apply, their bounds, and their default
//! with each option.

use super::declaration::{AlgorithmSection, CHOICES, GATES, Hyperparameters};
use super::hyperparameter::ChoiceOption;
use crate::condition::{Condition, FieldValue};
use orchestrate_settings::{KeyInfo, Limit, SectionKeys, list_of};
use serde_json::{Map, Value};

/// Completes what is known about the keys of `[algorithm]`.
pub(crate) fn describe_keys(keys: &mut Vec<KeyInfo>) {
    let fields = Hyperparameters::fields();
    for key in keys {
        if let Some(options) = applies_with(key.name) {
            key.description = format!("{}\nOnly with {}.", key.description, options);
        }
        let bounds = fields.iter().find(|field| field.name == key.name);
        for bound in bounds.iter().flat_map(|field| &field.bounds) {
            let when = bound.when.as_ref().map(|when| format!(" with {}", text(when)));
            key.limits.push(format!("{}{}", bound.range, when.clone().unwrap_or_default()));
            if when.is_none() && key.schema.get("type").is_some_and(|kind| kind != "array") {
                bound.range.annotate(&mut key.schema);
            }
        }
        if let Some(varying) = varying_default(key) {
            key.default = None;
            key.default_text = Some(varying);
        }
    }
}

/// The options with which a hyperparameter applies; `None` if it always does.
pub(super) fn applies_with(key: &str) -> Option<String> {
    if let Some((_, number)) = GATES.iter().find(|(gated, _)| *gated == key) {
        return Some(format!("{number} above 0"));
    }
    applies(key).map(|condition| text(&condition))
}

fn text(condition: &Condition) -> String {
    match condition {
        Condition::Is(field, names) => {
            let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
            format!("{field} = {}", list_of(&names, "or"))
        }
        Condition::Any(conditions) => conditions.iter().map(text).collect::<Vec<_>>().join(", or "),
        Condition::All(conditions) => conditions.iter().map(text).collect::<Vec<_>>().join(" and "),
        Condition::IsOn(_) | Condition::Within(..) | Condition::Above(..) | Condition::Not(_) => {
            String::new()
        }
    }
}

/// The default of a key for each option of other keys on which it depends; `None` if it is the same
/// for all.
fn varying_default(key: &KeyInfo) -> Option<String> {
    let base = key.default.clone()?;
    let mut texts = vec![format!("`{base}`")];
    for choice in CHOICES.iter().filter(|choice| choice.key != key.name) {
        let mut by_value: Vec<(Value, Vec<&str>)> = Vec::new();
        for option in choice.options {
            let Some(value) = default_with(choice.key, option.name, key.name) else { continue };
            if value == base {
                continue;
            }
            match by_value.iter_mut().find(|(known, _)| *known == value) {
                Some((_, names)) => names.push(option.name),
                None => by_value.push((value, vec![option.name])),
            }
        }
        for (value, names) in by_value {
            texts.push(format!("`{value}` for {}", names.join(", ")));
        }
    }
    (texts.len() > 1).then(|| texts.join("; "))
}

/// The default of `key` where only `choice` is written, if the key applies there.
fn default_with(choice: &str, option: &str, key: &str) -> Option<Value> {
    let written: Map<String, Value> = [(choice.to_owned(), option.into())].into_iter().collect();
    let section: AlgorithmSection = serde_json::from_value(written.into()).ok()?;
    let values = section.fill();
    if !is_used(key, &values.sent()) {
        return None;
    }
    serde_json::to_value(AlgorithmSection::from_values(&values)).ok()?.get(key).cloned()
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

/// The options that are chosen in `h` and on which something depends.
fn chosen(h: &Hyperparameters) -> impl Iterator<Item = (&'static str, &'static ChoiceOption)> {
    CHOICES.iter().filter_map(|choice| {
        let value = h.value(choice.key);
        let is_chosen = |option: &&ChoiceOption| value == FieldValue::Choice(option.name);
        choice.options.iter().find(is_chosen).map(|option| (choice.key, option))
    })
}

/// Whether a hyperparameter applies with the options chosen in `h`.
pub(super) fn is_used(key: &str, h: &Hyperparameters) -> bool {
    let gate = GATES.iter().find(|(gated, _)| *gated == key);
    if gate.is_some_and(|(_, number)| h.value(number).number() <= 0.0) {
        return false;
    }
    let depends = CHOICES
        .iter()
        .any(|choice| choice.options.iter().any(|option| option.applies.contains(&key)));
    let applies = |(choice, option): (&str, &ChoiceOption)| {
        option.applies.contains(&key) && is_used(choice, h)
    };
    !depends || chosen(h).any(applies)
}

/// Whether a hyperparameter has a single possible value with the options chosen in `h`.
pub(super) fn is_fixed(key: &str, h: &Hyperparameters) -> bool {
    chosen(h).any(|(choice, option)| option.fixed.contains(&key) && is_used(choice, h))
}
