//! The internal form of a history, equal for equal histories of every dialect.

use orchestrate_types::mended_json;
use serde_json::Value;

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions: `system` and `developer`.
    System,
    /// The user, or the agent in the user's name.
    User,
    /// The model.
    Assistant,
    /// The result of one tool call.
    Tool,
}

/// A message of a history.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who wrote it.
    pub role: Role,
    /// Its text; several text parts of a request are joined, see the crate's documentation.
    pub content: String,
    /// The model's thinking before the content, where the client sent it back.
    pub reasoning: Option<String>,
    /// Calls of an assistant message, in order.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a [`Role::Tool`] message answers.
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message with text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }

    /// The result of the call `id`.
    pub fn tool(id: impl Into<String>, content: impl Into<String>) -> Self {
        Self { tool_call_id: Some(id.into()), ..Self::new(Role::Tool, content) }
    }
}

/// A call of a tool. Two calls are equal if their arguments are equal as JSON, or as text where
/// one of them is not valid JSON.
#[derive(Clone, Debug)]
pub struct ToolCall {
    /// Names the call in its result.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON text; exactly the client's where the dialect carries text.
    pub arguments: String,
}

impl PartialEq for ToolCall {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
            && self.name == other.name
            && (self.arguments == other.arguments
                || matches!((self.parsed(), other.parsed()), (Some(a), Some(b)) if a == b))
    }
}

impl ToolCall {
    /// The arguments as JSON; no text at all means no arguments. `None` if they are not JSON.
    pub fn parsed(&self) -> Option<Value> {
        if self.arguments.trim().is_empty() {
            return Some(Value::Object(serde_json::Map::new()));
        }
        json_of(&self.arguments)
    }
}

/// The value of a JSON text that a client wrote; text in it that is not Unicode becomes U+FFFD.
pub(crate) fn json_of(text: &str) -> Option<Value> {
    let parsed = serde_json::from_str(text);
    parsed.or_else(|_| serde_json::from_slice(&mended_json(text.as_bytes()))).ok()
}

/// Builds a history from dialects whose assistant messages arrive in several items or blocks.
#[derive(Debug, Default)]
pub(crate) struct History {
    messages: Vec<Message>,
}

impl History {
    /// Appends a message.
    pub(crate) fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// The last message if `role` wrote it.
    pub(crate) fn last_of(&mut self, role: Role) -> Option<&mut Message> {
        self.messages.last_mut().filter(|message| message.role == role)
    }

    /// Calls `change` with the assistant message at the end, appended if there is none.
    pub(crate) fn assistant(&mut self, change: impl FnOnce(&mut Message)) {
        if self.last_of(Role::Assistant).is_none() {
            self.push(Message::new(Role::Assistant, ""));
        }
        if let Some(message) = self.last_of(Role::Assistant) {
            change(message);
        }
    }

    /// Appends thinking to the assistant message at the end.
    pub(crate) fn reasoning(&mut self, text: &str) {
        self.assistant(|message| {
            if !text.is_empty() {
                message.reasoning.get_or_insert_default().push_str(text);
            }
        });
    }

    /// The messages, oldest first.
    pub(crate) fn finish(self) -> Vec<Message> {
        self.messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: &str) -> ToolCall {
        ToolCall { id: "c".into(), name: "f".into(), arguments: arguments.into() }
    }

    #[test]
    fn arguments_are_compared_as_json_and_malformed_ones_as_text() {
        assert_eq!(call(r#"{"a": 1, "b": [2]}"#), call(r#"{"b":[2],"a":1}"#));
        assert_eq!(call(""), call("{}"));
        assert_eq!(call("{oops"), call("{oops"));
        assert_ne!(call("{oops"), call("{oops "));
        assert_ne!(call(r#"{"a":1}"#), call(r#"{"a":"1"}"#));
        assert_ne!(call("{}"), ToolCall { id: "d".into(), ..call("{}") });
    }
}
