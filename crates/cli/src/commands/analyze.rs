//! `orchestrate analyze`: one run as a page, and its verdict.

use crate::args::AnalyzeArgs;
use crate::run_folder::write_whole;
use crate::{output, tables, wiring};
use orchestrate_report::{RunReport, write_html};
use orchestrate_store::Reader;
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: AnalyzeArgs) -> anyhow::Result<ExitCode> {
    let folder = wiring::absolute(&args.run_dir)?;
    let reader = Reader::open(&folder).await?;
    let report = RunReport::from_journal(&reader).await?;
    let page = match &args.out {
        Some(file) => wiring::absolute(file)?,
        None => folder.join("report.html"),
    };
    write_whole(&page, &write_html(&report, &reader.metrics().await?))?;
    if args.json {
        output::json(&report)?;
    } else {
        output::data(tables::final_table(&report));
        if report.collapse.is_none() {
            output::data("no sign of collapse");
        }
    }
    output::say(format!("report: {page}"));
    Ok(ExitCode::SUCCESS)
}
