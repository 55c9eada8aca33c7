//! Harbor tasks (the format of Terminal-Bench 2): read from folders by Harbor's own rules, kept as
//! rows, and graded by the reward file that their tests write.
//!
//! The invariant: a task that Harbor accepts and this program cannot run is refused with the reason
//! ([`HarborProblem::Unsupported`]); no feature is ignored silently.

mod config;
mod export;
mod files;
mod folder;
mod hosts;
mod reward;
mod row;
mod value;

pub use export::{ExportError, export_task};
pub use folder::{read_task, task_folders};
pub use hosts::{NetworkMode, NetworkPolicy};
pub use reward::{REWARD_FILES, RewardProblem, VERIFIER_FOLDER, reward, rewards};
pub use row::{
    Artifact, CollectHook, ENVIRONMENT, FOLDER_MODE, HarborFile, HarborImage, HarborLine,
    HarborRow, HarborStep, HarborVerifier, Healthcheck, ImageFacts, RewardStrategy, TEST_SCRIPT,
    seconds,
};
pub use value::HarborProblem;
