//! Graded changes on disk, in the folder layout of SWE-bench's harness.

use super::graded::GradedChange;
use super::record::remove_verdict;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err as fs;
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{GradingRun, ModelName};
use std::fmt::Write as _;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;

/// The verdict, in the format of the harness.
pub(super) const REPORT_FILE: &str = "report.json";
/// Output of the tests.
const LOG_FILE: &str = "test_output.txt";
/// What was done to grade the change.
const STEPS_FILE: &str = "run_instance.log";

/// Where graded changes are kept, and under which model name.
#[derive(Debug, Clone)]
pub struct GradeLogs {
    /// Folder that contains `logs/run_evaluation`.
    pub root: Utf8PathBuf,
    /// Name of the model, as in predictions.
    pub model: ModelName,
}

impl GradeLogs {
    /// The folder of one graded change.
    pub fn folder(&self, run: &GradingRun, task: &Task) -> Utf8PathBuf {
        let evaluation = self.root.join("logs/run_evaluation").join(run.as_str());
        evaluation.join(self.model.file_name()).join(task.id.as_str())
    }
}

/// Writes the folder `logs/run_evaluation/RUN/MODEL/INSTANCE` as the harness does, and returns its
/// path.
///
/// It contains `patch.diff`, `eval.sh`, `test_output.txt`, `run_instance.log` and `report.json`; a
/// file without content is left out. An earlier verdict is removed first, and the report is written
/// last and as a whole, so that no report stands next to the files of another change. MODEL is [`ModelName::file_name`]; none of the three names can
/// lead out of [`GradeLogs::root`]. For families other than SWE-bench `report.json` is the verdict.
///
/// # Errors
/// If a file cannot be written.
pub fn write_log_folder(
    logs: &GradeLogs,
    run: &GradingRun,
    task: &Task,
    graded: &GradedChange,
) -> io::Result<Utf8PathBuf> {
    let folder = logs.folder(run, task);
    fs::create_dir_all(&folder)?;
    remove_verdict(&folder)?;
    fs::write(folder.join("patch.diff"), &graded.patch)?;
    let script = graded.eval_script.as_ref().map(String::as_bytes);
    write_or_remove(&folder.join("eval.sh"), script)?;
    let log = (!graded.test_time.is_zero()).then_some(graded.log.as_slice());
    write_or_remove(&folder.join(LOG_FILE), log)?;
    fs::write(folder.join(STEPS_FILE), instance_log(&folder, task, graded))?;
    let report = match (&task.origin, &graded.verdict.report) {
        (Origin::SweBench(_), report) => report.as_ref().map(|r| r.file(&task.id)).transpose()?,
        (Origin::R2e | Origin::Files | Origin::External(_) | Origin::Harbor(_), _) => {
            Some(serde_json::to_value(&graded.verdict)?)
        }
    };
    if let Some(report) = report {
        replace_file(&folder.join(REPORT_FILE), format!("{report:#}").as_bytes(), READABLE)?;
    }
    Ok(folder)
}

/// Writes a file, or removes what an earlier grading left there.
fn write_or_remove(path: &Utf8Path, content: Option<&[u8]>) -> io::Result<()> {
    match content {
        Some(content) => fs::write(path, content),
        None if path.exists() => fs::remove_file(path),
        None => Ok(()),
    }
}

/// The mode of files that programs of other users may read, as far as the umask allows.
pub const READABLE: u32 = 0o666;

/// Writes a file so that it is either the old one or all of the new one, whatever ends this program
/// or the machine. Creates missing parent folders. The umask applies to `mode`.
///
/// # Errors
/// If it cannot be written.
pub fn replace_file(path: &Utf8Path, content: &[u8], mode: u32) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_str().is_empty());
    let folder = folder.unwrap_or(Utf8Path::new("."));
    fs::create_dir_all(folder)?;
    // Removed on an error.
    let mut file =
        tempfile::Builder::new().permissions(Permissions::from_mode(mode)).tempfile_in(folder)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    fs::File::open(folder)?.sync_all()
}

/// The files of a verdict's folder that show a failure of the environment, in the order in which the
/// harness searches them. Either may be absent.
pub fn log_files(folder: &Utf8Path) -> [Utf8PathBuf; 2] {
    [folder.join(LOG_FILE), folder.join(STEPS_FILE)]
}

/// The text of `run_instance.log`, with the lines that readers of the harness's logs search.
fn instance_log(folder: &Utf8Path, task: &Task, graded: &GradedChange) -> String {
    let (id, image) = (&task.id, &task.image);
    let mut text = format!("Container for {id} started from {image}\n");
    let failed = graded.problem.as_deref() == Some(APPLY_FAILED);
    let heading = if failed { APPLY_FAILED } else { ">>>>> Applied Patch" };
    let _ = writeln!(text, "{heading}:\n{}", graded.apply_log);
    if !graded.test_time.is_zero() {
        let _ = writeln!(text, "Test runtime: {:.2} seconds", graded.test_time.as_secs_f64());
        let _ = writeln!(text, "Test output for {id} written to {folder}/{LOG_FILE}");
    }
    if let Some(problem) = &graded.problem {
        let _ = writeln!(text, "Error in evaluating model for {id}: {problem}");
    } else {
        let resolved = if graded.verdict.reward > 0.5 { "True" } else { "False" };
        let _ = writeln!(text, "Result for {id}: resolved: {resolved}");
    }
    text
}

/// The harness's message for a patch that no command applies.
pub(super) const APPLY_FAILED: &str = ">>>>> Patch Apply Failed";
