//! How a request begins: its place, its prompt and its generation, or the reply that it is owed.

use super::ask::{Ask, AskError, Past, digest_of, digest_of_ids};
use super::live::LiveText;
use super::served::{Client, Waiting};
use super::tool_set::ToolSet;
use super::tree::{Place, Recognition, Step};
use super::{Conversation, Planned, State};
use crate::chat::ChatErrorKind;
use crate::line::GenerationId;
use crate::turn_journal::ConversationRecord;
use orchestrate_gateway::TextSink;
use orchestrate_types::Limit;
use std::sync::{Arc, Weak};
use tracing::Instrument;

/// Longest text that is tokenized on a thread of the event loop, in bytes, and longest history that is
/// compared there.
const NEW_BYTES_HERE: usize = 8 << 10;
const HISTORY_BYTES_HERE: usize = 256 << 10;

/// A future of the answer, or why there will be none.
type Begun = Result<Waiting, AskError>;

impl Conversation {
    /// The tools of a request.
    pub(super) fn tools_of(&self, past: &Past) -> Arc<ToolSet> {
        match past {
            Past::Messages { tools, thinking, .. } => {
                self.tools.of(&self.calls.chat, tools, *thinking)
            }
            Past::Tokens(_) => ToolSet::of_tokens(),
        }
    }

    /// Begins to sample on this thread if that is a matter of microseconds, as it is for most requests:
    /// a history of moderate length with few new words. Otherwise gives back `text`.
    pub(super) fn begin_here(
        self: &Arc<Self>,
        ask: &Arc<Ask>,
        client: &Weak<Client>,
        text: Option<TextSink>,
    ) -> Result<Begun, Option<TextSink>> {
        let tools = match &ask.past {
            Past::Messages { tools, thinking, .. } => self.tools.known(tools, *thinking),
            Past::Tokens(_) => None,
        };
        let Some(tools) = tools.filter(|tools| tools.bytes <= NEW_BYTES_HERE) else {
            return Err(text);
        };
        if ask.past.bytes_from(0) > HISTORY_BYTES_HERE {
            return Err(text);
        }
        // It may be held for long, by a computation on another thread.
        let Ok(mut state) = self.state.try_lock() else { return Err(text) };
        let place = state.locate(&ask.past, &tools);
        if ask.past.bytes_from(place.steps(&state.tree)) > NEW_BYTES_HERE {
            return Err(text);
        }
        Ok(self.begin_at(&mut state, (place, &tools), ask, client, text))
    }

    /// Begins to sample, or finds the reply that the request is owed. Tokenizes what is new.
    pub(super) fn begin(
        self: &Arc<Self>,
        ask: &Arc<Ask>,
        client: &Weak<Client>,
        text: Option<TextSink>,
    ) -> Begun {
        let tools = self.tools_of(&ask.past);
        let mut state = self.state();
        let place = state.locate(&ask.past, &tools);
        self.begin_at(&mut state, (place, &tools), ask, client, text)
    }

    fn begin_at(
        self: &Arc<Self>,
        state: &mut State,
        (place, tools): (Place, &ToolSet),
        ask: &Arc<Ask>,
        client: &Weak<Client>,
        text: Option<TextSink>,
    ) -> Begun {
        let digest = digest_of(ask, &tools.digest);
        if client.strong_count() == 0 {
            return Err(AskError::Ended("the client is gone".to_owned()));
        }
        if let Some(served) = state.receipts.find(digest, ask.repeats) {
            if let Some((live, text)) = served.live.as_ref().zip(text) {
                live.join(text);
            }
            *state.recognised.entry(Recognition::Returned).or_default() += 1;
            return Ok(served.wait(client));
        }
        if let Some(number) = place.reply(&state.tree) {
            state.receipts.is_continued(number);
        }
        self.check_open(state)?;
        let mut planned = self.plan(state, ask, (place, tools))?;
        self.record(state, || ConversationRecord::Asked {
            number: planned.id.ordinal,
            ask: Arc::clone(ask),
        })?;
        planned.line.recorded = self.journal.get().map(|_| Vec::new());
        planned.live = text.and_then(|text| self.live_text(&planned, ask, text));
        let served = state.receipts.open(digest, planned.live.clone());
        let waiting = served.wait(client);
        let (this, past) = (Arc::clone(self), ask.past.clone());
        let run = async move { this.run(planned, past, served).await };
        while state.generating.try_join_next().is_some() {}
        state.generating.spawn(run.in_current_span());
        Ok(waiting)
    }

    /// The text of a reply that is about to be sampled; `None` if it can only be read as a whole.
    fn live_text(&self, planned: &Planned, ask: &Ask, text: TextSink) -> Option<Arc<LiveText>> {
        let chat = &self.calls.chat;
        if !chat.decodes_in_parts() {
            return None;
        }
        let prompt = planned.line.buffer.prompt_for_turn();
        let thinks = chat.opens_thinking(&prompt);
        let stops = Arc::clone(&ask.stops);
        let reply = (planned.id.ordinal, prompt.len());
        Some(Arc::new(LiveText::new(Arc::clone(chat), reply, thinks, stops, text)))
    }

    /// Finds the place of a request and prepares its line.
    pub(super) fn plan(
        &self,
        state: &mut State,
        ask: &Ask,
        (place, tools): (Place, &ToolSet),
    ) -> Result<Planned, AskError> {
        if ask.past.is_empty() {
            return Err(AskError::Refused("the request has no history".to_owned()));
        }
        if !ask.past.tools().is_empty() && !self.calls.chat.reads_tool_calls() {
            return Err(AskError::Refused(ChatErrorKind::UnknownToolFormat.to_string()));
        }
        let (head, tail) = self.prompt_at(&state.tree, place, &ask.past, tools)?;
        let prompt = head + tail.len();
        let room = self.limits.max_sequence_tokens.saturating_sub(prompt);
        if room == 0 {
            return Err(AskError::TooLong { prompt, limit: self.limits.max_sequence_tokens });
        }
        if state.tree.is_ambiguous(&tools.digest, ask.past.said(), place) {
            *state.recognised.entry(Recognition::Ambiguous).or_default() += 1;
        }
        let known = place.steps(&state.tree);
        let (branch, forked) = self.branch_at(state, place, tools, (ask.past.said(), &tail));
        for cause in place.cause().into_iter().chain(forked) {
            *state.forks.entry(cause).or_default() += 1;
        }
        let Some(target) = state.tree.branches.get_mut(branch) else {
            return Err(AskError::Failed("the branch is gone".to_owned()));
        };
        let new = ask.past.said().iter().skip(known).cloned();
        target.steps.extend(new.map(Step::Given));
        target.is_busy = true;
        let turn = target.steps.iter().filter(|step| matches!(step, Step::Reply { .. })).count();
        let mut line = target.line.copy();
        line.extend(&tail);
        line.stops = Arc::clone(&ask.stops);
        line.asked = ask.sampling;
        let repetition = {
            let digest = digest_of_ids(&line.buffer.prompt_for_turn());
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
        let room = ask.max_tokens.map_or(longest, |wanted| wanted.max(1).min(longest));
        let limit = (room == longest).then_some(limit);
        let turn = u32::try_from(turn).unwrap_or(u32::MAX);
        let id = GenerationId { turn, ordinal, repetition, max_new_tokens: room };
        let overridden = Arc::clone(&ask.overridden);
        Ok(Planned { branch, line, tail, id, room, limit, live: None, overridden })
    }
}
