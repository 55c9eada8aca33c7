//! Graded changes on disk, in the folder layout of SWE-bench's harness.

use super::graded::GradedChange;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err as fs;
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{GradingRun, ModelName};
use std::fmt::Write as _;
use std::io;

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
        self.folder_of(run, task, &self.model.file_name())
    }

    /// The folder that earlier versions used, which other models may share; often the same.
    pub fn earlier_folder(&self, run: &GradingRun, task: &Task) -> Utf8PathBuf {
        self.folder_of(run, task, &self.model.shared_file_name())
    }

    fn folder_of(&self, run: &GradingRun, task: &Task, model: &str) -> Utf8PathBuf {
        let evaluation = self.root.join("logs/run_evaluation").join(run.as_str());
        evaluation.join(model).join(task.id.as_str())
    }
}

/// Writes the folder `logs/run_evaluation/RUN/MODEL/INSTANCE` as the harness does, and returns its
/// path.
///
/// It contains `patch.diff`, `eval.sh`, `test_output.txt`, `report.json` and `run_instance.log`; a
/// file without content is left out. MODEL is [`ModelName::file_name`]; none of the three names can
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
    fs::write(folder.join("patch.diff"), &graded.patch)?;
    if let Some(script) = &graded.eval_script {
        fs::write(folder.join("eval.sh"), script)?;
    }
    if !graded.test_time.is_zero() {
        fs::write(folder.join("test_output.txt"), &graded.log)?;
    }
    let report = match (&task.origin, &graded.verdict.report) {
        (Origin::SweBench(_), report) => report.as_ref().map(|r| r.file(&task.id)).transpose()?,
        (Origin::R2e | Origin::Files | Origin::Outside(_) | Origin::Harbor(_), _) => {
            Some(serde_json::to_value(&graded.verdict)?)
        }
    };
    let path = folder.join("report.json");
    match report {
        Some(report) => fs::write(path, format!("{report:#}"))?,
        // An earlier attempt may have left one.
        None if path.exists() => fs::remove_file(path)?,
        None => {}
    }
    fs::write(folder.join("run_instance.log"), instance_log(&folder, task, graded))?;
    Ok(folder)
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
        let _ = writeln!(text, "Test output for {id} written to {folder}/test_output.txt");
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
