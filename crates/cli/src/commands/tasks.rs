//! `orchestrate tasks`: lists, shows, imports, makes and verifies tasks.

mod export;
mod harbor;
mod make;
mod rows;
mod verify;

use super::grade::chosen_harness;
use crate::args::{
    ExportArgs, ExportTo, ImportArgs, ImportFrom, SplitArg, TaskSelection, TasksArgs, TasksCommand,
};
use crate::config::{self, Sections, Settings};
use crate::error::UsageError;
use crate::task_source::Skip;
use crate::{output, tables, task_source, wiring};
use camino::Utf8Path;
use orchestrate_tasks::{Split, Task, printable, printable_lines};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;
use std::process::ExitCode;

/// Number of characters of an id or another name that are printed.
pub(super) const NAME_CHARS: usize = 120;

/// Runs the command.
pub(crate) async fn run(args: TasksArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        TasksCommand::List { selection, file: None } => list(&selection),
        TasksCommand::List { selection, file: Some(file) } => {
            rows::list(&config::load(&selection.source)?.check()?, &file, selection.json)
        }
        TasksCommand::Show { id, selection, file: None, .. } => show(&id, &selection),
        TasksCommand::Show { id, selection, file: Some(file), eval_script, harness } => {
            let settings = config::load(&selection.source)?.check()?;
            if eval_script {
                return rows::eval_script(&file, &id, chosen_harness(harness, &settings)?);
            }
            rows::show(&file, &id, selection.json)
        }
        TasksCommand::Import(ImportArgs { from: Some(ImportFrom::Harbor(args)), .. }) => {
            Box::pin(harbor::import(&args)).await
        }
        TasksCommand::Import(ImportArgs { file, json, .. }) => match file {
            Some(file) => rows::import(&file, json),
            None => anyhow::bail!(UsageError::NothingToImport),
        },
        TasksCommand::Export(ExportArgs { to: ExportTo::Harbor(args) }) => export::harbor(&args),
        TasksCommand::Make(args) => Box::pin(make::make(args)).await,
        TasksCommand::Verify { selection, ids, sample, all, out } => {
            let (settings, mut tasks) = to_verify(&selection)?;
            if !ids.is_empty() {
                let known: HashSet<&str> = tasks.iter().map(|task| task.id.as_str()).collect();
                if let Some(id) = ids.iter().find(|id| !known.contains(id.as_str())) {
                    anyhow::bail!(UsageError::UnknownTask { id: id.clone(), known: tasks.len() });
                }
                tasks.retain(|task| ids.iter().any(|id| task.id == *id));
            } else if !all && sample > 0 {
                tasks.shuffle(&mut ChaCha8Rng::seed_from_u64(settings.tasks.seed));
                tasks.truncate(sample);
            }
            Box::pin(verify::verify(&settings, &tasks, out.as_deref(), selection.json)).await
        }
    }
}

/// The selected tasks of an environment, including those that `tasks.skip` leaves out.
fn select(selection: &TaskSelection) -> anyhow::Result<(Settings, Vec<Task>)> {
    let mut raw: Sections = config::load(&selection.source)?;
    raw.tasks.environment = Some(selection.environment.clone());
    // Its tasks, whatever a run would take from files.
    (raw.tasks.file, raw.tasks.held_out_file, raw.tasks.mix) = (None, None, None);
    if raw.tasks.held_out.is_none() {
        raw.tasks.held_out = Some(400);
    }
    let settings = raw.check()?;
    let wanted = selection.split.map(|split| match split {
        SplitArg::Train => Split::Train,
        SplitArg::HeldOut => Split::HeldOut,
        SplitArg::HeldOutFamilies => Split::HeldOutFamilies,
    });
    let mut tasks = wiring::all_tasks(&settings);
    tasks.retain(|task| wanted.is_none_or(|split| task.split == split));
    Ok((settings, tasks))
}

/// The selected tasks of an environment that `tasks.skip` does not leave out.
fn not_skipped(selection: &TaskSelection) -> anyhow::Result<(Settings, Vec<Task>)> {
    let (settings, mut tasks) = select(selection)?;
    let mut skip = Skip::new(&settings.tasks.skip);
    tasks.retain(|task| !skip.has(&task.id));
    skip.say_generated(&selection.environment);
    Ok((settings, tasks))
}

/// The tasks of an environment, or of a task file if one is named, that `tasks.skip` does not leave out.
fn to_verify(selection: &TaskSelection) -> anyhow::Result<(Settings, Vec<Task>)> {
    let file = Utf8Path::new(&selection.environment);
    if !file.is_file() {
        return not_skipped(selection);
    }
    let settings = config::load(&selection.source)?.check()?;
    let tasks = task_source::tested_of_file(file, &settings.tasks.skip, settings.reward.harness)?;
    Ok((settings, tasks))
}

fn list(selection: &TaskSelection) -> anyhow::Result<ExitCode> {
    let (_, tasks) = not_skipped(selection)?;
    if selection.json {
        for task in &tasks {
            let line =
                serde_json::json!({"id": task.id, "family": task.family, "split": task.split});
            output::json_line(&line)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = tables::table(&["id", "family", "issue"]);
    for task in &tasks {
        let issue = task.problem_statement.lines().next().unwrap_or_default();
        table.add_row(
            [task.id.as_str(), &task.family, issue].map(|cell| printable(cell, NAME_CHARS)),
        );
    }
    output::data(table);
    Ok(ExitCode::SUCCESS)
}

fn show(id: &str, selection: &TaskSelection) -> anyhow::Result<ExitCode> {
    let (_, tasks) = select(selection)?;
    let task = tasks
        .iter()
        .find(|task| task.id == id)
        .ok_or_else(|| UsageError::UnknownTask { id: id.to_owned(), known: tasks.len() })?;
    if selection.json {
        output::json(task)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(task);
    Ok(ExitCode::SUCCESS)
}

/// Prints a task for people, including what is hidden from the agent.
fn print(task: &Task) {
    output::data(format!(
        "{} ({}, image {})\n\n{}",
        printable(&task.id, NAME_CHARS),
        printable(&task.family, NAME_CHARS),
        printable(&task.image, NAME_CHARS),
        printable_lines(&task.problem_statement)
    ));
    for (title, files) in [("given", &task.agent_files), ("hidden", &task.hidden_files)] {
        for file in files {
            let path = printable(&file.path, NAME_CHARS);
            output::data(format!(
                "\n--- {title}: {path}\n{}",
                printable_lines(file.content.trim_end())
            ));
        }
    }
    output::data(format!("\n--- gold patch\n{}", printable_lines(task.gold_patch.trim_end())));
}
