//! Writing regular files below the working directory. Symlinks are never followed.

use crate::protocol::is_safe_path;
use crate::sys;
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Writes one piece. Missing folders are made; a symlink or special file at the path is replaced;
/// a folder there, or a symlink on the way to it, is an error.
pub(crate) fn write(
    root: &Path,
    path: &str,
    mode: u32,
    first: bool,
    data: &[u8],
) -> Result<(), String> {
    let text = |error: &io::Error| format!("{path}: {error}");
    let target = if first { prepare(root, path)? } else { checked(root, path)? };
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(sys::O_NOFOLLOW | sys::O_NONBLOCK).mode(0o600);
    if first {
        options.create(true).truncate(true);
    } else {
        options.append(true);
    }
    let mut file = options.open(&target).map_err(|e| text(&e))?;
    file.write_all(data).map_err(|e| text(&e))?;
    file.set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(|e| text(&e))
}

fn checked(root: &Path, path: &str) -> Result<PathBuf, String> {
    if is_safe_path(path) { Ok(root.join(path)) } else { Err(format!("`{path}` is no safe path")) }
}

fn prepare(root: &Path, path: &str) -> Result<PathBuf, String> {
    let target = checked(root, path)?;
    let text = |at: &Path, error: &io::Error| format!("{}: {error}", at.display());
    let mut folder = root.to_owned();
    for part in Path::new(path).parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        match std::fs::symlink_metadata(&folder) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(format!("{} is in the way and no folder", folder.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().mode(0o755).create(&folder).map_err(|e| text(&folder, &e))?;
            }
            Err(error) => return Err(text(&folder, &error)),
        }
    }
    match std::fs::symlink_metadata(&target) {
        Ok(found) if found.is_dir() => Err(format!("{path} is a folder")),
        // Removed rather than truncated: it may be a hard link, a fifo or a symlink.
        Ok(_) => std::fs::remove_file(&target).map_err(|e| text(&target, &e)).map(|()| target),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(target),
        Err(error) => Err(text(&target, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn pieces_are_joined_and_folders_made() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a/b/c.py", 0o755, true, b"one ").unwrap();
        write(dir.path(), "a/b/c.py", 0o755, false, b"two").unwrap();
        let file = dir.path().join("a/b/c.py");
        assert_eq!(std::fs::read(&file).unwrap(), b"one two");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o755);
        write(dir.path(), "a/b/c.py", 0o644, true, b"x").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"x");
    }

    #[test]
    fn symlinks_do_not_lead_outside() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink(outside.path(), dir.path().join("link")).unwrap();
        assert!(write(dir.path(), "link/x", 0o644, true, b"x").is_err());
        let target = outside.path().join("target");
        std::fs::write(&target, "old").unwrap();
        symlink(&target, dir.path().join("file")).unwrap();
        write(dir.path(), "file", 0o644, true, b"new").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        assert!(write(dir.path(), "../x", 0o644, true, b"x").is_err());
        assert!(write(dir.path(), "/etc/x", 0o644, true, b"x").is_err());
    }
}
