//! The description of the keys of `[algorithm]`: when they apply, their bounds, and their default
//! with each option.

use super::declaration::GATES;
use super::{AlgorithmSection, CHOICES, Hyperparameters, is_used};
use crate::rules::{Condition, applies};
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
