//! How a request begins: its branch point, its prompt and its generation, or the reply that it is owed.

use super::generation::{PlannedGeneration, TokenBudget};
use super::live::LiveText;
use super::pending::{Asking, Begun};
use super::prompt::Located;
use super::request::{ReplyError, ReplyRequest, RequestPrompt, digest_of, digest_of_ids};
use super::tool_set::ToolSet;
use super::tree::{Recognition, Segment};
use super::{Conversation, State};
use crate::chat::ChatErrorKind;
use crate::machine::EpisodeLimits;
use crate::sequence::GenerationId;
use crate::turn_journal::ConversationRecord;
use orchestrate_gateway::TextSink;
use orchestrate_types::Limit;
use std::sync::Arc;
use tracing::Instrument;

/// Longest text that is tokenized on a thread of the event loop, in bytes, and longest history that is
/// compared there.
const NEW_BYTES_HERE: usize = 8 << 10;
const HISTORY_BYTES_HERE: usize = 256 << 10;

impl Conversation {
    /// The tools of a request.
    pub(super) fn tools_of(&self, prompt: &RequestPrompt) -> Arc<ToolSet> {
        match prompt {
            RequestPrompt::Messages { tools, thinking, .. } => {
                self.tools.of(&self.context.chat, tools, *thinking)
            }
            RequestPrompt::Tokens(_) => ToolSet::of_tokens(),
        }
    }

    /// Begins to sample on this thread if that is a matter of microseconds, as it is for most requests:
    /// a history of moderate length with few new words. Otherwise gives back `asking`.
    pub(super) fn begin_here(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
        asking: Asking,
    ) -> Result<Result<Begun, ReplyError>, Asking> {
        let tools = match &request.prompt {
            RequestPrompt::Messages { tools, thinking, .. } => self.tools.known(tools, *thinking),
            RequestPrompt::Tokens(_) => None,
        };
        let Some(tools) = tools.filter(|tools| tools.bytes <= NEW_BYTES_HERE) else {
            return Err(asking);
        };
        if request.prompt.bytes_from(0) > HISTORY_BYTES_HERE {
            return Err(asking);
        }
        // It may be held for long, by a computation on another thread.
        let Ok(mut state) = self.state.try_lock() else { return Err(asking) };
        let located = state.locate(&request.prompt, &tools);
        if request.prompt.bytes_from(located.point.segments(&state.tree)) > NEW_BYTES_HERE {
            return Err(asking);
        }
        Ok(self.begin_at(&mut state, located, request, asking))
    }

    /// Begins to sample, or finds the reply that the request is owed. Tokenizes what is new.
    pub(super) fn begin(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
        asking: Asking,
    ) -> Result<Begun, ReplyError> {
        let tools = self.tools_of(&request.prompt);
        let mut state = self.state();
        let located = state.locate(&request.prompt, &tools);
        self.begin_at(&mut state, located, request, asking)
    }

    fn begin_at(
        self: &Arc<Self>,
        state: &mut State,
        located: Located<'_>,
        request: &Arc<ReplyRequest>,
        asking: Asking,
    ) -> Result<Begun, ReplyError> {
        let digest = digest_of(request, &located.tools.digest);
        let Asking { mut delivery, text, is_settled } = asking;
        if delivery.now() == Some(false) {
            return Err(ReplyError::Ended("the client is gone".to_owned()));
        }
        if let Some(pending) = state.replies.find(digest, request.repeats) {
            if let Some((live, text)) = pending.live.as_ref().zip(text) {
                live.join(text);
            }
            *state.recognised.entry(Recognition::Returned).or_default() += 1;
            return Ok(Begun::Waiting(pending.wait(delivery)));
        }
        if !is_settled && state.replies.may_be_owed(digest) {
            return Ok(Begun::Unsettled {
                content: digest,
                asking: Asking { delivery, text, is_settled: true },
            });
        }
        if let Some(number) = located.point.reply(&state.tree) {
            state.replies.mark_continued(number);
        }
        self.check_open(state)?;
        let mut planned = self.plan(state, request, located)?;
        self.record(state, || ConversationRecord::Asked {
            number: planned.id.number,
            request: Arc::clone(request),
        })?;
        planned.sequence.recorded = self.journal.get().map(|_| Vec::new());
        planned.live = text.and_then(|text| self.live_text(&planned, request, text));
        let pending = state.replies.open(digest, planned.live.clone());
        let waiting = pending.wait(delivery);
        let (this, prompt) = (Arc::clone(self), request.prompt.clone());
        let run = async move { this.run(planned, prompt, pending).await };
        while state.generating.try_join_next().is_some() {}
        state.generating.spawn(run.in_current_span());
        Ok(Begun::Waiting(waiting))
    }

    /// The text of a reply that is about to be sampled; `None` if it can only be read as a whole.
    fn live_text(
        &self,
        planned: &PlannedGeneration,
        request: &ReplyRequest,
        text: TextSink,
    ) -> Option<Arc<LiveText>> {
        let chat = &self.context.chat;
        if !chat.decodes_in_parts() {
            return None;
        }
        let prompt = planned.sequence.buffer.prompt_for_turn();
        let stops = Arc::clone(&request.stops);
        let number = planned.id.number;
        Some(Arc::new(LiveText::new(Arc::clone(chat), number, &prompt, stops, text)))
    }

    /// Finds the branch point of a request and prepares its sequence.
    pub(super) fn plan(
        &self,
        state: &mut State,
        request: &ReplyRequest,
        located: Located<'_>,
    ) -> Result<PlannedGeneration, ReplyError> {
        if request.prompt.is_empty() {
            return Err(ReplyError::Refused("the request has no history".to_owned()));
        }
        if !request.prompt.tools().is_empty() && !self.context.chat.reads_tool_calls() {
            return Err(ReplyError::Refused(ChatErrorKind::UnknownToolFormat.to_string()));
        }
        let Located { point, tools } = located;
        let prompt = self.prompt_at(&state.tree, located, &request.prompt)?;
        let budget = self.budget(prompt.len(), request.max_tokens)?;
        if state.tree.is_ambiguous(&tools.digest, request.prompt.messages(), point) {
            *state.recognised.entry(Recognition::Ambiguous).or_default() += 1;
        }
        let known = point.segments(&state.tree);
        let messages = request.prompt.messages();
        let (branch, forked) = self.branch_at(state, located, messages, &prompt.new);
        for cause in point.cause().into_iter().chain(forked) {
            *state.forks.entry(cause).or_default() += 1;
        }
        let Some(target) = state.tree.branches.get_mut(branch) else {
            return Err(ReplyError::Failed("the branch is gone".to_owned()));
        };
        let new = messages.iter().skip(known).cloned();
        target.segments.extend(new.map(Segment::Message));
        target.is_busy = true;
        let turn = target
            .segments
            .iter()
            .filter(|segment| matches!(segment, Segment::Reply { .. }))
            .count();
        let mut sequence = target.sequence.copy();
        sequence.extend(&prompt.new);
        sequence.stops = Arc::clone(&request.stops);
        sequence.agent_sampling = request.sampling;
        let repetition = {
            let digest = digest_of_ids(&sequence.buffer.prompt_for_turn());
            let count = state.prompts.entry(digest).or_default();
            let repetition = *count;
            *count += 1;
            repetition
        };
        let number = state.next_number;
        state.next_number += 1;
        state.turns_used += 1;
        let turn = u32::try_from(turn).unwrap_or(u32::MAX);
        Ok(PlannedGeneration {
            branch,
            sequence,
            new_tokens: prompt.new,
            id: GenerationId { turn, number, repetition },
            budget,
            live: None,
            overridden: Arc::clone(&request.overridden),
        })
    }

    /// How many tokens may be sampled after a prompt of `prompt` tokens, if the agent asks for `max_tokens`.
    fn budget(&self, prompt: usize, max_tokens: Option<usize>) -> Result<TokenBudget, ReplyError> {
        let EpisodeLimits { max_sequence_tokens, max_response_tokens, .. } = self.limits;
        let left = max_sequence_tokens.saturating_sub(prompt);
        if left == 0 {
            return Err(ReplyError::TooLong { prompt, limit: max_sequence_tokens });
        }
        let (longest, limit) = if left <= max_response_tokens {
            (left, Limit::SequenceTokens)
        } else {
            (max_response_tokens, Limit::ResponseTokens)
        };
        let max_new_tokens = max_tokens.map_or(longest, |wanted| wanted.max(1).min(longest));
        // An agent that asked for fewer tokens has met its own limit, not the episode's.
        Ok(TokenBudget { max_new_tokens, limit: (max_new_tokens == longest).then_some(limit) })
    }
}
