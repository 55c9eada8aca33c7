//! `orchestrate tasks import harbor`: converts Harbor task folders to rows.

use super::NAME_CHARS;
use crate::args::HarborImportArgs;
use crate::config;
use crate::error::{InputError, UsageError};
use crate::output;
use anyhow::Context as _;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_sandbox::{BuildError, FileEntry, ImageBuilder};
use orchestrate_tasks::harbor::{
    self, HarborFile, HarborImage, HarborLine, HarborProblem, HarborRow, ImageFacts,
};
use orchestrate_tasks::r2e::write_rows;
use orchestrate_tasks::{printable, printable_lines};
use serde_json::json;
use std::collections::HashMap;
use std::process::ExitCode;

/// Printed characters of a reason.
const REASON_CHARS: usize = 2000;

/// Reads the folders, completes the rows with facts of their images, and writes the usable ones.
pub(super) async fn import(args: &HarborImportArgs) -> anyhow::Result<ExitCode> {
    let settings = config::load(&args.source)?.check()?;
    let folders = harbor::task_folders(&args.folder)
        .with_context(|| format!("cannot read {}", args.folder))?;
    check_out(&args.out, &args.source.files, &folders)?;
    let builder = ImageBuilder::connect(&settings.sandbox).await?;
    let mut known: HashMap<String, Result<ImageFacts, String>> = HashMap::new();
    let mut lines: Vec<HarborLine> = Vec::new();
    let (mut refused, mut networked, mut several) = (Vec::new(), 0_usize, 0_usize);
    for folder in &folders {
        let name = folder.file_name().unwrap_or_default();
        match row_of(folder, &builder, args.build_network, &mut known).await {
            Ok(row) if lines.iter().any(|line| line.harbor.id == row.id) => {
                refused.push((name, format!("another folder has the id `{}`", row.id)));
            }
            Ok(row) => {
                networked += usize::from(row.wants_network());
                several += usize::from(row.has_steps());
                lines.push(HarborLine { harbor: row });
            }
            Err(reason) => refused.push((name, reason)),
        }
        if let Some((name, reason)) = refused.last().filter(|(refused, _)| *refused == name) {
            let (name, reason) = (printable(name, NAME_CHARS), printable(reason, REASON_CHARS));
            output::say(format!("refused: {name}: {reason}"));
        }
    }
    if lines.is_empty() {
        let file = args.folder.clone();
        return Err(InputError::NoUsableRow { file, refused: refused.len(), skipped: 0 }.into());
    }
    write_rows(&args.out, &lines)?;
    if args.json {
        let refused: HashMap<_, _> = refused.iter().map(|(name, why)| (name, why)).collect();
        output::json(&json!({
            "usable": lines.len(),
            "refused": refused,
            "ask_for_network": networked,
            "several_steps": several,
        }))?;
    } else {
        let (usable, bad, out) = (lines.len(), refused.len(), &args.out);
        output::data(format!("{out}: usable {usable}; refused {bad}"));
    }
    if networked > 0 {
        output::say(format!(
            "note: {}, but no container gets one; `orchestrate tasks verify` shows which tasks need it",
            match networked {
                1 => "1 task allows a network".to_owned(),
                several => format!("{several} tasks allow a network"),
            }
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if `out` would replace a config file, or a file of a task folder.
fn check_out(
    out: &Utf8Path,
    configs: &[Utf8PathBuf],
    folders: &[Utf8PathBuf],
) -> Result<(), UsageError> {
    let real = |path: &Utf8Path| path.canonicalize_utf8().ok();
    let output = real(out);
    if output.is_some() && configs.iter().any(|config| real(config) == output) {
        return Err(UsageError::OutputIsInput { path: out.to_owned() });
    }
    // The file itself need not exist.
    let parent = out.parent().filter(|parent| !parent.as_str().is_empty());
    let Some(parent) = real(parent.unwrap_or(Utf8Path::new("."))) else { return Ok(()) };
    let is_around = |folder: &&Utf8PathBuf| real(folder).is_some_and(|f| parent.starts_with(f));
    match folders.iter().find(is_around) {
        Some(folder) => {
            Err(UsageError::OutputInTask { path: out.to_owned(), folder: folder.clone() })
        }
        None => Ok(()),
    }
}

/// The row of one folder. Builds or pulls its images.
async fn row_of(
    folder: &Utf8Path,
    builder: &ImageBuilder,
    has_network: bool,
    known: &mut HashMap<String, Result<ImageFacts, String>>,
) -> Result<HarborRow, String> {
    let mut row = harbor::read_task(folder).map_err(|error: HarborProblem| error.to_string())?;
    for image in row.images_mut() {
        let facts = if let Some(facts) = known.get(&image.name) {
            facts.clone()
        } else {
            let facts = facts(image, builder, has_network).await.map_err(|e| e.to_string());
            known.entry(image.name.clone()).or_insert(facts).clone()
        };
        image.complete(&facts?).map_err(|error| error.to_string())?;
    }
    row.to_task().map_err(|problem| problem.to_string())?;
    Ok(row)
}

async fn facts(
    image: &HarborImage,
    builder: &ImageBuilder,
    has_network: bool,
) -> Result<ImageFacts, BuildError> {
    if let Some(context) = &image.context {
        let context: Vec<FileEntry> = context.iter().map(entry).collect();
        let limit = harbor::seconds(image.build_timeout_s);
        if builder.build(&image.name, &context, limit, has_network).await? > 0 {
            output::say(format!("built {}", image.name));
        }
    }
    let found = builder.config(&image.name).await?;
    Ok(ImageFacts {
        workdir: found.workdir,
        user: found.user,
        has_entrypoint: found.has_entrypoint,
    })
}

fn entry(file: &HarborFile) -> FileEntry {
    FileEntry { path: file.path.clone(), mode: file.mode, content: file.content.clone() }
}

/// Prints a row in readable form, including the parts that are hidden from the agent.
pub(super) fn print(row: &HarborRow) {
    let name = |text: &str| printable(text, NAME_CHARS);
    output::data(format!(
        "{} (format {}, image {})",
        name(&row.id),
        name(&row.schema_version),
        name(&row.image.name)
    ));
    for step in &row.steps {
        if !step.name.is_empty() {
            output::data(format!("\n=== step {}", name(&step.name)));
        }
        output::data(format!("\n{}", printable_lines(step.instruction.trim_end())));
        for (title, files) in [("test", &step.tests), ("solution", &step.solution)] {
            for file in files {
                let text = String::from_utf8_lossy(&file.content);
                output::data(format!(
                    "\n--- {title}: {}\n{}",
                    name(&file.path),
                    printable_lines(text.trim_end())
                ));
            }
        }
    }
}
