//! The run: which episodes are made, what is trained on, when weights change, what is measured.
//!
//! The invariant: every decision is in the journal before its effect, so a run that died at any
//! instant continues from the journal alone. Start reading at `run_loop.rs`.

pub mod collapse;
mod comparison;
mod config;
mod error;
mod evaluation;
mod events;
mod files;
mod groups;
mod lag;
mod metrics;
mod page;
mod plan;
mod plot;
mod pool;
mod record;
mod report;
mod run_loop;
mod run_page;
mod schedule;
mod series;
mod trainer;
mod training;

pub use comparison::{
    ComparedRun, Comparison, ConfigResult, ConfigRuns, Estimate, read_runs, write_runs,
};
pub use config::{
    DiagnosticsSection, DiagnosticsSettings, OnCollapse, RunSection, RunSettings, TasksSection,
    TasksSettings,
};
pub use error::{FailureClass, RunError};
pub use events::{Event, Reporter};
pub use lag::{LagSummary, LoopLag};
pub use plan::{Plan, SamplingPlan, TaskSet};
pub use record::{EpisodeDetail, EpisodeSummary};
pub use report::{EvalPoint, Gain, RunReport, StepMeans};
pub use run_loop::{Coordinator, RunEnd, Stop};
pub use run_page::write_html;
pub use schedule::{episode_seed, task_index};
pub use trainer::{HttpTrainer, StepProgress, TrainerSink};
