//! Where tasks come from: an environment that generates them, or task files.

use crate::config::{ConfigError, Settings};
use crate::error::{InputError, UsageError};
use crate::files::write_whole;
use crate::output;
use camino::Utf8Path;
use orchestrate_coordinator::TaskSet;
use orchestrate_rollout::Scaffold;
use orchestrate_tasks::{Origin, Split, Task, load, micro};
use orchestrate_types::ConfigProblem;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;

/// Default image of the micro environment.
const MICRO_IMAGE: &str = "orchestrate/micro:latest";

/// Name of the record of a run's task files in its folder.
pub(crate) const FILES_FILE: &str = "task-files.json";

/// The tasks of the run in `folder`, whose task files must be those that it began with: its groups may
/// be half done, and its results are of those tasks. A data set on a hub is pinned to a commit instead.
///
/// # Errors
/// As [`task_set`]; and if a task file was changed after the run began.
pub(crate) fn task_set_of_run(settings: &Settings, folder: &Utf8Path) -> anyhow::Result<TaskSet> {
    let tasks = &settings.tasks;
    let files = [&tasks.file, &tasks.held_out_file].into_iter().flatten();
    let mut found = BTreeMap::new();
    for file in files.filter(|file| !load::is_on_hub(file)) {
        let unreadable = |source| InputError::Unreadable { file: file.into(), source };
        let mut hasher = blake3::Hasher::new();
        let content = fs_err::File::open(file.as_str()).map_err(unreadable)?;
        hasher.update_reader(content).map_err(unreadable)?;
        found.insert(file.clone(), format!("blake3:{}", hasher.finalize().to_hex()));
    }
    let recorded = recorded_files(folder)?;
    let changed = found
        .iter()
        .find(|(file, digest)| recorded.get(*file).is_some_and(|recorded| recorded != *digest));
    if let Some((file, _)) = changed {
        let error = "was changed after the run started; restore it, or start a new run";
        let (name, error) = (file.clone(), error.to_owned());
        anyhow::bail!(ConfigError::Layer { name, error });
    }
    if recorded.is_empty() && !found.is_empty() {
        write_whole(&folder.join(FILES_FILE), &serde_json::to_string_pretty(&found)?)?;
    }
    task_set(settings)
}

/// The digests of the task files of the run in `folder`, by path; empty if it has none, or was made by
/// an earlier version.
///
/// # Errors
/// If the record cannot be read.
pub(crate) fn recorded_files(folder: &Utf8Path) -> anyhow::Result<BTreeMap<String, String>> {
    match fs_err::read(folder.join(FILES_FILE)) {
        Ok(record) => Ok(serde_json::from_slice(&record)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error.into()),
    }
}

/// The tasks that the settings name.
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
                "note: {file}: left out {} with several steps; an agent takes only one",
                output::counted(left_out, "Harbor task")
            ));
        }
        rows.truncate(count.map_or(usize::MAX, |count| count as usize));
        Ok(rows.into_iter().map(|task| Arc::new(Task { split, ..task })).collect())
    };
    let mut train = part(&tasks.file, Split::Train, tasks.train)?;
    // Their position does not matter: a run draws its own order.
    let mix = micro::MicroCounts { train: tasks.mix as usize, held_out: 0, held_out_families: 0 };
    train.extend(of_environment(settings, mix).into_iter().map(Arc::new));
    let held_out = part(&tasks.held_out_file, Split::HeldOut, tasks.held_out)?;
    let trained: HashSet<&str> = train.iter().map(|task| task.id.as_str()).collect();
    let both = held_out.iter().filter(|task| trained.contains(task.id.as_str())).count();
    if both > 0 {
        output::say(format!(
            "note: {both} of {} held-out tasks are trained on, too: their scores do not measure \
             unseen tasks",
            held_out.len()
        ));
    }
    Ok(TaskSet { train, held_out, held_out_families: Vec::new() })
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
    let plain = tasks.iter().find(|task| matches!(task.origin, Origin::External(_)));
    if let Some(task) = plain {
        anyhow::bail!(UsageError::GradedExternally { id: task.id.as_str().to_owned() });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sections;
    use camino::Utf8PathBuf;

    #[test]
    fn a_resumed_run_must_find_its_task_files_unchanged() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Utf8PathBuf::from_path_buf(temporary.path().to_owned()).unwrap();
        let file = folder.join("rows.jsonl");
        let write = |prompt: &str| {
            let row = serde_json::json!({"id": "a-1", "prompt": prompt});
            fs_err::write(&file, row.to_string()).unwrap();
        };
        write("one");
        let mut raw = Sections::default();
        raw.tasks.file = Some(file.to_string());
        raw.run.eval_every = Some(0);
        let settings = raw.with_defaults().unwrap().check().unwrap();
        let run = folder.join("run");
        assert_eq!(task_set_of_run(&settings, &run).unwrap().train.len(), 1);
        // The same id and another row.
        write("two");
        let error = task_set_of_run(&settings, &run).unwrap_err().to_string();
        assert!(error.contains("was changed after the run started"), "{error}");
        write("one");
        assert_eq!(task_set_of_run(&settings, &run).unwrap().train.len(), 1);
        write("two");
        task_set_of_run(&settings, &folder.join("another-run")).unwrap();
    }
}
