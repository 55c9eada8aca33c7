//! Records generations, and repeats what was recorded of a conversation in an earlier process. Requests and replies take the same
//! way as at first; only the engine is not asked again.

use super::Conversation;
use super::generation::{FinishedGeneration, PlannedGeneration, SampledTurn};
use super::pending::PendingReply;
use super::request::{ReplyError, ReplyRequest, RequestPrompt, digest_of};
use super::tree::Segment;
use crate::sequence::{AcceptedCall, NoReply};
use crate::turn_journal::{ConversationRecord, LimitRecord, RepliedRecord};
use orchestrate_gateway::ErrorCode;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Why a record does not continue the ones before it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error("request {number} was recorded as number {recorded}")]
    Number { number: u32, recorded: u32 },
    #[error("there is a reply to request {0}, which is not recorded")]
    NotAsked(u32),
    #[error("request {number} cannot be repeated: {error}")]
    Failed { number: u32, error: String },
}

/// The record of a generation's end: `reply` says whether a client was shown another text.
pub(super) fn record_of(
    number: u32,
    elapsed: Duration,
    calls: Vec<AcceptedCall>,
    reply: Result<bool, &NoReply>,
) -> Option<ConversationRecord> {
    let limit = match reply {
        Ok(contradicts) => {
            let replied = RepliedRecord { number, elapsed, contradicts, calls };
            return Some(ConversationRecord::Replied(replied));
        }
        Err(NoReply::ContextFull(_)) => LimitRecord::Context,
        Err(NoReply::TimeUp) => LimitRecord::Time,
        // The attempt is not continued.
        Err(NoReply::Stopped | NoReply::Failed(_)) => return None,
    };
    Some(ConversationRecord::Limited { number, limit })
}

/// A request that has no reply yet.
struct Open {
    planned: PlannedGeneration,
    prompt: RequestPrompt,
    pending: Arc<PendingReply>,
}

impl Conversation {
    /// Repeats records, oldest first. Nothing may have been asked before.
    pub(crate) async fn replay(
        self: &Arc<Self>,
        records: Vec<ConversationRecord>,
    ) -> Result<(), ReplayError> {
        let mut open = BTreeMap::new();
        for record in records {
            match record {
                ConversationRecord::Asked { number, request } => {
                    open.insert(number, self.ask_again(number, &request)?);
                }
                ConversationRecord::Replied(replied) => {
                    let asked = open.remove(&replied.number);
                    let asked = asked.ok_or(ReplayError::NotAsked(replied.number))?;
                    self.reply_again(asked, replied).await?;
                }
                ConversationRecord::Limited { number, limit } => {
                    let Open { planned, prompt, pending } =
                        open.remove(&number).ok_or(ReplayError::NotAsked(number))?;
                    let reason = match limit {
                        LimitRecord::Context => NoReply::ContextFull(String::new()),
                        LimitRecord::Time => NoReply::TimeUp,
                    };
                    let generated = FinishedGeneration::replayed(planned, &prompt, Err(reason));
                    self.store(&mut self.state(), generated, String::new(), &pending);
                }
                ConversationRecord::Noted(unanswered) => {
                    let code = unanswered.as_ref().map(|unanswered| unanswered.code);
                    self.note(unanswered);
                    if code == Some(ErrorCode::EpisodeEnded) {
                        // Finds the same limit again.
                        let _ = self.check_open(&mut self.state());
                    }
                }
                ConversationRecord::Restarted => {
                    for asked in std::mem::take(&mut open).into_values() {
                        self.forget(&asked);
                    }
                }
            }
        }
        Ok(())
    }

    fn ask_again(&self, number: u32, request: &ReplyRequest) -> Result<Open, ReplayError> {
        let tools = self.tools_of(&request.prompt);
        let mut state = self.state();
        let located = state.locate(&request.prompt, &tools);
        if let Some(continued) = located.point.reply(&state.tree) {
            state.replies.mark_continued(continued);
        }
        let planned = self
            .plan(&mut state, request, located)
            .map_err(|error| ReplayError::Failed { number, error: error.to_string() })?;
        if planned.id.number != number {
            return Err(ReplayError::Number { number: planned.id.number, recorded: number });
        }
        let pending = state.replies.open(digest_of(request, &tools.digest), None);
        Ok(Open { planned, prompt: request.prompt.clone(), pending })
    }

    async fn reply_again(&self, asked: Open, replied: RepliedRecord) -> Result<(), ReplayError> {
        let Open { mut planned, prompt, pending } = asked;
        let RepliedRecord { number, elapsed, contradicts, calls } = replied;
        let failed = |error: String| ReplayError::Failed { number, error };
        planned.sequence.replayed = Some(calls.into());
        let (id, max_new_tokens) = (planned.id, planned.budget.max_new_tokens);
        let sampled = self.generate(&mut planned.sequence, id, max_new_tokens, None).await;
        let left = planned.sequence.replayed.take().map_or(0, |calls| calls.len());
        let sampled = sampled.map_err(|error| failed(format!("{error:?}")))?;
        if left > 0 {
            return Err(failed(format!("its record has {left} engine calls too many")));
        }
        let observation = self.observation(&prompt, &planned.new_tokens);
        let generated = FinishedGeneration {
            elapsed,
            contradicted_earlier: contradicts,
            ..FinishedGeneration::replayed(planned, &prompt, Ok(sampled))
        };
        self.store(&mut self.state(), generated, observation, &pending);
        let answer = pending.answered();
        match answer {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(failed(error.to_string())),
            None => Err(failed("it was not answered".to_owned())),
        }
    }

    /// Forgets a request that has no reply, so that it can be sent again.
    fn forget(&self, asked: &Open) {
        let mut state = self.state();
        if let Some(branch) = state.tree.branches.get_mut(asked.planned.branch) {
            branch.is_busy = false;
            while matches!(branch.segments.last(), Some(Segment::Message(_))) {
                branch.segments.pop();
            }
        }
        let gone = "the run was killed before it answered this request";
        asked.pending.answer(Err(ReplyError::Ended(gone.to_owned())));
    }
}

impl FinishedGeneration {
    fn replayed(
        planned: PlannedGeneration,
        prompt: &RequestPrompt,
        sampled: Result<SampledTurn, NoReply>,
    ) -> Self {
        let PlannedGeneration { branch, sequence, id, budget, overridden, .. } = planned;
        Self {
            branch,
            sequence,
            id,
            limit: budget.limit,
            elapsed: Duration::ZERO,
            sampled,
            tools: prompt.tools(),
            overridden,
            contradicted_earlier: false,
        }
    }
}
