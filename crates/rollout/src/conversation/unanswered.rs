//! The error that answered an agent's last request.

use orchestrate_gateway::ErrorCode;
use orchestrate_types::Limit;

/// A request that was answered with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unanswered {
    /// What happened, and who caused it.
    pub(crate) code: ErrorCode,
    /// The same, for a person.
    pub(crate) message: String,
}

impl Unanswered {
    /// The limit that the code stands for. That of an episode which has ended is known already.
    pub(crate) fn limit(&self) -> Option<Limit> {
        let is_full = matches!(self.code, ErrorCode::ContextFull | ErrorCode::RequestTooLarge);
        is_full.then_some(Limit::SequenceTokens)
    }
}
