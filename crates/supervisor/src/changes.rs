//! What changed below the working directory since it was marked, as process 1 itself sees it.
//!
//! The mark is kept in this process's memory, which no command can read or write. No program of the
//! container takes part, so nothing that a command replaces or leaves behind changes the result. No
//! other process is alive when a tree is walked; symlinks are never followed. A symlink is a file of its own
//! kind whose content is its target.

use crate::protocol::{CHUNK, ChangedItem, LINK_MODE, Reply, TreeEnd, is_link, is_safe_path};
use crate::sys;
use crate::tree::{MAX_DEPTH, send_content, with_access};
use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Entries of all folders together that a marked tree may have.
const MAX_MARKED_ENTRIES: usize = 400_000;
/// Entries that commands may add to a marked tree.
const MAX_ADDED_ENTRIES: usize = 100_000;
/// Bytes of paths that a marked tree may have; commands may add a fourth of it.
const MAX_PATH_BYTES: usize = 64 << 20;
/// Time for one walk. Content that is not read by then is compared by its metadata alone.
const HASH_TIME: Duration = Duration::from_secs(30);
/// Time after which a walk is given up.
const WALK_TIME: Duration = Duration::from_secs(90);
/// Larger files are compared by their metadata alone.
const MAX_HASHED_FILE: u64 = 64 << 20;
/// Bytes at the start of a file in which a NUL makes it a binary file, as in git.
const SNIFFED_BYTES: u64 = 8000;
/// A new folder with one of these files is a virtual environment or a cache of a tool, and never part
/// of a change.
const SKIP_MARKERS: [&str; 2] = ["pyvenv.cfg", "CACHEDIR.TAG"];

/// The files of a tree at the time when it was marked.
#[derive(Debug)]
pub(crate) struct MarkedTree {
    skip: Vec<String>,
    files: BTreeMap<Box<str>, Marked>,
    folders: std::collections::BTreeSet<Box<str>>,
    entries: usize,
}

#[derive(Debug)]
struct Marked {
    stat: Stat,
    /// `None` if the content was not read.
    digest: Option<u64>,
}

/// What changes whenever a file's content or mode is changed. The change time cannot be set.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stat {
    mode: u32,
    size: u64,
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stat {
    fn of(meta: &Metadata) -> Self {
        Self {
            mode: mode_of(meta),
            size: meta.len(),
            inode: meta.ino(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    fn is_executable(&self) -> bool {
        self.mode & 0o100 != 0
    }
}

/// Permission bits, with [`LINK_MODE`] for a symlink.
fn mode_of(meta: &Metadata) -> u32 {
    let kind = if meta.is_symlink() { LINK_MODE } else { 0 };
    kind | (meta.mode() & 0o7777)
}

/// A walk over the regular files and symlinks of a tree, within limits.
struct Walk<'a> {
    root: &'a Path,
    skip: &'a [String],
    entries: usize,
    path_bytes: usize,
    give_up_at: Instant,
    /// Folders that existed when the tree was marked; `None` while it is marked.
    known: Option<&'a std::collections::BTreeSet<Box<str>>>,
    files: Vec<(String, Stat)>,
    folders: Vec<String>,
}

impl Walk<'_> {
    fn run(&mut self) -> Result<(), TreeEnd> {
        // A command may have replaced the folder. A symlink in its place leads elsewhere.
        let is_folder = std::fs::symlink_metadata(self.root).is_ok_and(|meta| meta.is_dir());
        if is_folder { self.folder("", 0) } else { Ok(()) }
    }

    fn folder(&mut self, prefix: &str, depth: usize) -> Result<(), TreeEnd> {
        let folder = self.root.join(prefix);
        if depth > MAX_DEPTH || Instant::now() >= self.give_up_at {
            return Err(TreeEnd::TooLarge(format!("{prefix}/")));
        }
        make_accessible(&folder);
        let most = self.entries.saturating_add(1);
        let names = || std::fs::read_dir(&folder)?.take(most).collect::<io::Result<Vec<_>>>();
        let entries = match names() {
            Ok(entries) => entries,
            // What this process cannot read is not part of the tree.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(error) => return Err(walk_error(prefix, &error)),
        };
        self.entries = self
            .entries
            .checked_sub(entries.len())
            .ok_or_else(|| TreeEnd::TooLarge(format!("{prefix}/")))?;
        let is_new = self.known.is_some_and(|known| !known.contains(prefix)) && !prefix.is_empty();
        if is_new
            && entries
                .iter()
                .any(|entry| SKIP_MARKERS.iter().any(|marker| entry.file_name() == *marker))
        {
            return Ok(());
        }
        for entry in entries {
            // A name that is not UTF-8 cannot be sent to the host. It is skipped, like special files.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            if self.is_skipped(&name, &path) {
                continue;
            }
            let place = self.root.join(&path);
            let meta =
                std::fs::symlink_metadata(&place).map_err(|error| walk_error(&path, &error))?;
            self.path_bytes = self
                .path_bytes
                .checked_sub(path.len())
                .ok_or_else(|| TreeEnd::TooLarge(format!("{prefix}/")))?;
            if meta.is_dir() {
                self.folder(&path, depth + 1)?;
                self.folders.push(path);
            } else if (meta.is_file() || meta.is_symlink()) && is_safe_path(&path) {
                self.files.push((path, Stat::of(&meta)));
            }
        }
        Ok(())
    }

    /// Whether the host asked to leave this out: a name at any depth, or a path that starts with `/`.
    fn is_skipped(&self, name: &str, path: &str) -> bool {
        self.skip.iter().any(|skip| match skip.strip_prefix('/') {
            Some(anchored) => anchored == path,
            None => skip == name,
        })
    }
}

fn walk_error(path: &str, error: &io::Error) -> TreeEnd {
    match error.kind() {
        // The path is longer than system calls accept.
        io::ErrorKind::InvalidFilename => TreeEnd::TooLarge(path.to_owned()),
        _ => TreeEnd::Failed(format!("{path}: {error}")),
    }
}

/// Lets the owner list and enter a folder, for as long as it exists: root without capabilities is
/// bound by the permissions of its own folders, and everything below needs them. Failures show when
/// the folder is used.
pub(crate) fn make_accessible(folder: &Path) {
    if let Ok(meta) = std::fs::symlink_metadata(folder)
        && meta.is_dir()
        && meta.mode() & 0o500 != 0o500
    {
        let _ = std::fs::set_permissions(folder, Permissions::from_mode(meta.mode() | 0o500));
    }
}

/// Records the regular files and symlinks below `root`. Entries whose name is in `skip`, or whose path is in it
/// after a `/`, are left out here and later.
pub(crate) fn mark(root: &Path, skip: &[String]) -> Result<MarkedTree, TreeEnd> {
    let now = Instant::now();
    let mut walk = Walk {
        root,
        skip,
        entries: MAX_MARKED_ENTRIES,
        path_bytes: MAX_PATH_BYTES,
        give_up_at: now + WALK_TIME,
        known: None,
        files: Vec::new(),
        folders: Vec::new(),
    };
    walk.run()?;
    let (files, folders) = (walk.files, walk.folders);
    let entries = MAX_MARKED_ENTRIES - walk.entries;
    let mut buffer = vec![0; 256 * 1024];
    let marked = files.into_iter().map(|(path, stat)| {
        let is_hashed = stat.size <= MAX_HASHED_FILE && now.elapsed() < HASH_TIME;
        let digest = is_hashed.then(|| digest(&root.join(&path), stat.size, &mut buffer));
        (path.into_boxed_str(), Marked { stat, digest: digest.flatten() })
    });
    Ok(MarkedTree {
        files: marked.collect(),
        folders: folders.into_iter().map(String::into_boxed_str).collect(),
        skip: skip.to_owned(),
        entries,
    })
}

impl MarkedTree {
    /// Sends each marked file with the name `name` and at most `cap` bytes of content together, then
    /// the end.
    pub(crate) fn send_named(
        &self,
        root: &Path,
        name: &str,
        cap: u64,
        emit: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let has_name = |path: &str| path.rsplit('/').next() == Some(name);
        let named =
            self.files.iter().filter(|(path, marked)| has_name(path) && !is_link(marked.stat.mode));
        let paths: Vec<String> = named.map(|(path, _)| path.to_string()).collect();
        send_files(root, &paths, cap, emit)
    }

    /// Sends every new, changed or removed file, sorted by path, then the end.
    pub(crate) fn send_changes(
        &self,
        root: &Path,
        mut emit: impl FnMut(Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let now = Instant::now();
        let mut walk = Walk {
            root,
            skip: &self.skip,
            entries: self.entries + MAX_ADDED_ENTRIES,
            path_bytes: MAX_PATH_BYTES + MAX_PATH_BYTES / 4,
            give_up_at: now + WALK_TIME,
            known: Some(&self.folders),
            files: Vec::new(),
            folders: Vec::new(),
        };
        if let Err(end) = walk.run() {
            return emit(Reply::TreeEnd(end));
        }
        let found: BTreeMap<String, Stat> = walk.files.into_iter().collect();
        let mut count = 0;
        let mut buffer = vec![0; 256 * 1024];
        for path in self.files.keys().filter(|path| !found.contains_key(path.as_ref())) {
            count += 1;
            emit(Reply::TreeItem(ChangedItem::Removed { path: path.to_string() }))?;
        }
        for (path, stat) in found {
            let marked = self.files.get(path.as_str());
            let place = root.join(&path);
            let is_same = marked.is_some_and(|marked| {
                let may_hash = now.elapsed() < HASH_TIME;
                marked.stat == stat || (may_hash && marked.is_unchanged(&place, &stat, &mut buffer))
            });
            if !is_same {
                count += 1;
                let item = ChangedItem::Written {
                    mode: stat.mode,
                    size: stat.size,
                    is_new: marked.is_none(),
                    is_binary: !is_link(stat.mode) && is_binary(&place),
                    path,
                };
                emit(Reply::TreeItem(item))?;
            }
        }
        emit(Reply::TreeEnd(TreeEnd::Complete { files: count }))
    }
}

impl Marked {
    /// Whether only the metadata differs, as after `git stash pop`.
    fn is_unchanged(&self, place: &Path, stat: &Stat, buffer: &mut [u8]) -> bool {
        is_link(self.stat.mode) == is_link(stat.mode)
            && self.stat.size == stat.size
            && self.stat.is_executable() == stat.is_executable()
            && self.digest.is_some()
            && self.digest == digest(place, stat.size, buffer)
    }
}

/// Sends the files among `paths`, with at most `cap` bytes of content together, then the end. What does not
/// exist or is reached through a symlink is left out. What is neither a regular file nor a symlink has no
/// content: a caller must be able to tell it from what does not exist.
pub(crate) fn send_files(
    root: &Path,
    paths: &[String],
    cap: u64,
    mut emit: impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<()> {
    let (mut left, mut count) = (cap, 0);
    for path in paths {
        let Some((place, meta)) = find(root, path) else { continue };
        count += 1;
        if !meta.is_file() && !meta.is_symlink() {
            emit(Reply::TreeFile { path: path.clone(), mode: meta.mode(), size: 0 })?;
            continue;
        }
        let Some(rest) = left.checked_sub(meta.len()) else {
            return emit(Reply::TreeEnd(TreeEnd::TooLarge(path.clone())));
        };
        left = rest;
        let sent = if meta.is_symlink() {
            send_link(path, &place, &meta, &mut emit)?
        } else {
            send_file(path, &place, meta.len(), &mut emit)?
        };
        if let Err(error) = sent {
            return emit(Reply::TreeEnd(TreeEnd::Failed(format!("{path}: {error}"))));
        }
    }
    emit(Reply::TreeEnd(TreeEnd::Complete { files: count }))
}

/// The outer error is one of sending, the inner one of reading.
fn send_file(
    path: &str,
    place: &Path,
    size: u64,
    emit: &mut impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<io::Result<()>> {
    let opened = open(place).and_then(|file| Ok((mode_of(&file.metadata()?), file)));
    match opened {
        Ok((mode, file)) => {
            emit(Reply::TreeFile { path: path.to_owned(), mode, size })?;
            send_content(file, size, emit)
        }
        Err(error) => Ok(Err(error)),
    }
}

/// As [`send_file`]. The target of a symlink is never longer than a piece of a file.
fn send_link(
    path: &str,
    place: &Path,
    meta: &Metadata,
    emit: &mut impl FnMut(Reply) -> io::Result<()>,
) -> io::Result<io::Result<()>> {
    let data = match std::fs::read_link(place) {
        Ok(target) => target.into_os_string().into_vec(),
        Err(error) => return Ok(Err(error)),
    };
    let size = data.len() as u64;
    if size != meta.len() || data.len() > CHUNK {
        return Ok(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    emit(Reply::TreeFile { path: path.to_owned(), mode: mode_of(meta), size })?;
    emit(Reply::TreeData { data })?;
    Ok(Ok(()))
}

/// Place and metadata of `path`; `None` if it does not exist, or what should be a folder on the way to it is
/// anything else.
fn find(root: &Path, path: &str) -> Option<(PathBuf, Metadata)> {
    if !is_safe_path(path) || !std::fs::symlink_metadata(root).ok()?.is_dir() {
        return None;
    }
    let mut place = root.to_owned();
    let (folders, name) = path.rsplit_once('/').map_or((None, path), |(f, n)| (Some(f), n));
    for part in folders.into_iter().flat_map(|folders| folders.split('/')) {
        make_accessible(&place);
        place.push(part);
        if !std::fs::symlink_metadata(&place).ok()?.is_dir() {
            return None;
        }
    }
    make_accessible(&place);
    place.push(name);
    let meta = std::fs::symlink_metadata(&place).ok()?;
    Some((place, meta))
}

fn open(place: &Path) -> io::Result<File> {
    let open = || {
        OpenOptions::new().read(true).custom_flags(sys::O_NOFOLLOW | sys::O_NONBLOCK).open(place)
    };
    with_access(place, 0o400, open)
}

/// Whether git would take the file for a binary one. A file that cannot be read counts as one.
fn is_binary(place: &Path) -> bool {
    let mut start = Vec::new();
    let read = open(place).and_then(|file| file.take(SNIFFED_BYTES).read_to_end(&mut start));
    read.is_err() || start.contains(&0)
}

/// A number that differs, in practice, for different contents; `None` if the file cannot be read.
/// Who makes two contents with the same number only hides a change of its own.
fn digest(place: &Path, size: u64, buffer: &mut [u8]) -> Option<u64> {
    let mut file = open(place).ok()?.take(size);
    let mut hash = 0x9E37_79B9_7F4A_7C15 ^ size;
    loop {
        let mut filled = 0;
        while let Some(room) = buffer.get_mut(filled..).filter(|room| !room.is_empty()) {
            match file.read(room).ok()? {
                0 => break,
                count => filled += count,
            }
        }
        let (words, rest) = buffer.get(..filled)?.as_chunks::<8>();
        let mut last = [0; 8];
        last.get_mut(..rest.len())?.copy_from_slice(rest);
        for word in words.iter().chain([&last]) {
            let mixed = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            hash = mixed.rotate_left(29) ^ (mixed >> 32);
        }
        if filled < buffer.len() {
            return Some(hash);
        }
    }
}

#[cfg(test)]
mod tests;
