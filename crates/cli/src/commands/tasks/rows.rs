//! `orchestrate tasks` with a task file.

use super::{NAME_CHARS, harbor};
use crate::commands::grade::find;
use crate::config::Settings;
use crate::error::{InputError, UsageError};
use crate::task_source::Skip;
use crate::{output, tables};
use camino::Utf8Path;
use orchestrate_tasks::load::{self, Row};
use orchestrate_tasks::swe::{self, Harness};
use orchestrate_tasks::{printable, printable_lines};
use serde_json::json;
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Reports which rows of `file` can be used.
pub(super) fn import(file: &Utf8Path, as_json: bool) -> anyhow::Result<ExitCode> {
    let mut usable: BTreeMap<&str, usize> = BTreeMap::new();
    let mut refused = Vec::new();
    let mut needs: BTreeMap<Harness, usize> = BTreeMap::new();
    for row in load::rows(file)? {
        if let Some(harness) = row.as_ref().ok().and_then(Row::only_harness) {
            *needs.entry(harness).or_default() += 1;
        }
        match row {
            Ok(row) => *usable.entry(row.environment()).or_default() += 1,
            Err(bad) => {
                output::say(format!("refused: {bad}"));
                refused.push(json!({"row": bad.row, "id": bad.id, "reason": bad.reason}));
            }
        }
    }
    let total: usize = usable.values().sum();
    if as_json {
        output::json(&json!({"usable": usable, "refused": refused}))?;
    } else {
        let families: Vec<_> = usable.iter().map(|(name, rows)| format!("{rows} {name}")).collect();
        let families = if families.is_empty() { "none".to_owned() } else { families.join(", ") };
        output::data(format!("{file}: usable {families}; refused {}", refused.len()));
    }
    for (harness, rows) in needs {
        output::say(format!(
            "note: {file}: {} can only be graded with reward.harness = \"{}\"",
            output::counted(rows, "row"),
            harness.version()
        ));
    }
    if total == 0 {
        let (file, refused) = (file.to_owned(), refused.len());
        return Err(InputError::NoUsableRow { file, refused, skipped: 0 }.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the rows of `file` that a run with these settings can use.
pub(super) fn list(
    settings: &Settings,
    file: &Utf8Path,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let mut table = tables::table(&["id", "repository", "issue"]);
    let (mut usable, mut bad) = (0, 0);
    let mut skip = Skip::new(&settings.tasks.skip);
    for row in load::rows_for(file, settings.reward.harness)? {
        let row = match row {
            Ok(row) if skip.has(&row.id()) => continue,
            Ok(row) => row,
            Err(refused) if refused.id.as_deref().is_some_and(|id| skip.has(id)) => continue,
            Err(refused) => {
                output::say(format!("refused: {refused}"));
                bad += 1;
                continue;
            }
        };
        usable += 1;
        if as_json {
            output::json_line(&json!({
                "id": row.id(),
                "environment": row.environment(),
                "repo": row.repo(),
                "image": row.image(),
            }))?;
        } else {
            let title = row.issue().lines().next().unwrap_or_default();
            table.add_row(
                [row.id().as_str(), row.repo(), title].map(|cell| printable(cell, NAME_CHARS)),
            );
        }
    }
    skip.say(file);
    if usable == 0 {
        let (file, skipped) = (file.to_owned(), skip.found());
        return Err(InputError::NoUsableRow { file, refused: bad, skipped }.into());
    }
    if !as_json {
        output::data(table);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the script that a grading container runs for one row of SWE-bench's family in `file`.
pub(super) fn eval_script(file: &Utf8Path, id: &str, harness: Harness) -> anyhow::Result<ExitCode> {
    let Row::Swe(row) = find(load::rows_for(file, harness)?, file, id)? else {
        anyhow::bail!(UsageError::NoEvalScript { id: id.to_owned() });
    };
    // The script is data for a shell, so it is printed byte for byte.
    output::raw(swe::eval_script(&row, harness)?.trim_end_matches('\n'));
    Ok(ExitCode::SUCCESS)
}

/// Shows one row of `file`, including what is hidden from the agent.
pub(super) fn show(file: &Utf8Path, id: &str, as_json: bool) -> anyhow::Result<ExitCode> {
    match find(load::rows(file)?, file, id)? {
        Row::R2e(row) if as_json => output::json(&row.to_task()?)?,
        Row::R2e(row) => super::print(&row.to_task()?),
        Row::Plain(row) if as_json => output::json(&row.to_task())?,
        Row::Plain(row) => super::print(&row.to_task()),
        Row::Swe(row) if as_json => output::json(&row)?,
        Row::Swe(row) => {
            let name = |text: &str| printable(text, NAME_CHARS);
            output::data(format!(
                "{} ({} {}, image {})\n\n{}",
                name(id),
                name(&row.repo),
                name(&row.version),
                name(&row.image()),
                printable_lines(row.problem_statement.trim_end())
            ));
            for (title, tests) in
                [("FAIL_TO_PASS", &row.fail_to_pass), ("PASS_TO_PASS", &row.pass_to_pass)]
            {
                output::data(format!("\n--- {title}\n{}", printable_lines(&tests.join("\n"))));
            }
            let (withheld, _) = row.smith_test_files();
            let tests = if withheld.is_empty() { &row.test_patch } else { &withheld.join("\n") };
            output::data(format!("\n--- hidden tests\n{}", printable_lines(tests.trim_end())));
            let gold = row.gold_patch();
            output::data(format!("\n--- gold patch\n{}", printable_lines(gold.trim_end())));
        }
        Row::Harbor(row) if as_json => output::json(&row)?,
        Row::Harbor(row) => harbor::print(&row),
    }
    Ok(ExitCode::SUCCESS)
}
