//! A repository on disk as the files of a task.
//!
//! The invariant: what is read is what stands in the folder: no line end is changed, and whatever
//! is left out is counted.

use crate::task::TaskFile;
use camino::{Utf8Path, Utf8PathBuf};
use std::io;

/// Bytes that every row of a repository carries; above it a set of tasks gets unwieldy.
const TREE_BYTES: usize = 16 << 20;

/// Folders that tools make.
const TOOLS: &[&str] = &[
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

/// A repository that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// Reading failed.
    #[error("cannot read the repository {0}")]
    Io(Utf8PathBuf, #[source] io::Error),
    /// Too much of it.
    #[error(
        "{0} holds more than {TREE_BYTES} bytes of text, which every row would carry; remove what the tests do not need"
    )]
    TooLarge(Utf8PathBuf),
    /// No Python in it.
    #[error("{0} holds no Python file; name the folder of a Python repository")]
    NoPython(Utf8PathBuf),
}

/// The text files of a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Repository {
    /// Name, from the folder's.
    pub name: String,
    /// Its files, by path.
    pub files: Vec<TaskFile>,
    /// Paths that are left out: links and files that are not UTF-8.
    pub left_out: Vec<String>,
}

impl Repository {
    /// Reads the folder `root`.
    ///
    /// # Errors
    /// If it cannot be read, is too large, or holds no Python.
    pub fn read(root: &Utf8Path) -> Result<Self, TreeError> {
        let io = |error| TreeError::Io(root.to_owned(), error);
        let whole = root.canonicalize_utf8().map_err(io)?;
        let mut repository =
            Self { name: short_name(whole.file_name().unwrap_or("repository")), ..Self::default() };
        let mut bytes = 0;
        let mut folders = vec![whole.clone()];
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir_utf8().map_err(io)? {
                let entry = entry.map_err(io)?;
                let (path, kind) = (entry.path(), entry.file_type().map_err(io)?);
                let name = entry.file_name();
                let inside = path.strip_prefix(&whole).unwrap_or(path).to_string();
                if kind.is_dir() {
                    let is_tool = TOOLS.contains(&name) || name.ends_with("_cache");
                    if !is_tool {
                        folders.push(path.to_owned());
                    }
                } else if kind.is_file() && path.extension() != Some("pyc") {
                    match String::from_utf8(fs_err::read(path).map_err(io)?) {
                        Ok(content) => {
                            bytes += content.len();
                            repository.files.push(TaskFile { path: inside, content });
                        }
                        Err(_) => repository.left_out.push(inside),
                    }
                } else if !kind.is_file() {
                    repository.left_out.push(inside);
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

/// Whether Python would import it: extensions count as they are written.
fn is_python(path: &str) -> bool {
    Utf8Path::new(path).extension() == Some("py")
}

/// `python-slugify` of `python-slugify-8.0.4`: a version is not part of a name.
fn short_name(folder: &str) -> String {
    match folder.rsplit_once('-') {
        Some((name, version)) if version.starts_with(|c: char| c.is_ascii_digit()) => name,
        Some(_) | None => folder,
    }
    .to_lowercase()
}

/// Whether a file belongs to the tests: by name or folder.
pub fn is_test(path: &str) -> bool {
    let is_folder = |name: &str| matches!(name, "test" | "tests" | "Test" | "Tests" | "testing");
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    folders.split('/').any(is_folder)
        || name == "conftest.py"
        || name.starts_with("test_")
        || name.ends_with("_test.py")
}

/// Whether pytest may read its settings here.
pub(super) fn is_pytest_config(path: &str) -> bool {
    matches!(path, "pytest.ini" | ".pytest.ini" | "pyproject.toml" | "tox.ini" | "setup.cfg")
}

/// Whether faults may be put into this file: Python that is not a test, nor for installing, documents
/// or examples.
pub fn is_source(path: &str) -> bool {
    let aside = |name: &str| {
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
    let named =
        matches!(name, "setup.py" | "noxfile.py" | "fabfile.py" | "tasks.py" | "versioneer.py");
    let is_version = name.trim_start_matches('_').starts_with("version");
    is_python(name)
        && !is_test(path)
        && !named
        && !is_version
        && !folders.split('/').any(|folder| aside(folder) || folder.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_read_without_what_tools_made() {
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
    fn sources_are_neither_tests_nor_aside() {
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
