//! A sampled reply, split into its parts: thinking, text and tool calls. Scaffolds and agents' requests
//! read replies with it, so that both read it in the same way.
//!
//! Thinking is between `<think>` and the first `</think>`, at the beginning of the reply; the prompt may
//! have opened it. A `</think>` elsewhere is text. Thinking that is not closed is the whole reply. Calls
//! are in the [`ToolFormat`] of the model.
//!
//! [`PartialReply`] splits a reply while it is sampled. A whole reply is split by it, too, so that what
//! was released early is always the beginning of what the whole reply has.

use crate::api::{Action, Message};
use crate::tool_format::{ReadCalls, ToolFormat, Unread};
use serde_json::Value;
use std::sync::Arc;

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// The parts of a reply.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ReplyParts {
    pub(crate) reasoning: Option<String>,
    pub(crate) content: String,
    pub(crate) calls: Vec<Action>,
    /// Why there are no calls, although the content looks like some.
    pub(crate) unread: Option<Unread>,
}

impl ReplyParts {
    /// Splits the text of a reply. `thinks` says whether the prompt opened the thinking. Calls that cannot
    /// be read stay in the text, all of them: an agent must not perform half of what the policy wrote.
    pub(crate) fn parse(format: ToolFormat, tools: &[Value], thinks: bool, text: &str) -> Self {
        let (reasoning, body) = split_thinking(thinks, text);
        match format.read(&body, tools).and_then(checked) {
            Ok(ReadCalls { content, calls }) => Self { reasoning, content, calls, unread: None },
            Err(unread) => {
                Self { reasoning, content: body, calls: Vec::new(), unread: Some(unread) }
            }
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

/// Checks what every dialect of agents requires of a call.
fn checked(read: ReadCalls) -> Result<ReadCalls, Unread> {
    let invalid = |problem: &str| Err(Unread::Invalid(problem.to_owned()));
    if read.calls.iter().any(|call| call.name.is_empty()) {
        return invalid("its name is empty");
    }
    if read.calls.iter().any(|call| !call.arguments.is_object()) {
        return invalid("its arguments are not an object");
    }
    Ok(read)
}

/// The thinking of a reply, and everything after it. `thinks` says whether the prompt opened the thinking.
pub(crate) fn split_thinking(thinks: bool, text: &str) -> (Option<String>, String) {
    // Which calls follow does not matter here.
    let mut reply = PartialReply::new(thinks, ToolFormat::Json);
    reply.push(text);
    reply.finish()
}

/// A reply whose text arrives in pieces. What may still become part of a tag, or be trimmed, is held
/// back; so is everything from the first call on, because a later one may make all of them text.
#[derive(Debug, Clone)]
pub(crate) struct PartialReply {
    place: Place,
    format: ToolFormat,
    /// Text that is not assigned to a part yet.
    held: String,
    reasoning: String,
    /// Everything after the thinking.
    body: String,
    /// How much of `body` is certainly the beginning of the content.
    released: usize,
    /// Whether what is held, or not yet released, is white space alone. More of it decides nothing; a
    /// degenerate reply can be thousands of line breaks, which are not to be searched again for each.
    is_blank: bool,
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
    /// An empty reply; `thinks` says whether the prompt opened the thinking, and `format` how calls begin.
    pub(crate) fn new(thinks: bool, format: ToolFormat) -> Self {
        Self {
            place: Place::Start { thinks },
            format,
            held: String::new(),
            reasoning: String::new(),
            body: String::new(),
            released: 0,
            is_blank: true,
        }
    }

    /// The thinking so far.
    pub(crate) fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// The text so far.
    pub(crate) fn content(&self) -> &str {
        self.body.get(..self.released).unwrap_or_default()
    }

    /// Adds text.
    pub(crate) fn push(&mut self, text: &str) {
        let decides_nothing = self.is_blank && text.trim_start().is_empty();
        match self.place {
            Place::Start { .. } | Place::Thinking if decides_nothing => self.held.push_str(text),
            Place::Text if decides_nothing => self.body.push_str(text),
            Place::Text | Place::Calls => self.push_body(text),
            Place::Start { .. } | Place::Thinking | Place::Gap => {
                self.held.push_str(text);
                self.assign();
            }
        }
        if !decides_nothing {
            let waiting = match self.place {
                Place::Text | Place::Calls => self.body.get(self.released..).unwrap_or_default(),
                Place::Start { .. } | Place::Thinking | Place::Gap => &self.held,
            };
            self.is_blank = waiting.trim_start().is_empty();
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
                self.held.clear();
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
        let decided = if let Some(start) = self.format.start(&self.body, self.released) {
            self.place = Place::Calls;
            self.body.get(self.released..start).unwrap_or_default()
        } else {
            let openings = self.format.openings().iter();
            let decided = openings.map(|opening| without_tag_start(new, opening));
            decided.min_by_key(|text| text.len()).unwrap_or(new)
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
pub(crate) struct StopFilter {
    stops: Arc<[String]>,
    /// An end that may be the beginning of a stop string.
    held: String,
    has_stopped: bool,
}

impl StopFilter {
    pub(crate) fn new(stops: Arc<[String]>) -> Self {
        Self { stops, held: String::new(), has_stopped: false }
    }

    /// Adds text. Returns what certainly comes before every stop string.
    pub(crate) fn push(&mut self, text: &str) -> String {
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

/// The text before the first stop string, and that string.
pub(crate) fn first_stop<'a>(text: &'a str, stops: &'a [String]) -> Option<(&'a str, &'a str)> {
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
        let expected = ReplyParts {
            reasoning: Some("hm".to_owned()),
            content: "Look.".to_owned(),
            calls,
            unread: None,
        };
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
    fn thinking_ends_at_its_first_tag_and_only_if_it_was_opened() {
        let call = |command: &str| {
            let arguments = json!({"command": command});
            format!("<tool_call>{{\"name\": \"bash\", \"arguments\": {arguments}}}</tool_call>")
        };
        let ls = call("ls");
        let grep = call("grep -n '</think>' parser.py");
        for (thinks, text, reasoning, content, calls) in [
            (false, grep.clone(), None, "", 1),
            (true, format!("Look.</think>\n\n{grep}{ls}"), Some("Look."), "", 2),
            (false, format!("<think>Edit.</think>\n\n{grep}{ls}"), Some("Edit."), "", 2),
            (false, format!("Strip </think> from it. {ls}"), None, "Strip </think> from it.", 1),
            (
                false,
                format!("<think>The tag </think> ends it.</think> {ls}"),
                Some("The tag"),
                " ends it.</think>",
                1,
            ),
            (false, format!("x</think>{ls}"), None, "x</think>", 1),
            // Thinking without an end has no calls.
            (true, format!("perhaps {ls} but"), Some(&*format!("perhaps {ls} but")), "", 0),
            (false, format!("<think>perhaps {ls}"), Some(&*format!("perhaps {ls}")), "", 0),
            (true, format!("not {ls}</think>done"), Some(&*format!("not {ls}")), "done", 0),
        ] {
            let parts = ReplyParts::parse(ToolFormat::Json, &[], thinks, &text);
            let found = (parts.reasoning.as_deref(), parts.content.as_str(), parts.calls.len());
            assert_eq!(found, (reasoning, content, calls), "{text}");
        }
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
            assert!(parts.unread.is_some(), "it is counted");
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
            "<function=bash>\n",
            "<function=",
            "</function>",
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
            format in prop::sample::select(ToolFormat::ALL.to_vec()),
            stops in prop::sample::subsequence(vec!["STOP", "OPEN", "word", "P<"], 0..3),
        ) {
            let stops: Arc<[String]> = stops.into_iter().map(str::to_owned).collect();
            let stopped = first_stop(&text, &stops).map_or(text.as_str(), |(before, _)| before);
            // The first stop string that is completed ends a reply.
            let ends: Vec<usize> =
                stops.iter().filter_map(|stop| Some(text.find(stop.as_str())? + stop.len())).collect();
            let sampled = ends.iter().min().map_or(text.as_str(), |end| text.get(..*end).unwrap());
            let said = first_stop(sampled, &stops).map_or(stopped, |(before, _)| before);
            let whole = ReplyParts::parse(format, &[], thinks, said);
            let (mut filter, mut reply) = (StopFilter::new(stops), PartialReply::new(thinks, format));
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
            let mut reply = PartialReply::new(false, ToolFormat::Xml);
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

    #[test]
    fn white_space_is_searched_once() {
        // Of a reply eight times as long: about eight times the time, not 64 times.
        let least = |before: &str, length: usize| {
            let time = |_| {
                let mut reply = PartialReply::new(false, ToolFormat::Xml);
                reply.push(before);
                let began = orchestrate_e2e::thread_cpu_time().unwrap();
                for _ in 0..length {
                    reply.push("\n");
                }
                let took = orchestrate_e2e::thread_cpu_time().unwrap().saturating_sub(began);
                reply.push("x");
                assert!(reply.content().ends_with('x'), "{before:?}");
                took
            };
            (0..3).map(time).min().unwrap()
        };
        for before in ["", "<think>a</think>", "text"] {
            assert!(least(before, 1 << 15) < least(before, 1 << 12) * 24, "{before:?}");
        }
    }
}
