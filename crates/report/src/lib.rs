//! What runs achieved, for people: summaries, pages of charts, comparisons. Reads journals and never
//! writes one.
//!
//! Start reading at `summary.rs` for the numbers and at `run_page.rs` for the page of one run.

mod comparison;
mod page;
mod plot;
mod run_page;
mod scores;
mod series;
mod summary;

pub use comparison::{
    ComparedRun, Comparison, ConfigResult, ConfigRuns, Estimate, read_runs, write_runs,
};
pub use run_page::write_html;
pub use scores::task_scores;
pub use summary::{EvalPoint, Gain, RunReport, StepMeans};
