//! Runs that were made before, by whatever command.

use crate::args::ConfigSource;
use crate::commands::run::PLAN_FILE;
use crate::config::{self, RawConfig};
use crate::wiring;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{ComparedRun, ConfigRuns};
use orchestrate_store::Reader;

/// Reads the runs in `folders`; those that differ only in their seed are one configuration.
///
/// # Errors
/// A folder without a journal or plan.
pub(super) async fn read(folders: &[Utf8PathBuf]) -> anyhow::Result<Vec<ConfigRuns>> {
    let mut configs: Vec<(RawConfig, ConfigRuns)> = Vec::new();
    for folder in folders {
        let folder = wiring::absolute(folder)?;
        // Says what is missing where this is no run at all.
        Reader::open(&folder).await?;
        let source = ConfigSource { files: vec![folder.join(PLAN_FILE)], sets: vec![] };
        let mut raw: RawConfig = config::load(&source)?;
        let run = ComparedRun::read(&folder, &raw.check()?.run).await?;
        raw.run.seed = None;
        if let Some((_, known)) = configs.iter_mut().find(|(plan, _)| *plan == raw) {
            known.runs.push(run);
            continue;
        }
        let name = unused(name_of(&folder), &configs);
        let plan = serde_json::to_value(&raw)?;
        configs.push((raw, ConfigRuns { name, plan, runs: vec![run] }));
    }
    Ok(configs.into_iter().map(|(_, config)| config).collect())
}

/// The folder's own name; `seed-N` lies in a folder that has one.
fn name_of(folder: &Utf8Path) -> String {
    let own = folder.file_name().unwrap_or("run");
    let above = folder.parent().and_then(Utf8Path::file_name);
    above.filter(|_| own.starts_with("seed-")).unwrap_or(own).to_owned()
}

fn unused(name: String, configs: &[(RawConfig, ConfigRuns)]) -> String {
    let taken = |name: &str| configs.iter().any(|(_, config)| config.name == name);
    if !taken(&name) {
        return name;
    }
    // One more number than there are names: one of them is free.
    let numbers = 2..configs.len() + 3;
    numbers.map(|n| format!("{name}-{n}")).find(|other| !taken(other)).unwrap_or(name)
}
