//! Writing regular files and symlinks below the working directory. Symlinks are never followed.

use crate::protocol::{is_link, is_safe_path};
use crate::sys;
use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Why a file was not written.
#[derive(Debug)]
pub(crate) enum WriteError {
    UnsafePath(String),
    ParentIsNotFolder(PathBuf),
    TargetIsFolder(String),
    Io { path: PathBuf, source: io::Error },
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnsafePath(path) => write!(f, "`{path}` is not a plain relative path"),
            Self::ParentIsNotFolder(path) => write!(f, "{} is not a folder", path.display()),
            Self::TargetIsFolder(path) => write!(f, "{path} is a folder"),
            Self::Io { path, source } => write!(f, "{}: {source}", path.display()),
        }
    }
}

impl Error for WriteError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::UnsafePath(_) | Self::ParentIsNotFolder(_) | Self::TargetIsFolder(_) => None,
            Self::Io { source, .. } => Some(source),
        }
    }
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> WriteError + '_ {
    move |source| WriteError::Io { path: path.to_owned(), source }
}

/// Writes one piece of a file.
///
/// A symlink has one piece, its target. Missing parent folders are created; a symlink or special file at the path is replaced. A folder
/// at the path is an error, and so is a parent that is not a folder.
pub(crate) fn write(
    root: &Path,
    path: &str,
    mode: u32,
    first: bool,
    data: &[u8],
) -> Result<(), WriteError> {
    let failed = io_error(Path::new(path));
    let target = if first { prepare(root, path)? } else { resolve(root, path)? };
    if is_link(mode) {
        let points_to = Path::new(OsStr::from_bytes(data));
        return std::os::unix::fs::symlink(points_to, &target).map_err(&failed);
    }
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(sys::O_NOFOLLOW | sys::O_NONBLOCK).mode(0o600);
    if first {
        options.create(true).truncate(true);
    } else {
        options.append(true);
    }
    let mut file = options.open(&target).map_err(&failed)?;
    file.write_all(data).map_err(&failed)?;
    file.set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(&failed)
}

fn resolve(root: &Path, path: &str) -> Result<PathBuf, WriteError> {
    if is_safe_path(path) {
        Ok(root.join(path))
    } else {
        Err(WriteError::UnsafePath(path.to_owned()))
    }
}

/// Creates the missing parent folders and removes any file at the path.
fn prepare(root: &Path, path: &str) -> Result<PathBuf, WriteError> {
    let target = resolve(root, path)?;
    let mut folder = root.to_owned();
    for part in Path::new(path).parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        match std::fs::symlink_metadata(&folder) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(WriteError::ParentIsNotFolder(folder)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().mode(0o755).create(&folder).map_err(io_error(&folder))?;
            }
            Err(error) => return Err(io_error(&folder)(error)),
        }
    }
    match std::fs::symlink_metadata(&target) {
        Ok(found) if found.is_dir() => Err(WriteError::TargetIsFolder(path.to_owned())),
        // Removed rather than truncated: it may be a hard link, a fifo or a symlink.
        Ok(_) => std::fs::remove_file(&target).map_err(io_error(&target)).map(|()| target),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(target),
        Err(error) => Err(io_error(&target)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn write_joins_pieces_and_creates_folders() {
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
    fn write_creates_links_and_replaces_them_by_files() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("d/link");
        for target in ["../a", "/etc/passwd"] {
            let mode = crate::protocol::LINK_MODE | 0o777;
            write(dir.path(), "d/link", mode, true, target.as_bytes()).unwrap();
            assert_eq!(std::fs::read_link(&link).unwrap(), Path::new(target));
        }
        assert!(write(dir.path(), "d/link/x", 0o644, true, b"x").is_err());
        write(dir.path(), "d/link", 0o644, true, b"x").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
    }

    #[test]
    fn write_never_follows_symlinks_out_of_the_root() {
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
