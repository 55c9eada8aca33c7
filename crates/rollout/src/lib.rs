//! One episode: opening prompt, turns of sampling and acting, grading, outcome.
//!
//! [`EpisodeRunner`] is the entry point. An episode of a built-in [`Scaffold`] performs the commands of a
//! pure state machine: the engine samples a turn, the scaffold parses its calls, the sandbox
//! performs them, and a [`ChatModel`] turns the observations into the next tokens of the
//! [`TokenBuffer`]. At the end the agent's change is graded in a fresh sandbox. An agent program replaces
//! the turns, and external workers the sandboxes as well ([`EpisodeKind`]).
//!
//! The invariant: token in, token out. What the policy sampled is never rendered or tokenized
//! again; only the environment's new text is.

mod agent;
mod api;
mod attempt;
mod buffer;
mod chat;
mod codec;
mod collection;
mod config;
mod conversation;
mod dialogue;
mod editor;
mod expert;
mod failure;
mod grading;
mod harbor;
mod machine;
mod model_files;
mod offload;
#[cfg(any(test, fuzzing))]
#[cfg_attr(
    not(fuzzing),
    expect(unreachable_pub, reason = "the fuzz targets are outside this crate")
)]
mod planted;
mod prefill;
mod prefix;
mod reply;
mod repository;
mod reward;
mod rows;
mod runner;
mod sandboxed;
mod sandboxes;
mod scaffold;
mod sequence;
mod system_messages;
mod template;
mod tool_format;
mod tool_server;
mod toolbox;
mod tree;
mod turn_journal;
mod turns;
mod vocabulary;

pub use agent::{AGENT_FOLDER, AgentPreset, AgentSection, AgentSettings, ExternalWorkers};
pub use api::{
    Action, EpisodeBranch, EpisodeReport, EpisodeRequest, Episodes, Message, MessageExtra, Timings,
    TurnLog, opening_messages,
};
pub use buffer::{Fork, TokenBuffer};
pub use chat::{ChatError, ChatErrorKind, ChatModel, ChatOptions};
pub use config::{LOWEST_TEMPERATURE, RolloutSection, RolloutSettings};
pub use conversation::{ForkCause, Recognition};
pub use expert::{ExpertEpisode, ExpertTurn, SupervisedExample};
pub use grading::{
    GradeError, GradeLogs, GradedChange, GradingInputs, GradingRules, KnownVerdict, LogGrader,
    READABLE, grade_as_r2e, grade_by_summary, grade_patch, known_verdict, log_files,
    record_verdict, remove_verdict, replace_file, write_log_folder,
};
pub use harbor::{HarborActor, check_harbor};
pub use machine::EpisodeLimits;
#[cfg(any(test, fuzzing))]
pub use planted::{Reading, check_reply, check_turn};
pub use prefill::PrefillLeaders;
pub use prefix::History;
pub use reward::{RewardCompat, RewardSection, RewardSettings};
pub use rows::RowSharing;
pub use runner::{EpisodeKind, EpisodeRunner};
pub use sandboxed::{Actor, Sandboxed};
pub use scaffold::{Call, Change, EditorCommand, Mistake, Prompts, Scaffold, WrittenTurn};
pub use template::ChatTemplate;
pub use tool_format::ToolFormat;
pub use tool_server::{
    ToolServerError, ToolServerErrorKind, ToolServerSection, ToolServerSettings, ToolServers,
};
pub use tree::TreeChange;
#[cfg(any(test, fuzzing))]
pub use turn_journal::drawn::DrawnJournal;
pub use turn_journal::{TurnJournalError, TurnJournals};
pub use vocabulary::{CONTROL_TOKENS, MICRO_CHAT_TEMPLATE, train_tokenizer};
