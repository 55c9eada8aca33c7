//! A comparison as tables: as cells, and as Markdown.

use super::{ComparedRun, Comparison, ConfigResult, Estimate};
use serde_json::Value;
use std::fmt::Write;

/// Explains the columns of [`Comparison::table`].
pub(crate) const LEGEND: &str = "\
Means ± standard error over seeds; with fewer seeds than the row has, their number follows. Pass@1 is \
that of the newest evaluation. Best is the highest of each run's evaluations; the more there are, the \
more it overstates the policy. Best and crash steps are by seed (– = none; a run without a step cannot crash \
and says so). \"vs first\" is the final \
Pass@1 in points minus that of the first row, paired by seed. KL, F(2), entropy and gradient norm are \
means over the steps that have the value.";

impl Comparison {
    /// The results: header, and one row per configuration.
    pub fn table(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let header = [
            "config",
            "seeds",
            "Pass@1 (%)",
            "best (%)",
            "best step",
            "vs first",
            "crash step",
            "KL",
            "KL no replay",
            "F(2)",
            "entropy",
            "grad norm",
        ];
        let row = |config: &ConfigResult| {
            let runs = config.runs.len();
            let percent =
                |e: Option<Estimate>| with_error(e, runs, |v| format!("{:.1}", v * 100.0));
            let signed = |e: Option<Estimate>| {
                let mean = e.map_or_else(absent, |e| format!("{:+.1}", e.mean * 100.0));
                let se = e.and_then(|e| e.se).map(|se| format!(" ± {:.1}", se * 100.0));
                format!("{mean}{}", se.unwrap_or_default())
            };
            let small = |e: Option<Estimate>| {
                with_error(e, runs, |v| if v > 0.0 { format!("{v:.1e}") } else { "0".to_owned() })
            };
            let plain = |e: Option<Estimate>| with_error(e, runs, |v| format!("{v:.3}"));
            let finished = config.runs.iter().filter(|run| run.finished).count();
            let seeds = match config.runs.len() {
                all if all == finished => all.to_string(),
                all => format!("{finished} of {all} finished"),
            };
            vec![
                config.name.clone(),
                seeds,
                percent(config.final_pass_at_1),
                percent(config.best_pass_at_1),
                steps(&config.best_steps),
                signed(config.against_first),
                crash_steps(config),
                small(config.kl_train_infer),
                small(config.kl_train_infer_no_replay),
                small(config.extreme_tokens),
                plain(config.entropy),
                plain(config.grad_norm),
            ]
        };
        (header.map(str::to_owned).into(), self.configs.iter().map(row).collect())
    }

    /// The settings that differ: header, and one row per configuration.
    pub fn settings_table(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let keys: Vec<&String> =
            self.configs.first().map(|c| c.settings.keys().collect()).unwrap_or_default();
        let header = std::iter::once("config").chain(keys.iter().map(|k| k.as_str()));
        let row = |config: &ConfigResult| {
            let values = config.settings.values().map(|value| match value {
                Value::Null => absent(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            });
            std::iter::once(config.name.clone()).chain(values).collect()
        };
        (header.map(str::to_owned).collect(), self.configs.iter().map(row).collect())
    }

    /// Both tables as Markdown, with the meaning of the columns.
    pub fn markdown(&self) -> String {
        let mut out = markdown_table(self.table());
        out.push('\n');
        out.push_str(LEGEND);
        out.push_str("\n\n");
        if self.configs.iter().any(|config| !config.settings.is_empty()) {
            out.push_str(&markdown_table(self.settings_table()));
        }
        for (run, why) in self.failures() {
            let _ = writeln!(out, "\n{run}: {why}");
        }
        out
    }
}

fn absent() -> String {
    "–".to_owned()
}

/// The estimate with its standard error, and with the number of runs that have the value unless all
/// `runs` have it.
fn with_error(estimate: Option<Estimate>, runs: usize, write: impl Fn(f64) -> String) -> String {
    let Some(estimate) = estimate else { return absent() };
    let mean = write(estimate.mean);
    let text = estimate.se.map_or_else(|| mean.clone(), |se| format!("{mean} ± {}", write(se)));
    if estimate.runs == runs { text } else { format!("{text} ({} of {runs})", estimate.runs) }
}

fn steps(steps: &[Option<u32>]) -> String {
    by_seed(steps.iter().map(|step| step.map_or_else(absent, |step| step.to_string())))
}

fn crash_steps(config: &ConfigResult) -> String {
    let cell = |run: &ComparedRun| match &run.report.collapse {
        Some(collapse) => collapse.step.to_string(),
        None if run.report.steps() == 0 => "no steps".to_owned(),
        None => absent(),
    };
    by_seed(config.runs.iter().map(cell))
}

/// The cells of a configuration's runs, or a single one if none has anything to show.
fn by_seed(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<String> = cells.collect();
    if cells.iter().all(|cell| *cell == absent()) { absent() } else { cells.join(", ") }
}

fn markdown_table((header, rows): (Vec<String>, Vec<Vec<String>>)) -> String {
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = format!("|{}\n", "---|".repeat(header.len()));
    let rows: String = rows.iter().map(|row| line(row)).collect();
    format!("{}{rule}{rows}", line(&header))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::tests::comparison;

    #[test]
    fn markdown_has_a_row_per_configuration_and_lists_failures() {
        let text = comparison().markdown();
        let cells = |name: &str| {
            let row = text.lines().find(|line| line.starts_with(name)).unwrap();
            row.replace("\\|", "").split('|').map(|c| c.trim().to_owned()).collect::<Vec<_>>()
        };
        let none = cells("| none ");
        assert_eq!(none[2..8], ["2", "45.0 ± 5.0", "50.0 ± 10.0", "2, 1", "–", "–"]);
        let other = cells("| a\\|b ");
        assert_eq!(other[2], "2 of 3 finished");
        assert_eq!(other[6..8], ["+5.0 ± 15.0", "–, 60, –"]);
        assert!(text.contains("a|b, seed 2: the loss of mini step 1 is not finite"), "{text}");
    }

    #[test]
    fn a_run_without_steps_is_not_shown_as_one_that_did_not_crash() {
        let mut comparison = comparison();
        let report = &mut comparison.configs[1].runs[2].report;
        (report.steps_applied, report.steps_skipped) = (0, 0);
        let rows = comparison.table().1;
        assert_eq!([rows[0][6].as_str(), &rows[1][6]], ["–", "–, 60, no steps"]);
    }

    #[test]
    fn mean_over_fewer_runs_than_there_are_says_so() {
        let estimate = Estimate { mean: 0.5, se: Some(0.1), runs: 2 };
        let plain = |v: f64| format!("{v:.1}");
        assert_eq!(with_error(Some(estimate), 2, plain), "0.5 ± 0.1");
        assert_eq!(with_error(Some(estimate), 3, plain), "0.5 ± 0.1 (2 of 3)");
        assert_eq!(with_error(None, 3, plain), "–");
    }
}
