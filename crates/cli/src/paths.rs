//! Paths as a run records them, whatever the current folder is.

use crate::error::UsageError;
use camino::{Utf8Component, Utf8Path, Utf8PathBuf};

/// The absolute path of a file or folder, without `.` and `..`: the engine and the trainer may have another
/// working directory, and their servers compare paths with the folders that they may read from. Links keep
/// their names, because an inference server may know the folder by that name only; `..` after a link leads
/// out of the link's target, as for the operating system.
pub(crate) fn absolute(path: &Utf8Path) -> Result<Utf8PathBuf, UsageError> {
    let not_a_path = |path: String| UsageError::NotAPath { path };
    let whole = std::path::absolute(path).map_err(|_| not_a_path(path.to_string()))?;
    let whole =
        Utf8PathBuf::from_path_buf(whole).map_err(|path| not_a_path(path.display().to_string()))?;
    let mut resolved = Utf8PathBuf::new();
    for part in whole.components() {
        if part == Utf8Component::ParentDir {
            if resolved.is_symlink() {
                // What does not exist is reported where it is read.
                resolved = resolved.canonicalize_utf8().unwrap_or(resolved);
            }
            resolved.pop();
        } else {
            resolved.push(part);
        }
    }
    Ok(resolved)
}

/// The path of a file or folder below the current folder as a relative one, so that comparisons of the same
/// settings on several machines agree; any other path is returned as it is.
pub(crate) fn relative_to_current(path: &Utf8Path) -> &Utf8Path {
    let current = std::env::current_dir().ok();
    current.and_then(|current| path.strip_prefix(current).ok()).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_resolved_as_by_the_operating_system_but_keeps_links() {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8Path::from_path(guard.path()).unwrap().canonicalize_utf8().unwrap();
        fs_err::create_dir_all(root.join("a/b")).unwrap();
        fs_err::create_dir_all(root.join("c")).unwrap();
        std::os::unix::fs::symlink(root.join("a/b"), root.join("c/link")).unwrap();
        for (written, expected) in [
            ("a/./b/../b/", "a/b"),
            ("c/link", "c/link"),
            ("c/link/../b", "a/b"),
            ("missing/../a", "a"),
        ] {
            let resolved = absolute(&root.join(written)).unwrap();
            assert_eq!(resolved, root.join(expected), "{written}");
        }
        assert_eq!(absolute(Utf8Path::new("/../..")).unwrap(), "/");
        let current = Utf8PathBuf::try_from(std::env::current_dir().unwrap()).unwrap();
        let here = absolute(Utf8Path::new("./a/b")).unwrap();
        assert_eq!(here, current.join("a/b"));
        assert_eq!(relative_to_current(&here), Utf8Path::new("a/b"));
        let elsewhere = Utf8Path::new("/elsewhere/a");
        assert_eq!(relative_to_current(elsewhere), elsewhere);
        assert!(absolute(Utf8Path::new("")).is_err());
    }
}
