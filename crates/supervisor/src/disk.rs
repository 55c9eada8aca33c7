//! Free space on the file system of the container's root, which is the Docker host's own disk.

use std::fmt;
use std::time::Duration;

/// Interval between checks while a command runs.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Free bytes and free inodes of a file system; [`u64::MAX`] if the file system does not count
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeSpace {
    /// Bytes that an unprivileged user can still write.
    pub bytes: u64,
    /// Inodes that an unprivileged user can still allocate.
    pub files: u64,
}

impl FreeSpace {
    /// Below these values a write may fail, so that the result of a command no longer depends on the
    /// command alone.
    ///
    /// With a check every tenth of a second, a drop below 256 MiB is noticed before the first write
    /// fails at up to 2.5 GB/s, even if the space is freed again at once. ext4 allocates one inode
    /// per 16 KiB.
    pub const MIN: Self = Self { bytes: 256 << 20, files: 16 << 10 };

    /// Whether bytes or inodes are below [`FreeSpace::MIN`].
    pub fn is_exhausted(self) -> bool {
        self.bytes < Self::MIN.bytes || self.files < Self::MIN.files
    }
}

/// Prints the resource that is short: inodes if only they are below [`FreeSpace::MIN`], else bytes.
impl fmt::Display for FreeSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bytes >= Self::MIN.bytes && self.files < Self::MIN.files {
            write!(f, "{} free inodes", self.files)
        } else {
            write!(f, "{} MiB free", self.bytes >> 20)
        }
    }
}

/// What commands have put on the host's disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Bytes of files, and of deleted files that processes held open.
    pub bytes: u64,
    /// Number of files and folders.
    pub files: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn disk_is_exhausted_without_bytes_or_without_inodes() {
        let FreeSpace { bytes, files } = FreeSpace::MIN;
        for (bytes, files, message) in [
            (bytes - 1, files, Some("255 MiB free")),
            (0, u64::MAX, Some("0 MiB free")),
            (bytes, files - 1, Some("16383 free inodes")),
            (0, 0, Some("0 MiB free")),
            (bytes, files, None),
            (u64::MAX, u64::MAX, None),
        ] {
            let free = FreeSpace { bytes, files };
            assert_eq!(free.is_exhausted().then(|| free.to_string()).as_deref(), message);
        }
    }
}
