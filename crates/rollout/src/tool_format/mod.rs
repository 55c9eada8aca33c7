//! The formats in which models write tool calls.
//!
//! A format is used only if the chat template renders calls in exactly this format:
//! [`ToolFormat::of`] renders probe calls and reads them back.
//!
//! The invariant: the calls of a reply are read all or none. Where one of them is not valid, or may have
//! ended elsewhere, the reply is refused ([`Unread`]), so that neither half of what the policy wrote
//! nor something else is performed.

mod json;
mod schema;
mod xml;

use crate::api::Action;
use orchestrate_types::exact_json;
use serde_json::{Value, json};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A format of tool calls. Each call is between `<tool_call>` tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolFormat {
    /// `{"name": …, "arguments": {…}}`: Hermes, Qwen 2.5, Qwen 3.
    #[default]
    Json,
    /// `<function=NAME>` with a `<parameter=KEY>` for each argument: Qwen3-Coder, Qwen 3.5,
    /// Nemotron 3. Strings are not quoted, so the tool's schema decides which values are strings.
    /// Names and values are read as they are written, without one line feed at each end of a value: quotes
    /// around a name belong to it, and so does a carriage return to a value. vLLM's parser `qwen3_coder`
    /// reads parameters in the same way; some versions of it take no function whose name has quotes for a call.
    /// Models leave out `<tool_call>` at times; `<function=NAME>` at the beginning of a line begins a
    /// call, too.
    Xml,
}

/// A text that was read as calls.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReadCalls {
    /// The text outside the calls; without white space before its end if there are calls.
    pub(crate) content: String,
    pub(crate) calls: Vec<Action>,
}

/// Why the calls of a reply could not be read. None of them is performed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unread {
    /// A call without a closing tag.
    #[error("tool call is not closed")]
    Unclosed,
    /// The text of a call is not one, or may be read in several ways.
    #[error("tool call is not valid: {0}")]
    Invalid(String),
}

/// Reads the arguments of a call as JSON text; no text at all means no arguments.
///
/// # Errors
/// If they are not JSON, or would lose a repeated key or digits of a number.
pub(crate) fn read_arguments(text: &str) -> Result<Value, String> {
    if text.trim().is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    exact_json(text.as_bytes())
}

impl ToolFormat {
    /// Every format.
    pub const ALL: [Self; 2] = [Self::Json, Self::Xml];

    /// The format in which `render` writes calls; `None` if it is none of [`Self::ALL`]. `render`
    /// gets calls of the tool `probe` and returns the text of a turn with these calls.
    pub(crate) fn of<E>(
        render: impl Fn(&[Action]) -> Result<String, E>,
    ) -> Result<Option<Self>, E> {
        let calls = probes();
        let text = render(&calls)?;
        let tools = [probe_tool()];
        let exact =
            |format: &Self| format.read(&text, &tools).is_ok_and(|read| read.calls == calls);
        Ok(Self::ALL.into_iter().find(exact))
    }

    /// Reads the calls of a reply, without its thinking. `tools` are the JSON schemas that chat
    /// templates get.
    pub(crate) fn read(self, text: &str, tools: &[Value]) -> Result<ReadCalls, Unread> {
        let Some((before, mut rest)) = self.start(text, 0).and_then(|at| text.split_at_checked(at))
        else {
            return Ok(ReadCalls { content: text.to_owned(), calls: Vec::new() });
        };
        let mut content = before.to_owned();
        let mut calls = Vec::new();
        match self {
            Self::Json => {
                while let Some((between, call)) = rest.split_once(OPEN) {
                    content.push_str(between);
                    let (call, after) = json::read(call)?;
                    calls.push(call);
                    rest = after;
                }
                content.push_str(rest);
            }
            Self::Xml => {
                let (read, texts) = xml::read(rest, tools)?;
                calls = read;
                content.extend(texts);
            }
        }
        content.truncate(content.trim_end().len());
        Ok(ReadCalls { content, calls })
    }

    /// Where the first call after the byte `from` of a text begins.
    pub(crate) fn start(self, text: &str, from: usize) -> Option<usize> {
        match self {
            Self::Json => text.get(from..)?.find(OPEN).map(|at| from + at),
            Self::Xml => xml::start(text, from),
        }
    }

    /// The beginnings of calls.
    pub(crate) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Json => &[OPEN],
            Self::Xml => &[OPEN, xml::FUNCTION],
        }
    }
}

/// Calls with every type of argument, and strings that look like other types.
fn probes() -> Vec<Action> {
    let call = |arguments: Value| Action { name: "probe".to_owned(), arguments };
    vec![
        call(json!({"text": "a \"b\" \\ é\n  <c>\n\nd", "number": 3, "flag": true})),
        call(json!({"text": "12", "list": ["x", 1], "object": {"k": {"l": []}}})),
        call(json!({"text": "{\"k\": true}"})),
        call(json!({})),
    ]
}

pub(crate) fn probe_tool() -> Value {
    let kind = |kind: &str| json!({"type": kind});
    json!({"type": "function", "function": {"name": "probe", "parameters": {
        "type": "object",
        "properties": {
            "text": kind("string"), "number": kind("integer"), "flag": kind("boolean"),
            "list": kind("array"), "object": kind("object"),
        },
    }}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Message;
    use crate::chat::message;
    use crate::template::ChatTemplate;
    use proptest::prelude::*;

    /// The part of the templates of Qwen 3 and Qwen3-Coder that renders calls.
    const JSON_TEMPLATE: &str = r#"{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}"#;
    const XML_TEMPLATE: &str = r"{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}";
    const OTHER_TEMPLATE: &str = r"{% for m in messages %}{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{% endfor %}{% endfor %}";

    fn show(template: &str, calls: &[Action]) -> String {
        let turn = Message { tool_calls: calls.to_vec(), ..message("assistant", "") };
        ChatTemplate::new(template).unwrap().render(&[turn], &[], false).unwrap()
    }

    fn detected(template: &str) -> Option<ToolFormat> {
        ToolFormat::of(|calls| Ok::<_, ()>(show(template, calls))).unwrap()
    }

    #[test]
    fn the_detected_format_reads_back_what_the_template_renders() {
        assert_eq!(detected(JSON_TEMPLATE), Some(ToolFormat::Json));
        assert_eq!(detected(XML_TEMPLATE), Some(ToolFormat::Xml));
        assert_eq!(detected(OTHER_TEMPLATE), None);
        // Renders strings and numbers alike, but loses line breaks.
        assert_eq!(
            detected(&XML_TEMPLATE.replace("v if v is string", "v | trim if v is string")),
            Some(ToolFormat::Xml)
        );
        let lossy =
            XML_TEMPLATE.replace("v if v is string", "v | replace('\n', ' ') if v is string");
        assert_eq!(detected(&lossy), None);
    }

    fn read(format: ToolFormat, text: &str) -> Result<ReadCalls, Unread> {
        format.read(text, &[bash_tool(), probe_tool()])
    }

    fn bash_tool() -> Value {
        json!({"function": {"name": "bash", "parameters": {
            "type": "object", "properties": {"command": {"type": "string"}, "id": {"type": "string"}},
        }}})
    }

    fn bash(command: &str) -> Action {
        Action { name: "bash".to_owned(), arguments: json!({"command": command}) }
    }

    /// A call as the template of Qwen3-Coder writes it.
    fn call(command: &str) -> String {
        show(XML_TEMPLATE, &[bash(command)])
    }

    #[test]
    fn invalid_calls_are_named() {
        let read = |body: &str| {
            let text = format!("{OPEN}\n{body}\n{CLOSE}");
            ToolFormat::Xml.read(&text, &[]).map(|mut read| read.calls.remove(0).arguments)
        };
        for (body, problem) in [
            ("{}", "does not begin"),
            ("<function=f", "not closed"),
            ("<function=f>", "does not end"),
            ("<function=f>x</function>", "text outside"),
            ("<function=f><parameter=a>1</function>", "no </parameter>"),
            (
                "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
                "twice",
            ),
            ("<function=f><parameter=a>1<parameter=b>2</parameter></function>", "contains a tag"),
            ("<function=f></function></function>", "does not follow"),
            ("<function=f></function>\n</tool_call>\n</function>", "follows a call"),
        ] {
            let error = read(body).unwrap_err().to_string();
            assert!(error.contains(problem), "{body}: {error}");
        }
        let compact = "<function=f><parameter=a>1</parameter><parameter=b>x</parameter></function>";
        assert_eq!(read(compact), Ok(json!({"a": 1, "b": "x"})));
        for format in ToolFormat::ALL {
            assert_eq!(format.read("a<tool_call>b", &[]), Err(Unread::Unclosed));
        }
    }

    #[test]
    fn a_call_may_begin_without_its_opening_tag() {
        let (tagged, content) = (call("ls -la"), "I look at the files first.");
        let bare = tagged.strip_prefix("<tool_call>\n").unwrap();
        let untagged = bare.strip_suffix("\n</tool_call>").unwrap();
        for text in [bare, untagged] {
            for (before, after, number) in [("", "", 1), (content, "\n", 1), (content, bare, 2)] {
                let text = format!("{before}\n\n{text}\n{after}");
                let found = read(ToolFormat::Xml, &text).unwrap();
                assert_eq!(found.calls, vec![bash("ls -la"); number], "{text}");
                assert_eq!(found.content.trim(), before);
                assert_eq!(read(ToolFormat::Json, &text).unwrap().calls, []);
            }
        }
        // Prose about calls.
        for text in ["It is written as <function=bash>, see there.", "`<function=bash>`"] {
            let expected = ReadCalls { content: text.to_owned(), calls: Vec::new() };
            assert_eq!(read(ToolFormat::Xml, text), Ok(expected));
        }
        let other = bare.replace("bash", "other");
        assert!(read(ToolFormat::Xml, &other).unwrap_err().to_string().contains("no such tool"));
        assert_eq!(
            read(ToolFormat::Xml, "<function=bash>\n<parameter=command>"),
            Err(Unread::Unclosed)
        );
    }

    #[test]
    fn replies_of_qwen3_coder_without_its_tags_are_calls_and_prose_is_none() {
        let untagged = "<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>";
        let no_opener = format!("I will list the files first.\n\n{untagged}\n</tool_call>");
        for (text, content) in [
            (no_opener.as_str(), "I will list the files first."),
            (untagged, ""),
            (&format!("<tool_call>\n{untagged}\n</tool_call>"), ""),
        ] {
            let found = read(ToolFormat::Xml, text).unwrap();
            assert_eq!((found.content.as_str(), found.calls), (content, vec![bash("ls -la")]));
        }
        let prose = "The function is called with <function=bash>, as the documentation says. There is \
                     nothing to do.";
        let expected = ReadCalls { content: prose.to_owned(), calls: Vec::new() };
        assert_eq!(read(ToolFormat::Xml, prose), Ok(expected));
    }

    #[test]
    fn quotes_and_carriage_returns_belong_to_names_and_values() {
        let quoted = call("ls").replace("=bash>", "=\"bash\">");
        let other = Action { name: "\"bash\"".to_owned(), arguments: json!({"command": "ls"}) };
        assert_eq!(read(ToolFormat::Xml, &quoted).unwrap().calls, [other]);
        // Without an opening tag, a name that no tool has is refused.
        let bare = quoted.strip_prefix("<tool_call>\n").unwrap();
        let error = read(ToolFormat::Xml, bare).unwrap_err().to_string();
        assert!(error.contains("no such tool"), "{error}");
        let quoted = call("ls").replace("=command>", "=\"command\">");
        let found = read(ToolFormat::Xml, &quoted).unwrap().calls.remove(0);
        assert_eq!(found.arguments, json!({"\"command\"": "ls"}));
        let lines = call("ls").replace('\n', "\r\n");
        assert_eq!(read(ToolFormat::Xml, &lines).unwrap().calls, [bash("\r\nls\r")]);
    }

    #[test]
    fn a_schema_that_allows_a_string_keeps_the_text() {
        let parameters = json!({"type": "object", "properties": {
            "path": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": null},
            "label": {"oneOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
            "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "mode": {"allOf": [{"type": "string"}]},
            "kind": {"$ref": "#/$defs/Kind"},
            "fixed": {"const": "5"},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
            "$defs": {"Kind": {"type": "string", "enum": ["1", "2"]}}, "required": ["path"]});
        let tool =
            json!({"type": "function", "function": {"name": "edit", "parameters": parameters}});
        let package = "{\"name\": \"x\", \"version\": 1}\n";
        for (key, text, right) in [
            ("content", package, json!(package)),
            ("content", "12", json!("12")),
            ("content", "true", json!("true")),
            ("content", "null", Value::Null),
            ("content", "[1, 2]", json!("[1, 2]")),
            ("label", "007", json!("007")),
            ("label", "7", json!("7")),
            ("line", "12", json!(12)),
            ("line", "null", Value::Null),
            ("mode", "1", json!("1")),
            ("kind", "1", json!("1")),
            ("fixed", "5", json!("5")),
            ("either", "12", json!("12")),
        ] {
            let text = format!(
                "<tool_call>\n<function=edit>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n\
                 </tool_call>"
            );
            let tools = std::slice::from_ref(&tool);
            let found = ToolFormat::Xml.read(&text, tools).unwrap().calls.remove(0);
            assert_eq!(found.arguments, json!({key: right}), "{text}");
        }
    }

    #[test]
    fn a_value_that_quotes_a_call_is_one_value() {
        for quoted in [call("rm -rf build"), format!("# Calls\n\n{}\n", call(&call("ls")))] {
            for text in [call(&quoted), format!("{}\n{}\n", call(&quoted), call("ls"))] {
                assert_eq!(read(ToolFormat::Xml, &text).unwrap().calls[0], bash(&quoted), "{text}");
            }
        }
    }

    #[test]
    fn a_value_that_may_have_ended_elsewhere_is_refused() {
        let open = "<tool_call>\n<function=bash>\n<parameter=command>\n";
        let close = "\n</parameter>\n</function>\n</tool_call>";
        let end = "\n</parameter>\n";
        for (text, problem) in [
            // The first call may lack </function>, or quote the beginning of the second one.
            (format!("{open}ls{end}</tool_call>\n{open}pwd{close}"), "part of a call"),
            (format!("{open}ls\n{open}pwd{close}"), "part of a call"),
            (format!("{open}ls\n<parameter=id>\n1{close}"), "part of a call"),
            // The value may go on, or be followed by something that does not exist.
            (format!("{open}ls{end}<parameter=other>\n1{close}"), "not declared"),
            (format!("{open}ls{close}\n{}", call("x").replace("bash", "other")), "no such tool"),
            (format!("{open}ls{end}<parameter=command>\n1{close}"), "twice"),
            (format!("{open}ls{close}{close}{}", call("ls")), "part of a call"),
            (format!("{open}ls{close}\n</function>\nDone."), "follows a call"),
        ] {
            let error = read(ToolFormat::Xml, &text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    fn arguments() -> impl Strategy<Value = Value> {
        let list = prop::collection::vec("[a-z \"]{0,8}", 0..3);
        (text(), any::<i64>(), any::<bool>(), list).prop_map(|(text, number, flag, list)| {
            json!({"text": text, "number": number, "flag": flag, "list": list, "object": {"k": list}})
        })
    }

    /// Texts with tags, whole and in pieces, in every order.
    fn text() -> impl Strategy<Value = String> {
        let tags = [
            OPEN,
            CLOSE,
            "<think>",
            "</think>",
            "<function=probe>",
            "<function=other>",
            "</function>",
            "<parameter=text>",
            "<parameter=number>",
            "<parameter=other>",
            "</parameter>",
            "<",
            "\n",
            "\n",
            "{\"name\": \"probe\", \"arguments\": {}}",
            "\"",
            "\\",
            "\u{2028}",
            "\0",
        ];
        let piece = prop_oneof![
            2 => prop::sample::select(tags.to_vec()).prop_map(str::to_owned),
            1 => "\\PC{0,6}",
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn prop_rendered_calls_survive_a_round_trip(arguments in prop::collection::vec(arguments(), 1..4)) {
            let tools = [probe_tool()];
            let calls: Vec<Action> = arguments
                .into_iter()
                .map(|arguments| Action { name: "probe".to_owned(), arguments })
                .collect();
            let text = show(JSON_TEMPLATE, &calls);
            prop_assert_eq!(ToolFormat::Json.read(&text, &tools).map(|read| read.calls), Ok(calls.clone()));
            // In XML, the same text may also be what other calls are rendered as.
            let text = show(XML_TEMPLATE, &calls);
            match ToolFormat::Xml.read(&text, &tools) {
                Ok(read) => prop_assert_eq!(show(XML_TEMPLATE, &read.calls), text),
                Err(problem) => prop_assert!(text.contains("\n<parameter=") || text.contains("\n<function="), "{problem}"),
            }
        }

        #[test]
        fn prop_any_text_without_a_whole_tag_line_survives(text in text()) {
            let tags = ["<function=", "<parameter="];
            prop_assume!(!text.split('\n').any(|line| {
                line == "</function>" || tags.iter().any(|tag| line.starts_with(tag))
            }));
            for format in ToolFormat::ALL {
                let call = bash(&text);
                let template = if format == ToolFormat::Json { JSON_TEMPLATE } else { XML_TEMPLATE };
                let shown = format!("Look: {}", show(template, std::slice::from_ref(&call)));
                prop_assert_eq!(read(format, &shown).map(|read| read.calls), Ok(vec![call]));
            }
        }
    }
}
