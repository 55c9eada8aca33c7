//! Files named by the blake3 digest of their bytes: `blobs/<2 hex>/<64 hex>.zst`.

use crate::error::StoreError;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err as fs;
use std::collections::HashSet;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of temporary files that this process has named. One count for all stores: the last writes of a
/// store that was dropped may still be under way when another one of the same folder begins.
static TEMPORARY_NAMES: AtomicU64 = AtomicU64::new(0);

/// The folder with all stored trajectories of a run.
#[derive(Debug)]
pub(crate) struct Blobs {
    folder: Utf8PathBuf,
}

impl Blobs {
    pub(crate) fn new(run_folder: &Utf8Path) -> Self {
        Self { folder: run_folder.join("blobs") }
    }

    /// Path of the blob with this digest, 64 hexadecimal digits. Anything else (from a damaged row)
    /// maps to a file that is never written, and never to a path outside the folder.
    pub(crate) fn path(&self, digest: &str) -> Utf8PathBuf {
        let safe = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
        match digest.get(..2) {
            Some(prefix) if safe => self.folder.join(prefix).join(format!("{digest}.zst")),
            _ => self.folder.join("invalid-digest"),
        }
    }

    /// Writes `bytes` durably and returns their digest: temporary name, fsync, rename, fsync of the
    /// folder. Once this returns, a row may refer to the file. Blocking.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<String, StoreError> {
        let digest = blake3::hash(bytes).to_hex().to_string();
        let target = self.path(&digest);
        let folder = target.parent().unwrap_or(&self.folder).to_owned();
        let number = TEMPORARY_NAMES.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!("{}-{number}.tmp", std::process::id()));
        let io = |e| StoreError::from_io(&target, e);
        fs::create_dir_all(&folder).map_err(io)?;
        let written = (|| {
            let mut file = fs::File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &target)?;
            sync_folder(&folder)?;
            sync_folder(&self.folder)
        })();
        if let Err(e) = written {
            // A half-written file must not keep the disk full. If this fails as well, the next
            // start removes the file.
            let _ = fs::remove_file(&temporary);
            return Err(io(e));
        }
        Ok(digest)
    }

    /// Removes files that no row names: temporary files of interrupted writes, and files whose row
    /// was never committed. The caller holds the run lock. Returns the number of files removed.
    pub(crate) fn collect_garbage(&self, named: &HashSet<String>) -> Result<usize, StoreError> {
        let io = |e| StoreError::from_io(&self.folder, e);
        let mut removed = 0;
        if !self.folder.exists() {
            return Ok(0);
        }
        let mut pending = vec![self.folder.clone()];
        while let Some(folder) = pending.pop() {
            for entry in folder.read_dir_utf8().map_err(io)? {
                let entry = entry.map_err(io)?;
                let path = entry.path();
                if entry.file_type().map_err(io)?.is_dir() {
                    pending.push(path.to_owned());
                } else if !path.file_stem().is_some_and(|stem| named.contains(stem)) {
                    match fs::remove_file(path) {
                        Ok(()) => removed += 1,
                        // A writer that is still shutting down removed its own temporary file.
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(error) => return Err(io(error)),
                    }
                }
            }
        }
        Ok(removed)
    }
}

pub(crate) fn sync_folder(folder: &Utf8Path) -> std::io::Result<()> {
    fs::File::open(folder)?.sync_all()
}
