//! Reads a repository from disk as the files of a task.
//!
//! The invariant: contents are read byte for byte, including line ends, and files that cannot be
//! included are listed in [`Repository::left_out`]. Folders and caches of tools are ignored.

use crate::task_file::TaskFile;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::{RelativePath, TaskId};
use std::io;

/// Maximum number of bytes of text in a repository. Every row contains all of it.
const TREE_BYTES: usize = 16 << 20;

/// Maximum number of characters of a repository's name, which leaves space for the rest of an id.
const NAME_CHARS: usize = 100;

/// Names of folders that are ignored: those of tools and build outputs, and that of hidden tests.
const IGNORED_FOLDERS: &[&str] = &[
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    ".eggs",
    ".idea",
    ".vscode",
    "__pycache__",
    "node_modules",
    "build",
    "dist",
    "r2e_tests",
];

/// A repository that tasks cannot be made from.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// Reading failed.
    #[error("cannot read the repository {0}")]
    Io(Utf8PathBuf, #[source] io::Error),
    /// The text files are too large in total.
    #[error(
        "{0} contains more than {TREE_BYTES} bytes of text, which every row would contain; remove what the tests do not need"
    )]
    TooLarge(Utf8PathBuf),
    /// The folder has no Python file.
    #[error("{0} contains no Python file; expected the folder of a Python repository")]
    NoPython(Utf8PathBuf),
}

/// The text files of a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Repository {
    /// Name of the folder in lower case, without a version, in the characters that an id may have.
    pub name: String,
    /// The text files, sorted by path.
    pub files: Vec<TaskFile>,
    /// Paths that are left out, sorted: links, files that are not UTF-8, and files whose names no row
    /// may contain ([`RelativePath`]).
    pub left_out: Vec<String>,
}

impl Repository {
    /// Reads the folder `root`.
    ///
    /// # Errors
    /// If it cannot be read, is too large, or contains no Python file.
    pub fn read(root: &Utf8Path) -> Result<Self, TreeError> {
        let io = |error| TreeError::Io(root.to_owned(), error);
        let base = root.canonicalize_utf8().map_err(io)?;
        let mut repository =
            Self { name: short_name(base.file_name().unwrap_or("repository")), ..Self::default() };
        let mut bytes = 0;
        let mut folders = vec![base.clone()];
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir_utf8().map_err(io)? {
                let entry = entry.map_err(io)?;
                let (path, kind) = (entry.path(), entry.file_type().map_err(io)?);
                let name = entry.file_name();
                let relative = path.strip_prefix(&base).unwrap_or(path).to_string();
                if kind.is_dir() {
                    let is_ignored = IGNORED_FOLDERS.contains(&name) || name.ends_with("_cache");
                    if !is_ignored {
                        folders.push(path.to_owned());
                    }
                } else if kind.is_file() && RelativePath::new(relative.as_str()).is_err() {
                    repository.left_out.push(relative);
                } else if kind.is_file() && path.extension() != Some("pyc") {
                    match String::from_utf8(fs_err::read(path).map_err(io)?) {
                        Ok(content) => {
                            bytes += content.len();
                            repository.files.push(TaskFile { path: relative, content });
                        }
                        Err(_) => repository.left_out.push(relative),
                    }
                } else if !kind.is_file() {
                    repository.left_out.push(relative);
                }
                if bytes > TREE_BYTES {
                    return Err(TreeError::TooLarge(root.to_owned()));
                }
            }
        }
        repository.files.sort_by(|a, b| a.path.cmp(&b.path));
        repository.left_out.sort_unstable();
        if repository.files.iter().any(|file| is_python(&file.path)) {
            Ok(repository)
        } else {
            Err(TreeError::NoPython(root.to_owned()))
        }
    }
}

/// Whether Python can import the file. Extensions are case-sensitive.
fn is_python(path: &str) -> bool {
    Utf8Path::new(path).extension() == Some("py")
}

/// The folder's name in lower case and without a version: `python-slugify` for
/// `python-slugify-8.0.4`. It becomes the first part of ids.
fn short_name(folder: &str) -> String {
    let name = match folder.rsplit_once('-') {
        Some((name, version)) if version.starts_with(|c: char| c.is_ascii_digit()) => name,
        Some(_) | None => folder,
    };
    TaskId::made_of(&name.to_lowercase()).chars().take(NAME_CHARS).collect()
}

/// Whether a file belongs to the tests, by its name or folder.
pub fn is_test(path: &str) -> bool {
    let is_folder = |name: &str| matches!(name, "test" | "tests" | "Test" | "Tests" | "testing");
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    folders.split('/').any(is_folder)
        || name == "conftest.py"
        || name.starts_with("test_")
        || name.ends_with("_test.py")
}

/// Whether pytest may read its settings from this file.
pub(super) fn is_pytest_config(path: &str) -> bool {
    matches!(path, "pytest.ini" | ".pytest.ini" | "pyproject.toml" | "tox.ini" | "setup.cfg")
}

/// Whether faults may be inserted into this file: a Python file that does not belong to the tests,
/// installation, documentation, examples, tools or vendored code.
pub fn is_source(path: &str) -> bool {
    let is_auxiliary = |name: &str| {
        matches!(
            name,
            "doc"
                | "docs"
                | "examples"
                | "example"
                | "benchmark"
                | "benchmarks"
                | "bench"
                | "scripts"
                | "tools"
                | "_vendor"
                | "vendor"
        )
    };
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    let is_script =
        matches!(name, "setup.py" | "noxfile.py" | "fabfile.py" | "tasks.py" | "versioneer.py");
    let is_version = name.trim_start_matches('_').starts_with("version");
    is_python(name)
        && !is_test(path)
        && !is_script
        && !is_version
        && !folders.split('/').any(|folder| is_auxiliary(folder) || folder.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_caches_of_tools_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let root = Utf8Path::from_path(folder.path()).unwrap().join("Small-Lib-1.2.0");
        for (path, content) in [
            ("small/a.py", "x = 1\r\n".as_bytes()),
            ("small/__pycache__/a.pyc", b"x"),
            (".git/config", b"x"),
            ("logo.png", b"\x89PNG\xff"),
            ("tests/test_a.py", b"def test(): pass\n"),
        ] {
            let path = root.join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, content).unwrap();
        }
        let repository = Repository::read(&root).unwrap();
        assert_eq!(repository.name, "small-lib");
        let paths: Vec<&str> = repository.files.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(paths, ["small/a.py", "tests/test_a.py"]);
        assert_eq!(repository.files[0].content, "x = 1\r\n");
        assert_eq!(repository.left_out, ["logo.png"]);
    }

    #[test]
    fn a_folder_without_python_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = Utf8Path::from_path(folder.path()).unwrap();
        assert!(matches!(Repository::read(root), Err(TreeError::NoPython(_))));
        let absent = root.join("absent");
        assert!(matches!(Repository::read(&absent), Err(TreeError::Io(..))));
    }

    #[test]
    fn sources_are_neither_tests_nor_auxiliary_files() {
        for path in ["a.py", "src/pkg/core.py", "pkg/contest.py"] {
            assert!(is_source(path), "{path}");
        }
        for path in [
            "setup.py",
            "tests/helper.py",
            "test_a.py",
            "pkg/conftest.py",
            "docs/conf.py",
            "pkg/_version.py",
            "pkg/data.txt",
            ".github/x.py",
        ] {
            assert!(!is_source(path), "{path}");
        }
    }
}
