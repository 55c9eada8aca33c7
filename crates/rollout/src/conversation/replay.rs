//! Records generations, and repeats what was recorded of a conversation in an earlier process. Requests and replies take the same
//! way as at first; only the engine is not asked again.

use super::ask::{Ask, AskError, Past, digest_of};
use super::served::Served;
use super::tree::Step;
use super::{Conversation, Generated, Planned};
use crate::line::{AcceptedCall, NoReply};
use crate::turn_journal::{ConversationRecord, LimitRecord, RepliedRecord};
use orchestrate_engine::Finish;
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
    planned: Planned,
    past: Past,
    served: Arc<Served>,
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
                ConversationRecord::Asked { number, ask } => {
                    open.insert(number, self.ask_again(number, &ask)?);
                }
                ConversationRecord::Replied(replied) => {
                    let asked = open.remove(&replied.number);
                    let asked = asked.ok_or(ReplayError::NotAsked(replied.number))?;
                    self.reply_again(asked, replied).await?;
                }
                ConversationRecord::Limited { number, limit } => {
                    let Open { planned, past, served } =
                        open.remove(&number).ok_or(ReplayError::NotAsked(number))?;
                    let reason = match limit {
                        LimitRecord::Context => NoReply::ContextFull(String::new()),
                        LimitRecord::Time => NoReply::TimeUp,
                    };
                    let generated = Generated::replayed(planned, &past, Err(reason));
                    self.store(&mut self.state(), generated, String::new(), &served);
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

    fn ask_again(&self, number: u32, ask: &Ask) -> Result<Open, ReplayError> {
        let tools = self.tools_of(&ask.past);
        let mut state = self.state();
        let place = state.locate(&ask.past, &tools);
        if let Some(continued) = place.reply(&state.tree) {
            state.receipts.is_continued(continued);
        }
        let planned = self
            .plan(&mut state, ask, (place, &tools))
            .map_err(|error| ReplayError::Failed { number, error: error.to_string() })?;
        if planned.id.ordinal != number {
            return Err(ReplayError::Number { number: planned.id.ordinal, recorded: number });
        }
        let served = state.receipts.open(digest_of(ask, &tools.digest), None);
        Ok(Open { planned, past: ask.past.clone(), served })
    }

    async fn reply_again(&self, asked: Open, replied: RepliedRecord) -> Result<(), ReplayError> {
        let Open { mut planned, past, served } = asked;
        let RepliedRecord { number, elapsed, contradicts, calls } = replied;
        let failed = |error: String| ReplayError::Failed { number, error };
        planned.line.replayed = Some(calls.into());
        let prompt_tokens = planned.line.buffer.prompt_len();
        let (id, room) = (planned.id, planned.room);
        let sampled = self.generate(&mut planned.line, id, room, None).await;
        let left = planned.line.replayed.take().map_or(0, |calls| calls.len());
        let (finish, cached) = sampled.map_err(|error| failed(format!("{error:?}")))?;
        if left > 0 {
            return Err(failed(format!("its record has {left} engine calls too many")));
        }
        let asked = self.observation(&past, &planned.tail);
        let generated = Generated {
            elapsed,
            contradicted: contradicts,
            ..Generated::replayed(planned, &past, Ok((finish, prompt_tokens, cached)))
        };
        self.store(&mut self.state(), generated, asked, &served);
        let answer = served.answered();
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
            while matches!(branch.steps.last(), Some(Step::Given(_))) {
                branch.steps.pop();
            }
        }
        let gone = "the run was killed before it answered this request";
        asked.served.answer(Err(AskError::Ended(gone.to_owned())));
    }
}

impl Generated {
    fn replayed(
        planned: Planned,
        past: &Past,
        sampled: Result<(Finish, usize, usize), NoReply>,
    ) -> Self {
        let Planned { branch, line, id, limit, overridden, .. } = planned;
        Self {
            branch,
            line,
            id,
            limit,
            elapsed: Duration::ZERO,
            sampled,
            tools: past.tools(),
            overridden,
            contradicted: false,
        }
    }
}
