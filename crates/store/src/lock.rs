//! The run folder's lock: one coordinator per run on this machine.

use crate::error::StoreError;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err::{File, OpenOptions};
use std::fs::TryLockError;
use std::io::{Read, Seek, SeekFrom, Write};

/// Name of the lock inside a run folder.
pub const LOCK_FILE: &str = "run.lock";

/// An exclusive operating-system lock on `run.lock`. The kernel releases it when the process ends
/// for any reason. The file's text names the holder and the highest epoch of the run.
#[derive(Debug)]
pub(crate) struct RunLock {
    file: File,
    path: Utf8PathBuf,
    epoch_before: i64,
}

/// The highest epoch that the lock file in `folder` records; 0 if there is none.
pub(crate) fn recorded_epoch(folder: &Utf8Path) -> i64 {
    epoch(&fs_err::read_to_string(folder.join(LOCK_FILE)).unwrap_or_default())
}

/// The process that uses the run in `folder`, as text like `pid 12 on host gpu-a`; `None` if none does, as
/// far as this machine can tell. The kernel's list of locks is read: taking the lock to find out would
/// make a coordinator that starts at that moment fail.
pub fn holder(folder: &Utf8Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;
    let path = folder.join(LOCK_FILE);
    let inode = fs_err::metadata(&path).ok()?.ino().to_string();
    let locks = fs_err::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 4242 fe:00:131090 0 EOF`; waiting ones have `->` after the number.
    let is_held = locks.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let file = fields.get(5).and_then(|id| id.rsplit(':').next());
        fields.get(1) == Some(&"FLOCK") && file == Some(inode.as_str())
    });
    let text = is_held.then(|| fs_err::read_to_string(&path)).and_then(Result::ok)?;
    Some(text.lines().next().unwrap_or("another process").to_owned())
}

fn epoch(text: &str) -> i64 {
    text.lines()
        .find_map(|line| line.strip_prefix("epoch "))
        .and_then(|n| n.trim().parse().ok())
        .unwrap_or(0)
}

impl RunLock {
    /// Takes the lock, or fails immediately with [`StoreError::Locked`].
    pub(crate) fn take(folder: &Utf8Path) -> Result<Self, StoreError> {
        let path = folder.join(LOCK_FILE);
        let io = |e| StoreError::from_io(&path, e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        let locked = file.file().try_lock();
        let mut text = String::new();
        // The text informs the user and guards against old copies; incomplete text is tolerated.
        let _ = file.read_to_string(&mut text);
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = text.lines().next().unwrap_or("another process").to_owned();
                return Err(StoreError::Locked { folder: folder.to_owned(), holder });
            }
            Err(TryLockError::Error(e)) => return Err(io(e)),
        }
        let epoch_before = epoch(&text);
        let mut lock = Self { file, path, epoch_before };
        lock.write(epoch_before)?;
        Ok(lock)
    }

    /// Epoch recorded in the lock file when the lock was taken; 0 if none was.
    pub(crate) fn epoch_before(&self) -> i64 {
        self.epoch_before
    }

    /// Writes holder and epoch. Called after the journal has committed that epoch.
    pub(crate) fn write(&mut self, epoch: i64) -> Result<(), StoreError> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let text = format!("pid {} on host {host}\nepoch {epoch}\n", std::process::id());
        let path = &self.path;
        let file = &mut self.file;
        let length = text.len() as u64;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(text.as_bytes()))
            .and_then(|()| file.set_len(length))
            .and_then(|()| file.sync_all())
            .map_err(|e| StoreError::from_io(path, e))
    }
}
