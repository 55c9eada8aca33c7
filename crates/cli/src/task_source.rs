//! Where tasks come from: an environment that generates them, or task files.

use crate::config::{ConfigError, Settings};
use crate::error::{InputError, UsageError};
use crate::files::write_whole;
use crate::output;
use camino::Utf8Path;
use orchestrate_coordinator::TaskSet;
use orchestrate_rollout::Scaffold;
use orchestrate_settings::closest;
use orchestrate_tasks::swe::Harness;
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
    let mut skip = Skip::new(&settings.tasks.skip);
    let set = selected(settings, &mut skip)?;
    let tasks = &settings.tasks;
    let is_generated = tasks.file.is_none() && tasks.held_out_file.is_none() || tasks.mix > 0;
    skip.check(&set, is_generated)?;
    Ok(set)
}

fn selected(settings: &Settings, skip: &mut Skip<'_>) -> anyhow::Result<TaskSet> {
    let tasks = &settings.tasks;
    if tasks.file.is_none() && tasks.held_out_file.is_none() {
        let mut set = TaskSet::default();
        for task in generated(settings).into_iter().filter(|task| !skip.has(&task.id)) {
            match task.split {
                Split::Train => set.train.push(Arc::new(task)),
                Split::HeldOut => set.held_out.push(Arc::new(task)),
                Split::HeldOutFamilies => set.held_out_families.push(Arc::new(task)),
            }
        }
        return Ok(set);
    }
    let mut part = |file: &Option<String>, split, count: Option<u32>| -> anyhow::Result<Vec<_>> {
        let Some(file) = file else { return Ok(Vec::new()) };
        let mut rows = of_file(Utf8Path::new(file), skip, settings.reward.harness)?;
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
    let held_out = part(&tasks.held_out_file, Split::HeldOut, tasks.held_out)?;
    let generated = of_environment(settings, mix).into_iter().filter(|task| !skip.has(&task.id));
    train.extend(generated.map(Arc::new));
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

/// The ids of `tasks.skip`, and which of them tasks have.
#[derive(Debug)]
pub(crate) struct Skip<'a> {
    ids: BTreeMap<&'a str, bool>,
}

impl<'a> Skip<'a> {
    /// These ids, of which none was found yet.
    pub(crate) fn new(ids: &'a [String]) -> Self {
        Self { ids: ids.iter().map(|id| (id.as_str(), false)).collect() }
    }

    /// Whether the task with this id is left out.
    pub(crate) fn has(&mut self, id: &str) -> bool {
        self.ids.get_mut(id).map(|found| *found = true).is_some()
    }

    /// Number of ids that tasks have.
    pub(crate) fn found(&self) -> usize {
        self.ids.values().filter(|found| **found).count()
    }

    /// Says how many rows of `file` are left out, and names an id that none has: the list may be for
    /// another file.
    pub(crate) fn say(&self, file: &Utf8Path) {
        if self.found() > 0 {
            let rows = output::counted(self.found(), "row");
            output::say(format!("note: {file}: tasks.skip leaves out {rows}"));
        }
        if let Some(ids) = named(self.unknown()) {
            output::say(format!("note: {file}: no row has the id {ids} (tasks.skip)"));
        }
    }

    /// Says how many generated tasks are left out, and names an id that none can have: the list may be
    /// for the rows of a file.
    pub(crate) fn say_generated(&self, environment: &str) {
        if self.found() > 0 {
            let skipped = output::counted(self.found(), "task");
            output::say(format!("note: tasks.skip leaves out {skipped}"));
        }
        if let Some(ids) = named(self.unknown().filter(|id| !micro::is_id(id))) {
            output::say(format!("note: {environment}: no task has the id {ids} (tasks.skip)"));
        }
    }

    fn unknown(&self) -> impl Iterator<Item = &'a str> {
        self.ids.iter().filter(|(_, found)| !**found).map(|(id, _)| *id)
    }

    /// Fails for an id that no task of the run has, which would leave a task in that is known to be
    /// unsound.
    fn check(&self, set: &TaskSet, is_generated: bool) -> Result<(), ConfigError> {
        // A run with fewer generated tasks need not have all of them.
        let is_later = |id: &str| is_generated && micro::is_id(id);
        let Some(id) = self.unknown().find(|id| !is_later(id)) else { return Ok(()) };
        if id.trim().is_empty() {
            let remedy = "contains an empty id; remove it";
            let problem = ConfigProblem::new("tasks.skip", format!("[\"{id}\"]"), remedy);
            return Err(ConfigError::Problems(vec![problem]));
        }
        let all = set.train.iter().chain(&set.held_out).chain(&set.held_out_families);
        let meant = closest(id, all.map(|task| task.id.as_str()));
        let meant = meant.map(|id| format!("; did you mean `{id}`?")).unwrap_or_default();
        let remedy = format!("must be ids of tasks that this run would have{meant}");
        Err(ConfigError::Problems(vec![ConfigProblem::new("tasks.skip", id, remedy)]))
    }
}

/// The first of these ids, and the number of the others; `None` without one.
fn named<'a>(mut ids: impl Iterator<Item = &'a str>) -> Option<String> {
    let first = ids.next()?;
    let more = match ids.count() {
        0 => String::new(),
        more => format!(", and {more} more ids of tasks.skip"),
    };
    Some(format!("`{first}`{more}"))
}

/// The usable rows of `file` as tasks, except those that are left out. Refused rows are reported on
/// standard error; those that this version of SWE-bench's harness cannot grade are among them.
///
/// # Errors
/// If the file cannot be read or has no usable row.
fn of_file(file: &Utf8Path, skip: &mut Skip<'_>, harness: Harness) -> anyhow::Result<Vec<Task>> {
    let (mut tasks, mut refused, mut skipped) = (Vec::new(), 0_usize, 0_usize);
    for row in load::rows_for(file, harness)? {
        match row {
            Ok(row) if skip.has(&row.id()) => skipped += 1,
            Ok(row) => tasks.push(row.to_task()?),
            Err(bad) if bad.id.as_deref().is_some_and(|id| skip.has(id)) => skipped += 1,
            Err(bad) => {
                refused += 1;
                output::say(format!("note: {file}: refused: {bad}"));
            }
        }
    }
    let file = file.to_owned();
    anyhow::ensure!(!tasks.is_empty(), InputError::NoUsableRow { file, refused, skipped });
    Ok(tasks)
}

/// The usable rows of `file` whose tasks have tests, except those whose id is in `skip`.
///
/// # Errors
/// As [`of_file`]; and if a row is a plain row, whose environment an external worker provides.
pub(crate) fn tested_of_file(
    file: &Utf8Path,
    skip: &[String],
    harness: Harness,
) -> anyhow::Result<Vec<Task>> {
    let mut skip = Skip::new(skip);
    let tasks = of_file(file, &mut skip, harness)?;
    skip.say(file);
    let plain = tasks.iter().find(|task| matches!(task.origin, Origin::External(_)));
    if let Some(task) = plain {
        anyhow::bail!(UsageError::GradedExternally { id: task.id.as_str().to_owned() });
    }
    Ok(tasks)
}

/// All tasks that the configured environment generates, including those that `tasks.skip` leaves out.
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

    /// Settings with these training and held-out rows, whose ids are given, and these skipped ids.
    fn settings(folder: &Utf8Path, ids: [&[&str]; 2], mix: u32, skip: &[&str]) -> Settings {
        let mut raw = Sections::default();
        let file = |name: &str, ids: &[&str]| {
            let row = |id: &&str| format!("{}\n", serde_json::json!({"id": id, "prompt": "p"}));
            let path = folder.join(name);
            fs_err::write(&path, ids.iter().map(row).collect::<String>()).unwrap();
            (!ids.is_empty()).then(|| path.to_string())
        };
        raw.tasks.file = file("train.jsonl", ids[0]);
        raw.tasks.held_out_file = file("held_out.jsonl", ids[1]);
        raw.tasks.mix = Some(mix);
        if ids[0].is_empty() {
            (raw.tasks.train, raw.tasks.held_out) = (Some(3), Some(2));
        }
        raw.tasks.skip = Some(skip.iter().map(|id| (*id).to_owned()).collect());
        raw.run.eval_every = Some(0);
        raw.with_defaults().unwrap().check().unwrap()
    }

    fn ids(set: &TaskSet) -> Vec<&str> {
        let all = set.train.iter().chain(&set.held_out).chain(&set.held_out_families);
        all.map(|task| task.id.as_str()).collect()
    }

    #[test]
    fn skipped_tasks_are_left_out_wherever_tasks_come_from() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Utf8Path::from_path(temporary.path()).unwrap();
        let set = |ids, mix, skip: &[&str]| task_set(&settings(folder, ids, mix, skip)).unwrap();
        // The last one is a task of a longer list.
        let skip = ["micro__train_000001", "micro__held_out_000000", "micro__train_000700"];
        let generated = set([&[], &[]], 0, &skip);
        assert_eq!(
            ids(&generated),
            [
                "micro__train_000000",
                "micro__train_000002",
                "micro__held_out_000001",
                "micro__held_out_families_000000",
                "micro__held_out_families_000001",
            ]
        );
        let mixed = set([&["a-1", "a-2"], &["b-1", "b-2"]], 2, &["a-1", "b-2", skip[0]]);
        assert_eq!(ids(&mixed), ["a-2", "micro__train_000000", "b-1"]);
    }

    #[test]
    fn a_skipped_id_that_no_task_has_is_refused_with_the_nearest_one() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Utf8Path::from_path(temporary.path()).unwrap();
        let files: [&[&str]; 2] = [&["pallets__flask-1", "x-1"], &["b-1"]];
        for (ids, skip, expected) in [
            (files, "pallets__flask-11", "did you mean `pallets__flask-1`?"),
            (files, "micro__train_000001", "must be ids of tasks that this run would have"),
            ([&[][..], &[]], "micro__train_01", "did you mean `micro__train_000001`?"),
            (files, "", "tasks.skip = [\"\"]: contains an empty id; remove it"),
        ] {
            let error = task_set(&settings(folder, ids, 0, &[skip])).unwrap_err().to_string();
            assert!(error.contains("tasks.skip") && error.contains(skip), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
