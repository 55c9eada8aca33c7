//! The formats in which models write tool calls.
//!
//! A format is used only if the chat template renders calls in exactly this format:
//! [`ToolFormat::of`] renders probe calls and reads them back.

use crate::api::Action;
use serde_json::{Map, Value, json};

pub(crate) const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";

/// A format of tool calls. Each call is between `<tool_call>` tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolFormat {
    /// `{"name": …, "arguments": {…}}`: Hermes, Qwen 2.5, Qwen 3.
    #[default]
    Json,
    /// `<function=NAME>` with a `<parameter=KEY>` for each argument: Qwen3-Coder, Qwen 3.5,
    /// Nemotron 3. Strings are not quoted, so the tool's schema decides which values are strings.
    Xml,
}

/// A part of a reply.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece<'a> {
    /// Text outside calls.
    Text(&'a str),
    /// A call, or why the text between the tags is not one.
    Call(Result<Action, String>),
    /// A call without a closing tag.
    Unclosed,
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
        let exact = |format: &Self| {
            let read = format.read(&text, &tools);
            let read = read.into_iter().filter(|piece| !matches!(piece, Piece::Text(_)));
            read.eq(calls.iter().cloned().map(|call| Piece::Call(Ok(call))))
        };
        Ok(Self::ALL.into_iter().find(exact))
    }

    /// Splits a text at its calls. `tools` are the JSON schemas that chat templates get.
    pub(crate) fn read<'a>(self, text: &'a str, tools: &[Value]) -> Vec<Piece<'a>> {
        let (mut pieces, mut rest) = (Vec::new(), text);
        while let Some((before, after)) = rest.split_once(OPEN) {
            pieces.push(Piece::Text(before));
            let Some((body, after)) = after.split_once(CLOSE) else {
                pieces.push(Piece::Unclosed);
                return pieces;
            };
            pieces.push(Piece::Call(match self {
                Self::Json => serde_json::from_str(body.trim()).map_err(|e| e.to_string()),
                Self::Xml => xml(body.trim(), tools),
            }));
            rest = after;
        }
        pieces.push(Piece::Text(rest));
        pieces
    }
}

/// Reads `<function=NAME> <parameter=KEY>…</parameter> … </function>`.
fn xml(body: &str, tools: &[Value]) -> Result<Action, String> {
    let inside = body.strip_prefix(FUNCTION).ok_or("it does not begin with <function=NAME>")?;
    let (name, inside) = inside.split_once('>').ok_or("<function=NAME> is not closed")?;
    let inside = inside.strip_suffix(END_FUNCTION).ok_or("it does not end with </function>")?;
    let schema = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let mut schema = schema.filter(|tool| tool.get("name").and_then(Value::as_str) == Some(name));
    let schema = schema.find_map(|tool| tool.pointer("/parameters/properties"));
    let (mut arguments, mut rest) = (Map::new(), inside.trim_start());
    while !rest.is_empty() {
        let parameter = rest.strip_prefix(PARAMETER).ok_or("text outside a <parameter=KEY>")?;
        let (key, after) = parameter.split_once('>').ok_or("<parameter=KEY> is not closed")?;
        let (value, after) =
            after.split_once(END_PARAMETER).ok_or("a parameter has no </parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let declared = schema.and_then(|properties| properties.get(key));
        if arguments.insert(key.to_owned(), typed(value, declared)).is_some() {
            return Err(format!("the parameter {key} occurs twice"));
        }
        rest = after.trim_start();
    }
    Ok(Action { name: name.to_owned(), arguments: Value::Object(arguments) })
}

/// Reads a value by its declared type: a string as it is, everything else as JSON. A value that
/// does not match its type, or has none declared, is read as JSON if that is possible, else as a
/// string.
fn typed(value: &str, declared: Option<&Value>) -> Value {
    let is = |name: &str| declared.is_some_and(|schema| allows(schema, name));
    let kind = declared.and_then(|schema| schema.get("type"));
    if is("string") || declared.is_some_and(|schema| schema.get("enum").is_some() && kind.is_none())
    {
        return if is("null") && value == "null" { Value::Null } else { Value::from(value) };
    }
    // Python's spelling, which some templates write.
    let value = match value {
        "True" if is("boolean") => "true",
        "False" if is("boolean") => "false",
        "None" if is("null") => "null",
        value => value,
    };
    serde_json::from_str(value).unwrap_or_else(|_| Value::from(value))
}

/// Whether a schema allows values of a type, by itself or as one of its alternatives.
fn allows(schema: &Value, kind: &str) -> bool {
    let by_type = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|other| other == kind),
        Some(other) => other == kind,
        None => false,
    };
    let mut alternatives =
        ["anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
    by_type || alternatives.any(|schema| allows(schema, kind))
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

fn probe_tool() -> Value {
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

    #[test]
    fn invalid_calls_are_named() {
        let read = |body: &str| {
            let text = format!("{OPEN}\n{body}\n{CLOSE}");
            let pieces = ToolFormat::Xml.read(&text, &[]);
            match pieces.into_iter().nth(1) {
                Some(Piece::Call(call)) => call.map(|call| call.arguments),
                piece => panic!("{piece:?}"),
            }
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
        ] {
            assert!(read(body).unwrap_err().contains(problem), "{body}");
        }
        let compact = "<function=f><parameter=a>1</parameter><parameter=b>x</parameter></function>";
        assert_eq!(read(compact), Ok(json!({"a": 1, "b": "x"})));
        assert_eq!(ToolFormat::Xml.read("a<tool_call>b", &[]), [Piece::Text("a"), Piece::Unclosed]);
    }

    #[test]
    fn declared_types_decide() {
        for (kind, value, expected) in [
            (json!("string"), "12", json!("12")),
            (json!("integer"), "12", json!(12)),
            (json!("boolean"), "True", json!(true)),
            (json!(["string", "null"]), "null", Value::Null),
            (json!("number"), "many", json!("many")),
            (json!("object"), "{\"a\": 1}", json!({"a": 1})),
        ] {
            assert_eq!(typed(value, Some(&json!({"type": kind}))), expected, "{kind} {value}");
        }
        // An optional argument, as Python's SDK of tool servers declares it.
        let optional = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
        assert_eq!(typed("12", Some(&optional)), json!("12"));
        assert_eq!(typed("null", Some(&optional)), Value::Null);
        assert_eq!(typed("yes", Some(&json!({"enum": ["yes", "1"]}))), json!("yes"));
        assert_eq!(typed("1.5", None), json!(1.5));
    }

    fn arguments() -> impl Strategy<Value = Value> {
        // A text that closes a tag cannot be written in these formats.
        let text = "[^<\r]{0,40}".prop_filter("", |text| !text.contains("</"));
        (text, any::<i64>(), any::<bool>(), prop::collection::vec("[a-z \"]{0,8}", 0..3)).prop_map(
            |(text, number, flag, list)| {
                json!({"text": text, "number": number, "flag": flag, "list": list, "object": {"k": list}})
            },
        )
    }

    proptest! {
        #[test]
        fn prop_rendered_calls_survive_a_round_trip(arguments in prop::collection::vec(arguments(), 1..4)) {
            let tools = [probe_tool()];
            let calls: Vec<Action> = arguments
                .into_iter()
                .map(|arguments| Action { name: "probe".to_owned(), arguments })
                .collect();
            for (template, format) in [(JSON_TEMPLATE, ToolFormat::Json), (XML_TEMPLATE, ToolFormat::Xml)] {
                let text = show(template, &calls);
                let read: Vec<Action> = format
                    .read(&text, &tools)
                    .into_iter()
                    .filter_map(|piece| match piece {
                        Piece::Call(call) => Some(call.unwrap()),
                        Piece::Text(_) | Piece::Unclosed => None,
                    })
                    .collect();
                prop_assert_eq!(&read, &calls);
                prop_assert_eq!(show(template, &read), text);
            }
        }
    }
}
