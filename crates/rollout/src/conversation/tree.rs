//! The shape of an agent's conversation: branches of messages that share their beginnings.
//!
//! Agents send their whole history with every request. [`Tree::locate`] finds the branch that a
//! request continues: the one whose messages, sampled replies included, are the request's first ones.
//! Where the request departs from everything that was said, a branch forks off after the last reply
//! that both have in common. This file compares messages only; tokens and rows are in the sequence `S` of each branch.

use crate::api::Message;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// In place of the digest of tools, for branches whose prompts are sent in tokens.
pub(super) const IN_TOKENS: [u8; 32] = [0xff; 32];

/// A message of a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct HistoryMessage {
    /// Role, text and tool calls.
    pub(crate) message: Message,
    /// The thinking of an assistant message, if the agent sent it back.
    pub(crate) reasoning: Option<String>,
    /// Number of the reply that the thinking is of, if the agent sent that back, too.
    pub(crate) reply: Option<u32>,
    /// The ids of its tool calls, in order. Ids that were made here name the reply that they came with.
    pub(crate) call_ids: Vec<String>,
}

/// A reply as its agent got it.
#[derive(Debug, PartialEq)]
pub(crate) struct Reply {
    pub(crate) message: Message,
    pub(crate) reasoning: Option<String>,
    /// Number of this reply among all of the attempt, which the ids of its calls have.
    pub(crate) number: u32,
}

/// What the ids of tool calls begin with.
const CALL_ID: &str = "call_";

/// The id of a call: the number of its reply, and its place among the reply's calls.
pub(crate) fn call_id(reply: u32, index: usize) -> String {
    format!("{CALL_ID}{reply:05}{index:03}")
}

/// Whether an id has the form of those that are made here.
fn is_call_id(id: &str) -> bool {
    let digits = id.strip_prefix(CALL_ID).unwrap_or_default();
    digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// A text without the spaces around it; `None` if nothing is left.
fn trimmed(text: Option<&str>) -> Option<&str> {
    text.map(str::trim).filter(|text| !text.is_empty())
}

/// Messages are compared without what names a reply, the ids of its calls and its number, which agents may
/// change from request to request.
impl PartialEq for HistoryMessage {
    fn eq(&self, other: &Self) -> bool {
        self.message == other.message && self.reasoning == other.reasoning
    }
}

impl HistoryMessage {
    /// Whether the other message is the same in every part.
    pub(crate) fn is_identical(&self, other: &Self) -> bool {
        self == other && self.call_ids == other.call_ids && self.reply == other.reply
    }
}

impl HistoryMessage {
    /// Bytes of its texts.
    pub(super) fn bytes(&self) -> usize {
        let Message { content, tool_calls, .. } = &self.message;
        let calls =
            tool_calls.iter().map(|call| call.name.len() + call.arguments.to_string().len());
        content.len() + self.reasoning.as_ref().map_or(0, String::len) + calls.sum::<usize>()
    }

    /// The ids of its calls that were made here, each with its place among the calls.
    pub(super) fn own_call_ids(&self) -> impl Iterator<Item = (usize, &str)> {
        let ids = self.call_ids.iter().map(String::as_str).enumerate();
        ids.filter(|(_, id)| is_call_id(id))
    }

    /// Whether an agent that sends this repeats the reply `sampled`. All that came back must be the
    /// reply's. Agents drop thinking, make ids of their own, trim text and write the JSON of tool calls
    /// again, so these do not count.
    fn repeats(&self, sampled: &Reply) -> bool {
        let thinking = trimmed(self.reasoning.as_deref());
        self.message.role == "assistant"
            && self.message.content.trim() == sampled.message.content.trim()
            && self.message.tool_calls == sampled.message.tool_calls
            && self.own_call_ids().all(|(index, id)| id == call_id(sampled.number, index))
            && self.reply.is_none_or(|number| number == sampled.number)
            && (thinking.is_none() || thinking == trimmed(sampled.reasoning.as_deref()))
    }
}

/// Why a branch began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForkCause {
    /// The request has other tools than the branches before, or switches thinking the other way.
    Tools,
    /// Its first message differs from theirs: a sub-agent, another system prompt, a side request.
    Opening,
    /// A message differs from what was said before, after a common beginning: the history was edited,
    /// shortened or summarised.
    History,
    /// The same history is sampled once more: a retry of the agent, or several samples at once.
    Repeated,
    /// The chat template leaves the thinking of the last reply out of later prompts.
    Thinking,
}

impl ForkCause {
    /// Its name in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tools => "tools",
            Self::Opening => "opening",
            Self::History => "history",
            Self::Repeated => "repeated",
            Self::Thinking => "thinking",
        }
    }
}

/// What is counted of requests that begin no branch of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recognition {
    /// Nothing that the agent sent back tells which of several replies with the same message it continues:
    /// one that has not been continued was taken, and of these the first.
    Ambiguous,
    /// The request repeats one whose reply its client did not get: it got that reply.
    Returned,
}

impl Recognition {
    /// Its name in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ambiguous => "ambiguous",
            Self::Returned => "returned",
        }
    }
}

/// One element of a branch.
#[derive(Debug, Clone)]
pub(crate) enum Segment {
    /// A message of the agent.
    Message(Arc<HistoryMessage>),
    /// A sampled reply.
    Reply {
        /// As the agent got it.
        reply: Arc<Reply>,
        /// Number of tokens of the branch up to its end.
        end: usize,
        /// How many of them are the reply's.
        tokens: usize,
        /// Whether its thinking is not among them, because the chat template leaves it out.
        drops_thinking: bool,
    },
}

/// A branch: everything that was said from the start of the conversation on.
#[derive(Debug)]
pub(crate) struct Branch<S> {
    /// Digest of the tools that its prompts show.
    pub(crate) tools: [u8; 32],
    pub(crate) segments: Vec<Segment>,
    /// Whether a reply is being sampled at its end.
    pub(crate) is_busy: bool,
    /// The branch that it forked from, and the number of tokens that both have.
    pub(crate) parent: Option<(usize, usize)>,
    pub(crate) sequence: S,
}

/// Where a request belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BranchPoint {
    /// It continues a branch after its last reply.
    Tip { branch: usize },
    /// It departs from a branch after `segments` segments, the last of which is a reply that ends at `tokens`.
    Fork { branch: usize, segments: usize, tokens: usize, cause: ForkCause },
    /// It has no reply in common with any branch. `cause` is absent for the first request.
    Root { cause: Option<ForkCause> },
}

impl BranchPoint {
    /// How many of the request's messages the branch already has.
    pub(crate) fn segments<S>(self, tree: &Tree<S>) -> usize {
        match self {
            Self::Tip { branch } => tree.branches.get(branch).map_or(0, |b| b.segments.len()),
            Self::Fork { segments, .. } => segments,
            Self::Root { .. } => 0,
        }
    }

    /// Number of the reply that a request at this point continues.
    pub(crate) fn reply<S>(self, tree: &Tree<S>) -> Option<u32> {
        let (Self::Tip { branch } | Self::Fork { branch, .. }) = self else { return None };
        match tree.branches.get(branch)?.segments.get(self.segments(tree).checked_sub(1)?)? {
            Segment::Reply { reply, .. } => Some(reply.number),
            Segment::Message(_) => None,
        }
    }

    pub(crate) fn cause(self) -> Option<ForkCause> {
        match self {
            Self::Tip { .. } => None,
            Self::Fork { cause, .. } => Some(cause),
            Self::Root { cause } => cause,
        }
    }
}

/// The branches of one conversation, in the order in which they began.
#[derive(Debug)]
pub(crate) struct Tree<S> {
    pub(crate) branches: Vec<Branch<S>>,
}

impl<S> Tree<S> {
    pub(crate) fn new() -> Self {
        Self { branches: Vec::new() }
    }

    /// Finds the branch point of a request: after the longest common history that ends with a reply. Of equal
    /// ones, the end of a branch is preferred, so that nothing forks without need, and then a branch that
    /// answered the same request.
    pub(crate) fn locate(&self, tools: &[u8; 32], messages: &[Arc<HistoryMessage>]) -> BranchPoint {
        let mut best: Option<((usize, bool, bool), BranchPoint)> = None;
        for (index, branch) in self.branches.iter().enumerate() {
            if branch.tools != *tools {
                continue;
            }
            let common = branch.common(messages);
            let Some((segments, tokens)) = branch.last_reply(common) else { continue };
            let is_tip = segments == branch.segments.len() && !branch.is_busy;
            let cause = branch.cause_of_fork(common, messages);
            let rank = (segments, is_tip, cause == ForkCause::Repeated);
            if best.is_some_and(|(most, _)| most >= rank) {
                continue;
            }
            let point = if is_tip {
                BranchPoint::Tip { branch: index }
            } else {
                BranchPoint::Fork { branch: index, segments, tokens, cause }
            };
            best = Some((rank, point));
        }
        best.map_or_else(
            || BranchPoint::Root { cause: self.cause_of_root(tools, messages) },
            |(_, point)| point,
        )
    }

    /// Whether a request at `point` may continue another reply as well, because it sent nothing back
    /// that tells two replies with different thinking apart.
    pub(crate) fn is_ambiguous(
        &self,
        tools: &[u8; 32],
        messages: &[Arc<HistoryMessage>],
        point: BranchPoint,
    ) -> bool {
        let (BranchPoint::Tip { branch } | BranchPoint::Fork { branch, .. }) = point else {
            return false;
        };
        let end = point.segments(self);
        let last = |branch: &Branch<S>| match branch.segments.get(end.checked_sub(1)?)? {
            Segment::Reply { reply, .. } => Some(Arc::clone(reply)),
            Segment::Message(_) => None,
        };
        let Some(chosen) = self.branches.get(branch).and_then(last) else { return false };
        let alike = self.branches.iter().filter(|branch| branch.tools == *tools);
        alike
            .filter(|branch| branch.common(messages) >= end)
            .filter_map(last)
            .any(|reply| reply.reasoning != chosen.reasoning)
    }

    fn cause_of_root(
        &self,
        tools: &[u8; 32],
        messages: &[Arc<HistoryMessage>],
    ) -> Option<ForkCause> {
        let mut others = self.branches.iter().filter(|branch| branch.tools != IN_TOKENS).peekable();
        others.peek()?;
        let mut alike = others.filter(|branch| branch.tools == *tools).peekable();
        if alike.peek().is_none() {
            return Some(ForkCause::Tools);
        }
        let causes = alike.map(|branch| {
            let common = branch.common(messages);
            (common, branch.cause_of_fork(common, messages))
        });
        Some(match causes.max_by_key(|(common, cause)| (*common, *cause == ForkCause::Repeated)) {
            None | Some((0, _)) => ForkCause::Opening,
            Some((_, cause)) => cause,
        })
    }
}

impl<S> Branch<S> {
    /// Number of leading segments that are the request's first messages.
    pub(super) fn common(&self, messages: &[Arc<HistoryMessage>]) -> usize {
        let pairs = self.segments.iter().zip(messages);
        pairs
            .take_while(|(segment, entry)| match segment {
                Segment::Message(known) => Arc::ptr_eq(known, entry) || known == *entry,
                Segment::Reply { reply, .. } => entry.repeats(reply),
            })
            .count()
    }

    /// The last reply among the first `common` segments: number of segments up to it, and of tokens.
    fn last_reply(&self, common: usize) -> Option<(usize, usize)> {
        let segments = self.segments.get(..common)?;
        segments.iter().enumerate().rev().find_map(|(index, segment)| match segment {
            Segment::Message(_) => None,
            Segment::Reply { end, .. } => Some((index + 1, *end)),
        })
    }

    pub(super) fn cause_of_fork(
        &self,
        common: usize,
        messages: &[Arc<HistoryMessage>],
    ) -> ForkCause {
        // All of the request was said before, and answered or about to be.
        let is_answered = match self.segments.get(common) {
            Some(Segment::Reply { .. }) => true,
            Some(Segment::Message(_)) => false,
            None => self.is_busy,
        };
        if common == messages.len() && is_answered {
            ForkCause::Repeated
        } else {
            ForkCause::History
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(role: &str, text: &str) -> Arc<HistoryMessage> {
        Arc::new(HistoryMessage {
            message: crate::chat::message(role, text),
            reasoning: None,
            reply: None,
            call_ids: Vec::new(),
        })
    }

    fn reply(text: &str, end: usize) -> Segment {
        let message = crate::chat::message("assistant", text);
        let number = u32::try_from(end).unwrap();
        let reply = Arc::new(Reply { message, reasoning: None, number });
        Segment::Reply { reply, end, tokens: 5, drops_thinking: false }
    }

    const TOOLS: [u8; 32] = [1; 32];

    /// `u a v b`, with replies `a` and `b`.
    fn tree() -> Tree<()> {
        let segments = vec![
            Segment::Message(messages("user", "u")),
            reply("a", 10),
            Segment::Message(messages("user", "v")),
            reply("b", 20),
        ];
        let branch = Branch { tools: TOOLS, segments, is_busy: false, parent: None, sequence: () };
        Tree { branches: vec![branch] }
    }

    fn request(texts: &[&str]) -> Vec<Arc<HistoryMessage>> {
        let role = |text: &str| if matches!(text, "a" | "b" | "x") { "assistant" } else { "user" };
        texts.iter().map(|text| messages(role(text), text)).collect()
    }

    #[test]
    fn requests_are_placed_after_the_last_common_reply() {
        let fork =
            |segments, tokens, cause| BranchPoint::Fork { branch: 0, segments, tokens, cause };
        let root = |cause| BranchPoint::Root { cause: Some(cause) };
        for (texts, expected) in [
            (&["u", "a", "v", "b", "w"][..], BranchPoint::Tip { branch: 0 }),
            (&["u", "a", "v", "b"], BranchPoint::Tip { branch: 0 }),
            (&["u", "a", "v"], fork(2, 10, ForkCause::Repeated)),
            (&["u", "a", "other"], fork(2, 10, ForkCause::History)),
            (&["u", "a", "v", "x", "w"], fork(2, 10, ForkCause::History)),
            (&["u"], root(ForkCause::Repeated)),
            (&["u", "x"], root(ForkCause::History)),
            (&["summary"], root(ForkCause::Opening)),
        ] {
            assert_eq!(tree().locate(&TOOLS, &request(texts)), expected, "{texts:?}");
        }
        assert_eq!(tree().locate(&[2; 32], &request(&["u", "a", "v"])), root(ForkCause::Tools));
        assert_eq!(
            Tree::<()>::new().locate(&TOOLS, &request(&["u"])),
            BranchPoint::Root { cause: None }
        );
    }

    /// Another branch, `u a w c`, begins after the reply `a`.
    fn forked() -> Tree<()> {
        let mut tree = tree();
        let mut segments = tree.branches[0].segments[..2].to_vec();
        segments.extend([Segment::Message(messages("user", "w")), reply("c", 18)]);
        let parent = Some((0, 10));
        tree.branches.push(Branch { tools: TOOLS, segments, is_busy: false, parent, sequence: () });
        tree
    }

    #[test]
    fn a_request_is_repeated_whichever_branch_answered_it() {
        let point = forked().locate(&TOOLS, &request(&["u", "a", "w"]));
        let cause = ForkCause::Repeated;
        assert_eq!(point, BranchPoint::Fork { branch: 1, segments: 2, tokens: 10, cause });
        // One branch answered `u`, a later one has more messages before its first reply.
        let mut tree = tree();
        let segments = vec![
            Segment::Message(messages("user", "u")),
            Segment::Message(messages("user", "x")),
            reply("d", 9),
        ];
        tree.branches.push(Branch {
            tools: TOOLS,
            segments,
            is_busy: false,
            parent: None,
            sequence: (),
        });
        let point = tree.locate(&TOOLS, &request(&["u"]));
        assert_eq!(point, BranchPoint::Root { cause: Some(cause) });
    }

    #[test]
    fn prompts_in_tokens_do_not_count_as_branches_of_messages() {
        let mut tree = tree();
        tree.branches[0].tools = IN_TOKENS;
        assert_eq!(tree.locate(&TOOLS, &request(&["u"])), BranchPoint::Root { cause: None });
    }

    #[test]
    fn a_branch_that_is_sampling_is_not_continued() {
        let mut tree = tree();
        tree.branches[0].segments.push(Segment::Message(messages("user", "w")));
        tree.branches[0].is_busy = true;
        let point = tree.locate(&TOOLS, &request(&["u", "a", "v", "b", "w"]));
        let cause = ForkCause::Repeated;
        assert_eq!(point, BranchPoint::Fork { branch: 0, segments: 4, tokens: 20, cause });
        let point = tree.locate(&TOOLS, &request(&["u", "a", "v", "b", "z"]));
        let cause = ForkCause::History;
        assert_eq!(point, BranchPoint::Fork { branch: 0, segments: 4, tokens: 20, cause });
    }

    /// A reply with a call, and the same as agents send it back.
    fn called() -> (Reply, HistoryMessage) {
        let call = |text: &str| crate::api::Action {
            name: "bash".to_owned(),
            arguments: serde_json::from_str(text).unwrap(),
        };
        let mut message = crate::chat::message("assistant", "Look.\n");
        message.tool_calls = vec![call(r#"{"command": "ls", "n": 1}"#)];
        let mut sent = message.clone();
        sent.content = "Look.".to_owned();
        sent.tool_calls = vec![call(r#"{"n":1,"command":"ls"}"#)];
        let reply = Reply { message, reasoning: Some("hm".to_owned()), number: 7 };
        (
            reply,
            HistoryMessage { message: sent, reasoning: None, reply: None, call_ids: Vec::new() },
        )
    }

    #[test]
    fn a_reply_is_recognised_by_all_that_came_back_of_it() {
        let (reply, sent) = called();
        for (thinking, id, is_recognised) in [
            (None, "call_00007000", true),
            (Some(""), "", true),
            (Some(" hm\n"), "c0", true),
            (Some("hm, no"), "call_00007000", false),
            (Some("hm"), "call_00008000", false),
            (None, "call_00007001", false),
            // Ids that were not made here.
            (None, "call_8", true),
            (None, "call_0000800a", true),
            (None, "toolu_00008000", true),
        ] {
            let call_ids = vec![id.to_owned()];
            let sent =
                HistoryMessage { reasoning: thinking.map(str::to_owned), call_ids, ..sent.clone() };
            assert_eq!(sent.repeats(&reply), is_recognised, "{sent:?}");
        }
        for (number, is_recognised) in [(Some(7), true), (Some(8), false), (None, true)] {
            let sent = HistoryMessage { reply: number, ..sent.clone() };
            assert_eq!(sent.repeats(&reply), is_recognised, "{sent:?}");
        }
        let unthinking = Reply { reasoning: None, ..called().0 };
        let sent = HistoryMessage { reasoning: Some("hm".to_owned()), ..sent };
        assert!(!sent.repeats(&unthinking), "the agent made the thinking up");
        let mut other = sent;
        other.message.tool_calls[0].arguments = serde_json::json!({"command": "rm"});
        assert!(!other.repeats(&reply));
    }

    #[test]
    fn replies_that_differ_in_their_thinking_alone_are_told_apart_by_what_came_back() {
        let branches = [("first", 1), ("second", 2), ("third", 3)].map(|(thinking, number)| {
            let (reply, _) = called();
            let reply = Reply { reasoning: Some(thinking.to_owned()), number, ..reply };
            let reply = Segment::Reply {
                reply: Arc::new(reply),
                end: 10,
                tokens: 5,
                drops_thinking: false,
            };
            let segments = vec![Segment::Message(messages("user", "u")), reply];
            Branch { tools: TOOLS, segments, is_busy: false, parent: None, sequence: () }
        });
        let tree = Tree { branches: branches.into() };
        for (thinking, id, point, is_ambiguous) in [
            (Some("third"), "call_00003000", BranchPoint::Tip { branch: 2 }, false),
            (Some("third"), "c", BranchPoint::Tip { branch: 2 }, false),
            (None, "call_00002000", BranchPoint::Tip { branch: 1 }, false),
            // The first of those that may be meant.
            (None, "c", BranchPoint::Tip { branch: 0 }, true),
            (
                Some("edited"),
                "call_00003000",
                BranchPoint::Root { cause: Some(ForkCause::History) },
                false,
            ),
            (
                Some("first"),
                "call_00003000",
                BranchPoint::Root { cause: Some(ForkCause::History) },
                false,
            ),
        ] {
            let (_, sent) = called();
            let call_ids = vec![id.to_owned()];
            let sent = HistoryMessage { reasoning: thinking.map(str::to_owned), call_ids, ..sent };
            let request = [messages("user", "u"), Arc::new(sent), messages("user", "v")];
            assert_eq!(tree.locate(&TOOLS, &request), point, "{thinking:?} {id}");
            let found = tree.is_ambiguous(&TOOLS, &request, point);
            assert_eq!(found, is_ambiguous, "{thinking:?} {id}");
        }
    }
}
