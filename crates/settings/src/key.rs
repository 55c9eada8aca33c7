//! Metadata of a key: the source of the JSON schema and of the documentation.

use crate::{Limit, SectionKeys};
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// One key of a section.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyInfo {
    /// Name within the section.
    pub name: &'static str,
    /// Description; each paragraph is one line.
    pub description: String,
    /// The default where it is a fixed value.
    pub default: Option<Value>,
    /// The default as text, where it depends on other keys or stands for the absence of a value.
    pub default_text: Option<String>,
    /// Limits of the value as text, e.g. `at least 1`.
    pub limits: Vec<String>,
    /// JSON schema of the value, with its limits.
    pub schema: Map<String, Value>,
}

impl KeyInfo {
    /// A key with doc comment `lines`. `defaults` is an object with the default of each key that has
    /// one.
    pub fn new(name: &'static str, lines: &[&str], schema: Schema, defaults: &Value) -> Self {
        let schema = match schema.to_value() {
            Value::Object(schema) => schema,
            // `true`, the schema of any value.
            _ => Map::new(),
        };
        Self {
            name,
            description: paragraphs(lines),
            default: defaults.get(name).filter(|value| !value.is_null()).cloned(),
            default_text: None,
            limits: Vec::new(),
            schema,
        }
    }

    /// The same key, with its default as text.
    #[must_use]
    pub fn absent(self, text: &str) -> Self {
        Self { default: None, default_text: Some(text.to_owned()), ..self }
    }

    /// The same key with one more limit.
    #[must_use]
    pub fn limit<T: ?Sized>(mut self, limit: &dyn Limit<T>) -> Self {
        limit.annotate(&mut self.schema);
        self.limits.push(limit.text());
        self
    }

    /// The JSON schema of a key: that of its type, with description, default and limits.
    fn property(&self) -> Value {
        let mut schema = self.schema.clone();
        let mut description = self.description.clone();
        for limit in &self.limits {
            description = format!("{description}\nMust be {limit}.");
        }
        match (&self.default, &self.default_text) {
            (Some(default), _) => {
                schema.insert("default".to_owned(), default.clone());
            }
            (None, Some(text)) => description = format!("{description}\nDefault: {text}."),
            (None, None) => {}
        }
        schema.insert("description".to_owned(), json!(description));
        schema.into()
    }

    /// The JSON schema of a section.
    pub fn section_schema<S: SectionKeys>(generator: &mut SchemaGenerator) -> Schema {
        let properties: Map<String, Value> =
            S::keys(generator).iter().map(|key| (key.name.to_owned(), key.property())).collect();
        schemars::json_schema!({
            "description": paragraphs(S::ABOUT),
            "type": "object",
            "properties": properties,
            "additionalProperties": false,
        })
    }
}

/// Joins the lines of a doc comment into one line per paragraph.
pub(crate) fn paragraphs(lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines.iter().map(|line| line.trim()) {
        if line.is_empty() {
            text.push('\n');
        } else {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push(' ');
            }
            text.push_str(line);
        }
    }
    text
}
