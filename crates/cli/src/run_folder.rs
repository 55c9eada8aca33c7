//! The folder of a run or an evaluation: its plan and its journal.

use crate::args::ConfigSource;
use crate::config::{self, ConfigError, Sections, Settings};
use crate::error::UsageError;
use crate::wiring;
use anyhow::Context;
use camino::Utf8Path;
use orchestrate_coordinator::RunError;
use orchestrate_engine::{EngineKind, EngineSettings};
use orchestrate_store::{JOURNAL_FILE, NewRun, Store, StoreError, check_new};
use orchestrate_tasks::load;
use orchestrate_types::{ConfigProblem, RunId};
use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

/// The recorded plan inside a run folder.
pub(crate) const PLAN_FILE: &str = "plan.toml";

/// Records the plan of a new run or evaluation, with every default filled in, and creates its journal.
pub(crate) async fn create(folder: &Utf8Path, raw: &Sections) -> anyhow::Result<(Settings, Store)> {
    let mut raw = raw.with_defaults()?;
    pin_data_sets(&mut raw).await?;
    let settings = raw.check()?;
    check_model(&settings)?;
    // A damaged checkpoint is reported here as well.
    wiring::shape(&settings.engine, &settings.engine.model)?;
    let plan = toml::to_string(&raw).context("failed to write the plan as TOML")?;
    let new = NewRun { run: RunId::generate(), plan_digest: digest(&plan) };
    check_new(folder)?;
    // The plan is written first, so that every journal has one; a plan alone is not a run yet.
    if !folder.join(JOURNAL_FILE).exists() {
        write_whole(&folder.join(PLAN_FILE), &plan)?;
    }
    Ok((settings, Store::create(folder, &new).await?))
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

/// Opens a run or evaluation that was stopped, killed or finished; `source` must be empty.
pub(crate) async fn resume(
    folder: &Utf8Path,
    source: &ConfigSource,
) -> anyhow::Result<(Settings, Store)> {
    anyhow::ensure!(
        source.files.is_empty() && source.sets.is_empty(),
        UsageError::SettingsOfResumedRun { plan: folder.join(PLAN_FILE) }
    );
    let path = folder.join(PLAN_FILE);
    if path.exists() && !folder.join(JOURNAL_FILE).exists() {
        // Killed between plan and journal: nothing was started.
        let raw = config::load_plan(&path)?;
        return create(folder, &raw).await;
    }
    let store = Store::open(folder).await?;
    let text = fs_err::read_to_string(&path)
        .map_err(|error| ConfigError::Unreadable { file: path.clone(), error })?;
    let recorded = store.reader().run().await?.plan_digest;
    anyhow::ensure!(
        digest(&text) == recorded,
        ConfigError::Layer {
            name: path.to_string(),
            error: "was changed after the run started; restore it, or start a new run".into(),
        }
    );
    let raw: Sections = config::parse_layer(path.as_str(), &text)?;
    Ok((raw.check()?, store))
}

fn digest(plan: &str) -> String {
    blake3::hash(plan.as_bytes()).to_hex().to_string()
}

/// Writes a file atomically, and creates missing parent folders. A link is followed; a device or a
/// pipe is written to, not replaced.
pub(crate) fn write_whole(path: &Utf8Path, text: &str) -> Result<(), RunError> {
    let write = || {
        let target = path.canonicalize_utf8().unwrap_or_else(|_| path.to_owned());
        if target.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            return fs_err::write(&target, text);
        }
        let folder = target.parent().unwrap_or(&target);
        fs_err::create_dir_all(folder)?;
        // Removed on an error.
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&target).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|source| RunError::File { path: path.to_owned(), source })
}
