//! The internal form of a history, equal for equal histories of every dialect.

use crate::problem::Problem;
use orchestrate_types::{exact_json, mended_json};
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
    /// Number of the reply that [`Self::reasoning`] is of, where the client sent back the signature that
    /// names it.
    pub reply: Option<u32>,
    /// Calls of an assistant message, in order.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a [`Role::Tool`] message answers.
    pub tool_call_id: Option<String>,
    /// Name of the user, or of the tool that was called.
    pub name: Option<String>,
}

impl Message {
    /// A message with text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            reply: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Bytes of its texts.
    pub(crate) fn bytes(&self) -> usize {
        let calls = self.tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
        self.content.len() + self.reasoning.as_ref().map_or(0, String::len) + calls.sum::<usize>()
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

/// The value of a JSON text that a client wrote; text in it that is not Unicode becomes U+FFFD. `None` if it
/// is not JSON, or would lose a repeated key or digits of a number.
///
/// Such arguments stay text, as those that are not JSON do, and the request is not refused: a client sends its
/// history again with every request, so refusing it would end the episode over a call that another model made.
/// As text they are shown as they were sent, and are equal to the same text alone. The policy's own calls
/// never have them: a reply in which a call repeats a key has no calls, and comes back as its text.
pub(crate) fn json_of(text: &str) -> Option<Value> {
    let text = text.as_bytes();
    exact_json(text).or_else(|_| exact_json(&mended_json(text))).ok()
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

    /// Appends thinking to the assistant message at the end. `reply` is the number in its signature.
    pub(crate) fn reasoning(&mut self, text: &str, reply: Option<u32>) {
        self.assistant(|message| {
            message.reply = reply;
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

/// A history in which each call is followed by its result: after the message with the calls, in their
/// order. Clients send results of parallel calls as they arrive, and templates show them without their
/// ids. `field` has the history.
///
/// A result belongs to a call of the replies right before it; ids may repeat in other turns.
///
/// # Errors
/// If a call has no result or several, or a result has no call.
pub(crate) fn answered(messages: Vec<Message>, field: &str) -> Result<Vec<Message>, Problem> {
    let mut ordered = Vec::with_capacity(messages.len());
    let mut turn = Turn::default();
    for message in messages {
        match message.role {
            Role::Assistant => {
                if turn.is_followed {
                    std::mem::take(&mut turn).finish(&mut ordered, field)?;
                }
                let results = message.tool_calls.iter().map(|_| None).collect();
                turn.replies.push((message, results));
            }
            Role::Tool => turn.add(message, field)?,
            Role::System | Role::User => {
                turn.is_followed = true;
                turn.others.push(message);
            }
        }
    }
    turn.finish(&mut ordered, field)?;
    Ok(ordered)
}

/// Replies in a row, and what follows them.
#[derive(Debug, Default)]
struct Turn {
    /// Each with the results of its calls.
    replies: Vec<(Message, Vec<Option<Message>>)>,
    others: Vec<Message>,
    /// Whether something follows the replies. A history may end with calls.
    is_followed: bool,
}

impl Turn {
    /// Adds a result.
    fn add(&mut self, result: Message, field: &str) -> Result<(), Problem> {
        self.is_followed = true;
        let id = result.tool_call_id.clone().unwrap_or_default();
        let slots = self.replies.iter_mut().flat_map(|(reply, results)| {
            let ids = reply.tool_calls.iter().map(|call| call.id.as_str());
            ids.zip(results.iter_mut()).collect::<Vec<_>>()
        });
        let (mut known, mut free) = (false, None);
        for (_, slot) in slots.filter(|(call, _)| *call == id) {
            known = true;
            if slot.is_none() {
                free.get_or_insert(slot);
            }
        }
        match free {
            Some(slot) => {
                *slot = Some(result);
                Ok(())
            }
            None if known => {
                Err(Problem::field(field, format!("the call `{id}` has more than one result")))
            }
            None => Err(Problem::field(
                field,
                format!("there is a result for `{id}`, but the reply before it has no such call"),
            )),
        }
    }

    /// Appends the messages in order.
    fn finish(self, ordered: &mut Vec<Message>, field: &str) -> Result<(), Problem> {
        for (reply, results) in self.replies {
            let ids = reply.tool_calls.iter().map(|call| &call.id);
            let open = |(_, result): &(&String, &Option<Message>)| result.is_none();
            if let Some((id, _)) = ids.zip(&results).find(open).filter(|_| self.is_followed) {
                let problem = format!("the call `{id}` has no result; every call needs one");
                return Err(Problem::field(field, problem));
            }
            ordered.push(reply);
            ordered.extend(results.into_iter().flatten());
        }
        ordered.extend(self.others);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ids: &[&str]) -> Message {
        let call = |id: &&str| ToolCall { id: (*id).into(), ..call("{}") };
        Message { tool_calls: ids.iter().map(call).collect(), ..Message::new(Role::Assistant, "") }
    }

    #[test]
    fn arguments_with_a_number_that_would_be_rounded_stay_text() {
        let with = |arguments: &str| ToolCall { arguments: arguments.into(), ..call("{}") };
        let [wide, other] = ["18446744073709551616", "18446744073709551617"];
        let [wide, other] = [wide, other].map(|number| with(&format!("{{\"n\": {number}}}")));
        assert_eq!(wide.parsed(), None);
        assert_ne!(wide, other);
        assert_eq!(with("{\"n\": 1}"), with("{ \"n\":1 }"));
    }

    #[test]
    fn arguments_with_a_repeated_key_stay_text() {
        let with = |arguments: &str| ToolCall { arguments: arguments.into(), ..call("{}") };
        for (text, last) in [
            (r#"{"a": 1, "a": 2}"#, r#"{"a": 2}"#),
            (r#"{"a": 1, "\u0061": 1}"#, r#"{"a": 1}"#),
            (r#"{"b": [{"a": 1, "a": 1}]}"#, r#"{"b": [{"a": 1}]}"#),
            (r#"{"a": "\ud83d", "a": "x"}"#, r#"{"a": "x"}"#),
        ] {
            assert_eq!(with(text).parsed(), None, "{text}");
            assert_eq!(with(text), with(text));
            assert_ne!(with(text), with(last));
        }
    }

    #[test]
    fn results_are_in_the_order_of_their_calls() {
        let user = || Message::new(Role::User, "u");
        let result = |id: &str, text: &str| Message::tool(id, text);
        let in_order = vec![
            user(),
            reply(&["a", "b"]),
            result("a", "1"),
            result("b", "2"),
            user(),
            reply(&["a"]),
            result("a", "3"),
        ];
        let swapped = vec![
            user(),
            reply(&["a", "b"]),
            result("b", "2"),
            user(),
            result("a", "1"),
            reply(&["a"]),
            result("a", "3"),
        ];
        assert_eq!(answered(in_order.clone(), "input").unwrap(), in_order);
        assert_eq!(answered(swapped, "input").unwrap(), in_order);
        let ends_with_calls = vec![user(), reply(&["a", "b"])];
        assert_eq!(answered(ends_with_calls.clone(), "input").unwrap(), ends_with_calls);
        // Two replies in a row, as items of Responses can be.
        let apart = vec![reply(&["a"]), reply(&["b"]), result("b", "2"), result("a", "1"), user()];
        let joined = vec![reply(&["a"]), result("a", "1"), reply(&["b"]), result("b", "2"), user()];
        assert_eq!(answered(apart, "input").unwrap(), joined);
    }

    #[test]
    fn results_without_a_call_and_calls_without_a_result_are_named() {
        let result = |id: &str| Message::tool(id, "x");
        for (history, problem) in [
            (vec![reply(&["a", "b"]), result("b")], "`a` has no result"),
            (vec![reply(&["a"]), Message::new(Role::User, "u")], "`a` has no result"),
            (vec![reply(&["a"]), result("a"), result("x")], "result for `x`"),
            (vec![reply(&["a"]), result("a"), result("a")], "`a` has more than one result"),
            (vec![reply(&["a"]), result("a"), reply(&[]), result("a")], "result for `a`"),
            (vec![result("a")], "result for `a`"),
            // A result of a later turn does not belong to an earlier one.
            (
                vec![reply(&["a"]), result("a"), reply(&["b"]), result("b"), result("a")],
                "result for `a`",
            ),
            (vec![reply(&["a", "a"]), result("a")], "`a` has no result"),
        ] {
            let found = answered(history.clone(), "messages").unwrap_err();
            assert!(found.message.contains(problem), "{history:?}: {}", found.message);
            assert_eq!(found.field.as_deref(), Some("messages"));
        }
    }

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
