//! The folder of a run or an evaluation: its plan and its journal.

use crate::amend;
use crate::args::ConfigSource;
use crate::config::{self, ConfigError, Sections, Settings};
use crate::error::UsageError;
use crate::files::write_whole;
use crate::model_files::MODEL_FILES;
use crate::{task_source, wiring};
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{RunError, run_kind};
use orchestrate_engine::{EngineKind, EngineSettings};
use orchestrate_store::{
    JOURNAL_FILE, LOCK_FILE, NewRun, Reader, RunHold, RunKind, Store, StoreError, check_new,
};
use orchestrate_tasks::load;
use orchestrate_types::{ConfigProblem, RunId};
use std::io::ErrorKind;
use std::time::Duration;

/// The recorded plan inside a run folder.
pub(crate) const PLAN_FILE: &str = "plan.toml";

/// Records the plan of a new run or evaluation, with every default filled in, and creates its journal.
pub(crate) async fn create(
    folder: &Utf8Path,
    raw: &Sections,
    kind: RunKind,
) -> anyhow::Result<Opened> {
    let mut raw = raw.with_defaults()?.with_absolute_paths()?;
    pin_data_sets(&mut raw).await?;
    let settings = raw.check()?;
    check_model(&settings)?;
    // A damaged checkpoint is reported here as well.
    wiring::shape(&settings.engine, &settings.engine.model)?;
    let plan = toml::to_string(&raw).context("failed to write the plan as TOML")?;
    let new = NewRun { run: RunId::generate(), plan_digest: digest(&plan), kind };
    check_new(folder)?;
    // The plan is written first, so that every journal has one; a plan alone is not a run yet.
    if !folder.join(JOURNAL_FILE).exists() {
        write_whole(&folder.join(PLAN_FILE), &plan)?;
    }
    let store = Store::create(folder, &new).await?;
    Ok(Opened { settings, store, changes: Vec::new() })
}

/// Fails if `folder` holds a run already, as [`create`] would.
pub(crate) fn check_unused(folder: &Utf8Path) -> Result<(), StoreError> {
    check_new(folder)?;
    let journal = folder.join(JOURNAL_FILE);
    if journal.exists() { Err(StoreError::Exists { journal }) } else { Ok(()) }
}

/// Fails if the model does not exist, before anything is written. The default model exists only in a
/// checkout of the project.
pub(crate) fn check_model(settings: &Settings) -> Result<(), ConfigError> {
    let EngineSettings { kind, model, .. } = &settings.engine;
    if *kind == EngineKind::Openai || model.exists() {
        return Ok(());
    }
    let remedy = "must be an existing checkpoint folder, relative to the current directory; the \
                  default, environments/micro/policy, exists only in a checkout of the project: \
                  run from there, or set engine.model";
    Err(ConfigError::Problems(vec![ConfigProblem::new("engine.model", model, remedy)]))
}

/// Pins data sets on a hub, which may change during a run, to their current commit.
async fn pin_data_sets(raw: &mut Sections) -> anyhow::Result<()> {
    for file in [&mut raw.tasks.file, &mut raw.tasks.held_out_file].into_iter().flatten() {
        let named = file.clone();
        *file = tokio::task::spawn_blocking(move || load::pinned(&named)).await??;
    }
    Ok(())
}

/// A run or evaluation that is open for writing.
#[derive(Debug)]
pub(crate) struct Opened {
    /// What it runs with: its plan, all recorded changes, and those of this command.
    pub(crate) settings: Settings,
    pub(crate) store: Store,
    /// Changes of this command, which [`Opened::store`] has not recorded yet: a start that fails leaves
    /// the settings as they were.
    pub(crate) changes: Vec<String>,
}

/// Opens a run or evaluation of this `kind` that was stopped, killed or finished; `source` may change some
/// settings.
pub(crate) async fn resume(
    folder: &Utf8Path,
    source: &ConfigSource,
    kind: RunKind,
) -> anyhow::Result<Opened> {
    let path = folder.join(PLAN_FILE);
    anyhow::ensure!(source.files.is_empty(), UsageError::ConfigOfResumedRun { plan: path });
    // Unknown keys and values are reported before the rule for a run that has started.
    config::load(source)?;
    if path.exists() && !folder.join(JOURNAL_FILE).exists() {
        // Killed between plan and journal: nothing was started.
        let text = read_plan(&path)?;
        let raw = config::parse_plan(path.as_str(), &text, &[], &source.sets)?;
        raw.warn_of_old_names();
        return create(folder, &raw, kind).await;
    }
    amend::check(&source.sets)?;
    let store = Store::open(folder).await?;
    let reader = store.reader();
    anyhow::ensure!(
        digest(&read_plan(&path)?) == reader.run().await?.plan_digest,
        ConfigError::Layer {
            name: path.to_string(),
            error: "was changed after the run started; restore it, or start a new run".into(),
        }
    );
    let planned_before = planned(folder, reader, &[]).await?;
    planned_before.warn_of_old_names();
    let before = planned_before.check()?;
    match (run_kind(reader, wiring::policy(&before)).await?, kind) {
        (Some(RunKind::Evaluation), RunKind::Training) => {
            anyhow::bail!(RunError::HoldsEvaluation)
        }
        (Some(RunKind::Training), RunKind::Evaluation) => {
            anyhow::bail!(RunError::HoldsTrainingRun)
        }
        (Some(RunKind::Training), RunKind::Training)
        | (Some(RunKind::Evaluation), RunKind::Evaluation)
        | (None, _) => {}
    }
    let changes = source.sets.iter().map(|set| amend::recorded(set));
    let changes = changes.collect::<anyhow::Result<Vec<_>>>()?;
    let settings = planned(folder, reader, &changes).await?.check()?;
    check_changes(&before, &settings, reader).await?;
    Ok(Opened { settings, store, changes })
}

/// The recorded plan of a run with all recorded changes, and then `changes`.
pub(crate) async fn planned(
    folder: &Utf8Path,
    reader: &Reader,
    changes: &[String],
) -> anyhow::Result<Sections> {
    let path = folder.join(PLAN_FILE);
    let text = read_plan(&path)?;
    let recorded = reader.amendments().await?.into_iter().map(|row| row.assignment);
    let recorded: Vec<String> = recorded.collect();
    Ok(config::parse_plan(path.as_str(), &text, &recorded, changes)?)
}

fn read_plan(path: &Utf8Path) -> Result<String, ConfigError> {
    fs_err::read_to_string(path)
        .map_err(|error| ConfigError::Unreadable { file: path.to_owned(), error })
}

/// Refuses changes that the values themselves allow, but the state of the run does not.
async fn check_changes(before: &Settings, after: &Settings, reader: &Reader) -> anyhow::Result<()> {
    let mut problems = Vec::new();
    let begun = reader.steps().await?.iter().map(|row| row.step).max().unwrap_or(0);
    if after.run.steps < begun && after.run.steps != before.run.steps {
        let remedy = format!("must be at least {begun}: that step has started");
        problems.push(ConfigProblem::new("run.steps", after.run.steps, remedy));
    }
    let is_embedded = |settings: &Settings| settings.engine.is_embedded();
    if is_embedded(before) != is_embedded(after) {
        let remedy =
            "must stay as it is: the run samples with the embedded engine; start a new run";
        problems.push(ConfigProblem::new("engine.url", "an address", remedy));
    }
    if before.trainer.url.is_some() != after.trainer.url.is_some() {
        let remedy =
            "must stay as it is: the run trains with the embedded trainer; start a new run";
        problems.push(ConfigProblem::new("trainer.url", "an address", remedy));
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Problems(problems).into()) }
}

/// Name of the folder with the turns of external agents in a run folder.
pub(crate) const TURNS_FOLDER: &str = "turns";
/// Entries of a run folder that this program makes.
const ENTRIES: [&str; 21] = [
    PLAN_FILE,
    task_source::FILES_FILE,
    MODEL_FILES,
    "status.json",
    "tool-servers.json",
    "metrics.jsonl",
    "metrics.csv",
    "metrics.parquet",
    "report.html",
    "predictions.jsonl",
    "tensorboard",
    "routing",
    TURNS_FOLDER,
    "checkpoints",
    "batches",
    "blobs",
    "logs",
    "orchestrate.db-wal",
    "orchestrate.db-shm",
    JOURNAL_FILE,
    // Last, because a folder with a lock and without a journal is refused.
    LOCK_FILE,
];

/// What a folder held before a run was created in it.
#[derive(Debug)]
pub(crate) struct Before {
    folder: Utf8PathBuf,
    existed: bool,
    /// Which of [`ENTRIES`] it held.
    entries: Vec<&'static str>,
}

impl Before {
    /// Looks at the folder of a run that is about to be created.
    pub(crate) fn of(folder: &Utf8Path) -> Self {
        let is_there = |name: &&str| folder.join(name).symlink_metadata().is_ok();
        let entries = ENTRIES.into_iter().filter(is_there).collect();
        Self { folder: folder.to_owned(), existed: folder.exists(), entries }
    }

    /// Removes what a failed start has written, unless something was sampled: the corrected command can then
    /// use the same folder. Files of others stay. Returns whether it did. The journal must be closed.
    pub(crate) async fn restore(self) -> anyhow::Result<bool> {
        if self.entries.contains(&JOURNAL_FILE) || !self.folder.join(JOURNAL_FILE).exists() {
            return Ok(false);
        }
        // No other process resumes the run meanwhile.
        let Some(_hold) = hold(&self.folder).await? else { return Ok(false) };
        let reader = Reader::open(&self.folder).await?;
        let has_begun = reader.has_begun().await;
        reader.close().await;
        if has_begun? {
            return Ok(false);
        }
        for name in ENTRIES.into_iter().filter(|name| !self.entries.contains(name)) {
            let path = self.folder.join(name);
            let removed = match path.symlink_metadata() {
                Ok(meta) if meta.is_dir() => fs_err::remove_dir_all(&path),
                Ok(_) => fs_err::remove_file(&path),
                Err(error) => Err(error),
            };
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                Ok(()) | Err(_) => {}
            }
        }
        if !self.existed {
            // Unless others have put something into it.
            let _ = std::fs::remove_dir(&self.folder);
        }
        Ok(true)
    }
}

/// Keeps other processes out of a run folder; `None` if one is in it. A sink of this process may need a moment
/// to let it go.
async fn hold(folder: &Utf8Path) -> Result<Option<RunHold>, StoreError> {
    for _ in 0..20 {
        match RunHold::take(folder) {
            Err(StoreError::Locked { .. }) => tokio::time::sleep(Duration::from_millis(100)).await,
            held => return held.map(Some),
        }
    }
    Ok(None)
}

fn digest(plan: &str) -> String {
    blake3::hash(plan.as_bytes()).to_hex().to_string()
}
