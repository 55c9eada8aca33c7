//! A model's chat template, rendered the way Hugging Face renders it.
//!
//! The invariant: this module produces text only. [`crate::ChatModel`] turns text into tokens.

mod extras;
mod python;

use crate::api::{Action, Message};
pub(crate) use extras::ShownExtras;
use jiff::{Timestamp, tz::TimeZone};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value, context};
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
        let tools = match tools {
            [] => Value::from(()),
            tools => tools.iter().map(python::of_json).collect(),
        };
        Self { tools, thinking }
    }
}

impl ChatTemplate {
    /// Compiles `source`, a Jinja template as found in `tokenizer_config.json`.
    ///
    /// # Errors
    /// If `source` is not a valid template.
    pub fn new(source: &str) -> Result<Self, Error> {
        Self::with_variables(source, &BTreeMap::new(), Timestamp::now())
    }

    /// Like [`Self::new`], with variables that every rendering has: the special tokens of a tokenizer by
    /// name (`bos_token`). One without a text is not defined for the template. `strftime_now` is `now`, in
    /// UTC.
    ///
    /// # Errors
    /// If `source` is not a valid template.
    pub fn with_variables(
        source: &str,
        variables: &BTreeMap<String, Option<String>>,
        now: Timestamp,
    ) -> Result<Self, Error> {
        let mut env = Environment::new();
        // Hugging Face compiles chat templates with these two settings.
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_unknown_method_callback(python::method);
        env.add_filter("trim", python::trim);
        env.add_filter("indent", python::indent);
        env.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value))?));
        env.add_filter("tojson", |value: &Value, options: Kwargs| python::json(value, &options));
        env.add_filter("string", |value: &Value| python::text(value));
        env.add_test("iterable", python::is_iterable);
        env.add_test("number", python::is_number);
        env.add_test("float", python::is_float);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // One date for all prompts, wherever they are rendered.
        let now = now.to_zoned(TimeZone::UTC);
        env.add_function("strftime_now", move |format: String| {
            jiff::fmt::strtime::format(&format, &now)
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        for (name, text) in variables {
            if let Some(text) = text {
                env.add_global(name.clone(), text.clone());
            }
        }
        // Jinja reads every line end as `\\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        if joins_safe_text(&source) {
            let problem = "the filter `safe` on text that is joined with `+` or `~`: Jinja escapes the \
                           other text as HTML";
            return Err(Error::new(ErrorKind::SyntaxError, problem));
        }
        env.add_template_owned(NAME, without_generation_marks(&source))?;
        let reads = env.get_template(NAME)?.undeclared_variables(false);
        Ok(Self { env, source, reads })
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
        let messages = messages.into_iter().map(message_value).collect();
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
        let messages = with_both_names(messages).iter().map(python::of_json).collect();
        self.render_context(messages, input.tools, variables, add_generation_prompt)
    }

    fn render_context(
        &self,
        messages: Value,
        tools: Value,
        variables: Value,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.env.get_template(NAME)?.render(context! {
            messages => messages,
            tools => tools,
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..variables
        })
    }
}

/// Whether a template joins text with a text that it marks as safe.
fn joins_safe_text(source: &str) -> bool {
    source.split('|').skip(1).any(|filter| {
        let rest = filter.trim_start().strip_prefix("safe");
        rest.is_some_and(|rest| rest.trim_start().starts_with(['+', '~']))
    })
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

/// A message in the form that chat templates expect, with calls wrapped as `{id, type, function}`.
fn message_value(message: &Message) -> Value {
    let Message { role, content, tool_calls, extra } = message;
    let mut ids = extra.call_ids.iter();
    let calls = tool_calls.iter().map(|Action { name, arguments }| {
        let function =
            [("name", Value::from(name.as_str())), ("arguments", python::of_json(arguments))];
        let id = ids.next().map(|id| ("id", Value::from(id.as_str())));
        let call = [("type", Value::from("function")), ("function", Value::from_pairs(function))];
        Value::from_pairs(id.into_iter().chain(call))
    });
    let text = |name, text: &Option<String>| text.as_deref().map(|text| (name, Value::from(text)));
    let calls = (!tool_calls.is_empty()).then(|| ("tool_calls", calls.collect::<Value>()));
    let always = [("role", Value::from(role.as_str())), ("content", Value::from(content.as_str()))];
    let more = [
        // Templates read thinking by one of these names.
        text("reasoning_content", &extra.reasoning),
        text("thinking", &extra.reasoning),
        text("reasoning", &extra.reasoning),
        calls,
        text("tool_call_id", &extra.tool_call_id),
        text("name", &extra.name),
    ];
    Value::from_pairs(always.into_iter().chain(more.into_iter().flatten()))
}

/// The messages with their thinking under both names that templates read, as `transformers` gives it.
fn with_both_names(messages: &[serde_json::Value]) -> Vec<serde_json::Value> {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let each = messages.iter().cloned().map(|mut message| {
        let found = names.iter().find_map(|name| message.get(*name).filter(|v| !v.is_null()));
        if let (Some(thinking), Some(fields)) = (found.cloned(), message.as_object_mut()) {
            fields.entry("thinking").or_insert_with(|| thinking.clone());
            fields.insert("reasoning_content".to_owned(), thinking);
        }
        message
    });
    each.collect()
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
            ..Message::default()
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
