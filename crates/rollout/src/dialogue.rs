//! A conversation in messages, for servers that take those and give words.
//!
//! The invariant: what a policy wrote is sent again as the server gave it, calls apart from words,
//! and each call has one answer, in front of all else that follows. Its thinking is not sent again.

use crate::api::Message;
use crate::scaffold::call_text;
use orchestrate_engine::{ChatMessage, ChatTurn, Conversation};
use std::sync::Arc;

/// Answer to a call that was not performed: servers refuse a conversation that lacks one.
const NOT_PERFORMED: &str = "not performed";

/// A conversation that grows by turns and observations.
#[derive(Debug)]
pub(crate) struct Dialogue {
    conversation: Conversation,
    /// Names of the last turn's calls.
    calls: Vec<String>,
}

/// A turn as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// All of it, thinking first; in the form that scaffolds parse.
    pub(crate) text: String,
    /// What of it is part of the conversation from now on.
    pub(crate) kept: String,
}

impl Dialogue {
    /// A conversation that begins.
    pub(crate) fn open(messages: &[Message], tools: &[serde_json::Value]) -> Self {
        let messages = messages.iter().map(|message| said(&message.role, &message.content));
        let conversation = Conversation {
            messages: Arc::new(messages.collect()),
            tools: Arc::new(tools.to_vec()),
        };
        Self { conversation, calls: Vec::new() }
    }

    /// All of it so far, shared.
    pub(crate) fn conversation(&self) -> Conversation {
        self.conversation.clone()
    }

    /// Adds the policy's turn.
    pub(crate) fn hear(&mut self, turn: ChatTurn) -> Written {
        let ChatTurn { content, reasoning, tool_calls } = turn;
        let mut kept = content.clone();
        for call in &tool_calls {
            if !kept.is_empty() && !kept.ends_with('\n') {
                kept.push('\n');
            }
            kept.push_str(&call_text(&call.function.name, &call.function.arguments));
        }
        let text = match reasoning {
            Some(thinking) => format!("<think>\n{thinking}\n</think>\n\n{kept}"),
            None => kept.clone(),
        };
        self.calls = tool_calls.iter().map(|call| call.id.clone()).collect();
        let message = ChatMessage { tool_calls, ..said("assistant", &content) };
        self.push(message);
        Written { text, kept }
    }

    /// Adds what answers the last turn. Calls that the server did not take apart came first in its
    /// text; they are answered by a user's words, as no call has their name.
    pub(crate) fn answer(&mut self, observations: &[Message]) {
        let calls = std::mem::take(&mut self.calls);
        let (unnamed, named) =
            observations.split_at(observations.len().saturating_sub(calls.len()));
        let answers = named.iter().map(|message| message.content.as_str());
        let answers = answers.chain(std::iter::repeat(NOT_PERFORMED));
        for (id, answer) in calls.into_iter().zip(answers) {
            self.push(ChatMessage { tool_call_id: Some(id), ..said("tool", answer) });
        }
        for message in unnamed {
            self.push(said("user", &message.content));
        }
    }

    fn push(&mut self, message: ChatMessage) {
        Arc::make_mut(&mut self.conversation.messages).push(message);
    }
}

fn said(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content: content.to_owned(), ..ChatMessage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::message;
    use crate::scaffold::{Call, Scaffold};
    use orchestrate_engine::{CalledFunction, ToolCall};

    fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
        let function = CalledFunction { name: name.to_owned(), arguments: arguments.to_owned() };
        ToolCall { id: id.to_owned(), r#type: "function", function }
    }

    fn roles(dialogue: &Dialogue) -> Vec<(String, Option<String>, String)> {
        let messages = dialogue.conversation();
        let shown = messages.messages.iter();
        shown.map(|m| (m.role.clone(), m.tool_call_id.clone(), m.content.clone())).collect()
    }

    fn row(role: &str, id: Option<&str>, content: &str) -> (String, Option<String>, String) {
        (role.to_owned(), id.map(str::to_owned), content.to_owned())
    }

    #[test]
    fn calls_become_the_text_that_scaffolds_parse_and_answers_find_their_calls() {
        let mut dialogue = Dialogue::open(&[message("user", "mend it")], &[]);
        let turn = ChatTurn {
            content: "Look.".to_owned(),
            reasoning: Some("a <tool_call> is needed".to_owned()),
            tool_calls: vec![
                call("c1", "bash", r#"{"command": "grep '</tool_call>' x </think>"}"#),
                call("c2", "bash", "{broken"),
                call("c3", "submit", ""),
            ],
        };
        let written = dialogue.hear(turn);
        assert!(written.text.starts_with("<think>\na <tool_call> is needed\n</think>\n\nLook.\n"));
        assert!(written.kept.starts_with("Look.\n<tool_call>"), "{}", written.kept);
        let calls = Scaffold::Tools.parse(&written.text);
        let commands: Vec<_> = calls.into_iter().map(|call| call.map(|(_, call)| call)).collect();
        let bash = Call::Bash { command: "grep '</tool_call>' x </think>".to_owned() };
        assert_eq!(commands[0], Ok(bash));
        assert!(commands[1].as_ref().unwrap_err().0.contains("not valid"));
        assert_eq!(commands[2], Ok(Call::Submit));
        assert_eq!(commands.len(), 3);

        dialogue.answer(&[message("tool", "found"), message("tool", "mistake")]);
        let expected = [
            row("user", None, "mend it"),
            row("assistant", None, "Look."),
            row("tool", Some("c1"), "found"),
            row("tool", Some("c2"), "mistake"),
            row("tool", Some("c3"), "not performed"),
        ];
        assert_eq!(roles(&dialogue), expected);
        let sent = dialogue.conversation().messages;
        assert_eq!(sent[1].tool_calls[1].function.arguments, "{broken", "sent as it came");
        assert!(
            !serde_json::to_string(&*sent).unwrap().contains("is needed"),
            "thinking stays here"
        );
    }

    #[test]
    fn what_answers_no_call_is_a_users_words() {
        let mut dialogue = Dialogue::open(&[message("user", "mend it")], &[]);
        let plain = ChatTurn { content: "Hm.".to_owned(), ..ChatTurn::default() };
        dialogue.hear(plain);
        dialogue.answer(&[message("tool", "no tool call found")]);
        // One call in words, and one that the server took apart.
        let written = "<tool_call>\n{\"name\": \"bash\", \"arguments\": {}}\n</tool_call>";
        let both = ChatTurn {
            content: written.to_owned(),
            reasoning: None,
            tool_calls: vec![call("c9", "submit", "{}")],
        };
        assert_eq!(Scaffold::Tools.parse(&dialogue.hear(both).text).len(), 2);
        dialogue.answer(&[message("tool", "first"), message("tool", "second")]);
        let expected = [
            row("user", None, "no tool call found"),
            row("assistant", None, written),
            row("tool", Some("c9"), "second"),
            row("user", None, "first"),
        ];
        assert_eq!(roles(&dialogue)[2..], expected);
    }
}
