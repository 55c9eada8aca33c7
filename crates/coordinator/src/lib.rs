//! The run: which episodes are sampled, which of them are trained on, when weights change, and what is
//! measured.
//!
//! The invariant: every decision is in the journal before it takes effect, so a run that was killed at
//! any point continues from the journal alone. Start reading at `run_loop.rs`.

mod config;
mod context;
mod error;
mod evaluation;
mod events;
mod files;
mod groups;
mod lag;
mod metrics;
mod plan;
mod pool;
mod progress;
mod record;
mod retries;
mod run_loop;
mod schedule;
mod stop;
mod trainer;
mod training;

pub use config::{
    DiagnosticsSection, DiagnosticsSettings, OnCollapse, RunSection, RunSettings, TasksSection,
    TasksSettings,
};
pub use context::RunEnd;
pub use error::{FailureClass, RunError};
pub use evaluation::Evaluation;
pub use events::{Event, Reporter, StageBefore};
pub use lag::{LagSummary, LoopLag};
pub use plan::{EvaluationPlan, Plan, SamplingPlan, TaskSet};
pub use progress::{is_finished, run_kind};
pub use record::{EpisodeDetail, EpisodeSummary};
pub use run_loop::Coordinator;
pub use schedule::{attempt_seed, episode_seed, task_index};
pub use stop::Stop;
pub use trainer::{HttpTrainer, StepProgress, TrainerSink};
