//! One episode: chat template, append-only token buffer, actions, turn loop, grading, outcome.
//!
//! The invariant: token in, token out. What the policy sampled is never rendered again; only the
//! environment's new text is tokenised.
//!
//! [`EpisodeRunner`] is the way in; it performs the commands of the pure [`EpisodeMachine`].

mod api;
mod attempt;
mod buffer;
mod chat;
mod codec;
mod config;
mod dialogue;
mod editor;
mod grading;
mod leads;
mod machine;
mod prefix;
mod repository;
mod reward;
mod rows;
mod runner;
mod scaffold;
mod supervised;
mod template;
mod toolbox;
mod tree;
mod vocabulary;

pub use api::{
    Action, EpisodeReport, EpisodeRequest, Episodes, Message, Timings, TurnLog, opening_messages,
};
pub use buffer::{Fork, TokenBuffer};
pub use chat::{ChatError, ChatErrorKind, ChatModel, ChatUse};
pub use config::{RolloutSection, RolloutSettings};
pub use grading::{
    GradeError, GradeLogs, Graded, Judge, Rules, grade_patch, judge_as_r2e, judge_by_summary,
    write_log_folder,
};
pub use leads::Leads;
pub use machine::{Command, EpisodeLimits, EpisodeMachine, Event, IllegalTransition, State};
pub use prefix::History;
pub use reward::{HarnessVersion, RewardCompat, RewardSection, RewardSettings};
pub use rows::RowSharing;
pub use runner::EpisodeRunner;
pub use scaffold::{Call, Change, EditorCommand, Prompts, Scaffold};
pub use supervised::{ExpertEpisode, ExpertTurn, Supervised};
pub use template::ChatTemplate;
pub use tree::{TreeChange, compare_trees};
pub use vocabulary::{CONTROL_TOKENS, MICRO_CHAT_TEMPLATE, train_tokenizer};
