//! A sampled reply, split into the parts that agents read: thinking, text and tool calls.
//!
//! Thinking is everything up to `</think>`; calls are in the [`ToolFormat`] of the model.

use crate::api::{Action, Message};
use crate::tool_format::{Piece, ToolFormat};
use serde_json::Value;

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// The parts of a reply.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ReplyParts {
    pub(crate) reasoning: Option<String>,
    pub(crate) content: String,
    pub(crate) calls: Vec<Action>,
}

impl ReplyParts {
    /// Splits the text of a reply. A call that is not closed or not valid stays in the text, together
    /// with all others: an agent must not perform half of what the policy wrote.
    pub(crate) fn parse(format: ToolFormat, tools: &[Value], text: &str) -> Self {
        let (reasoning, rest) = match text.split_once(END_THINK) {
            Some((thinking, rest)) => {
                let thinking = thinking.trim_start().strip_prefix(THINK).unwrap_or(thinking);
                (Some(thinking.trim().to_owned()), rest.trim_start_matches('\n'))
            }
            None => (None, text),
        };
        let reasoning = reasoning.filter(|thinking| !thinking.is_empty());
        match calls(format, tools, rest) {
            Some((content, calls)) => Self { reasoning, content, calls },
            None => Self { reasoning, content: rest.to_owned(), calls: Vec::new() },
        }
    }

    /// The message that a later request repeats.
    pub(crate) fn message(&self) -> Message {
        Message {
            role: "assistant".to_owned(),
            content: self.content.clone(),
            tool_calls: self.calls.clone(),
        }
    }
}

/// The text outside the calls, and the calls; `None` if one of them is not valid.
fn calls(format: ToolFormat, tools: &[Value], text: &str) -> Option<(String, Vec<Action>)> {
    let (mut content, mut calls) = (String::new(), Vec::new());
    for piece in format.read(text, tools) {
        match piece {
            Piece::Text(text) => content.push_str(text),
            Piece::Call(Ok(call)) if !call.name.is_empty() && call.arguments.is_object() => {
                calls.push(call);
            }
            Piece::Call(_) | Piece::Unclosed => return None,
        }
    }
    if !calls.is_empty() {
        content.truncate(content.trim_end().len());
    }
    Some((content, calls))
}

/// The text before the first stop string, and that string.
pub(super) fn first_stop<'a>(text: &'a str, stops: &'a [String]) -> Option<(&'a str, &'a str)> {
    let found = stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
    let (at, stop) = found.min_by_key(|(at, _)| *at)?;
    Some((text.get(..at)?, stop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(text: &str) -> ReplyParts {
        ReplyParts::parse(ToolFormat::Json, &[], text)
    }

    fn call(name: &str, arguments: serde_json::Value) -> Action {
        Action { name: name.to_owned(), arguments }
    }

    #[test]
    fn thinking_text_and_calls_are_separated() {
        let text = "<think>\nhm\n</think>\n\nLook.\n<tool_call>\n{\"name\": \"bash\", \"arguments\": \
                    {\"command\": \"ls\"}}\n</tool_call>\n<tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call>";
        let parts = parse(text);
        let calls = vec![call("bash", json!({"command": "ls"})), call("submit", json!({}))];
        let expected =
            ReplyParts { reasoning: Some("hm".to_owned()), content: "Look.".to_owned(), calls };
        assert_eq!(parts, expected);
        // The template opened the thinking.
        assert_eq!(parse("hm</think>yes").reasoning.as_deref(), Some("hm"));
        assert_eq!(parse("<think>\n\n</think>\n\nyes").reasoning, None);
        assert_eq!(parse("plain\n").content, "plain\n");
    }

    #[test]
    fn an_invalid_call_leaves_the_whole_text() {
        for body in [
            "<tool_call>{\"name\": \"bash\"",
            "<tool_call>{'name'}</tool_call>",
            "<tool_call>{\"name\": \"bash\", \"arguments\": \"ls\"}</tool_call>",
            "<tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call><tool_call>",
        ] {
            let parts = parse(body);
            assert_eq!((parts.content.as_str(), parts.calls.len()), (body, 0));
        }
    }
}
