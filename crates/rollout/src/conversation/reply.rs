//! A sampled reply, split into the parts that agents read: thinking, text and tool calls.
//!
//! Thinking is between `<think>` and `</think>` at the beginning of the reply; the prompt may have
//! opened it. Calls are in the [`ToolFormat`] of the model.
//!
//! [`PartialReply`] splits a reply while it is sampled. A whole reply is split by it, too, so that what
//! was released early is always the beginning of what the whole reply has.

use crate::api::{Action, Message};
use crate::tool_format::{OPEN, Piece, ToolFormat};
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
    /// Splits the text of a reply. `thinks` says whether the prompt opened the thinking. A call that is
    /// not closed or not valid stays in the text, together with all others: an agent must not perform
    /// half of what the policy wrote.
    pub(crate) fn parse(format: ToolFormat, tools: &[Value], thinks: bool, text: &str) -> Self {
        let mut reply = PartialReply::new(thinks);
        reply.push(text);
        let (reasoning, body) = reply.finish();
        match calls(format, tools, &body) {
            Some((content, calls)) => Self { reasoning, content, calls },
            None => Self { reasoning, content: body, calls: Vec::new() },
        }
    }

    /// The message that a later request repeats.
    pub(crate) fn message(&self) -> Message {
        Message {
            role: "assistant".to_owned(),
            content: self.content.clone(),
            tool_calls: self.calls.clone(),
            ..Message::default()
        }
    }
}

/// A reply whose text arrives in pieces. What may still become part of a tag, or be trimmed, is held
/// back; so is everything from the first call on, because a later one may make all of them text.
#[derive(Debug, Clone)]
pub(super) struct PartialReply {
    place: Place,
    /// Text that is not assigned to a part yet.
    held: String,
    reasoning: String,
    /// Everything after the thinking.
    body: String,
    /// How much of `body` is certainly the beginning of the content.
    released: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before everything that is not a space.
    Start {
        thinks: bool,
    },
    Thinking,
    /// Between the thinking and the text.
    Gap,
    Text,
    Calls,
}

impl PartialReply {
    /// An empty reply; `thinks` says whether the prompt opened the thinking.
    pub(super) fn new(thinks: bool) -> Self {
        Self {
            place: Place::Start { thinks },
            held: String::new(),
            reasoning: String::new(),
            body: String::new(),
            released: 0,
        }
    }

    /// The thinking so far.
    pub(super) fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// The text so far.
    pub(super) fn content(&self) -> &str {
        self.body.get(..self.released).unwrap_or_default()
    }

    /// Adds text.
    pub(super) fn push(&mut self, text: &str) {
        match self.place {
            Place::Text | Place::Calls => self.push_body(text),
            Place::Start { .. } | Place::Thinking | Place::Gap => {
                self.held.push_str(text);
                self.assign();
            }
        }
    }

    /// Assigns held text to its part, as far as that is decided.
    fn assign(&mut self) {
        if let Place::Start { thinks } = self.place {
            let text = self.held.trim_start();
            if let Some(thinking) = text.strip_prefix(THINK) {
                self.held = thinking.to_owned();
                self.place = Place::Thinking;
            } else if THINK.starts_with(text) {
                return;
            } else {
                self.place = if thinks { Place::Thinking } else { Place::Text };
            }
        }
        if self.place == Place::Thinking {
            if let Some((thinking, rest)) = self.held.split_once(END_THINK) {
                let (thinking, rest) = (thinking.to_owned(), rest.to_owned());
                self.think(thinking.trim_end());
                self.held = rest;
                self.place = Place::Gap;
            } else {
                let decided = without_tag_start(&self.held, END_THINK).trim_end().len();
                let rest = self.held.split_off(decided);
                let thinking = std::mem::replace(&mut self.held, rest);
                self.think(&thinking);
            }
        }
        if self.place == Place::Gap {
            let text = self.held.trim_start_matches('\n');
            if text.is_empty() {
                return;
            }
            self.held = text.to_owned();
            self.place = Place::Text;
        }
        if self.place == Place::Text {
            let text = std::mem::take(&mut self.held);
            self.push_body(&text);
        }
    }

    fn think(&mut self, text: &str) {
        let text = if self.reasoning.is_empty() { text.trim_start() } else { text };
        self.reasoning.push_str(text);
    }

    fn push_body(&mut self, text: &str) {
        self.body.push_str(text);
        if self.place == Place::Calls {
            return;
        }
        let new = self.body.get(self.released..).unwrap_or_default();
        let decided = match new.split_once(OPEN) {
            Some((before, _)) => {
                self.place = Place::Calls;
                before
            }
            None => without_tag_start(new, OPEN),
        };
        self.released += decided.trim_end().len();
    }

    /// The thinking, and everything after it.
    fn finish(mut self) -> (Option<String>, String) {
        let held = std::mem::take(&mut self.held);
        match self.place {
            Place::Start { thinks: true } | Place::Thinking => self.think(held.trim_end()),
            Place::Start { thinks: false } => self.body.push_str(&held),
            Place::Gap | Place::Text | Place::Calls => {}
        }
        (Some(self.reasoning).filter(|thinking| !thinking.is_empty()), self.body)
    }
}

/// The text without an end that may be the beginning of `tag`.
fn without_tag_start<'a>(text: &'a str, tag: &str) -> &'a str {
    let mut starts = (1..tag.len()).rev().filter_map(|length| tag.get(..length));
    starts.find_map(|start| text.strip_suffix(start)).unwrap_or(text)
}

/// Text that is cut before the first stop string, while it arrives in pieces.
#[derive(Debug, Clone)]
pub(super) struct StopFilter {
    stops: std::sync::Arc<[String]>,
    /// An end that may be the beginning of a stop string.
    held: String,
    has_stopped: bool,
}

impl StopFilter {
    pub(super) fn new(stops: std::sync::Arc<[String]>) -> Self {
        Self { stops, held: String::new(), has_stopped: false }
    }

    /// Adds text. Returns what certainly comes before every stop string.
    pub(super) fn push(&mut self, text: &str) -> String {
        if self.has_stopped {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held) + text;
        if let Some((before, _)) = first_stop(&text, &self.stops) {
            self.has_stopped = true;
            return before.to_owned();
        }
        let decided = self.stops.iter().map(|stop| without_tag_start(&text, stop).len());
        self.held = text.split_off(decided.min().unwrap_or(text.len()));
        text
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
    use proptest::prelude::*;
    use serde_json::json;

    fn parse(text: &str) -> ReplyParts {
        ReplyParts::parse(ToolFormat::Json, &[], false, text)
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
        assert_eq!(parse("<think>\n\n</think>\n\nyes").reasoning, None);
        assert_eq!(parse("plain\n").content, "plain\n");
        assert_eq!(parse(" \n").content, " \n");
    }

    #[test]
    fn the_prompt_may_open_the_thinking() {
        let parts = |thinks, text| {
            let ReplyParts { reasoning, content, .. } =
                ReplyParts::parse(ToolFormat::Json, &[], thinks, text);
            (reasoning, content)
        };
        let split = |thinking: &str, text: &str| (Some(thinking.to_owned()), text.to_owned());
        assert_eq!(parts(true, "hm</think>yes"), split("hm", "yes"));
        assert_eq!(parts(true, "<think>hm</think>yes"), split("hm", "yes"));
        assert_eq!(parts(false, "hm</think>yes"), (None, "hm</think>yes".to_owned()));
        // Thinking without an end is not text.
        assert_eq!(parts(true, "hm </thi"), split("hm </thi", ""));
        assert_eq!(parts(false, "<think>hm"), split("hm", ""));
        assert_eq!(parts(true, "<thi"), split("<thi", ""));
        assert_eq!(parts(false, "<thi"), (None, "<thi".to_owned()));
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

    /// Replies of tags, their beginnings, spaces and words in every order.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<th",
            "</th",
            "<tool_",
            "<",
            " ",
            "\n",
            "\n\n",
            "word",
            "é",
            "STOP",
            "STO",
            "OPEN",
            "P",
            "{\"name\": \"bash\", \"arguments\": {}}",
            "<tool_call>{\"name\": \"bash\", \"arguments\": {}}</tool_call>",
        ]);
        prop::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat())
    }

    /// `text` in pieces of these sizes, in characters.
    fn split(text: &str, sizes: &[usize]) -> Vec<String> {
        let (mut chars, mut sizes) = (text.chars().peekable(), sizes.iter().cycle());
        let mut pieces = Vec::new();
        while chars.peek().is_some() {
            pieces.push(chars.by_ref().take(*sizes.next().unwrap()).collect());
        }
        pieces
    }

    proptest! {
        #[test]
        fn prop_released_pieces_are_the_beginning_of_the_whole_reply(
            text in text(),
            sizes in prop::collection::vec(1_usize..9, 1..8),
            thinks in any::<bool>(),
            stops in prop::sample::subsequence(vec!["STOP", "OPEN", "word", "P<"], 0..3),
        ) {
            let stops: std::sync::Arc<[String]> = stops.into_iter().map(str::to_owned).collect();
            let stopped = first_stop(&text, &stops).map_or(text.as_str(), |(before, _)| before);
            // The first stop string that is completed ends a reply.
            let ends: Vec<usize> =
                stops.iter().filter_map(|stop| Some(text.find(stop.as_str())? + stop.len())).collect();
            let sampled = ends.iter().min().map_or(text.as_str(), |end| text.get(..*end).unwrap());
            let said = first_stop(sampled, &stops).map_or(stopped, |(before, _)| before);
            let whole = ReplyParts::parse(ToolFormat::Json, &[], thinks, said);
            let (mut filter, mut reply) = (StopFilter::new(stops), PartialReply::new(thinks));
            let reasoning = whole.reasoning.clone().unwrap_or_default();
            let mut before = (0, 0);
            for piece in split(sampled, &sizes) {
                reply.push(&filter.push(&piece));
                prop_assert!(reasoning.starts_with(reply.reasoning()), "{reply:?} {whole:?}");
                prop_assert!(whole.content.starts_with(reply.content()), "{reply:?} {whole:?}");
                let now = (reply.reasoning().len(), reply.content().len());
                prop_assert!(now.0 >= before.0 && now.1 >= before.1);
                // Text begins only after all of the thinking.
                prop_assert!(now.1 == 0 || reply.reasoning() == reasoning);
                before = now;
            }
        }

        #[test]
        fn prop_text_without_tags_is_released_at_once(
            words in prop::collection::vec("[a-zé]{1,5}", 1..9),
        ) {
            let mut reply = PartialReply::new(false);
            let mut text = String::new();
            for word in &words {
                reply.push(word);
                text.push_str(word);
                prop_assert_eq!(reply.content(), text.as_str());
                reply.push(" ");
                text.push(' ');
            }
        }
    }
}
