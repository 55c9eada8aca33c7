//! Exports tasks that carry their own files as Harbor task folders.

use super::row::HarborFile;
use crate::patch::{self, PatchError};
use crate::task::{Origin, Task};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Grades the log of a task's tests in a Harbor container, by the strict rule.
const GRADE: &str = include_str!("export/grade.py");
const TEST: &str = include_str!("export/test.sh");
const SOLVE: &str = include_str!("export/solve.sh");

/// Why a task cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The task's tree is in an image, and its tests need more than their log.
    #[error("only micro and repair tasks can be exported")]
    Family,
    /// Its solution does not apply to its files.
    #[error("its solution does not apply")]
    Solution(#[from] PatchError),
    /// Its expected results cannot be written as JSON.
    #[error("its expected results cannot be written")]
    Expected(#[from] serde_json::Error),
    /// Its image or working directory would be misread in a Dockerfile.
    #[error("the image or the working directory contains a line break")]
    Name,
}

/// The files of `task` as a Harbor task folder in format 1.4: with Harbor's oracle its reward is 1,
/// and with no change 0.
///
/// # Errors
/// If it is not a micro or repair task, or its solution does not apply.
pub fn export_task(task: &Task) -> Result<Vec<HarborFile>, ExportError> {
    if task.origin != Origin::Files {
        return Err(ExportError::Family);
    }
    if [&task.image, &task.workdir].iter().any(|text| text.contains(['\n', '\r'])) {
        return Err(ExportError::Name);
    }
    let solved = patch::apply(&task.agent_files, &task.gold_patch)?;
    let text = |path: String, content: &str, mode: u32| HarborFile {
        path,
        mode,
        content: content.as_bytes().to_vec(),
    };
    let workdir = shell_word(&task.workdir);
    let mut files = vec![
        text("task.toml".to_owned(), &config(task), 0o644),
        text("instruction.md".to_owned(), &task.problem_statement, 0o644),
        text(
            "environment/Dockerfile".to_owned(),
            &format!("FROM {}\nWORKDIR {}\nCOPY files/ ./\n", task.image, task.workdir),
            0o644,
        ),
        text("tests/grade.py".to_owned(), GRADE, 0o644),
        text("tests/expected.json".to_owned(), &serde_json::to_string(&task.expected)?, 0o644),
        text("tests/command.sh".to_owned(), &format!("{}\n", task.test_command), 0o644),
        text("tests/test.sh".to_owned(), &TEST.replace("@WORKDIR@", &workdir), 0o755),
        text("solution/solve.sh".to_owned(), &SOLVE.replace("@WORKDIR@", &workdir), 0o755),
    ];
    for file in &task.agent_files {
        files.push(text(format!("environment/files/{}", file.path), &file.content, 0o644));
    }
    // Files that the agent wrote into a test folder must not take part.
    let cleared: BTreeSet<&str> =
        task.hidden_files.iter().filter_map(|file| test_folder(&file.path)).collect();
    let is_cleared = |path: &str| {
        cleared
            .iter()
            .any(|folder| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
    };
    let is_hidden = |path: &str| task.hidden_files.iter().any(|file| file.path == path);
    let given = task.agent_files.iter();
    let given = given.filter(|file| is_cleared(&file.path) && !is_hidden(&file.path));
    files.push(text("tests/cleared.txt".to_owned(), &lines(cleared.iter().copied()), 0o644));
    for file in task.hidden_files.iter().chain(given) {
        files.push(text(format!("tests/hidden/{}", file.path), &file.content, 0o644));
    }
    for file in solved.iter().filter(|file| !task.agent_files.contains(file)) {
        files.push(text(format!("solution/files/{}", file.path), &file.content, 0o644));
    }
    let is_gone = |path: &str| solved.iter().all(|file| file.path != path);
    let removed = task.agent_files.iter().filter(|file| is_gone(&file.path));
    let removed = lines(removed.map(|file| file.path.as_str()));
    files.push(text("solution/removed.txt".to_owned(), &removed, 0o644));
    Ok(files)
}

fn config(task: &Task) -> String {
    let name: String = task
        .id
        .as_str()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
        .collect();
    let category = toml::Value::String(task.family.clone());
    format!(
        "schema_version = \"1.4\"\n\n[task]\nname = \"orchestrate/{}\"\n\n[metadata]\ncategory = \
         {category}\n\n[environment]\nnetwork_mode = \"no-network\"\n\n[agent]\ntimeout_sec = \
         3600.0\n\n[verifier]\ntimeout_sec = {}.0\n",
        name.replace("..", "__"),
        task.test_timeout.as_secs().max(1),
    )
}

fn lines<'a>(paths: impl Iterator<Item = &'a str>) -> String {
    paths.fold(String::new(), |mut list, path| {
        let _ = writeln!(list, "{path}");
        list
    })
}

/// The outermost folder of `path` whose name contains `test`.
fn test_folder(path: &str) -> Option<&str> {
    let folders = path.match_indices('/').filter_map(|(at, _)| path.get(..at));
    let is_of_tests = |folder: &&str| folder.rsplit('/').next().is_some_and(|n| n.contains("test"));
    folders.into_iter().find(is_of_tests)
}

/// `text`, quoted as one shell word.
fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
