//! What changed in the container's whole file system since it was marked, as process 1 sees it.
//!
//! Unlike the tree of [`crate::changes`], contents are not read: the time of an entry's last change is
//! compared, which no command can set, and its inode, so that an older file in its place differs as
//! well. Symlinks are never followed; they are entries themselves.

use crate::protocol::{ChangedItem, Reply, TreeEnd};
use crate::tree::MAX_DEPTH;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Entries that a marked file system may have.
const MAX_MARKED_ENTRIES: usize = 1_000_000;
/// Entries that commands may add to it.
const MAX_ADDED_ENTRIES: usize = 100_000;
/// Time after which a walk is given up.
const WALK_TIME: Duration = Duration::from_mins(1);

/// What cannot stay the same when an entry is changed or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl Identity {
    fn of(meta: &Metadata) -> Self {
        Self { inode: meta.ino(), seconds: meta.ctime(), nanoseconds: meta.ctime_nsec() }
    }
}

/// Entries of one folder that are not folders, sorted by name.
type Entries = BTreeMap<OsString, (Identity, u32, u64)>;

/// The file system at the time when it was marked.
#[derive(Debug)]
pub(crate) struct MarkedSystem {
    skip: Vec<String>,
    folders: BTreeMap<PathBuf, Vec<(OsString, Identity)>>,
    entries: usize,
}

/// A walk over all folders below `root`, within limits.
struct Walk<'a> {
    root: &'a Path,
    skip: &'a [String],
    left: usize,
    give_up_at: Instant,
}

impl Walk<'_> {
    /// Calls `visit` with the path of each folder below the root, relative to it, and its entries.
    fn run(&mut self, mut visit: impl FnMut(PathBuf, Entries)) -> Result<(), TreeEnd> {
        let mut folders = vec![(PathBuf::new(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            if depth > MAX_DEPTH || Instant::now() >= self.give_up_at {
                return Err(TreeEnd::TooLarge(shown(&folder)));
            }
            let mut entries = Entries::new();
            let read = match std::fs::read_dir(self.root.join(&folder)) {
                Ok(read) => read,
                // What this process cannot read, no command can change: both are the same user.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
                Err(error) => return Err(failed(&folder, &error)),
            };
            for entry in read {
                let entry = entry.map_err(|error| failed(&folder, &error))?;
                self.left =
                    self.left.checked_sub(1).ok_or_else(|| TreeEnd::TooLarge(shown(&folder)))?;
                let path = folder.join(entry.file_name());
                if self.skip.iter().any(|skip| Path::new(skip) == path) {
                    continue;
                }
                let meta = match std::fs::symlink_metadata(self.root.join(&path)) {
                    Ok(meta) => meta,
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
                    Err(error) => return Err(failed(&path, &error)),
                };
                if meta.is_dir() {
                    folders.push((path, depth + 1));
                } else {
                    let found = (Identity::of(&meta), meta.mode(), meta.len());
                    entries.insert(entry.file_name(), found);
                }
            }
            visit(folder, entries);
        }
        Ok(())
    }
}

/// The path as text. A path that is not UTF-8 has one fixed name, which no file of an image has.
fn shown(path: &Path) -> String {
    path.to_str().unwrap_or("name that is not UTF-8").to_owned()
}

fn failed(path: &Path, error: &io::Error) -> TreeEnd {
    match error.kind() {
        // The path is longer than system calls accept.
        io::ErrorKind::InvalidFilename => TreeEnd::TooLarge(shown(path)),
        _ => TreeEnd::Failed(format!("{}: {error}", path.display())),
    }
}

/// Records every entry below `root` but the paths in `skip`, which are relative to it, and what is
/// below those.
pub(crate) fn mark(root: &Path, skip: &[String]) -> Result<MarkedSystem, TreeEnd> {
    let mut folders = BTreeMap::new();
    let give_up_at = Instant::now() + WALK_TIME;
    let mut walk = Walk { root, skip, left: MAX_MARKED_ENTRIES, give_up_at };
    walk.run(|folder, entries| {
        if !entries.is_empty() {
            let of = entries.into_iter().map(|(name, (identity, ..))| (name, identity));
            folders.insert(folder, of.collect());
        }
    })?;
    let entries = MAX_MARKED_ENTRIES - walk.left;
    Ok(MarkedSystem { skip: skip.to_owned(), folders, entries })
}

impl MarkedSystem {
    /// Sends every new, changed or removed entry with its path relative to `root`, then the end. The
    /// mode has the bits of the file's type. Names that are not UTF-8 are not told apart.
    pub(crate) fn send_changes(
        mut self,
        root: &Path,
        mut emit: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let left = self.entries + MAX_ADDED_ENTRIES;
        let give_up_at = Instant::now() + WALK_TIME;
        let mut changed = Vec::new();
        let skip = std::mem::take(&mut self.skip);
        let mut walk = Walk { root, skip: &skip, left, give_up_at };
        let walked = walk.run(|folder, mut entries| {
            for (name, identity) in self.folders.remove(&folder).unwrap_or_default() {
                let path = shown(&folder.join(&name));
                match entries.remove(&name) {
                    None => changed.push(ChangedItem::Removed { path }),
                    Some((found, ..)) if found == identity => {}
                    Some((_, mode, size)) => changed.push(written(path, mode, size, false)),
                }
            }
            for (name, (_, mode, size)) in entries {
                changed.push(written(shown(&folder.join(name)), mode, size, true));
            }
        });
        if let Err(end) = walked {
            return emit(Reply::TreeEnd(end));
        }
        // What is left was in folders that do not exist any more.
        for (folder, entries) in self.folders {
            let gone = entries.into_iter().map(|(name, _)| shown(&folder.join(name)));
            changed.extend(gone.map(|path| ChangedItem::Removed { path }));
        }
        let files = changed.len() as u64;
        for item in changed {
            emit(Reply::TreeItem(item))?;
        }
        emit(Reply::TreeEnd(TreeEnd::Complete { files }))
    }
}

fn written(path: String, mode: u32, size: u64, is_new: bool) -> ChangedItem {
    ChangedItem::Written { path, mode, size, is_new, is_binary: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn changes(system: MarkedSystem, root: &Path) -> (Vec<String>, TreeEnd) {
        let (mut items, mut end) = (Vec::new(), None);
        system
            .send_changes(root, |reply| {
                match reply {
                    Reply::TreeItem(ChangedItem::Removed { path }) => {
                        items.push(format!("-{path}"));
                    }
                    Reply::TreeItem(ChangedItem::Written { path, is_new, .. }) => {
                        items.push(format!("{}{path}", if is_new { '+' } else { '~' }));
                    }
                    Reply::TreeEnd(e) => end = Some(e),
                    other => panic!("not expected: {other:?}"),
                }
                Ok(())
            })
            .unwrap();
        items.sort();
        (items, end.unwrap())
    }

    /// Returns when the clock of change times has advanced.
    fn later() {
        let probe = || {
            let file = tempfile::NamedTempFile::new().unwrap();
            let meta = file.as_file().metadata().unwrap();
            (meta.ctime(), meta.ctime_nsec())
        };
        let first = probe();
        while probe() == first {
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_change_is_listed_whatever_times_it_sets() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for name in ["bin/python", "bin/same", "lib/os.py", "lib/gone.py", "old/a", "tmp/x"] {
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::write(root.join(name), "one").unwrap();
        }
        symlink("python", root.join("bin/python3")).unwrap();
        later();
        let skip = ["tmp".to_owned()];
        let mark_now = || mark(root, &skip).unwrap();
        assert_eq!(changes(mark_now(), root), (vec![], TreeEnd::Complete { files: 0 }));

        let system = mark_now();
        let place = root.join("lib/os.py");
        let time = fs::metadata(&place).unwrap().modified().unwrap();
        fs::write(&place, "two").unwrap();
        fs::File::options().write(true).open(&place).unwrap().set_modified(time).unwrap();
        fs::set_permissions(root.join("bin/python"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::remove_file(root.join("bin/python3")).unwrap();
        symlink("same", root.join("bin/python3")).unwrap();
        fs::remove_file(root.join("lib/gone.py")).unwrap();
        fs::rename(root.join("old"), root.join("new")).unwrap();
        fs::write(root.join("tmp/y"), "x").unwrap();
        fs::write(root.join("a\nb"), "x").unwrap();
        let expected = [
            "+a\nb",
            "+new/a",
            "-lib/gone.py",
            "-old/a",
            "~bin/python",
            "~bin/python3",
            "~lib/os.py",
        ];
        let (found, end) = changes(system, root);
        assert_eq!(found, expected);
        assert_eq!(end, TreeEnd::Complete { files: 7 });

        // A folder of older files in place of another one: all names are the same.
        fs::create_dir(root.join("json")).unwrap();
        fs::write(root.join("json/a"), "three").unwrap();
        later();
        let system = mark_now();
        fs::rename(root.join("json"), root.join("away")).unwrap();
        fs::rename(root.join("new"), root.join("json")).unwrap();
        assert_eq!(changes(system, root).0, ["+away/a", "-new/a", "~json/a"]);
    }

    #[test]
    fn more_entries_than_a_system_may_have_are_too_large() {
        let dir = tempfile::tempdir().unwrap();
        let mut system = mark(dir.path(), &[]).unwrap();
        system.entries = 1_usize.wrapping_sub(MAX_ADDED_ENTRIES);
        for name in ["a", "b"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        let mut walk = Walk {
            root: dir.path(),
            skip: &[],
            left: system.entries.wrapping_add(MAX_ADDED_ENTRIES),
            give_up_at: Instant::now() + WALK_TIME,
        };
        assert!(matches!(walk.run(|_, _| ()), Err(TreeEnd::TooLarge(_))));
    }
}
