//! Where tasks come from: an environment that generates them, or task files.

use crate::config::{ConfigError, Settings};
use crate::error::{InputError, UsageError};
use crate::output;
use camino::Utf8Path;
use orchestrate_coordinator::TaskSet;
use orchestrate_rollout::Scaffold;
use orchestrate_tasks::{Origin, Split, Task, load, micro};
use orchestrate_types::ConfigProblem;
use std::collections::HashSet;
use std::sync::Arc;

/// Default image of the micro environment.
const MICRO_IMAGE: &str = "orchestrate/micro:latest";

/// The tasks of a run.
///
/// # Errors
/// If a file cannot be read or has no usable row.
pub(crate) fn task_set(settings: &Settings) -> anyhow::Result<TaskSet> {
    let mut set = all_tasks(settings)?;
    if settings.rollout.scaffold == Scaffold::Command {
        leave_out_unstartable(settings, &mut set)?;
    }
    Ok(set)
}

/// Leaves out the tasks that no process can be given, because every attempt at them would break.
fn leave_out_unstartable(settings: &Settings, set: &mut TaskSet) -> anyhow::Result<()> {
    let mut last = None;
    for part in [&mut set.train, &mut set.held_out, &mut set.held_out_families] {
        part.retain(|task| {
            let Some(why) = settings.agent.obstacle(&settings.rollout, task) else { return true };
            let id = task.id.as_str();
            output::say(format!(
                "note: task {id} is left out, because no agent can be started: {why}"
            ));
            last = Some(why);
            false
        });
    }
    let is_empty = [&set.train, &set.held_out, &set.held_out_families].iter().all(|p| p.is_empty());
    if let Some(why) = last.filter(|_| is_empty) {
        let remedy = "must name tasks that an agent's process can be given: shorten the prompt or \
                      the variables, or use a built-in scaffold";
        anyhow::bail!(ConfigError::Problems(vec![ConfigProblem::new("tasks", why, remedy)]));
    }
    Ok(())
}

fn all_tasks(settings: &Settings) -> anyhow::Result<TaskSet> {
    let tasks = &settings.tasks;
    if tasks.file.is_none() && tasks.held_out_file.is_none() {
        let mut set = TaskSet::default();
        for task in generated(settings) {
            match task.split {
                Split::Train => set.train.push(Arc::new(task)),
                Split::HeldOut => set.held_out.push(Arc::new(task)),
                Split::HeldOutFamilies => set.held_out_families.push(Arc::new(task)),
            }
        }
        return Ok(set);
    }
    let part = |file: &Option<String>, split, count: Option<u32>| -> anyhow::Result<Vec<_>> {
        let Some(file) = file else { return Ok(Vec::new()) };
        let mut rows = of_file(Utf8Path::new(file), &tasks.skip)?;
        let all = rows.len();
        rows.retain(|task| !matches!(&task.origin, Origin::Harbor(row) if row.has_steps()));
        if rows.len() < all {
            let left_out = all - rows.len();
            output::say(format!(
                "note: {file}: {left_out} Harbor tasks with several steps are left out; an agent \
                 takes only one"
            ));
        }
        rows.truncate(count.map_or(usize::MAX, |count| count as usize));
        Ok(rows.into_iter().map(|task| Arc::new(Task { split, ..task })).collect())
    };
    let mut train = part(&tasks.file, Split::Train, tasks.train)?;
    // Their position does not matter: a run draws its own order.
    let mix = micro::MicroCounts { train: tasks.mix as usize, held_out: 0, held_out_families: 0 };
    train.extend(of_environment(settings, mix).into_iter().map(Arc::new));
    Ok(TaskSet {
        train,
        held_out: part(&tasks.held_out_file, Split::HeldOut, tasks.held_out)?,
        held_out_families: Vec::new(),
    })
}

/// The usable rows of `file` as tasks, except those whose id is in `skip`. Refused rows are reported
/// on standard error.
///
/// # Errors
/// If the file cannot be read or has no usable row.
pub(crate) fn of_file(file: &Utf8Path, skip: &[String]) -> anyhow::Result<Vec<Task>> {
    let skip: HashSet<&str> = skip.iter().map(String::as_str).collect();
    let (mut tasks, mut refused) = (Vec::new(), 0_usize);
    for row in load::rows(file)? {
        match row {
            Ok(row) if skip.contains(row.id().as_str()) => {}
            Ok(row) => tasks.push(row.to_task()?),
            Err(bad) => {
                refused += 1;
                output::say(format!("note: {file}: refused: {bad}"));
            }
        }
    }
    anyhow::ensure!(
        !tasks.is_empty(),
        InputError::NoUsableRow { file: file.to_owned(), refused, skipped: skip.len() }
    );
    Ok(tasks)
}

/// The usable rows of `file` whose tasks have tests.
///
/// # Errors
/// As [`of_file`]; and if a row is a plain row, whose environment an external worker provides.
pub(crate) fn tested_of_file(file: &Utf8Path, skip: &[String]) -> anyhow::Result<Vec<Task>> {
    let tasks = of_file(file, skip)?;
    let plain = tasks.iter().find(|task| matches!(task.origin, Origin::Outside(_)));
    if let Some(task) = plain {
        anyhow::bail!(UsageError::GradedOutside { id: task.id.as_str().to_owned() });
    }
    Ok(tasks)
}

/// All tasks that the configured environment generates.
pub(crate) fn generated(settings: &Settings) -> Vec<Task> {
    let count = |n: Option<u32>| n.unwrap_or_default() as usize;
    let counts = micro::MicroCounts {
        train: count(settings.tasks.train),
        held_out: count(settings.tasks.held_out),
        held_out_families: count(settings.tasks.held_out),
    };
    of_environment(settings, counts)
}

fn of_environment(settings: &Settings, counts: micro::MicroCounts) -> Vec<Task> {
    let image = settings.tasks.image.clone().unwrap_or_else(|| MICRO_IMAGE.into());
    let mut tasks = micro::generate(settings.tasks.seed, counts);
    for task in &mut tasks {
        task.image.clone_from(&image);
    }
    tasks
}
