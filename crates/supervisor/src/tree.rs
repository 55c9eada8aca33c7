//! Reading and wiping the folders that commands wrote to.
//!
//! No process of the sandbox is alive at that time, so nothing changes between a check and its use.
//! Symlinks are still never followed.

use crate::protocol::{CHUNK, Reply, TreeEnd, is_safe_path};
use crate::sys;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Deepest nesting of folders; a deeper tree is refused.
pub(crate) const MAX_DEPTH: usize = 128;
/// Largest number of entries in all folders together. Listing more could take memory that the
/// container does not have.
const MAX_ENTRIES: usize = 50_000;
/// Bytes counted per file in addition to its content, so that empty files count, too.
const FILE_COST: u64 = 64;

struct FoundFile {
    path: String,
    mode: u32,
    size: u64,
}

/// What is left of the limits for the rest of the tree.
struct Budget {
    bytes: u64,
    entries: usize,
}

/// Sends all regular files below `root`, sorted by path, then a [`Reply::TreeEnd`].
///
/// The result is an error only if sending fails.
pub(crate) fn send(
    root: &Path,
    cap: u64,
    mut emit: impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<()> {
    let mut found = Vec::new();
    let mut budget = Budget { bytes: cap, entries: MAX_ENTRIES };
    // A command may have replaced the folder. A symlink in its place leads elsewhere.
    let is_folder = std::fs::symlink_metadata(root).is_ok_and(|meta| meta.is_dir());
    let listed = if is_folder { list(root, "", 0, &mut budget, &mut found) } else { Ok(()) };
    let end = match listed {
        Ok(()) => {
            found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
            let mut end = TreeEnd::Complete { files: found.len() as u64 };
            for file in &found {
                if let Err(error) = send_file(root, file, &mut emit)? {
                    end = TreeEnd::Failed(format!("{}: {error}", file.path));
                    break;
                }
            }
            end
        }
        Err(end) => end,
    };
    emit(Reply::TreeEnd(end))
}

fn list(
    root: &Path,
    prefix: &str,
    depth: usize,
    budget: &mut Budget,
    found: &mut Vec<FoundFile>,
) -> Result<(), TreeEnd> {
    let folder = root.join(prefix);
    let failed = |error: io::Error| match error.kind() {
        // The path is longer than system calls accept.
        io::ErrorKind::InvalidFilename => TreeEnd::TooLarge(prefix.to_owned()),
        _ => TreeEnd::Failed(format!("{}: {error}", folder.display())),
    };
    if depth > MAX_DEPTH {
        return Err(TreeEnd::TooLarge(prefix.to_owned()));
    }
    let most = budget.entries.saturating_add(1);
    let names = || std::fs::read_dir(&folder)?.take(most).collect::<io::Result<Vec<_>>>();
    let entries = with_access(&folder, 0o500, names).map_err(failed)?;
    budget.entries = budget
        .entries
        .checked_sub(entries.len())
        .ok_or_else(|| TreeEnd::TooLarge(format!("{prefix}/")))?;
    for entry in entries {
        // A name that is not UTF-8 cannot be sent to the host. It is skipped, like special files.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
        let meta = with_access(&folder, 0o500, || std::fs::symlink_metadata(root.join(&path)))
            .map_err(failed)?;
        if meta.is_dir() {
            if name != "__pycache__" {
                list(root, &path, depth + 1, budget, found)?;
            }
        } else if meta.is_file() && is_safe_path(&path) {
            let cost = meta.len() + path.len() as u64 + FILE_COST;
            let left = budget.bytes.checked_sub(cost);
            budget.bytes = left.ok_or_else(|| TreeEnd::TooLarge(path.clone()))?;
            found.push(FoundFile {
                path,
                mode: meta.permissions().mode() & 0o7777,
                size: meta.len(),
            });
        }
    }
    Ok(())
}

fn send_file(
    root: &Path,
    file: &FoundFile,
    emit: &mut impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<io::Result<()>> {
    let path = root.join(&file.path);
    let parent = path.parent().unwrap_or(root).to_owned();
    let open = || {
        OpenOptions::new().read(true).custom_flags(sys::O_NOFOLLOW | sys::O_NONBLOCK).open(&path)
    };
    let handle = match with_access(&parent, 0o500, || with_access(&path, 0o400, open)) {
        Ok(handle) => handle,
        Err(error) => return Ok(Err(error)),
    };
    emit(Reply::TreeFile { path: file.path.clone(), mode: file.mode, size: file.size })?;
    send_content(handle, file.size, emit)
}

pub(crate) fn send_content(
    handle: File,
    size: u64,
    emit: &mut impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<io::Result<()>> {
    let mut handle = handle.take(size);
    let mut sent = 0;
    while sent < size {
        let mut data = Vec::with_capacity(CHUNK);
        match handle.by_ref().take(CHUNK as u64).read_to_end(&mut data) {
            Ok(0) => return Ok(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => sent += count as u64,
            Err(error) => return Ok(Err(error)),
        }
        emit(Reply::TreeData { data })?;
    }
    Ok(Ok(()))
}

/// Performs `action`. If permission is denied, adds `bits` to the mode of `path` while the action is
/// repeated: root without capabilities is bound by the permissions of its own files.
pub(crate) fn with_access<T>(
    path: &Path,
    bits: u32,
    action: impl Fn() -> io::Result<T>,
) -> io::Result<T> {
    match action() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let meta: Metadata = std::fs::symlink_metadata(path)?;
            if meta.is_symlink() {
                return Err(error);
            }
            let mode = meta.permissions().mode();
            std::fs::set_permissions(path, Permissions::from_mode(mode | bits))?;
            let result = action();
            std::fs::set_permissions(path, Permissions::from_mode(mode))?;
            result
        }
        result => result,
    }
}

/// Removes everything below `folder`, but not the folder itself.
pub(crate) fn wipe(folder: &Path) -> io::Result<()> {
    wipe_at(folder, 0)
}

fn wipe_at(folder: &Path, depth: usize) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other(format!("{} is nested too deeply", folder.display())));
    }
    for entry in std::fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        remove(&path, depth + 1)?;
    }
    Ok(())
}

fn remove(path: &Path, depth: usize) -> io::Result<()> {
    if std::fs::symlink_metadata(path)?.is_dir() {
        std::fs::set_permissions(path, Permissions::from_mode(0o700))?;
        wipe_at(path, depth)?;
        std::fs::remove_dir(path)
    } else {
        std::fs::remove_file(path)
    }
    .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
}

/// Removes an entry and everything below it.
pub(crate) fn remove_entry(path: &Path) -> io::Result<()> {
    remove(path, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn read(root: &Path, cap: u64) -> (Vec<(String, Vec<u8>)>, TreeEnd) {
        let (mut files, mut end) = (Vec::<(String, Vec<u8>)>::new(), None);
        send(root, cap, |reply| {
            match reply {
                Reply::TreeFile { path, .. } => files.push((path, Vec::new())),
                Reply::TreeData { data } => files.last_mut().unwrap().1.extend(data),
                Reply::TreeEnd(e) => end = Some(e),
                Reply::Hello { .. }
                | Reply::DiskFull(_)
                | Reply::DiskUse(_)
                | Reply::Damaged(_)
                | Reply::Connection { .. }
                | Reply::Output { .. }
                | Reply::Done(_)
                | Reply::TreeItem(_)
                | Reply::Ack(_) => {
                    panic!("not a reply to ReadTree")
                }
            }
            Ok(())
        })
        .unwrap();
        (files, end.unwrap())
    }

    #[test]
    fn send_reads_regular_files_only_and_sorts_them() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir_all(root.join("b/__pycache__")).unwrap();
        std::fs::write(root.join("b/__pycache__/x.pyc"), "no").unwrap();
        std::fs::write(root.join("b/one"), "1").unwrap();
        std::fs::write(root.join("a"), vec![5; CHUNK + 3]).unwrap();
        std::fs::write(root.join("empty"), "").unwrap();
        symlink("/etc/passwd", root.join("link")).unwrap();
        let (files, end) = read(root, 1 << 30);
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b/one", "empty"]);
        assert_eq!(files[0].1, vec![5; CHUNK + 3]);
        assert_eq!(end, TreeEnd::Complete { files: 3 });
    }

    #[test]
    fn send_refuses_a_huge_sparse_file_without_reading_it() {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("big")).unwrap().set_len(3 << 30).unwrap();
        let (files, end) = read(dir.path(), 1 << 20);
        assert_eq!((files.len(), end), (0, TreeEnd::TooLarge("big".into())));
    }

    #[test]
    fn entry_limit_covers_all_folders_together() {
        let dir = tempfile::tempdir().unwrap();
        let mut found = Vec::new();
        for name in ["a", "b", "c"] {
            std::fs::create_dir_all(dir.path().join(name).join("deep")).unwrap();
        }
        let mut within = |entries| {
            let mut budget = Budget { bytes: 1 << 20, entries };
            list(dir.path(), "", 0, &mut budget, &mut found)
        };
        assert_eq!(within(6), Ok(()));
        assert!(matches!(within(5), Err(TreeEnd::TooLarge(_))));
        assert!(matches!(within(2), Err(TreeEnd::TooLarge(_))));
    }

    #[test]
    fn missing_or_symlinked_root_reads_as_empty() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let root = dir.path().join("work");
        assert_eq!(read(&root, 99).1, TreeEnd::Complete { files: 0 });
        symlink(outside.path(), &root).unwrap();
        assert_eq!(read(&root, 99).1, TreeEnd::Complete { files: 0 });
    }

    #[test]
    fn wipe_does_not_follow_symlinks() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("keep"), "x").unwrap();
        symlink(outside.path(), dir.path().join("link")).unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::set_permissions(dir.path().join("a"), Permissions::from_mode(0o000)).unwrap();
        wipe(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(outside.path().join("keep").exists());
    }
}
