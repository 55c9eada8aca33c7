//! What is left of the disk on which the container's root lies: the Docker host's own.

use std::fmt;
use std::time::Duration;

/// Between two looks while a command runs.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Free space and free inodes of a file system; [`u64::MAX`] where it does not count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// Bytes that an ordinary user may still write.
    pub bytes: u64,
    /// Files that may still be made.
    pub files: u64,
}

impl Free {
    /// With less than this, what a command does is no longer its own doing: a write may fail.
    ///
    /// With a look every tenth of a second, 256 MiB are seen to go before the first write fails, up
    /// to 2.5 GB a second and however soon there is room again; ext4 has a file for each 16 KiB.
    pub const LEAST: Self = Self { bytes: 256 << 20, files: 16 << 10 };

    /// Whether there is less than [`Free::LEAST`] of either.
    pub fn is_exhausted(self) -> bool {
        self.bytes < Self::LEAST.bytes || self.files < Self::LEAST.files
    }
}

/// Of the two, what there is less of than there must be.
impl fmt::Display for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bytes >= Self::LEAST.bytes && self.files < Self::LEAST.files {
            write!(f, "{} free inodes", self.files)
        } else {
            write!(f, "{} MiB free", self.bytes >> 20)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_full_without_room_or_without_inodes() {
        let Free { bytes, files } = Free::LEAST;
        for (bytes, files, words) in [
            (bytes - 1, files, Some("255 MiB free")),
            (0, u64::MAX, Some("0 MiB free")),
            (bytes, files - 1, Some("16383 free inodes")),
            (0, 0, Some("0 MiB free")),
            (bytes, files, None),
            (u64::MAX, u64::MAX, None),
        ] {
            let free = Free { bytes, files };
            assert_eq!(free.is_exhausted().then(|| free.to_string()).as_deref(), words);
        }
    }
}
