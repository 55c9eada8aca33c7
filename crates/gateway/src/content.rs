//! What the request bodies of all dialects share: text or lists, text parts, and typed parsing with
//! errors that name the field.

use crate::problem::{Kind, Problem};
use crate::sampler::{Tool, ToolChoice};
use orchestrate_types::{UniqueKeys, mended_json, rounded_integer, whole_zeros};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// Maximum number of stop strings of a request.
const MAX_STOP_STRINGS: usize = 64;

/// Parses a body. Text in it that is not Unicode becomes U+FFFD: it is a part of the history for as long
/// as the conversation lasts, so refusing it would end the conversation.
///
/// # Errors
/// Names the first field with a wrong type, the place where the JSON is malformed, or a whole number that
/// would be rounded.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let Object(parsed) = parse_rounding(body)?;
    let number = std::str::from_utf8(body).ok().and_then(rounded_integer);
    number.map_or(Ok(parsed), |number| {
        let problem = format!("the number {number:.60} has more than 64 bits; send it as a string");
        Err(Problem::new(Kind::Invalid, problem))
    })
}

fn parse_rounding<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let body = whole_zeros(body);
    // Tracking the path to a field takes most of the time, and only errors need it.
    if let Ok(parsed) = serde_json::from_slice(&body) {
        return Ok(parsed);
    }
    let body = mended_json(&body);
    let mut json = serde_json::Deserializer::from_slice(&body);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let field = error.path().to_string();
        let error = error.into_inner();
        if error.is_data() && field != "." {
            return Problem::field(field, error);
        }
        Problem::new(Kind::Invalid, format!("the body is not a valid request: {error}"))
    })?;
    json.end().map_err(|error| Problem::new(Kind::Invalid, format!("after the body: {error}")))?;
    Ok(parsed)
}

/// A field with any value, in which no key is repeated: schemas and calls are shown to the model, and no one
/// can say which of two values the client means. Libraries write no such objects.
pub(crate) fn unique<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    let value = Option::<UniqueKeys>::deserialize(from)?;
    Ok(value.map(|UniqueKeys(value)| value))
}

/// A value that is written as an object. Derived types read a list as their fields in the order of their code,
/// and the tables of fields would not see those.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A string or a list.
#[derive(Clone, Debug)]
pub(crate) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = TextOr<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a string or a list")
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(TextOr::List)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// A part of a message's content in OpenAI's dialects.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
}

impl Part {
    fn into_text(self, at: &str) -> Result<String, Problem> {
        match self.kind.as_deref() {
            Some("text" | "input_text" | "output_text" | "summary_text" | "reasoning_text")
            | None => self
                .text
                .ok_or_else(|| Problem::field(format!("{at}.text"), "a text part has a text")),
            Some("refusal") => Ok(self.refusal.unwrap_or_default()),
            Some(kind) => Err(only_text(format!("{at}.type"), kind)),
        }
    }
}

/// The error for content other than text.
pub(crate) fn only_text(field: String, kind: &str) -> Problem {
    let kind: String = kind.chars().take(64).collect();
    Problem::unsupported(field, &format!("content of type `{kind}`"), "the model reads text only")
}

/// The text of a content; parts that are not empty are joined with `separator`.
pub(crate) fn text_of(
    content: Option<TextOr<Part>>,
    at: &str,
    separator: &str,
) -> Result<String, Problem> {
    match content {
        None => Ok(String::new()),
        Some(TextOr::Text(text)) => Ok(text),
        Some(TextOr::List(parts)) => {
            let texts = parts.into_iter().enumerate();
            let texts = texts.map(|(index, part)| part.into_text(&format!("{at}[{index}]")));
            Ok(join(texts.collect::<Result<Vec<_>, _>>()?, separator))
        }
    }
}

/// The text of a message of the user or of a system message, which must have a content, as in OpenAI's own
/// API: a missing one or an empty list is rather a mistake of the client than a wish for an empty message.
/// Replies may be empty, and so may the results of tools.
pub(crate) fn text_given(
    content: Option<TextOr<Part>>,
    at: &str,
    separator: &str,
) -> Result<String, Problem> {
    match &content {
        None => Err(Problem::field(at, "this field is required")),
        Some(TextOr::List(parts)) if parts.is_empty() => {
            Err(Problem::field(at, "must not be an empty list; an empty text is \"\""))
        }
        Some(_) => text_of(content, at, separator),
    }
}

/// Joins the texts that are not empty.
pub(crate) fn join(mut texts: Vec<String>, separator: &str) -> String {
    texts.retain(|text| !text.is_empty());
    if texts.len() == 1 { texts.pop().unwrap_or_default() } else { texts.join(separator) }
}

/// Checked stop strings.
pub(crate) fn stop_strings(stop: Option<TextOr<String>>, at: &str) -> Result<Vec<String>, Problem> {
    let stop = match stop {
        None => Vec::new(),
        Some(TextOr::Text(text)) => vec![text],
        Some(TextOr::List(list)) => list,
    };
    if stop.len() > MAX_STOP_STRINGS {
        return Err(Problem::field(at, format!("at most {MAX_STOP_STRINGS} strings")));
    }
    if stop.iter().any(String::is_empty) {
        return Err(Problem::field(at, "a stop string must not be empty"));
    }
    Ok(stop)
}

/// A token limit, which must be at least 1.
pub(crate) fn limit(value: Option<u64>, at: &str) -> Result<Option<usize>, Problem> {
    match value {
        Some(0) => Err(Problem::field(at, "must be at least 1")),
        value => Ok(value.map(|value| usize::try_from(value).unwrap_or(usize::MAX))),
    }
}

/// A checked tool. Without a schema it takes no arguments.
pub(crate) fn tool(
    name: Option<String>,
    description: Option<String>,
    schema: Option<Value>,
    at: &str,
) -> Result<Tool, Problem> {
    let name = name.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| Problem::field(format!("{at}.name"), "a tool has a name"))?;
    let parameters = match schema {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(_) => return Err(Problem::field(at, "the schema of a tool is an object")),
    };
    let description = description.filter(|text| !text.is_empty());
    Ok(Tool { name, description, parameters })
}

/// What a request says about calls.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    choice: ToolChoice,
    /// Names of the tools that the reply may call; `None` means all of the request's.
    allowed: Option<Vec<String>>,
}

/// Whether a reply that may call some of the request's tools must call one.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AllowedMode {
    Auto,
    Required,
}

impl From<ToolChoice> for Choice {
    fn from(choice: ToolChoice) -> Self {
        Self { choice, allowed: None }
    }
}

impl Choice {
    /// Reads `tool_choice` of OpenAI's dialects: a word, or an object of the dialect's own form.
    pub(crate) fn read<T: DeserializeOwned + Into<Self>>(
        choice: Option<&Value>,
    ) -> Result<Self, Problem> {
        let at = "tool_choice";
        match choice {
            None | Some(Value::Null) => Ok(Self::default()),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Auto.into()),
                "none" => Ok(ToolChoice::None.into()),
                "required" => Ok(ToolChoice::Required.into()),
                _ => Err(Problem::field(at, "must be `auto`, `none`, `required` or an object")),
            },
            Some(choice @ Value::Object(_)) => {
                let object = T::deserialize(choice).map_err(|error| Problem::field(at, error))?;
                Ok(object.into())
            }
            Some(_) => Err(Problem::field(at, "must be a string or an object")),
        }
    }

    /// The choice among some of the request's tools.
    pub(crate) fn among(mode: &AllowedMode, allowed: Vec<String>) -> Self {
        let choice = match mode {
            AllowedMode::Auto => ToolChoice::Auto,
            AllowedMode::Required => ToolChoice::Required,
        };
        Self { choice, allowed: Some(allowed) }
    }

    /// Checks that the request has the tools that are named, each of them once, and hides those that the reply
    /// may not call.
    pub(crate) fn apply(self, tools: &mut Vec<Tool>) -> Result<ToolChoice, Problem> {
        let problem = |why: &str| Err(Problem::field("tool_choice", why));
        let Self { choice, allowed } = self;
        let mut names = HashSet::with_capacity(tools.len());
        if let Some(tool) = tools.iter().find(|tool| !names.insert(tool.name.as_str())) {
            let problem = format!(
                "the model would read the name `{}` twice; a name is of one tool",
                tool.name
            );
            return Err(Problem::field("tools", problem));
        }
        if allowed.as_ref().is_some_and(Vec::is_empty) {
            return problem("allows no tool that the model knows; send `none`");
        }
        let named = match &choice {
            ToolChoice::Named(name) => Some(name),
            ToolChoice::Auto | ToolChoice::None | ToolChoice::Required => None,
        };
        let is_unknown = |name: &&String| tools.iter().all(|tool| tool.name != **name);
        if let Some(name) = named.into_iter().chain(allowed.iter().flatten()).find(is_unknown) {
            return problem(&format!("there is no tool `{name}`"));
        }
        if let Some(allowed) = allowed {
            tools.retain(|tool| allowed.contains(&tool.name));
        }
        if choice == ToolChoice::Required && tools.is_empty() {
            return problem("the request has no tools");
        }
        Ok(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Body {
        content: Option<TextOr<Part>>,
    }

    fn text(body: &str) -> Result<String, Problem> {
        text_of(parse::<Body>(body.as_bytes())?.content, "content", "\n")
    }

    #[test]
    fn strings_and_parts_give_the_same_text() {
        for body in [
            r#"{"content": "a\nb"}"#,
            r#"{"content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}"#,
            r#"{"content": [{"text": "a\nb"}, {"type": "text", "text": ""}]}"#,
        ] {
            assert_eq!(text(body).unwrap(), "a\nb");
        }
        assert_eq!(text("{}").unwrap(), text(r#"{"content": null}"#).unwrap());
        let number = "18446744073709551616";
        assert_eq!(text(&format!(r#"{{"content": "{number}"}}"#)).unwrap(), number);
    }

    #[test]
    fn a_repeated_key_is_refused_with_the_field_that_has_it() {
        #[derive(Debug, Deserialize)]
        struct Tools {
            tools: Vec<ToolBody>,
        }
        #[derive(Debug, Deserialize)]
        struct ToolBody {
            #[serde(default, deserialize_with = "unique")]
            schema: Option<Value>,
        }
        let read = |text: &str| parse::<Tools>(text.as_bytes());
        for (schema, field) in [
            (r#"{"a": 1, "a": 1}"#, "tools[1].schema"),
            (r#"{"properties": {"p": {}, "p": {"type": "string"}}}"#, "tools[1].schema"),
        ] {
            let text = format!(r#"{{"tools": [{{}}, {{"schema": {schema}}}]}}"#);
            let problem = read(&text).unwrap_err();
            let named = problem.field.unwrap_or_default();
            assert!(named.starts_with(field), "{named}");
            assert!(problem.message.contains("occurs twice"), "{}", problem.message);
        }
        let read =
            read(r#"{"tools": [{}, {"schema": null}, {"schema": {"a": [{"b": 1}, {"b": 1}]}}]}"#);
        let schemas = read.unwrap().tools.into_iter().map(|tool| tool.schema);
        let last = json!({"a": [{"b": 1}, {"b": 1}]});
        assert_eq!(schemas.collect::<Vec<_>>(), [None, None, Some(last)]);
    }

    #[test]
    fn errors_name_the_field() {
        for (body, field, word) in [
            (r#"{"content": 3}"#, Some("content"), "a string or a list"),
            (r#"{"content": [{"text": []}]}"#, Some("content[0].text"), "expected a string"),
            (r#"{"content": [{"type": "image"}]}"#, Some("content[0].type"), "text only"),
            (r#"{"content": [{"type": "text"}]}"#, Some("content[0].text"), "has a text"),
            (r#"{"content": "a"} x"#, None, "after the body"),
            (
                r#"{"content": "a", "x": [18446744073709551616]}"#,
                None,
                "18446744073709551616 has more",
            ),
            ("{", None, "not a valid request"),
            ("[]", None, "expected an object"),
            ("[\"a\"]", None, "expected an object"),
        ] {
            let problem = text(body).unwrap_err();
            assert_eq!(problem.field.as_deref(), field, "{body}");
            assert!(problem.message.contains(word), "{body}: {}", problem.message);
        }
    }
}
