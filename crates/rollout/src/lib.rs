//! One episode: chat template, append-only token buffer, actions, turn loop, grading, outcome.
//!
//! The invariant: token in, token out. What the policy sampled is never rendered again; only the
//! environment's new text is tokenised.

mod api;
mod chat;
mod supervised;
mod template;
mod vocabulary;

pub use api::{
    Action, EpisodeReport, EpisodeRequest, Episodes, Message, Timings, TurnLog, opening_messages,
};
pub use chat::{ChatError, ChatErrorKind, ChatModel};
pub use supervised::{ExpertEpisode, ExpertTurn, Supervised};
pub use template::ChatTemplate;
pub use vocabulary::{CONTROL_TOKENS, MICRO_CHAT_TEMPLATE, train_tokenizer};
