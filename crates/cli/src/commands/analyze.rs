//! `orchestrate analyze`: writes one run as a page of charts and prints its summary.

use super::runs::{self, Kind};
use crate::args::AnalyzeArgs;
use crate::error::UsageError;
use crate::files::write_whole;
use crate::{output, paths, tables};
use camino::Utf8Path;
use orchestrate_coordinator::RunError;
use orchestrate_metrics::detect_collapse;
use orchestrate_report::{RunReport, metrics_lines, run_page};
use orchestrate_store::Reader;
use std::process::ExitCode;

/// Warnings that are printed; of the others only the number is.
const WARNINGS: usize = 5;

/// Rejects a page that would replace a file of the run.
fn check_out(folder: &Utf8Path, out: &Utf8Path) -> Result<(), UsageError> {
    let real = |path: &Utf8Path| path.canonicalize_utf8().unwrap_or_else(|_| path.to_owned());
    let out = real(out);
    if out.starts_with(real(folder)) && out.extension() != Some("html") {
        return Err(UsageError::RunFile { path: out });
    }
    Ok(())
}

/// Runs the command.
pub(crate) async fn run(args: AnalyzeArgs) -> anyhow::Result<ExitCode> {
    let folder = paths::absolute(&args.run_dir)?;
    let reader = Reader::open(&folder).await?;
    let report = RunReport::from_journal(&reader).await.map_err(RunError::from)?;
    if let Some(file) = &args.out {
        check_out(&folder, &paths::absolute(file)?)?;
    }
    let lines = metrics_lines(&reader).await.map_err(RunError::from)?;
    let page = match &args.out {
        Some(file) => paths::absolute(file)?,
        None => folder.join("report.html"),
    };
    let written = write_whole(&page, &run_page(&report, &lines));
    if args.json {
        output::json(&report)?;
    } else {
        let kind = runs::kind(&folder, &reader).await.ok();
        output::data(tables::final_table(&report, kind != Some(Kind::Evaluation)));
        if report.collapse.is_none() {
            output::data(report.without_collapse());
        }
        let warnings = detect_collapse(&lines).1;
        for warning in warnings.iter().take(WARNINGS) {
            output::say(format!("warning: {warning}"));
        }
        if warnings.len() > WARNINGS {
            output::say(format!("warning: and {} more", warnings.len() - WARNINGS));
        }
    }
    match written {
        Ok(()) => output::say(format!("report: {page}")),
        Err(error) if args.out.is_none() && is_read_only(&error) => output::say(format!(
            "note: {folder} is read-only, so no page was written; name a file by --out"
        )),
        Err(error) => return Err(error.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn is_read_only(error: &RunError) -> bool {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    match error {
        RunError::File { source, .. } => {
            matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem)
        }
        _ => false,
    }
}
