//! Messages and content blocks.

use crate::content::{self, TextOr, join, only_text};
use crate::message::{History, Message, Role, ToolCall};
use crate::opaque::signed;
use crate::problem::Problem;
use serde::Deserialize;
use serde_json::{Map, Value};

/// What begins a system block that identifies the client's version. It is not meant for the model
/// and would make histories of two versions differ.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

#[derive(Debug, Deserialize)]
pub(super) struct MessageParam {
    role: String,
    content: TextOr<Block>,
}

/// A content block: the fields of all types.
#[derive(Debug, Deserialize)]
pub(super) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    signature: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[serde(default, deserialize_with = "content::unique")]
    input: Option<Value>,
    tool_use_id: Option<String>,
    content: Option<TextOr<Block>>,
    tool_name: Option<String>,
}

impl Block {
    fn into_text(self, at: &str) -> Result<String, Problem> {
        match self.kind.as_str() {
            "text" => {
                refuse_misplaced(self.thinking.as_deref(), &format!("{at}.thinking"))?;
                let missing = || Problem::field(format!("{at}.text"), "a text block has a text");
                self.text.ok_or_else(missing)
            }
            // In results of a search for tools.
            "tool_reference" => Ok(self.tool_name.unwrap_or_default()),
            kind => Err(only_text(format!("{at}.type"), kind)),
        }
    }
}

/// Refuses a text that blocks of this type do not have: the model would not read it.
fn refuse_misplaced(text: Option<&str>, at: &str) -> Result<(), Problem> {
    match text {
        None | Some("") => Ok(()),
        Some(_) => Err(Problem::field(at, "a block of this type has no such field")),
    }
}

/// The text of blocks that hold text alone.
fn text(content: Option<TextOr<Block>>, at: &str) -> Result<Vec<String>, Problem> {
    match content {
        None => Ok(Vec::new()),
        Some(TextOr::Text(text)) => Ok(vec![text]),
        Some(TextOr::List(blocks)) => {
            let blocks = blocks.into_iter().enumerate();
            blocks.map(|(index, block)| block.into_text(&format!("{at}[{index}]"))).collect()
        }
    }
}

/// The system prompt.
pub(super) fn system(content: Option<TextOr<Block>>, at: &str) -> Result<String, Problem> {
    let mut texts = text(content, at)?;
    texts.retain(|text| !text.starts_with(BILLING_HEADER));
    Ok(join(texts, "\n"))
}

/// Appends a message. Consecutive messages of one role are one turn.
pub(super) fn append(
    history: &mut History,
    message: MessageParam,
    at: &str,
) -> Result<(), Problem> {
    let within = format!("{at}.content");
    match message.role.as_str() {
        "user" => user(history, message.content, &within),
        "assistant" => assistant(history, message.content, &within),
        // Clients add instructions in the middle of a conversation.
        "system" => {
            check_given(&message.content, &within)?;
            let text = system(Some(message.content), &within)?;
            history.push(Message::new(Role::System, text));
            Ok(())
        }
        _ => {
            let expected = "must be `user`, `assistant` or `system`";
            Err(Problem::field(format!("{at}.role"), expected))
        }
    }
}

/// Refuses a message without a content, as the vendor's own API does. Replies may be empty there only at the
/// end, but one that the policy sampled here may be anywhere.
fn check_given(content: &TextOr<Block>, at: &str) -> Result<(), Problem> {
    let is_empty = match content {
        TextOr::Text(text) => text.is_empty(),
        TextOr::List(blocks) => blocks
            .iter()
            .all(|block| block.kind == "text" && block.text.as_ref().is_some_and(String::is_empty)),
    };
    if is_empty { Err(Problem::field(at, "must not be empty")) } else { Ok(()) }
}

/// Results of tools come before the text, wherever the client put them.
fn user(history: &mut History, content: TextOr<Block>, at: &str) -> Result<(), Problem> {
    check_given(&content, at)?;
    let blocks = match content {
        TextOr::Text(text) => {
            push_user(history, text);
            return Ok(());
        }
        TextOr::List(blocks) => blocks,
    };
    let mut texts = Vec::new();
    let mut results = false;
    for (index, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{index}]");
        if block.kind != "tool_result" {
            texts.push(block.into_text(&at)?);
            continue;
        }
        let missing = || Problem::field(format!("{at}.tool_use_id"), "this field is required");
        let id = block.tool_use_id.ok_or_else(missing)?;
        refuse_misplaced(block.text.as_deref(), &format!("{at}.text"))?;
        let text = join(text(block.content, &format!("{at}.content"))?, "\n");
        history.push(Message::tool(id, text));
        results = true;
    }
    let text = join(texts, "\n");
    if !(results && text.is_empty()) {
        push_user(history, text);
    }
    Ok(())
}

fn push_user(history: &mut History, text: String) {
    match history.last_of(Role::User) {
        Some(last) => last.content = join(vec![std::mem::take(&mut last.content), text], "\n"),
        None => history.push(Message::new(Role::User, text)),
    }
}

fn assistant(history: &mut History, content: TextOr<Block>, at: &str) -> Result<(), Problem> {
    // Also where it has no block.
    history.assistant(|_| {});
    let blocks = match content {
        TextOr::Text(text) => {
            history.assistant(|message| message.content.push_str(&text));
            return Ok(());
        }
        TextOr::List(blocks) => blocks,
    };
    for (index, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{index}]");
        match block.kind.as_str() {
            "thinking" => {
                let reply = block.signature.as_deref().and_then(signed);
                history.reasoning(&block.thinking.unwrap_or_default(), reply);
            }
            // Made by another server: the model that is served here did not write it.
            "redacted_thinking" => {}
            "tool_use" => {
                let call = block.into_call(&at)?;
                history.assistant(|message| message.tool_calls.push(call));
            }
            _ => {
                let text = block.into_text(&at)?;
                history.assistant(|message| message.content.push_str(&text));
            }
        }
    }
    Ok(())
}

impl Block {
    fn into_call(self, at: &str) -> Result<ToolCall, Problem> {
        let missing =
            |field: &str| Problem::field(format!("{at}.{field}"), "this field is required");
        let arguments = match self.input {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(input)) => input,
            Some(_) => return Err(Problem::field(format!("{at}.input"), "must be an object")),
        };
        Ok(ToolCall {
            id: self.id.ok_or_else(|| missing("id"))?,
            name: self.name.ok_or_else(|| missing("name"))?,
            arguments: Value::Object(arguments).to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opaque::signature;
    use serde_json::json;

    fn history(messages: Value) -> Result<Vec<Message>, Problem> {
        let messages: Vec<MessageParam> = serde_json::from_value(messages).unwrap();
        let mut history = History::default();
        for (index, message) in messages.into_iter().enumerate() {
            append(&mut history, message, &format!("messages[{index}]"))?;
        }
        Ok(history.finish())
    }

    #[test]
    fn blocks_become_messages_with_results_before_text() {
        let found = history(json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": signature(7)},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
                {"type": "tool_use", "id": "t2", "name": "ls"}]},
            {"role": "user", "content": [
                {"type": "text", "text": "and now?"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [
                    {"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": true}]},
        ]));
        let call = |id: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: "ls".into(),
            arguments: arguments.into(),
        };
        let assistant = Message {
            reasoning: Some("hm".into()),
            reply: Some(7),
            tool_calls: vec![call("t1", r#"{"path":"."}"#), call("t2", "{}")],
            ..Message::new(Role::Assistant, "I look.")
        };
        let user = |text: &str| Message::new(Role::User, text);
        let results = [Message::tool("t2", "x\ny"), Message::tool("t1", "")];
        let [second, first] = results;
        assert_eq!(found.unwrap(), [user("a"), assistant, second, first, user("and now?")]);
    }

    #[test]
    fn the_same_history_in_other_blocks_is_equal() {
        let one = history(json!([
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "cd"},
            {"role": "system", "content": "e"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
        ]));
        let other = history(json!([
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
            {"role": "system", "content": [{"type": "text", "text": "e"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": false,
                "content": [{"type": "text", "text": "r"}]}]},
        ]));
        assert_eq!(one.unwrap(), other.unwrap());
    }

    #[test]
    fn an_empty_reply_that_comes_back_stays_in_the_history() {
        let found = history(json!([{"role": "assistant", "content": []}])).unwrap();
        assert_eq!(found, [Message::new(Role::Assistant, "")]);
    }

    #[test]
    fn an_empty_message_is_refused_and_named() {
        let empty = json!({"type": "text", "text": ""});
        for role in ["user", "system"] {
            for content in [json!([]), json!(""), json!([empty]), json!([empty, empty])] {
                let messages =
                    json!([{"role": "user", "content": "a"}, {"role": role, "content": content}]);
                let problem = history(messages).unwrap_err();
                assert_eq!(problem.field.as_deref(), Some("messages[1].content"), "{content}");
            }
        }
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": []});
        let found = history(json!([{"role": "user", "content": [result, empty]}])).unwrap();
        assert_eq!(found, [Message::tool("t", "")]);
    }

    #[test]
    fn other_content_is_refused_and_named() {
        for (block, field) in [
            (json!({"type": "image", "source": {}}), "messages[0].content[0].type"),
            (json!({"type": "document", "source": {}}), "messages[0].content[0].type"),
            (json!({"type": "text"}), "messages[0].content[0].text"),
            (
                json!({"type": "text", "text": "a", "thinking": "b"}),
                "messages[0].content[0].thinking",
            ),
            (
                json!({"type": "tool_result", "tool_use_id": "t", "text": "a"}),
                "messages[0].content[0].text",
            ),
            (json!({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
            (
                json!({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
                "messages[0].content[0].content[0].type",
            ),
        ] {
            let problem = history(json!([{"role": "user", "content": [block]}])).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field));
        }
        let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]);
        let problem = history(json!([{"role": "assistant", "content": call}])).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("messages[0].content[0].input"));
    }
}
