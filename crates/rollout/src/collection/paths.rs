//! Which paths can be part of a change at all, whatever the task's rules are.

/// Names of files and folders that never belong to a source tree: metadata of version control,
/// environments, caches, and modules that Python imports by itself.
const NAMES: &[&str] = &[
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "__pycache__",
    "site-packages",
    "dist-packages",
    "pyvenv.cfg",
    "sitecustomize",
    "sitecustomize.py",
    "usercustomize",
    "usercustomize.py",
];

/// Endings of files that Python or the linker load and that show no source.
const ENDINGS: &[&str] = &[".pth", ".pyc", ".pyo", ".pyd", ".so", ".egg-link"];

/// Whether a change of this file can count.
pub(super) fn may_be_changed(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    !path.chars().any(char::is_control)
        && !path.split('/').any(|part| NAMES.contains(&part))
        && !ENDINGS.iter().any(|ending| name.ends_with(ending))
        && !name.contains(".so.")
}

#[cfg(test)]
mod tests {
    use super::may_be_changed;

    #[test]
    fn environments_metadata_and_files_without_source_never_count() {
        for path in ["a.py", "src/git.py", "docs/site/x.md", ".gitignore", "venv.py", "a b.py"] {
            assert!(may_be_changed(path), "{path}");
        }
        for path in [
            ".git/config",
            "sub/.git/hooks/x",
            ".venv/lib/evil.pth",
            "evil.pth",
            "a/b.pyc",
            "x/__pycache__/y.py",
            "lib/site-packages/x.py",
            "sitecustomize.py",
            "a/usercustomize/__init__.py",
            "env/pyvenv.cfg",
            "fast.cpython-311.so",
            "lib.so.1",
            "a\nb.py",
            "a\u{1b}[2J.py",
        ] {
            assert!(!may_be_changed(path), "{path}");
        }
    }
}
