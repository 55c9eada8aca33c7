//! How a request begins: its branch point, its prompt and its generation, or the reply that it is owed.

use super::live::LiveText;
use super::pending::{Asking, Begun};
use super::request::{ReplyError, ReplyRequest, RequestPrompt, digest_of, digest_of_ids};
use super::tool_set::ToolSet;
use super::tree::{BranchPoint, Recognition, Segment};
use super::{Conversation, PlannedGeneration, State};
use crate::chat::ChatErrorKind;
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
        let point = state.locate(&request.prompt, &tools);
        if request.prompt.bytes_from(point.segments(&state.tree)) > NEW_BYTES_HERE {
            return Err(asking);
        }
        Ok(self.begin_at(&mut state, (point, &tools), request, asking))
    }

    /// Begins to sample, or finds the reply that the request is owed. Tokenizes what is new.
    pub(super) fn begin(
        self: &Arc<Self>,
        request: &Arc<ReplyRequest>,
        asking: Asking,
    ) -> Result<Begun, ReplyError> {
        let tools = self.tools_of(&request.prompt);
        let mut state = self.state();
        let point = state.locate(&request.prompt, &tools);
        self.begin_at(&mut state, (point, &tools), request, asking)
    }

    fn begin_at(
        self: &Arc<Self>,
        state: &mut State,
        (point, tools): (BranchPoint, &ToolSet),
        request: &Arc<ReplyRequest>,
        asking: Asking,
    ) -> Result<Begun, ReplyError> {
        let digest = digest_of(request, &tools.digest);
        let Asking { client, text, is_settled } = asking;
        if client.strong_count() == 0 {
            return Err(ReplyError::Ended("the client is gone".to_owned()));
        }
        if let Some(pending) = state.replies.find(digest, request.repeats) {
            if let Some((live, text)) = pending.live.as_ref().zip(text) {
                live.join(text);
            }
            *state.recognised.entry(Recognition::Returned).or_default() += 1;
            return Ok(Begun::Waiting(pending.wait(&client)));
        }
        if !is_settled && state.replies.may_be_owed(digest) {
            return Ok(Begun::Unsettled {
                content: digest,
                asking: Asking { client, text, is_settled: true },
            });
        }
        if let Some(number) = point.reply(&state.tree) {
            state.replies.is_continued(number);
        }
        self.check_open(state)?;
        let mut planned = self.plan(state, request, (point, tools))?;
        self.record(state, || ConversationRecord::Asked {
            number: planned.id.ordinal,
            request: Arc::clone(request),
        })?;
        planned.sequence.recorded = self.journal.get().map(|_| Vec::new());
        planned.live = text.and_then(|text| self.live_text(&planned, request, text));
        let pending = state.replies.open(digest, planned.live.clone());
        let waiting = pending.wait(&client);
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
        let thinks = chat.opens_thinking(&prompt);
        let stops = Arc::clone(&request.stops);
        let reply = (planned.id.ordinal, prompt.len());
        Some(Arc::new(LiveText::new(Arc::clone(chat), reply, thinks, stops, text)))
    }

    /// Finds the branch point of a request and prepares its sequence.
    pub(super) fn plan(
        &self,
        state: &mut State,
        request: &ReplyRequest,
        (point, tools): (BranchPoint, &ToolSet),
    ) -> Result<PlannedGeneration, ReplyError> {
        if request.prompt.is_empty() {
            return Err(ReplyError::Refused("the request has no history".to_owned()));
        }
        if !request.prompt.tools().is_empty() && !self.context.chat.reads_tool_calls() {
            return Err(ReplyError::Refused(ChatErrorKind::UnknownToolFormat.to_string()));
        }
        let (head, tail) = self.prompt_at(&state.tree, point, &request.prompt, tools)?;
        let prompt = head + tail.len();
        let room = self.limits.max_sequence_tokens.saturating_sub(prompt);
        if room == 0 {
            return Err(ReplyError::TooLong { prompt, limit: self.limits.max_sequence_tokens });
        }
        if state.tree.is_ambiguous(&tools.digest, request.prompt.messages(), point) {
            *state.recognised.entry(Recognition::Ambiguous).or_default() += 1;
        }
        let known = point.segments(&state.tree);
        let (branch, forked) =
            self.branch_at(state, point, tools, (request.prompt.messages(), &tail));
        for cause in point.cause().into_iter().chain(forked) {
            *state.forks.entry(cause).or_default() += 1;
        }
        let Some(target) = state.tree.branches.get_mut(branch) else {
            return Err(ReplyError::Failed("the branch is gone".to_owned()));
        };
        let new = request.prompt.messages().iter().skip(known).cloned();
        target.segments.extend(new.map(Segment::Message));
        target.is_busy = true;
        let turn = target
            .segments
            .iter()
            .filter(|segment| matches!(segment, Segment::Reply { .. }))
            .count();
        let mut sequence = target.sequence.copy();
        sequence.extend(&tail);
        sequence.stops = Arc::clone(&request.stops);
        sequence.asked = request.sampling;
        let repetition = {
            let digest = digest_of_ids(&sequence.buffer.prompt_for_turn());
            let count = state.prompts.entry(digest).or_default();
            let repetition = *count;
            *count += 1;
            repetition
        };
        let ordinal = state.begun;
        state.begun += 1;
        state.generations += 1;
        let longest = self.limits.max_response_tokens;
        let limit = if room <= longest { Limit::SequenceTokens } else { Limit::ResponseTokens };
        let longest = room.min(longest);
        let room = request.max_tokens.map_or(longest, |wanted| wanted.max(1).min(longest));
        let limit = (room == longest).then_some(limit);
        let turn = u32::try_from(turn).unwrap_or(u32::MAX);
        let id = GenerationId { turn, ordinal, repetition };
        let overridden = Arc::clone(&request.overridden);
        Ok(PlannedGeneration { branch, sequence, tail, id, room, limit, live: None, overridden })
    }
}
