//! Evicted blocks in files: a folder with a size limit, evicted in least-recently-used order.
//!
//! One file per block, named by its key: `magic [4] | major u16 | minor u16 | frame`
//! ([`crate::codec`]), where key and header are part of the frame's checksum: a file under another
//! name is rejected like a damaged one. If a file is unreadable, its block is fetched again; this is
//! never an error of the run.

use crate::codec::{pack, unpack};
use crate::key::BlockKey;
use crate::recent::Recent;
use crate::{BLOCK_ROWS, RoutingError};
use std::io::Write;
use std::path::{Path, PathBuf};

const HEADER: [u8; 8] = *b"ORMB\x01\0\0\0";
const SUFFIX: &str = ".ormb";
const TEMPORARY: &str = ".ormb-new";

/// Index of the files in order of use. Does not access the files themselves.
#[derive(Debug)]
pub(crate) struct SpillIndex {
    files: Recent<u64>,
    bytes: u64,
    limit: u64,
}

impl SpillIndex {
    pub(crate) fn new(limit: u64) -> Self {
        Self { files: Recent::new(), bytes: 0, limit }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.files.contains(key)
    }

    pub(crate) fn touch(&mut self, key: &BlockKey) {
        self.files.get(key);
    }

    /// Records a written file and returns the keys of files to delete.
    pub(crate) fn add(&mut self, key: BlockKey, bytes: u64) -> Vec<BlockKey> {
        self.bytes += bytes;
        if let Some(before) = self.files.put(key, bytes) {
            self.bytes -= before;
        }
        let mut gone = Vec::new();
        while self.bytes > self.limit {
            let Some((key, bytes)) = self.files.pop_oldest() else { break };
            self.bytes -= bytes;
            gone.push(key);
        }
        gone
    }

    pub(crate) fn remove(&mut self, key: &BlockKey) {
        if let Some(bytes) = self.files.remove(key) {
            self.bytes -= bytes;
        }
    }
}

/// The folder with the files.
#[derive(Debug)]
pub(crate) struct SpillFolder(PathBuf);

impl SpillFolder {
    /// Opens the folder and removes the blocks of an earlier process: a policy version may have
    /// been trained again since.
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(path)?;
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(SUFFIX) || name.ends_with(TEMPORARY) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(Self(path.to_owned()))
    }

    fn path(&self, key: &BlockKey, suffix: &str) -> PathBuf {
        self.0.join(format!("{key}{suffix}"))
    }

    /// Writes a block and returns the file's size. Not synced: the folder is emptied at the start.
    pub(crate) fn write(&self, key: &BlockKey, block: &[u8]) -> std::io::Result<u64> {
        let mut file = HEADER.to_vec();
        pack(&mut file, std::iter::once(block), block.len(), &context(key));
        let temporary = self.path(key, TEMPORARY);
        let written = std::fs::File::create(&temporary)
            .and_then(|mut out| out.write_all(&file))
            .and_then(|()| std::fs::rename(&temporary, self.path(key, SUFFIX)));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        Ok(file.len() as u64)
    }

    /// Reads a block of [`BLOCK_ROWS`] rows back.
    pub(crate) fn read(&self, key: &BlockKey, row_bytes: usize) -> Result<Vec<u8>, RoutingError> {
        let block_bytes = BLOCK_ROWS * row_bytes;
        let unreadable = |_| RoutingError::Stored("its file cannot be read");
        let path = self.path(key, SUFFIX);
        // A frame exceeds its uncompressed rows by a few bytes at most.
        let limit = (HEADER.len() + block_bytes + 64) as u64;
        if std::fs::metadata(&path).map_err(unreadable)?.len() > limit {
            return Err(RoutingError::Stored("it is larger than a block"));
        }
        let file = std::fs::read(&path).map_err(unreadable)?;
        let frame = file.strip_prefix(&HEADER);
        let frame = frame.ok_or(RoutingError::Stored("it does not start like a block"))?;
        let mut pieces = unpack(frame, &context(key), block_bytes, block_bytes)?;
        pieces.pop().ok_or(RoutingError::Stored("it is empty"))
    }

    pub(crate) fn delete(&self, key: &BlockKey) {
        let _ = std::fs::remove_file(self.path(key, SUFFIX));
    }
}

fn context(key: &BlockKey) -> Vec<u8> {
    [HEADER.as_slice(), key.as_bytes()].concat()
}
