//! A comparison as a page: the tables, and every measure with one line per configuration.

use super::table::LEGEND;
use super::{ComparedRun, Comparison};
use crate::page::{document, escape, section, table};
use crate::plot::{Caption, Lines, Scale, Series};
use crate::series::{COST, LEARNING, MISMATCH, Measure, OPTIMIZER, points};
use orchestrate_metrics::{EvalLine, MetricsLine, mean_and_se};
use std::collections::BTreeMap;
use std::fmt::Write;

impl Comparison {
    /// The comparison as one self-contained page, without scripts or network.
    pub fn html(&self) -> String {
        let (header, rows) = self.table();
        let mut body = String::from("<h2>Results</h2>\n");
        body.push_str(&table(&header, &rows));
        let _ = writeln!(body, "<p class=\"note\">{}</p>", escape(LEGEND));
        for (run, why) in self.failures() {
            let (run, why) = (escape(&run), escape(why));
            let _ = writeln!(body, "<p class=\"verdict bad\">✗ {run}: {why}</p>");
        }
        let (header, rows) = self.settings_table();
        if header.len() > 1 {
            body.push_str("<h2>Settings that differ</h2>\n");
            body.push_str(&table(&header, &rows));
        }
        let note =
            "Bold lines: means over seeds, with standard errors as bars. Thin lines: single runs.";
        let caption = Caption { title: "Evaluation Pass@1", note };
        let pass = self.chart(caption, Scale::FromZero, |lines| {
            let point = |line: &EvalLine| Some((f64::from(line.global_step), line.eval_pass_at_1?));
            lines.iter().filter_map(MetricsLine::evaluation).filter_map(point).collect()
        });
        let charts = |measures: &[Measure]| -> Vec<String> {
            let first = |m: &Measure| {
                let (_, read) = m.series.first()?;
                let caption = Caption { title: m.title, note: m.note };
                Some(self.chart(caption, m.scale, |lines| points(lines, *read)))
            };
            measures.iter().filter_map(first).collect()
        };
        let mut learning = vec![pass];
        learning.extend(charts(LEARNING));
        body.push_str(&section("Learning", &learning));
        body.push_str(&section("Trainer against engine", &charts(MISMATCH)));
        body.push_str(&section("Optimizer", &charts(OPTIMIZER)));
        body.push_str(&section("Time", &charts(COST)));
        body.push_str("<h2>Runs</h2>\n");
        let header = ["config", "seed", "folder", "steps", "state"].map(str::to_owned);
        body.push_str(&table(&header, &self.runs()));
        document(&format!("Comparison of {} configurations", self.configs.len()), &body)
    }

    /// One line per configuration; `points` takes `(global step, value)` from the lines of a run.
    fn chart(
        &self,
        caption: Caption<'_>,
        scale: Scale,
        points: impl Fn(&[MetricsLine]) -> Vec<(f64, f64)>,
    ) -> String {
        let mut series = Vec::new();
        for (style, config) in self.configs.iter().enumerate() {
            let mut by_step: BTreeMap<u64, (f64, Vec<f64>)> = BTreeMap::new();
            for run in &config.runs {
                let points = points(&run.lines);
                for &(step, value) in &points {
                    let at = by_step.entry(step.to_bits()).or_insert((step, Vec::new()));
                    at.1.push(value);
                }
                if config.runs.len() > 1 {
                    let name = format!("{}, seed {}", config.name, run.seed);
                    let points = points.into_iter().map(|(x, y)| (x, y, 0.0)).collect();
                    series.push(Series { name, style, faint: true, points });
                }
            }
            let means = by_step.into_values().filter_map(|(step, values)| {
                let (mean, se) = mean_and_se(&values)?;
                Some((step, mean, se))
            });
            let points = means.collect();
            series.push(Series { name: config.name.clone(), style, faint: false, points });
        }
        Lines { caption, scale, series, mark: None }.draw()
    }

    /// Rows of the table of runs.
    fn runs(&self) -> Vec<Vec<String>> {
        let state = |run: &ComparedRun| match (&run.failure, run.finished) {
            (Some(why), _) => why.clone(),
            (None, true) => "finished".to_owned(),
            (None, false) => "not finished".to_owned(),
        };
        let row = |name: &str, run: &ComparedRun| {
            let steps = run.report.steps();
            vec![
                name.to_owned(),
                run.seed.to_string(),
                run.folder.to_string(),
                steps.to_string(),
                state(run),
            ]
        };
        let rows = self.configs.iter().flat_map(|c| c.runs.iter().map(|r| row(&c.name, r)));
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::comparison::tests::comparison;

    #[test]
    fn each_chart_has_a_bold_mean_and_a_thin_line_per_seed() {
        let page = comparison().html();
        // Pass@1, reward, entropy and KL have data.
        assert_eq!(page.matches("<figure>").count(), 4);
        assert_eq!(page.matches("opacity=\"0.3\"").count(), 4 * 5, "two and three seeds");
        assert!(page.contains("none, step 2: 0.45 ± 0.05"), "{page}");
        assert!(page.contains("algorithm.policy_loss") && page.contains("✗ a|b, seed 2"));
        assert!(!page.contains("http") && !page.contains("<script") && !page.contains("NaN"));
    }
}
