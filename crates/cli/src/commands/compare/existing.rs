//! Runs that exist already, made by any command, on this machine or another.

use crate::config::Sections;
use crate::error::{InputError, OutputError, UsageError};
use crate::run_folder::planned;
use crate::{paths, task_source};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{RunError, RunSettings, is_finished};
use orchestrate_report::{ComparedRun, ConfigRuns, read_runs, write_runs};
use orchestrate_store::Reader;
use std::collections::BTreeMap;
use std::io::{self, BufReader, BufWriter, Read};

/// The file in the folder of a comparison with all its runs. `--runs` reads it on any machine.
pub(super) const RUNS_FILE: &str = "runs.jsonl.zst";

/// Maximum size of a file of runs, unpacked. A small file may expand to any size.
const RUNS_BYTES: u64 = 512 << 20;

/// A reader that fails at a number of bytes.
struct Limited<R> {
    inner: io::Take<R>,
    limit: u64,
}

impl<R: Read> Limited<R> {
    fn new(inner: R, limit: u64) -> Self {
        Self { inner: inner.take(limit + 1), limit }
    }
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        if self.inner.limit() > 0 {
            return Ok(read);
        }
        let limit = self.limit;
        Err(io::Error::other(format!("it has more than {limit} bytes when unpacked")))
    }
}

/// Reads the runs in `paths`: folders of one run, or files that [`write()`] made. Runs that differ only in
/// their seed are one configuration.
///
/// # Errors
/// A folder without a journal or plan, a file that is not one of runs, and a run that is named twice.
pub(super) async fn read(paths: &[Utf8PathBuf]) -> anyhow::Result<Vec<ConfigRuns>> {
    let mut configs: Vec<ConfigRuns> = Vec::new();
    for path in paths {
        let path = paths::absolute(path)?;
        let found =
            if path.is_file() { from_file(&path)? } else { vec![from_folder(&path).await?] };
        for mut one in found {
            if let Some(known) = configs.iter_mut().find(|config| config.plan == one.plan) {
                let seeds: Vec<u64> = known.runs.iter().map(|run| run.seed).collect();
                let again = one.runs.iter().find(|run| seeds.contains(&run.seed));
                if let Some(run) = again {
                    let (seed, name) = (run.seed, known.name.clone());
                    anyhow::bail!(UsageError::RepeatedRun { path, seed, name });
                }
                known.runs.append(&mut one.runs);
                known.runs.sort_by_key(|run| run.seed);
                continue;
            }
            one.name = unused_name(one.name, &configs);
            configs.push(one);
        }
    }
    Ok(configs)
}

/// Writes the runs of a comparison to [`RUNS_FILE`] in its folder.
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
    Ok(write().map_err(|source| OutputError { file: path.clone(), source })?)
}

fn from_file(path: &Utf8Path) -> anyhow::Result<Vec<ConfigRuns>> {
    let file = fs_err::File::open(path)
        .map_err(|source| InputError::Unreadable { file: path.to_owned(), source })?;
    let read = || read_runs(BufReader::new(Limited::new(zstd::Decoder::new(file)?, RUNS_BYTES)));
    Ok(read().map_err(|source| InputError::NotRuns { file: path.to_owned(), source })?)
}

async fn from_folder(folder: &Utf8Path) -> anyhow::Result<ConfigRuns> {
    // Opened first: its error says what is missing if the folder holds no run at all.
    let reader = Reader::open(folder).await?;
    let raw = planned(folder, &reader, &[]).await?.with_defaults()?;
    let run = read_run(&reader, folder, &raw.check()?.run).await?;
    Ok(ConfigRuns { name: name_of(folder), plan: plan(&raw, folder)?, runs: vec![run] })
}

/// Reads the run in `folder`, whose `[run]` section is `settings`, from its journal.
pub(super) async fn read_run(
    reader: &Reader,
    folder: &Utf8Path,
    settings: &RunSettings,
) -> anyhow::Result<ComparedRun> {
    let finished = is_finished(reader, settings).await?;
    let run = ComparedRun::read(reader, folder, settings.seed, finished).await;
    Ok(run.map_err(RunError::from)?)
}

/// The plan of a configuration: the plan of any of its runs, without the seed. It includes the digests
/// of the run's task files, because runs on other tasks are not the same configuration, and one of its secrets,
/// which it does not include.
pub(super) fn plan(raw: &Sections, folder: &Utf8Path) -> anyhow::Result<serde_json::Value> {
    let mut raw = raw.clone();
    raw.run.seed = None;
    (raw.run.name, raw.run.tags) = (None, None);
    // An earlier version recorded paths as they were written.
    raw = raw.with_absolute_paths()?;
    raw.map_paths(&mut |path| {
        *path = paths::relative_to_current(Utf8Path::new(path.as_str())).to_string();
    });
    let shown = raw.without_secrets();
    let mut plan = serde_json::to_value(&shown)?;
    let files = task_source::recorded_files(folder)?.into_iter();
    let files: BTreeMap<String, String> = files
        .map(|(file, digest)| {
            let file = paths::absolute(Utf8Path::new(&file))?;
            Ok((paths::relative_to_current(&file).to_string(), digest))
        })
        .collect::<Result<_, UsageError>>()?;
    let Some(entries) = plan.as_object_mut() else { return Ok(plan) };
    if !files.is_empty() {
        entries.insert("task_files".to_owned(), serde_json::to_value(files)?);
    }
    if shown != raw {
        let digest =
            blake3::hash(&serde_json::to_vec(&(&raw.agent.env, &raw.rollout.tool_servers))?);
        // Enough to tell configurations apart.
        let digest: String = digest.to_hex().chars().take(8).collect();
        entries.insert("not_shown".to_owned(), digest.into());
    }
    Ok(plan)
}

/// The name of the folder; for `seed-N` that of the folder around it.
fn name_of(folder: &Utf8Path) -> String {
    let own = folder.file_name().unwrap_or("run");
    let above = folder.parent().and_then(Utf8Path::file_name);
    above.filter(|_| own.starts_with("seed-")).unwrap_or(own).to_owned()
}

fn unused_name(name: String, configs: &[ConfigRuns]) -> String {
    let taken = |name: &str| configs.iter().any(|config| config.name == name);
    if !taken(&name) {
        return name;
    }
    // There is one more number than names, so one of them is free.
    let numbers = 2..configs.len() + 3;
    numbers.map(|n| format!("{name}-{n}")).find(|other| !taken(other)).unwrap_or(name)
}
