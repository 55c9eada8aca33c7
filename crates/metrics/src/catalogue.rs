//! The metrics as a list, from the same declaration as the fields, and as a documentation page.

use crate::{EvalLine, Metric, SCHEMA_VERSION, StepLine};
use std::fmt::Write;

/// First line of [`catalogue_markdown`].
pub const CATALOGUE_TITLE: &str = "# Metrics";

const INTRODUCTION: &str = "\
<!-- Generated from crates/metrics; do not edit. To update it:
     ORCHESTRATE_REGENERATE=1 cargo test -p orchestrate-metrics -->

`metrics.jsonl` in a run's folder has one JSON object per line: one per global step and one per
evaluation, in the order in which they ended. The lines come from the journal; the file is repaired at
each start of the run.

Every line has these keys:

| Key | Meaning |
|---|---|
| `schema_version` | version of the format; within a version, keys are only added. Missing in lines of older versions |
| `time` | when the line was written, RFC 3339, UTC. Missing in lines of older versions |
| `global_step` | the step, counted from 1; an evaluation has the step after which it ran, 0 = before training |
| `policy_version` | version of the weights that are served after the step, or that were evaluated |

A value that does not exist is `null`: a skipped step has no loss, and only a step with a forward pass
without replay has `_no_replay` values. A number that is not finite is `null`, too.
";

/// All metrics: those of a step, then those of an evaluation.
pub fn catalogue() -> impl Iterator<Item = &'static Metric> {
    StepLine::METRICS.iter().chain(EvalLine::METRICS)
}

/// The documentation page that lists all metrics.
pub fn catalogue_markdown() -> String {
    let mut page =
        format!("{CATALOGUE_TITLE}\n\n{INTRODUCTION}\nThe current version is {SCHEMA_VERSION}.\n");
    for (heading, metrics) in
        [("A global step", StepLine::METRICS), ("An evaluation", EvalLine::METRICS)]
    {
        let _ = write!(
            page,
            "\n## {heading}\n\n| Key | Unit | Meaning | Healthy |\n|---|---|---|---|\n"
        );
        for metric in metrics {
            let meaning = metric.meaning.split_whitespace().collect::<Vec<_>>().join(" ");
            let healthy = metric.healthy.unwrap_or_default();
            let cells = [metric.unit, &meaning, healthy].map(|cell| cell.replace('|', "\\|"));
            let _ = writeln!(page, "| `{}` | {} |", metric.name, cells.join(" | "));
        }
    }
    page
}
