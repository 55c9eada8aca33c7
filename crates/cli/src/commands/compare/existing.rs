//! Runs that were made before, by whatever command, here or elsewhere.

use crate::commands::run::PLAN_FILE;
use crate::config::{self, Sections};
use crate::wiring;
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{ComparedRun, ConfigRuns, read_runs, write_runs};
use orchestrate_store::Reader;
use std::io::{BufReader, BufWriter};

/// In the folder of a comparison: its runs, to be given to `--runs` on another machine.
pub(super) const RUNS_FILE: &str = "runs.jsonl.zst";

/// Reads the runs of `paths`, folders of one run or files as [`write()`] makes them; those that
/// differ only in their seed are one configuration.
///
/// # Errors
/// A folder without a journal or plan, a file that is none of runs, and a run that is there twice.
pub(super) async fn read(paths: &[Utf8PathBuf]) -> anyhow::Result<Vec<ConfigRuns>> {
    let mut configs: Vec<ConfigRuns> = Vec::new();
    for path in paths {
        let path = wiring::absolute(path)?;
        let found =
            if path.is_file() { from_file(&path)? } else { vec![from_folder(&path).await?] };
        for mut one in found {
            if let Some(known) = configs.iter_mut().find(|config| config.plan == one.plan) {
                let seeds: Vec<u64> = known.runs.iter().map(|run| run.seed).collect();
                let again = one.runs.iter().find(|run| seeds.contains(&run.seed));
                if let Some(run) = again {
                    anyhow::bail!("{path}: seed {} of {} is there twice", run.seed, known.name);
                }
                known.runs.append(&mut one.runs);
                known.runs.sort_by_key(|run| run.seed);
                continue;
            }
            one.name = unused(one.name, &configs);
            configs.push(one);
        }
    }
    Ok(configs)
}

/// Writes the runs of a comparison into its folder.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write(configs: &[ConfigRuns], out: &Utf8Path) -> anyhow::Result<()> {
    let path = out.join(RUNS_FILE);
    let temporary = path.with_extension("tmp");
    let write = || {
        let file = BufWriter::new(fs_err::File::create(&temporary)?);
        let mut packed = zstd::Encoder::new(file, 19)?;
        write_runs(configs, &mut packed)?;
        let file = packed.finish()?.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs_err::rename(&temporary, &path)
    };
    write().with_context(|| format!("write {path}"))
}

fn from_file(path: &Utf8Path) -> anyhow::Result<Vec<ConfigRuns>> {
    let file = fs_err::File::open(path)?;
    let read = || read_runs(BufReader::new(zstd::Decoder::new(file)?));
    read().with_context(|| format!("{path} is no {RUNS_FILE} of `orchestrate compare`"))
}

async fn from_folder(folder: &Utf8Path) -> anyhow::Result<ConfigRuns> {
    // Says what is missing where this is no run at all.
    Reader::open(folder).await?;
    let raw = config::load_plan(&folder.join(PLAN_FILE))?.with_defaults()?;
    let run = ComparedRun::read(folder, &raw.check()?.run).await?;
    Ok(ConfigRuns { name: name_of(folder), plan: plan(&raw)?, runs: vec![run] })
}

/// The plan of a configuration: that of any of its runs, without the seed.
pub(super) fn plan(raw: &Sections) -> anyhow::Result<serde_json::Value> {
    let mut raw = raw.clone();
    raw.run.seed = None;
    Ok(serde_json::to_value(&raw)?)
}

/// The folder's own name; `seed-N` lies in a folder that has one.
fn name_of(folder: &Utf8Path) -> String {
    let own = folder.file_name().unwrap_or("run");
    let above = folder.parent().and_then(Utf8Path::file_name);
    above.filter(|_| own.starts_with("seed-")).unwrap_or(own).to_owned()
}

fn unused(name: String, configs: &[ConfigRuns]) -> String {
    let taken = |name: &str| configs.iter().any(|config| config.name == name);
    if !taken(&name) {
        return name;
    }
    // One more number than there are names: one of them is free.
    let numbers = 2..configs.len() + 3;
    numbers.map(|n| format!("{name}-{n}")).find(|other| !taken(other)).unwrap_or(name)
}
