//! The prompt of a request, and the branch on which it goes on.

use super::request::{ReplyError, RequestPrompt};
use super::tool_set::ToolSet;
use super::tree::IN_TOKENS;
use super::tree::{Branch, BranchPoint, ForkCause, HistoryMessage, Segment, Tree};
use super::{Conversation, State};
use crate::api::Message;
use crate::chat::ChatError;
use crate::prefix::{History, deciding_role};
use crate::sequence::Sequence;
use orchestrate_types::TokenId;
use std::sync::Arc;

/// Bytes of text that one token stands for at most, on the average of a whole prompt.
const BYTES_PER_TOKEN: usize = 32;

/// A request's branch point, and the tools that its prompt shows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) point: BranchPoint,
    pub(super) tools: &'a ToolSet,
}

/// The prompt of a request, at its branch point.
pub(super) struct SplitPrompt {
    /// How many of its tokens the branch has.
    pub(super) known: usize,
    /// The tokens after these.
    pub(super) new: Vec<TokenId>,
}

impl SplitPrompt {
    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.known + self.new.len()
    }
}

impl Conversation {
    /// The prompt of a request at a branch point.
    pub(super) fn prompt_at(
        &self,
        tree: &Tree<Sequence>,
        located: Located<'_>,
        prompt: &RequestPrompt,
    ) -> Result<SplitPrompt, ReplyError> {
        let Located { point, tools } = located;
        let messages = match prompt {
            RequestPrompt::Messages { messages, .. } => messages,
            RequestPrompt::Tokens(ids) => return self.tokens_at(tree, point, ids),
        };
        let limit = self.limits.max_sequence_tokens;
        let new = || messages.iter().skip(point.segments(tree));
        let bytes = prompt.bytes_from(point.segments(tree));
        if bytes / BYTES_PER_TOKEN > limit {
            // Certainly too long, so it is not tokenized.
            return Err(ReplyError::TooLong { prompt: bytes / BYTES_PER_TOKEN, limit });
        }
        let new: Vec<Message> = new().map(|entry| self.rendered(entry, tools)).collect();
        let refused = |error: ChatError| ReplyError::Refused(error.to_string());
        let chat = &self.context.chat;
        let role = deciding_role(new.iter().map(|message| message.role.as_str()));
        for role in [chat.options.scaffold.observation_role(), role] {
            chat.earlier_thinking(&tools.shown, role).map_err(refused)?;
        }
        let (branch, tokens) = match point {
            BranchPoint::Root { .. } => {
                let new = chat.prompt_with(&new, &tools.shown).map_err(refused)?.to_vec();
                return Ok(SplitPrompt { known: 0, new });
            }
            BranchPoint::Tip { branch } => (branch, None),
            BranchPoint::Fork { branch, tokens, .. } => (branch, Some(tokens)),
        };
        let Some(branch) = tree.branches.get(branch) else {
            return Ok(SplitPrompt { known: 0, new: Vec::new() });
        };
        let ids = branch.sequence.buffer.ids();
        let known = tokens.unwrap_or(ids.len());
        let last = known.checked_sub(1).and_then(|last| ids.get(last)).copied();
        Ok(SplitPrompt { known, new: chat.delta_with(&new, last, &tools.shown).map_err(refused)? })
    }

    /// The prompt of a request in tokens at a branch point.
    fn tokens_at(
        &self,
        tree: &Tree<Sequence>,
        point: BranchPoint,
        prompt: &[TokenId],
    ) -> Result<SplitPrompt, ReplyError> {
        let vocabulary = self.context.engine.shape().vocab;
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocabulary) {
            let problem =
                format!("token id {id} is not below {vocabulary}, the model's vocabulary");
            return Err(ReplyError::Refused(problem));
        }
        let known = match point {
            BranchPoint::Root { .. } => 0,
            BranchPoint::Fork { tokens, .. } => tokens,
            BranchPoint::Tip { branch } => {
                tree.branches.get(branch).map_or(0, |branch| branch.sequence.buffer.len())
            }
        };
        Ok(SplitPrompt { known, new: prompt.get(known..).unwrap_or_default().to_vec() })
    }

    /// A message as the template shows it. An agent's text cannot hold control tokens, even in replies
    /// that it made up.
    fn rendered(&self, entry: &HistoryMessage, tools: &ToolSet) -> Message {
        let mut message = entry.message.clone();
        if message.role == "assistant" {
            message.content = self.context.chat.break_control_texts(&message.content);
            if self.context.chat.shown_extras(tools.has_any()).reasoning {
                message.extra.reasoning.clone_from(&entry.reasoning);
            } else if let Some(thinking) = &entry.reasoning {
                let thinking = self.context.chat.break_control_texts(thinking);
                message.content = format!("<think>\n{thinking}\n</think>\n\n{}", message.content);
            }
        }
        message
    }

    /// The branch for a branch point, begun if necessary, without the messages and tokens that are new.
    /// `messages` are all messages of the request, and `new_tokens` the tokens of its prompt that are new.
    /// Also returns why a branch began at a point that itself begins none: the template drops thinking.
    pub(super) fn branch_at(
        &self,
        state: &mut State,
        Located { point, tools }: Located<'_>,
        messages: &[Arc<HistoryMessage>],
        new_tokens: &[TokenId],
    ) -> (usize, Option<ForkCause>) {
        let number = state.tree.branches.len();
        let (parent, is_tip) = match point {
            BranchPoint::Tip { branch } => (branch, true),
            BranchPoint::Fork { branch, .. } => (branch, false),
            BranchPoint::Root { .. } => {
                let sequence = self.root_sequence(&state.tree, number, new_tokens);
                let (tools, segments, parent) = (tools.digest, Vec::new(), None);
                state.tree.branches.push(Branch {
                    tools,
                    segments,
                    is_busy: false,
                    parent,
                    sequence,
                });
                return (number, None);
            }
        };
        let segments = point.segments(&state.tree);
        let Some(from) = state.tree.branches.get(parent) else { return (number, None) };
        let forked = |cause| Some(cause).filter(|_| is_tip);
        let Some(shorter) = self.without_thinking(from, segments, messages, tools) else {
            if let BranchPoint::Fork { tokens, .. } = point {
                let branch = self.fork(state, parent, segments, tokens);
                return (branch, None);
            }
            return (parent, None);
        };
        // A request that continued the same replies in the same way has left it out before.
        let end = shorter.common + shorter.kept.len();
        let has_left_it_out = |branch: &Branch<Sequence>| {
            let ids = branch.sequence.buffer.ids();
            branch.parent == Some((parent, shorter.common))
                && branch.segments.len() >= segments
                && ids.get(shorter.common..end) == Some(shorter.kept.as_slice())
        };
        if let Some(known) = state.tree.branches.iter().position(has_left_it_out) {
            let Some(branch) = state.tree.branches.get(known) else { return (number, None) };
            if branch.segments.len() == segments && !branch.is_busy {
                return (known, None);
            }
            let cause = branch.cause_of_fork(branch.common(messages), messages);
            return (self.fork(state, known, segments, end), forked(cause));
        }
        let mut sequence = from.sequence.branch(&self.context, number, shorter.common);
        sequence.extend(&shorter.kept);
        let (tools, parent) = (from.tools, Some((parent, shorter.common)));
        state.tree.branches.push(Branch {
            tools,
            segments: shorter.segments,
            is_busy: false,
            parent,
            sequence,
        });
        (number, forked(ForkCause::Thinking))
    }

    /// Begins a branch after the first segments of another, which have `tokens` tokens.
    fn fork(&self, state: &mut State, parent: usize, segments: usize, tokens: usize) -> usize {
        let number = state.tree.branches.len();
        if let Some(from) = state.tree.branches.get(parent) {
            let branch = Branch {
                tools: from.tools,
                segments: from.segments.get(..segments).unwrap_or_default().to_vec(),
                is_busy: false,
                parent: Some((parent, tokens)),
                sequence: from.sequence.branch(&self.context, number, tokens),
            };
            state.tree.branches.push(branch);
        }
        number
    }

    /// A sequence for a conversation without a common reply. Rows of tokens that it has in common with another
    /// branch are shared.
    fn root_sequence(&self, tree: &Tree<Sequence>, number: usize, prompt: &[TokenId]) -> Sequence {
        let common = |sequence: &Sequence| {
            sequence.buffer.ids().iter().zip(prompt).take_while(|(a, b)| a == b).count()
        };
        let sequences = tree.branches.iter().map(|branch| &branch.sequence);
        match sequences
            .map(|sequence| (common(sequence), sequence))
            .max_by_key(|(common, _)| *common)
        {
            Some((common, sequence)) => sequence.sibling(&self.context, number, common),
            None => Sequence::new(&self.context, number),
        }
    }

    /// The first `segments` segments of a branch without the thinking that the chat template leaves out before the
    /// messages that follow them in `messages`; `None` if it leaves out nothing.
    fn without_thinking(
        &self,
        from: &Branch<Sequence>,
        segments: usize,
        messages: &[Arc<HistoryMessage>],
        tools: &ToolSet,
    ) -> Option<WithoutThinking> {
        let chat = &self.context.chat;
        if chat.options.history != History::Template || from.tools == IN_TOKENS {
            return None;
        }
        let next = messages.get(segments..).unwrap_or_default();
        let role = deciding_role(next.iter().map(|entry| entry.message.role.as_str()));
        let ids = from.sequence.buffer.ids();
        let mut segments = from.segments.get(..segments)?.to_vec();
        let mut shorter: Option<(usize, Vec<TokenId>)> = None;
        // The end of the tokens that are kept or left out so far.
        let mut done = 0;
        for segment in &mut segments {
            let Segment::Reply { end, tokens, drops_thinking, .. } = segment else { continue };
            let (begin, old_end) = (end.checked_sub(*tokens)?, *end);
            let turn = ids.get(begin..old_end)?;
            let (header, thinking) = if *drops_thinking {
                (0, 0)
            } else {
                chat.dropped_tokens(turn, &tools.shown, role)
            };
            let is_changed = header + thinking > 0;
            if shorter.is_none() && !is_changed {
                continue;
            }
            let begin = begin.checked_sub(header)?;
            if shorter.is_none() {
                done = begin;
            }
            let (common, kept) = shorter.get_or_insert((begin, Vec::new()));
            kept.extend(ids.get(done..begin)?);
            kept.extend(turn.get(thinking..)?);
            *end = *common + kept.len();
            *tokens -= thinking;
            *drops_thinking |= is_changed;
            done = old_end;
        }
        shorter.map(|(common, kept)| WithoutThinking { common, kept, segments })
    }
}

/// The beginning of a branch without some thinking.
struct WithoutThinking {
    /// Tokens that it has in common with the branch.
    common: usize,
    /// What it keeps of the others.
    kept: Vec<TokenId>,
    segments: Vec<Segment>,
}
