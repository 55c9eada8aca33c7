//! The prompt of a request, and the branch on which it goes on.

use super::ask::{AskError, Past};
use super::tool_set::ToolSet;
use super::tree::IN_TOKENS;
use super::tree::{Branch, ForkCause, Place, Said, Step, Tree};
use super::{Conversation, State};
use crate::api::Message;
use crate::chat::ChatError;
use crate::line::Line;
use crate::prefix::History;
use crate::template::TemplateInput;
use orchestrate_types::TokenId;

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
        chat.earlier_thinking(&tools.shown).map_err(refused)?;
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

    /// The branch for a place, begun if necessary, without the messages and tokens that are new.
    pub(super) fn branch_at(
        &self,
        state: &mut State,
        place: Place,
        tools: &ToolSet,
        tail: &[TokenId],
    ) -> (usize, Option<ForkCause>) {
        let ToolSet { digest: tools, ref shown, .. } = *tools;
        let number = state.tree.branches.len();
        let (parent, steps, tokens) = match place {
            Place::Tip { branch } => match self.dropped_thinking(state, branch, number, shown) {
                Some(forked) => {
                    state.tree.branches.push(forked);
                    return (number, Some(ForkCause::Thinking));
                }
                None => return (branch, None),
            },
            Place::Fork { branch, steps, tokens, .. } => (branch, steps, tokens),
            Place::Root { .. } => {
                let line = self.root_line(&state.tree, number, tail);
                let branch =
                    Branch { tools, steps: Vec::new(), is_busy: false, parent: None, line };
                state.tree.branches.push(branch);
                return (number, None);
            }
        };
        if let Some(from) = state.tree.branches.get(parent) {
            let branch = Branch {
                tools,
                steps: from.steps.get(..steps).unwrap_or_default().to_vec(),
                is_busy: false,
                parent: Some((parent, tokens)),
                line: from.line.branch(&self.calls, number, tokens),
            };
            state.tree.branches.push(branch);
        }
        (number, None)
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

    /// If the chat template leaves out the thinking of a branch's last reply: a branch without it.
    fn dropped_thinking(
        &self,
        state: &State,
        branch: usize,
        number: usize,
        input: &TemplateInput,
    ) -> Option<Branch<Line>> {
        let chat = &self.calls.chat;
        if chat.options.history != History::Template {
            return None;
        }
        let from = state.tree.branches.get(branch).filter(|from| from.tools != IN_TOKENS)?;
        let buffer = &from.line.buffer;
        let turn = buffer.last_turn();
        let (header, thinking) = chat.dropped_tokens(turn, input);
        if header + thinking == 0 {
            return None;
        }
        let end = buffer.len();
        let at = end.checked_sub(turn.len() + header)?;
        let kept = turn.get(thinking..).unwrap_or_default();
        let mut line = from.line.branch(&self.calls, number, at);
        line.extend(kept);
        let mut steps = from.steps.clone();
        if let Some(Step::Reply { end, .. }) = steps.last_mut() {
            *end = at + kept.len();
        }
        Some(Branch { tools: from.tools, steps, is_busy: false, parent: Some((branch, at)), line })
    }
}
