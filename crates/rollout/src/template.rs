//! A model's chat template, rendered the way Hugging Face renders it.
//!
//! The invariant: this module produces text only. [`crate::ChatModel`] turns text into tokens.

use crate::api::{Action, Message};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;
use std::io;

const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Compiles `source`, a Jinja template as found in `tokenizer_config.json`.
    ///
    /// # Errors
    /// If `source` is not a valid template.
    pub fn new(source: &str) -> Result<Self, Error> {
        let mut env = Environment::new();
        // Hugging Face compiles chat templates with these two settings.
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", |value: &Value, kwargs: Kwargs| {
            python_json(value, kwargs.get("indent")?)
        });
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_template_owned(NAME, source.to_owned())?;
        Ok(Self { env, source: source.to_owned() })
    }

    /// The template's source text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// `tools` are JSON schemas; an empty list reads as `none` in the template.
    /// `add_generation_prompt` appends the header of the next assistant turn.
    ///
    /// # Errors
    /// If the template raises an exception or uses something unsupported.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.render_with_tools(messages, tools_value(tools), add_generation_prompt)
    }

    /// Like [`Self::render`], with tools that [`tools_value`] converted before.
    pub(crate) fn render_with_tools<'a>(
        &self,
        messages: impl IntoIterator<Item = &'a Message>,
        tools: Value,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let messages: Vec<_> = messages.into_iter().map(MessageView::from).collect();
        self.env.get_template(NAME)?.render(context! {
            messages => Value::from(Serde(messages)),
            tools => tools,
            add_generation_prompt => add_generation_prompt,
        })
    }
}

/// Converts tool schemas to the value that templates read. They are the same in every turn, so a
/// caller that renders often converts them once.
pub(crate) fn tools_value(tools: &[serde_json::Value]) -> Value {
    if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) }
}

/// The value with all of its strings changed, names of fields included.
pub(crate) fn with_strings(
    value: &serde_json::Value,
    change: &dyn Fn(&str) -> String,
) -> serde_json::Value {
    match value {
        serde_json::Value::String(text) => change(text).into(),
        serde_json::Value::Array(all) => {
            all.iter().map(|value| with_strings(value, change)).collect()
        }
        serde_json::Value::Object(fields) => {
            fields.iter().map(|(name, value)| (change(name), with_strings(value, change))).collect()
        }
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {
            value.clone()
        }
    }
}

/// A message in the form that chat templates expect, with calls wrapped as `{type, function}`.
#[derive(Serialize)]
struct MessageView<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallView<'a>>,
}

#[derive(Serialize)]
struct ToolCallView<'a> {
    r#type: &'static str,
    function: &'a Action,
}

impl<'a> From<&'a Message> for MessageView<'a> {
    fn from(message: &'a Message) -> Self {
        let Message { role, content, tool_calls } = message;
        let calls = tool_calls.iter().map(|function| ToolCallView { r#type: "function", function });
        Self { role, content, tool_calls: calls.collect() }
    }
}

/// The `tojson` filter of chat templates: Python's `json.dumps(…, ensure_ascii=False)`. Jinja's own
/// filter escapes `<`, `>`, `&` and `'` for HTML, which no model has seen in training.
fn python_json(value: &Value, indent: Option<usize>) -> Result<String, Error> {
    let fail = |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, e.to_string());
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let indent = vec![b' '; width];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
                .map_err(fail)?;
        }
        None => value
            .serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter))
            .map_err(fail)?,
    }
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// Formats JSON with Python's separators `", "` and `": "`.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_formatted_as_in_python() {
        let template = ChatTemplate::new(
            "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
        )
        .unwrap();
        let arguments =
            serde_json::json!({"new": "a < b & 'c' \"é\"", "line": 3, "all": [1, true]});
        let message = Message {
            role: "assistant".to_owned(),
            content: String::new(),
            tool_calls: vec![Action { name: "edit".to_owned(), arguments }],
        };
        assert_eq!(
            template.render(&[message], &[], false).unwrap(),
            r#"{"name": "edit", "arguments": {"new": "a < b & 'c' \"é\"", "line": 3, "all": [1, true]}}"#
        );
    }

    #[test]
    fn template_can_reject_a_conversation() {
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}").unwrap();
        let error = template.render(&[], &[], false).unwrap_err().to_string();
        assert!(error.contains("roles must alternate"), "{error}");
    }
}
