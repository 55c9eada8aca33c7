//! Reports of runs, for people: summaries, pages of charts, comparisons. Reads journals and metrics lines,
//! and writes neither.
//!
//! Start reading at `summary.rs` for the numbers and at `run_page.rs` for the page of one run.

mod comparison;
mod error;
mod journal;
mod page;
mod plot;
mod run_page;
mod series;
mod summary;

pub use comparison::{
    ComparedRun, Comparison, ConfigResult, ConfigRuns, Estimate, read_runs, write_runs,
};
pub use error::ReportError;
pub use journal::{metrics_lines, task_scores};
pub use run_page::run_page;
pub use summary::{EvalPoint, Gain, RunReport, StepMeans};
