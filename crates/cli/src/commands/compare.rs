//! `orchestrate compare`: compares configurations over several seeds, one run for each.

mod existing;
mod matrix;

use super::run::{Job, drive};
use crate::args::{CompareArgs, ConfigSource};
use crate::config::{self, ConfigError, Sections};
use crate::exit::{STOPPED, TRAINER};
use crate::files::write_whole;
use crate::run_folder;
use crate::{live, output, paths, tables};
use camino::Utf8Path;
use matrix::{Cell, Matrix};
use orchestrate_coordinator::{OnCollapse, RunEnd, RunError, Stop};
use orchestrate_handoff::{TrainerError, TrainerErrorKind};
use orchestrate_report::{ComparedRun, Comparison, ConfigRuns};
use orchestrate_store::{JOURNAL_FILE, Reader, RunKind};
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: CompareArgs) -> anyhow::Result<ExitCode> {
    let out = args.out.as_deref().map(paths::absolute).transpose()?;
    if !args.runs.is_empty() {
        let runs = existing::read(&args.runs).await?;
        if let Some(out) = &out {
            write_reports(&runs, out)?;
        }
        let comparison = Comparison::new(runs);
        show(&comparison, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let out = out.unwrap_or_default();
    // All settings are checked before the first run starts.
    let matrix = Matrix::new(&args, &out)?;
    if args.dry_run {
        list(&matrix).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let stop = Stop::default();
    let mut results = Results { matrix: &matrix, runs: Vec::new() };
    let made = Box::pin(make_all(&matrix, &mut results, &out, &stop));
    let finished = live::until_stopped(stop.clone(), made).await?;
    let comparison = Comparison::new(results.configs()?);
    show(&comparison, args.json)?;
    output::say(format!("report: {out}/report.html"));
    if !finished {
        output::say("stopped; run the same command again to resume");
        return Ok(ExitCode::from(STOPPED));
    }
    let failed = comparison.failures().count();
    if failed > 0 {
        output::say(format!(
            "error: the trainer failed in {}, see the report",
            output::counted(failed, "run")
        ));
        output::say("hint: the same command retries them; a gentler [algorithm] may prevent it");
        return Ok(ExitCode::from(TRAINER));
    }
    Ok(ExitCode::SUCCESS)
}

/// The runs so far, each with the index of its cell in the matrix.
struct Results<'a> {
    matrix: &'a Matrix,
    runs: Vec<(usize, ComparedRun)>,
}

impl Results<'_> {
    fn configs(&self) -> anyhow::Result<Vec<ConfigRuns>> {
        let mut configs: Vec<ConfigRuns> = Vec::new();
        for (place, run) in &self.runs {
            let Some(cell) = self.matrix.cells.get(*place) else { continue };
            match configs.iter_mut().find(|config| config.name == cell.name) {
                Some(config) => config.runs.push(run.clone()),
                None => configs.push(ConfigRuns {
                    name: cell.name.clone(),
                    plan: existing::plan(&cell.raw, &cell.folder)?,
                    runs: vec![run.clone()],
                }),
            }
        }
        Ok(configs)
    }
}

/// Makes the runs that are missing. Returns false if it was stopped.
async fn make_all(
    matrix: &Matrix,
    results: &mut Results<'_>,
    out: &Utf8Path,
    stop: &Stop,
) -> anyhow::Result<bool> {
    for (place, cell) in matrix.cells.iter().enumerate() {
        if stop.drain.is_cancelled() {
            return Ok(false);
        }
        let (number, all) = (place + 1, matrix.cells.len());
        let title = format!("[{number}/{all}] {}, seed {}", cell.name, cell.seed);
        let made = Box::pin(make(cell, &title, stop)).await;
        let made = made.inspect_err(|_| {
            output::say(format!(
                "{title}: failed in {}; run the same command again to resume",
                cell.folder
            ));
        })?;
        let mut run = cell_run(cell).await?;
        let ended = match made {
            Made::Done => true,
            Made::Stopped => false,
            Made::Failed(why) => {
                output::say(format!("{title}: {why}"));
                run.failure = Some(why);
                true
            }
        };
        results.runs.push((place, run));
        write_reports(&results.configs()?, out)?;
        if !ended {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn cell_run(cell: &Cell) -> anyhow::Result<ComparedRun> {
    let reader = Reader::open(&cell.folder).await?;
    existing::read_run(&reader, &cell.folder, &cell.settings()?.run).await
}

/// How making one run ended.
enum Made {
    /// Nothing is left to do.
    Done,
    /// Stopped on request.
    Stopped,
    /// The trainer could not apply a step and would fail again: a result, like a collapse.
    Failed(String),
}

async fn make(cell: &Cell, title: &str, stop: &Stop) -> anyhow::Result<Made> {
    let state = State::of(cell).await?;
    output::say(format!("{title}: {}", state.text()));
    let opened = match state {
        State::Done => return Ok(Made::Done),
        State::Started => {
            run_folder::resume(&cell.folder, &ConfigSource::default(), RunKind::Training).await?
        }
        State::New => run_folder::create(&cell.folder, &cell.raw, RunKind::Training).await?,
    };
    let driven = drive(opened, &cell.folder, Job::Train, stop.clone());
    match Box::pin(driven).await {
        Ok(RunEnd::Finished(_)) => Ok(Made::Done),
        Ok(RunEnd::Stopped(_)) => Ok(Made::Stopped),
        Err(error) => match error.downcast_ref::<RunError>() {
            Some(RunError::Collapsed { .. }) => {
                output::say(format!("{title}: {error}"));
                Ok(Made::Done)
            }
            Some(RunError::Trainer(TrainerError {
                kind: TrainerErrorKind::StepFailed { error, .. },
                ..
            })) => Ok(Made::Failed(error.clone())),
            Some(_) | None => Err(error),
        },
    }
}

/// How far an earlier command brought a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    Started,
    Done,
}

impl State {
    /// Reads the folder of a cell.
    ///
    /// # Errors
    /// If the folder has a run with other settings.
    async fn of(cell: &Cell) -> anyhow::Result<Self> {
        if !cell.folder.join(JOURNAL_FILE).exists() {
            return Ok(Self::New);
        }
        let path = cell.folder.join(run_folder::PLAN_FILE);
        let text = fs_err::read_to_string(&path)
            .map_err(|error| ConfigError::Unreadable { file: path.clone(), error })?;
        // With the defaults of this version, which the plan of an earlier one may lack.
        let stored: Sections = config::parse_layer(path.as_str(), &text)?;
        anyhow::ensure!(
            stored.with_defaults()?.with_absolute_paths()? == cell.raw,
            ConfigError::Layer {
                name: path.into(),
                error:
                    "belongs to a run with other settings; choose another --out, or remove its folder"
                        .into(),
            }
        );
        let run = cell_run(cell).await?;
        let ends = cell.settings()?.diagnostics.on_collapse == OnCollapse::Stop;
        let done = run.finished || (ends && run.report.collapse.is_some());
        Ok(if done { Self::Done } else { Self::Started })
    }

    fn text(self) -> &'static str {
        match self {
            Self::New => "starts",
            Self::Started => "resumes",
            Self::Done => "finished",
        }
    }
}

async fn list(matrix: &Matrix) -> anyhow::Result<()> {
    let mut table = tables::table(&["config", "seed", "folder", "run"]);
    for cell in &matrix.cells {
        let state = State::of(cell).await?.text();
        let (name, seed, folder) = (cell.name.clone(), cell.seed.to_string(), cell.folder.clone());
        table.add_row([name, seed, folder.into_string(), state.to_owned()]);
    }
    output::data(table);
    Ok(())
}

fn write_reports(configs: &[ConfigRuns], out: &Utf8Path) -> anyhow::Result<()> {
    let comparison = Comparison::new(configs.to_vec());
    write_whole(&out.join("report.html"), &comparison.html())?;
    let json = serde_json::to_string_pretty(&comparison)?;
    write_whole(&out.join("report.json"), &format!("{json}\n"))?;
    write_whole(&out.join("report.md"), &comparison.markdown())?;
    existing::write(configs, out)
}

fn show(comparison: &Comparison, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(comparison);
    }
    let (header, rows) = comparison.table();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = tables::table(&header);
    for row in rows {
        table.add_row(row.iter().map(|text| tables::cell(text)));
    }
    output::data(table);
    Ok(())
}
