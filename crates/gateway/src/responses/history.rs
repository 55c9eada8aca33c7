//! Input items.

use super::tools::{custom_arguments, flat_name};
use crate::content::{self, Part, TextOr, text_given, text_of};
use crate::message::{History, Message, Role, ToolCall};
use crate::opaque::decoded;
use crate::problem::Problem;
use serde::Deserialize;
use serde_json::Value;

/// An input item: the fields of all types.
#[derive(Debug, Deserialize)]
pub(super) struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<TextOr<Part>>,
    summary: Option<TextOr<Part>>,
    encrypted_content: Option<String>,
    call_id: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    /// Text in calls of functions; objects in items of other types.
    #[serde(default, deserialize_with = "content::unique")]
    arguments: Option<Value>,
    #[serde(default, deserialize_with = "content::unique")]
    input: Option<Value>,
    #[serde(default, deserialize_with = "content::unique")]
    output: Option<Value>,
}

/// Appends an item. The items of one reply, up to the next result or message, are one message.
pub(super) fn append(history: &mut History, item: Item, at: &str) -> Result<(), Problem> {
    let kind = item.kind.clone().unwrap_or_else(|| "message".to_owned());
    match kind.as_str() {
        "message" => message(history, item, at),
        "reasoning" => reasoning(history, item, at),
        "function_call" | "custom_tool_call" => {
            let call = item.into_call(kind == "custom_tool_call", at)?;
            history.assistant(|message| message.tool_calls.push(call));
            Ok(())
        }
        "function_call_output" | "custom_tool_call_output" => {
            let missing =
                |field: &str| Problem::field(format!("{at}.{field}"), "this field is required");
            let call = item.call_id.ok_or_else(|| missing("call_id"))?;
            let result = item.output.ok_or_else(|| missing("output"))?;
            history.push(Message::tool(call, output(result, &format!("{at}.output"))?));
            Ok(())
        }
        "item_reference" => {
            let why = "items are not stored by their ids; send the item itself";
            Err(Problem::unsupported(format!("{at}.type"), "`item_reference`", why))
        }
        kind => {
            let what = format!("an item of type `{}`", kind.chars().take(64).collect::<String>());
            let why =
                "the model reads messages, reasoning, and calls of functions and their results";
            Err(Problem::unsupported(format!("{at}.type"), &what, why))
        }
    }
}

fn message(history: &mut History, item: Item, at: &str) -> Result<(), Problem> {
    let role = match item.role.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        _ => {
            let expected = "must be `system`, `developer`, `user` or `assistant`";
            return Err(Problem::field(format!("{at}.role"), expected));
        }
    };
    let separator = if role == Role::Assistant { "" } else { "\n" };
    let text_of = if role == Role::Assistant { text_of } else { text_given };
    let text = text_of(item.content, &format!("{at}.content"), separator)?;
    if role == Role::Assistant {
        history.assistant(|message| message.content.push_str(&text));
    } else {
        history.push(Message::new(role, text));
    }
    Ok(())
}

/// Reasoning comes first in a reply: after content or calls it begins the next one.
fn reasoning(history: &mut History, item: Item, at: &str) -> Result<(), Problem> {
    let own = item.encrypted_content.as_deref().and_then(decoded);
    let (reply, own) = own.unzip();
    let text = match own {
        Some(text) => text,
        None => match text_of(item.content, &format!("{at}.content"), "")? {
            text if text.is_empty() => text_of(item.summary, &format!("{at}.summary"), "\n")?,
            text => text,
        },
    };
    let begun = |last: &mut Message| !last.content.is_empty() || !last.tool_calls.is_empty();
    if history.last_of(Role::Assistant).is_some_and(begun) {
        history.push(Message::new(Role::Assistant, ""));
    }
    history.reasoning(&text, reply);
    Ok(())
}

/// The text of a call's result.
fn output(output: Value, at: &str) -> Result<String, Problem> {
    match output {
        value @ (Value::String(_) | Value::Array(_)) => {
            let parsed = serde_path_to_error::deserialize::<_, TextOr<Part>>(value);
            let content = parsed
                .map_err(|error| Problem::field(format!("{at}{}", error.path()), error.inner()))?;
            text_of(Some(content), at, "\n")
        }
        _ => Err(Problem::field(at, "must be a string or a list of parts")),
    }
}

impl Item {
    fn into_call(self, is_custom: bool, at: &str) -> Result<ToolCall, Problem> {
        let missing =
            |field: &str| Problem::field(format!("{at}.{field}"), "this field is required");
        let field = if is_custom { "input" } else { "arguments" };
        let text = match if is_custom { self.input } else { self.arguments } {
            None => return Err(missing(field)),
            Some(Value::String(text)) => text,
            Some(_) => return Err(Problem::field(format!("{at}.{field}"), "must be a string")),
        };
        let name = self.name.ok_or_else(|| missing("name"))?;
        Ok(ToolCall {
            id: self.call_id.ok_or_else(|| missing("call_id"))?,
            name: flat_name(self.namespace.as_deref(), &name),
            arguments: if is_custom { custom_arguments(&text) } else { text },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opaque::encoded;
    use serde_json::json;

    fn history(items: Value) -> Result<Vec<Message>, Problem> {
        let items: Vec<Item> = serde_json::from_value(items).unwrap();
        let mut history = History::default();
        for (index, item) in items.into_iter().enumerate() {
            append(&mut history, item, &format!("input[{index}]"))?;
        }
        Ok(history.finish())
    }

    #[test]
    fn the_items_of_a_reply_are_one_message() {
        let found = history(json!([
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "id": "m0", "role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "short"}],
                "content": null, "encrypted_content": encoded(7, "hm\n é")},
            {"type": "message", "id": "m1", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "id": "f1", "call_id": "c1", "namespace": "n", "name": "ls",
                "arguments": "{ }", "status": "completed"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** x"},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "y"}]},
            {"type": "reasoning", "id": "r2", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "message", "role": "assistant", "content": "Done."},
            {"type": "reasoning", "id": "r3", "summary": [], "encrypted_content": "gAAAA-foreign"},
        ]))
        .unwrap();
        let roles: Vec<Role> = found.iter().map(|message| message.role).collect();
        let assistant = Role::Assistant;
        let expected =
            [Role::System, Role::User, assistant, Role::Tool, Role::Tool, assistant, assistant];
        assert_eq!(roles, expected);
        assert_eq!(found[1].content, "a\nb");
        assert_eq!(found[2].reasoning.as_deref(), Some("hm\n é"));
        assert_eq!((found[2].content.as_str(), found[2].reply), ("I look.", Some(7)));
        let [ls, patch] = found[2].tool_calls.as_slice() else { panic!("two calls") };
        assert_eq!((ls.name.as_str(), ls.arguments.as_str()), ("n__ls", "{ }"));
        assert_eq!(patch.arguments, r#"{"input":"*** x"}"#);
        assert_eq!(found[4], Message::tool("c2", "y"));
        assert_eq!((found[5].reasoning.as_deref(), found[5].reply), (Some("so"), None));
        assert_eq!((found[5].content.as_str(), &found[6].reasoning), ("Done.", &None));
    }

    #[test]
    fn other_items_are_refused_and_named() {
        for (item, field) in [
            (json!({"type": "item_reference", "id": "x"}), "input[0].type"),
            (json!({"type": "local_shell_call", "action": {}}), "input[0].type"),
            (json!({"type": "tool_search_call", "arguments": {}}), "input[0].type"),
            (json!({"role": "tool", "content": "a"}), "input[0].role"),
            (json!({"role": "user", "content": []}), "input[0].content"),
            (json!({"role": "user"}), "input[0].content"),
            (json!({"type": "message", "role": "developer", "content": null}), "input[0].content"),
            (
                json!({"role": "user", "content": [{"type": "input_image"}]}),
                "input[0].content[0].type",
            ),
            (json!({"type": "function_call", "name": "f", "arguments": ""}), "input[0].call_id"),
            (
                json!({"type": "function_call", "name": "f", "call_id": "c", "input": "{}"}),
                "input[0].arguments",
            ),
            (
                json!({"type": "custom_tool_call", "name": "f", "call_id": "c", "arguments": "{}"}),
                "input[0].input",
            ),
            (
                json!({"type": "function_call_output", "call_id": "c", "content": "a"}),
                "input[0].output",
            ),
            (
                json!({"type": "custom_tool_call_output", "call_id": "c", "output": null}),
                "input[0].output",
            ),
            (
                json!({"type": "function_call", "name": "f", "call_id": "c", "arguments": {}}),
                "input[0].arguments",
            ),
            (
                json!({"type": "function_call_output", "call_id": "c", "output": 3}),
                "input[0].output",
            ),
            (
                json!({"type": "function_call_output", "call_id": "c", "output": [{"text": 3}]}),
                "input[0].output[0].text",
            ),
            (
                json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
                "input[0].output[0].type",
            ),
            (json!({"type": "function_call_output", "output": "a"}), "input[0].call_id"),
        ] {
            let problem = history(json!([item])).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field), "{}", problem.message);
        }
    }
}
