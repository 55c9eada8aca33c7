//! A model's chat template, rendered the way Hugging Face renders it.
//!
//! The invariant: this module produces text only. [`crate::ChatModel`] turns text into tokens.

mod python;

use crate::api::{Action, Message};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

const NAME: &str = "chat";

/// The variables by which templates switch thinking on and off: the first in most families, the second
/// in DeepSeek and Granite.
const THINKING_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    /// Names that it reads and does not set.
    reads: HashSet<String>,
}

/// What a template reads besides the messages.
#[derive(Debug, Clone)]
pub(crate) struct TemplateInput {
    /// From [`tools_value`].
    pub(crate) tools: Value,
    /// Whether the model is asked to think; `None` leaves it to the template.
    pub(crate) thinking: Option<bool>,
}

impl TemplateInput {
    /// The input for these tool schemas. They are the same in every turn, so a caller that renders
    /// often converts them once.
    pub(crate) fn new(tools: &[serde_json::Value], thinking: Option<bool>) -> Self {
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) };
        Self { tools, thinking }
    }
}

impl ChatTemplate {
    /// Compiles `source`, a Jinja template as found in `tokenizer_config.json`.
    ///
    /// # Errors
    /// If `source` is not a valid template.
    pub fn new(source: &str) -> Result<Self, Error> {
        Self::with_variables(source, &BTreeMap::new())
    }

    /// Like [`Self::new`], with variables that every rendering has: the special tokens of a tokenizer by
    /// name (`bos_token`). One without a text is not defined for the template.
    ///
    /// # Errors
    /// If `source` is not a valid template.
    pub fn with_variables(
        source: &str,
        variables: &BTreeMap<String, Option<String>>,
    ) -> Result<Self, Error> {
        let mut env = Environment::new();
        // Hugging Face compiles chat templates with these two settings.
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value))?));
        env.add_filter("tojson", |value: &Value, options: Kwargs| python::json(value, &options));
        env.add_filter("string", |value: &Value| python::text(value));
        env.add_test("iterable", python::is_iterable);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // One date for all prompts: the members of a group must read the same one.
        let now = jiff::Zoned::now();
        env.add_function("strftime_now", move |format: String| {
            jiff::fmt::strtime::format(&format, &now)
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        for (name, text) in variables {
            if let Some(text) = text {
                env.add_global(name.clone(), text.clone());
            }
        }
        env.add_template_owned(NAME, without_generation_marks(source))?;
        let reads = env.get_template(NAME)?.undeclared_variables(false);
        Ok(Self { env, source: source.to_owned(), reads })
    }

    /// The template's source text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Names of the variables that the template reads and does not set, in no order.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &str> {
        self.reads.iter().map(String::as_str)
    }

    /// Whether the template can switch thinking on and off.
    pub(crate) fn switches_thinking(&self) -> bool {
        THINKING_SWITCHES.iter().any(|name| self.reads.contains(*name))
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
        self.render_input(messages, &TemplateInput::new(tools, None), add_generation_prompt)
    }

    /// Like [`Self::render`], with everything else that the template reads.
    pub(crate) fn render_input<'a>(
        &self,
        messages: impl IntoIterator<Item = &'a Message>,
        input: &TemplateInput,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let messages: Vec<_> = messages.into_iter().map(MessageView::from).collect();
        let switch = match input.thinking {
            Some(on) => Value::from(BTreeMap::from(THINKING_SWITCHES.map(|name| (name, on)))),
            None => context! {},
        };
        self.render_context(messages, input.tools.clone(), switch, add_generation_prompt)
    }

    /// Renders messages in the form that templates read, as `apply_chat_template` of `transformers` takes
    /// them. `variables` are its further arguments.
    ///
    /// # Errors
    /// If the template raises an exception or uses something unsupported.
    pub fn render_values(
        &self,
        messages: &[serde_json::Value],
        tools: &[serde_json::Value],
        variables: &serde_json::Map<String, serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let input = TemplateInput::new(tools, None);
        let variables = Value::from(Serde(variables));
        self.render_context(messages, input.tools, variables, add_generation_prompt)
    }

    fn render_context(
        &self,
        messages: impl Serialize,
        tools: Value,
        variables: Value,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.env.get_template(NAME)?.render(context! {
            messages => Value::from(Serde(messages)),
            tools => tools,
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..variables
        })
    }
}

/// The source without the tags `{% generation %}` and `{% endgeneration %}`, by which some templates
/// mark what the model writes. They change nothing but the spaces around them.
fn without_generation_marks(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some((before, after)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        rest = after;
        let Some((tag, _)) = after.split_once("%}") else { break };
        let word = tag.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&tag.replacen(word, replacement, 1));
        rest = after.get(tag.len()..).unwrap_or_default();
    }
    out.push_str(rest);
    out
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
