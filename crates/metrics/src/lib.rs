//! The measurements of a run: the lines of `metrics.jsonl`, the definitions of a solved task and of
//! Pass@1, and collapse detection. Pure: no journal, no files, no clock.
//!
//! Two invariants. There is one definition of a solved episode ([`is_solved`]) and one of the tasks that
//! an evaluation counts ([`TaskScore::rate`]). And every key of a line is a field: a reader that asks
//! for a metric that does not exist does not compile.
//!
//! Read [`StepLine`] next. [`catalogue`] lists every metric with its unit, meaning and healthy range.

mod catalogue;
mod collapse;
mod eval_line;
mod extreme;
mod line;
mod metric;
mod score;
mod step_line;

pub use catalogue::{CATALOGUE_TITLE, catalogue, catalogue_markdown};
pub use collapse::{Collapse, Detector, Finding, Symptom, detect_collapse};
pub use eval_line::EvalLine;
pub use extreme::{ExtremeTokens, Threshold};
pub use line::{LineError, MetricsLine, SCHEMA_VERSION};
pub use metric::{Metric, ValueKind};
pub use score::{TaskScore, is_solved, mean_and_se};
pub use step_line::{BrokenByStage, SandboxHost, StepLine};
