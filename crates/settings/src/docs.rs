//! The documentation page of all settings, from their JSON schema.

use crate::shape::{choices, list_of};
use crate::{KeyInfo, SectionKeys};
use schemars::SchemaGenerator;
use serde_json::{Map, Value};
use std::fmt::Write;

/// One section of the page, in Markdown: its description, and a table of its keys.
pub fn documentation<S: SectionKeys>() -> String {
    let mut generator = SchemaGenerator::default();
    let keys = S::keys(&mut generator);
    let definitions = generator.take_definitions(true);
    let mut page = format!("## `[{}]`\n\n{}\n\n", S::NAME, crate::key::paragraphs(S::ABOUT));
    page.push_str("| Key | Type | Default | Description |\n|---|---|---|---|\n");
    let mut chosen: Vec<(&str, String)> = Vec::new();
    for key in &keys {
        let schema = resolved(&key.schema, &definitions);
        let kind = type_text(&schema, &definitions);
        let mut description = key.description.replace('\n', "<br>");
        for limit in &key.limits {
            let _ = write!(description, "<br>Must be {limit}.");
        }
        let cells = [format!("`{}`", key.name), kind, default_text(key), description];
        let cells = cells.map(|cell| cell.replace('|', "\\|"));
        let _ = writeln!(page, "| {} |", cells.join(" | "));
        let described = described_choices(&schema);
        if !described.is_empty() {
            chosen.push((key.name, described));
        }
    }
    for (name, described) in chosen {
        let _ = write!(page, "\nValues of `{name}`:\n\n{described}");
    }
    page
}

fn default_text(key: &KeyInfo) -> String {
    match (&key.default, &key.default_text) {
        (Some(Value::Array(list)), _) if list.is_empty() => "none".to_owned(),
        (Some(value), _) => format!("`{value}`"),
        (None, Some(text)) => text.clone(),
        (None, None) => "none".to_owned(),
    }
}

/// The definition that a schema refers to, or the schema itself if it is not a reference.
fn resolved(schema: &Map<String, Value>, definitions: &Map<String, Value>) -> Value {
    let target = schema.get("$ref").and_then(Value::as_str);
    let name = target.and_then(|target| target.rsplit('/').next());
    let definition = name.and_then(|name| definitions.get(name));
    definition.cloned().unwrap_or_else(|| Value::Object(schema.clone()))
}

fn type_text(schema: &Value, definitions: &Map<String, Value>) -> String {
    let names = choices(schema);
    if !names.is_empty() {
        let names: Vec<String> = names.iter().map(|name| format!("`\"{name}\"`")).collect();
        return list_of(&names, "or");
    }
    match (schema["format"].as_str(), schema["type"].as_str()) {
        (Some("duration"), _) => "duration".to_owned(),
        (Some("byte-size"), _) => "size".to_owned(),
        (_, Some("integer")) => "whole number".to_owned(),
        (_, Some("number")) => "number".to_owned(),
        (_, Some("string")) => "text".to_owned(),
        (_, Some("boolean")) => "`true` or `false`".to_owned(),
        (_, Some("array")) if schema.get("prefixItems").is_some() => "two numbers".to_owned(),
        (_, Some("array")) => match &schema["items"] {
            Value::Object(items) => {
                let item = resolved(items, definitions);
                match item.get("type").and_then(Value::as_str) {
                    Some("object") => "list of tables".to_owned(),
                    _ => format!("list of {}", type_text(&item, definitions)),
                }
            }
            _ => "list".to_owned(),
        },
        (_, Some("object")) => "table".to_owned(),
        (_, _) => String::new(),
    }
}

/// The choices of a schema with their descriptions, as a list.
fn described_choices(schema: &Value) -> String {
    let mut text = String::new();
    for choice in schema["oneOf"].as_array().into_iter().flatten() {
        if let (Some(name), Some(description)) =
            (choice["const"].as_str(), choice["description"].as_str())
        {
            let description = description.replace('\n', " ");
            let _ = writeln!(text, "* `\"{name}\"`: {description}");
        }
    }
    text
}
