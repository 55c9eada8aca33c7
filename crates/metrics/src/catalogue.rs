//! The metrics as a list, from the same declaration as the fields, and as a page of documentation.

use crate::{EvalLine, SCHEMA_VERSION, StepLine};
use std::fmt::Write;

/// Declares the struct of one kind of line, and the list of its metrics.
///
/// Each field has a doc comment (the meaning), a type, a unit with its range, and optionally what is
/// healthy. All measurements are optional: a line written by an older version may lack any of them.
macro_rules! metrics_line {
    (
        $(#[$attribute:meta])*
        $name:ident {
            $(
                $(#[doc = $meaning:literal])+
                $field:ident: $type:ty, $unit:literal $(, healthy: $healthy:literal)?;
            )*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            /// Version of the line's format; 0 in lines written before it was recorded.
            #[serde(default)]
            pub schema_version: u32,
            /// When the line was written, UTC; `None` in lines written before it was recorded.
            pub time: Option<jiff::Timestamp>,
            /// Global step that the line belongs to; 0 = the evaluation before training.
            pub global_step: u32,
            /// Version of the weights that engines serve after the step, or that were evaluated.
            pub policy_version: orchestrate_types::PolicyVersion,
            $(
                $(#[doc = $meaning])+
                #[doc = concat!("\n\nUnit: ", $unit, ".")]
                $(#[doc = concat!("Healthy: ", $healthy, ".")])?
                pub $field: Option<$type>,
            )*
        }

        impl $name {
            /// The metrics of this line, in the order in which they are written.
            pub const METRICS: &'static [$crate::Metric] = &[
                $($crate::Metric {
                    name: stringify!($field),
                    unit: $unit,
                    meaning: concat!($($meaning),+),
                    healthy: metrics_line!(@healthy $($healthy)?),
                },)*
            ];
        }
    };
    (@healthy) => { None };
    (@healthy $healthy:literal) => { Some($healthy) };
}
pub(crate) use metrics_line;

/// One metric: a key of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// The key, and the name of the field.
    pub name: &'static str,
    /// Unit and range, for example `share, 0 to 1`.
    pub unit: &'static str,
    /// What it measures. Markdown, with a space in front of every line.
    pub meaning: &'static str,
    /// What to expect of a healthy run; `None` where nothing can be said in general.
    pub healthy: Option<&'static str>,
}

/// First line of [`catalogue_markdown`].
pub const CATALOGUE_TITLE: &str = "# Metrics";

const INTRODUCTION: &str = "\
<!-- Generated from crates/metrics; do not edit. To update it:
     ORCHESTRATE_UPDATE_GOLDEN=1 cargo test -p orchestrate-metrics -->

`metrics.jsonl` in a run's folder has one JSON object per line: one per global step and one per
evaluation, in the order in which they ended. The lines come from the journal; the file is repaired at
each start of the run.

Every line has these keys:

| Key | Meaning |
|---|---|
| `schema_version` | version of the format; keys are only added within a version. Lines of older programs have none |
| `time` | when the line was written, RFC 3339, UTC. Lines of older programs have none |
| `global_step` | the step, counted from 1; an evaluation has the step after which it ran, 0 = before training |
| `policy_version` | version of the weights that are served after the step, or that were evaluated |

A value that does not exist is `null`: a skipped step has no loss, a step without a forward pass without
replay has no `_no_replay` values. A number that is not finite is `null`, too.
";

/// All metrics: those of a step, then those of an evaluation.
pub fn catalogue() -> impl Iterator<Item = &'static Metric> {
    StepLine::METRICS.iter().chain(EvalLine::METRICS)
}

/// The page of documentation that lists all metrics.
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
