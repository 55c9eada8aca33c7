//! The prompt of a request, and the branch on which it goes on.

use super::ask::{AskError, Past};
use super::tool_set::ToolSet;
use super::tree::IN_TOKENS;
use super::tree::{Branch, ForkCause, Place, Said, Step, Tree};
use super::{Conversation, State};
use crate::api::Message;
use crate::chat::ChatError;
use crate::line::Line;
use crate::prefix::{History, deciding_role};
use orchestrate_types::TokenId;
use std::sync::Arc;

/// Bytes of text that one token stands for at most, on the average of a whole prompt.
const BYTES_PER_TOKEN: usize = 32;

impl Conversation {
    /// The prompt of a request at a place: number of tokens that the branch has, and those that follow.
    pub(super) fn prompt_at(
        &self,
        tree: &Tree<Line>,
        place: Place,
        past: &Past,
        tools: &ToolSet,
    ) -> Result<(usize, Vec<TokenId>), AskError> {
        let said = match past {
            Past::Messages { said, .. } => said,
            Past::Tokens(ids) => return self.tokens_at(tree, place, ids),
        };
        let limit = self.limits.max_sequence_tokens;
        let new = || said.iter().skip(place.steps(tree));
        let bytes = past.bytes_from(place.steps(tree));
        if bytes / BYTES_PER_TOKEN > limit {
            // Certainly too long, so it is not tokenized.
            return Err(AskError::TooLong { prompt: bytes / BYTES_PER_TOKEN, limit });
        }
        let new: Vec<Message> = new().map(|said| self.rendered(said, tools)).collect();
        let refused = |error: ChatError| AskError::Refused(error.to_string());
        let chat = &self.calls.chat;
        let role = deciding_role(new.iter().map(|message| message.role.as_str()));
        for role in [chat.options.scaffold.observation_role(), role] {
            chat.earlier_thinking(&tools.shown, role).map_err(refused)?;
        }
        let (branch, tokens) = match place {
            Place::Root { .. } => {
                return Ok((0, chat.prompt_with(&new, &tools.shown).map_err(refused)?.to_vec()));
            }
            Place::Tip { branch } => (branch, None),
            Place::Fork { branch, tokens, .. } => (branch, Some(tokens)),
        };
        let Some(branch) = tree.branches.get(branch) else { return Ok((0, Vec::new())) };
        let ids = branch.line.buffer.ids();
        let head = tokens.unwrap_or(ids.len());
        let last = head.checked_sub(1).and_then(|last| ids.get(last)).copied();
        Ok((head, chat.delta_with(&new, last, &tools.shown).map_err(refused)?))
    }

    /// The prompt of a request in tokens at a place.
    fn tokens_at(
        &self,
        tree: &Tree<Line>,
        place: Place,
        prompt: &[TokenId],
    ) -> Result<(usize, Vec<TokenId>), AskError> {
        let vocabulary = self.calls.engine.shape().vocab;
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocabulary) {
            let problem =
                format!("token id {id} is not below {vocabulary}, the model's vocabulary");
            return Err(AskError::Refused(problem));
        }
        let head = match place {
            Place::Root { .. } => 0,
            Place::Fork { tokens, .. } => tokens,
            Place::Tip { branch } => {
                tree.branches.get(branch).map_or(0, |branch| branch.line.buffer.len())
            }
        };
        Ok((head, prompt.get(head..).unwrap_or_default().to_vec()))
    }

    /// A message as the template shows it. An agent's text cannot hold control tokens, even in replies
    /// that it made up.
    fn rendered(&self, said: &Said, tools: &ToolSet) -> Message {
        let mut message = said.message.clone();
        if message.role == "assistant" {
            message.content = self.calls.chat.break_control_texts(&message.content);
            if self.calls.chat.shown_extras(tools.has_any()).reasoning {
                message.extra.reasoning.clone_from(&said.reasoning);
            } else if let Some(thinking) = &said.reasoning {
                let thinking = self.calls.chat.break_control_texts(thinking);
                message.content = format!("<think>\n{thinking}\n</think>\n\n{}", message.content);
            }
        }
        message
    }

    /// The branch for a place, begun if necessary, without the messages and tokens that are new. `said` are
    /// all messages of the request, and `tail` the new tokens. Also returns why a branch began that the place
    /// does not begin.
    pub(super) fn branch_at(
        &self,
        state: &mut State,
        place: Place,
        tools: &ToolSet,
        (said, tail): (&[Arc<Said>], &[TokenId]),
    ) -> (usize, Option<ForkCause>) {
        let number = state.tree.branches.len();
        let (parent, is_tip) = match place {
            Place::Tip { branch } => (branch, true),
            Place::Fork { branch, .. } => (branch, false),
            Place::Root { .. } => {
                let line = self.root_line(&state.tree, number, tail);
                let (tools, steps, parent) = (tools.digest, Vec::new(), None);
                state.tree.branches.push(Branch { tools, steps, is_busy: false, parent, line });
                return (number, None);
            }
        };
        let steps = place.steps(&state.tree);
        let Some(from) = state.tree.branches.get(parent) else { return (number, None) };
        let forked = |cause| Some(cause).filter(|_| is_tip);
        let Some(cut) = self.dropped_thinking(from, steps, said, tools) else {
            if let Place::Fork { tokens, .. } = place {
                let branch = self.fork(state, parent, steps, tokens);
                return (branch, None);
            }
            return (parent, None);
        };
        // A request that continued the same replies in the same way has left it out before.
        let is_cut = |branch: &Branch<Line>| {
            let ids = branch.line.buffer.ids();
            branch.parent == Some((parent, cut.at))
                && branch.steps.len() >= steps
                && ids.get(cut.at..cut.at + cut.kept.len()) == Some(cut.kept.as_slice())
        };
        if let Some(known) = state.tree.branches.iter().position(is_cut) {
            let end = cut.at + cut.kept.len();
            let Some(branch) = state.tree.branches.get(known) else { return (number, None) };
            if branch.steps.len() == steps && !branch.is_busy {
                return (known, None);
            }
            let cause = branch.cause_of_fork(branch.common(said), said);
            return (self.fork(state, known, steps, end), forked(cause));
        }
        let mut line = from.line.branch(&self.calls, number, cut.at);
        line.extend(&cut.kept);
        let (tools, parent) = (from.tools, Some((parent, cut.at)));
        state.tree.branches.push(Branch { tools, steps: cut.steps, is_busy: false, parent, line });
        (number, forked(ForkCause::Thinking))
    }

    /// Begins a branch after the first steps of another, which have `tokens` tokens.
    fn fork(&self, state: &mut State, parent: usize, steps: usize, tokens: usize) -> usize {
        let number = state.tree.branches.len();
        if let Some(from) = state.tree.branches.get(parent) {
            let branch = Branch {
                tools: from.tools,
                steps: from.steps.get(..steps).unwrap_or_default().to_vec(),
                is_busy: false,
                parent: Some((parent, tokens)),
                line: from.line.branch(&self.calls, number, tokens),
            };
            state.tree.branches.push(branch);
        }
        number
    }

    /// A line for a conversation without a common reply. Rows of tokens that it has in common with another
    /// branch are shared.
    fn root_line(&self, tree: &Tree<Line>, number: usize, prompt: &[TokenId]) -> Line {
        let common =
            |line: &Line| line.buffer.ids().iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let lines = tree.branches.iter().map(|branch| &branch.line);
        match lines.map(|line| (common(line), line)).max_by_key(|(common, _)| *common) {
            Some((common, line)) => line.sibling(&self.calls, number, common),
            None => Line::new(&self.calls, number),
        }
    }

    /// The first `steps` steps of a branch without the thinking that the chat template leaves out before the
    /// messages that follow them in `said`; `None` if it leaves out nothing.
    fn dropped_thinking(
        &self,
        from: &Branch<Line>,
        steps: usize,
        said: &[Arc<Said>],
        tools: &ToolSet,
    ) -> Option<Cut> {
        let chat = &self.calls.chat;
        if chat.options.history != History::Template || from.tools == IN_TOKENS {
            return None;
        }
        let next = said.get(steps..).unwrap_or_default();
        let role = deciding_role(next.iter().map(|said| said.message.role.as_str()));
        let ids = from.line.buffer.ids();
        let mut steps = from.steps.get(..steps)?.to_vec();
        let mut cut: Option<(usize, Vec<TokenId>)> = None;
        // The end of the tokens that are kept or left out so far.
        let mut done = 0;
        for step in &mut steps {
            let Step::Reply { end, tokens, is_cut, .. } = step else { continue };
            let (begin, old_end) = (end.checked_sub(*tokens)?, *end);
            let turn = ids.get(begin..old_end)?;
            let (header, thinking) =
                if *is_cut { (0, 0) } else { chat.dropped_tokens(turn, &tools.shown, role) };
            let is_changed = header + thinking > 0;
            if cut.is_none() && !is_changed {
                continue;
            }
            let begin = begin.checked_sub(header)?;
            if cut.is_none() {
                done = begin;
            }
            let (at, kept) = cut.get_or_insert((begin, Vec::new()));
            kept.extend(ids.get(done..begin)?);
            kept.extend(turn.get(thinking..)?);
            *end = *at + kept.len();
            *tokens -= thinking;
            *is_cut |= is_changed;
            done = old_end;
        }
        cut.map(|(at, kept)| Cut { at, kept, steps })
    }
}

/// The beginning of a branch without some thinking.
struct Cut {
    /// Tokens that it has in common with the branch.
    at: usize,
    /// What it keeps of the others.
    kept: Vec<TokenId>,
    steps: Vec<Step>,
}
