//! Messages of the OpenAI-compatible chat API (`/v1/chat/completions`).

use serde::{Deserialize, Serialize};

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The message text.
    pub content: String,
    /// Tool calls of an assistant message.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// [`ToolCall::id`] of the call that a tool message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The model's thinking before an assistant message. A client sends it if its settings say so.
    #[serde(skip)]
    pub thinking: Option<Thinking>,
}

/// A model's thinking, and the fields in which the server gave it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Thinking {
    /// `reasoning`.
    pub reasoning: Option<String>,
    /// `reasoning_content`, the older name.
    pub reasoning_content: Option<String>,
}

impl Thinking {
    /// The text; `None` if there is none.
    pub fn text(&self) -> Option<&str> {
        let texts = [self.reasoning.as_deref(), self.reasoning_content.as_deref()];
        texts.into_iter().flatten().find(|text| !text.is_empty())
    }
}

/// A tool call that the server parsed from the model's output.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// Identifies the call within the conversation.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// The function that a [`ToolCall`] calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the tool.
    pub name: String,
    /// The arguments exactly as the model wrote them: meant to be a JSON object, but not checked.
    pub arguments: String,
}

/// The model's output in one turn, as the server parsed it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AssistantMessage {
    /// The text before the tool calls.
    pub content: String,
    /// The thinking, where the server separates it from the text.
    pub thinking: Option<Thinking>,
    /// The tool calls, where the server separates them from the text.
    pub tool_calls: Vec<ToolCall>,
}
