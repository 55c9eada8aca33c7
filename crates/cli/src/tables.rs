//! Tables for people.

use crate::output::counted;
use comfy_table::{ContentArrangement, Table, presets};
use orchestrate_report::{EvalPoint, Gain, RunReport};
use orchestrate_tasks::printable;
use std::io::IsTerminal as _;

/// Maximum number of characters of a cell.
const CELL_CHARS: usize = 2000;
/// Width of a table at a terminal in characters; longer cells are wrapped.
const WIDTH: u16 = 100;

/// An empty table with a header row, in the style of all commands. At a terminal, long cells are wrapped.
/// Elsewhere a row is one line, so that programs like `grep` find what is in it.
pub fn table(header: &[&str]) -> Table {
    table_for(std::io::stdout().is_terminal(), header)
}

fn table_for(is_terminal: bool, header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(header);
    if is_terminal {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    } else {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    table
}

/// A text that came from elsewhere as a cell: in one line, escaped and limited in length.
pub(crate) fn cell(text: &str) -> String {
    printable(text, CELL_CHARS)
}

fn point(point: &EvalPoint) -> String {
    format!(
        "{:.4} ± {:.4} ({})",
        point.pass_at_1,
        point.pass_at_1_se,
        counted(point.tasks, "held-out task")
    )
}

fn gain(gain: &Gain) -> String {
    format!("{:+.4} ± {:.4} ({})", gain.pass_at_1, gain.se, counted(gain.tasks, "held-out task"))
}

/// The results of a run, with standard errors, so that a small gain is not mistaken for a large one;
/// `has_training` is false for an evaluation.
pub(crate) fn final_table(report: &RunReport, has_training: bool) -> Table {
    let mut table = table(&["result", ""]);
    let mut row = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            table.add_row([name.to_owned(), value]);
        }
    };
    row("Pass@1 before", report.baseline.as_ref().map(point));
    row("Pass@1 after", report.last.as_ref().map(point));
    let best = report.best.as_ref().filter(|best| Some(*best) != report.newest());
    row("highest Pass@1", best.map(|b| format!("{}, after step {}", point(b), b.global_step)));
    row("gain (paired, ± standard error)", report.gain.as_ref().map(gain));
    for (name, eval) in [("before", &report.baseline), ("after", &report.last)] {
        let Some(eval) = eval else { continue };
        row(
            &format!("Pass@{} {name}", eval.k),
            eval.pass_at_k.filter(|_| eval.k > 1).map(|p| format!("{p:.4}")),
        );
        row(
            &format!("Pass@1 on unseen families, {name}"),
            eval.held_out_families_pass_at_1.map(|p| format!("{p:.4}")),
        );
    }
    row("gain on unseen families", report.held_out_families_gain.as_ref().map(gain));
    let of_training = |value: String| has_training.then_some(value);
    let steps = format!("{} ({} skipped)", report.steps_applied, report.steps_skipped);
    row("global steps", of_training(steps));
    row("training episodes", of_training(report.episodes.to_string()));
    row("tokens trained on", of_training(report.train_tokens.to_string()));
    row("KL train/infer (mean)", report.kl_train_infer.map(|kl| format!("{kl:.2e}")));
    row("KL without replay / with", report.kl_ratio.map(|r| format!("{r:.2}")));
    let collapse = report.collapse.as_ref();
    row("collapsed", collapse.map(|c| format!("at step {}: {}", c.step, c.symptom)));
    for container in &report.quarantined {
        row("container left behind", Some(cell(container)));
    }
    row("time", Some(format!("{:.0} s", report.seconds)));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_tables_are_wrapped_at_100_characters_of_a_terminal_only() {
        let shown = |is_terminal| {
            let mut table = table_for(is_terminal, &["a", "b"]);
            table.add_row(["x".repeat(300), "word ".repeat(90)]);
            table.to_string()
        };
        let text = shown(true);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let text = shown(false);
        assert!(text.contains(&"x".repeat(300)) && text.contains(&"word ".repeat(90)), "{text}");
    }

    #[test]
    fn cells_are_short_lines_without_anything_that_acts() {
        let text = cell(&"\u{1b}[2J\n".repeat(50_000));
        assert!(text.chars().count() < 20_000 && !text.contains(['\u{1b}', '\n']));
    }
}
