//! What commands have put on the host's disk.

use crate::changes::make_accessible;
use crate::disk::DiskUse;
use std::fs::{File, Metadata};
use std::io::{self, Read as _, Seek as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// More than any limit: a tree that no path leads through.
const UNBOUNDED: DiskUse = DiskUse { bytes: u64::MAX, files: u64::MAX };

/// Unit in which a file's size on disk is given, in bytes.
const BLOCK: u64 = 512;
/// Time for counting files.
const COUNT_TIME: Duration = Duration::from_secs(10);

/// Counts what has been created or changed below `root`, on its file system, since `since`: the change
/// time of a file cannot be set, and files of the image are older. What is not counted after ten
/// seconds is left out.
pub(crate) fn changed_since(root: &Path, since: SystemTime) -> DiskUse {
    let give_up_at = Instant::now() + COUNT_TIME;
    let since = since.duration_since(UNIX_EPOCH).unwrap_or_default();
    let is_new = |meta: &Metadata| {
        let (seconds, nanoseconds) = (meta.ctime(), meta.ctime_nsec());
        let changed = Duration::new(
            u64::try_from(seconds).unwrap_or_default(),
            u32::try_from(nanoseconds).unwrap_or_default(),
        );
        changed >= since
    };
    let mut used = DiskUse::default();
    let Ok(device) = std::fs::symlink_metadata(root).map(|meta| meta.dev()) else { return used };
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        make_accessible(&folder);
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                return UNBOUNDED;
            }
            Err(_) => continue,
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if Instant::now() >= give_up_at {
                return used;
            }
            match std::fs::symlink_metadata(&path) {
                Ok(meta) => {
                    if is_new(&meta) {
                        let size = meta.blocks().saturating_mul(BLOCK) / meta.nlink().max(1);
                        let bytes = if meta.is_dir() { 0 } else { size };
                        used.bytes = used.bytes.saturating_add(bytes);
                        used.files += 1;
                    }
                    if meta.is_dir() && meta.dev() == device {
                        folders.push(path);
                    }
                }
                // Only commands make a path that is longer than system calls accept.
                Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                    return UNBOUNDED;
                }
                Err(_) => {}
            }
        }
    }
    used
}

/// How much the processes of this container have written to disks.
#[derive(Debug)]
pub(crate) struct WrittenBytes {
    /// This process's account, including those of its children that have ended.
    account: Option<File>,
}

impl WrittenBytes {
    /// Opens the account. Not readable by name any more once this process is hardened.
    pub(crate) fn open() -> Self {
        Self { account: File::open("/proc/self/io").ok() }
    }

    /// Bytes written so far, to files that may be deleted now. 0 if the kernel does not count them.
    pub(crate) fn total(&mut self) -> u64 {
        let own = self.account.as_mut().and_then(|account| {
            let mut text = String::new();
            account.rewind().ok()?;
            account.read_to_string(&mut text).ok()?;
            text.lines()
                .find_map(|line| line.strip_prefix("write_bytes: ")?.trim().parse::<u64>().ok())
        });
        // A process whose parent ignores its end is missing there, but not in its control group.
        let group = std::fs::read_to_string("/sys/fs/cgroup/io.stat").ok().map(|text| {
            let written = text.split_whitespace().filter_map(|word| word.strip_prefix("wbytes="));
            written.filter_map(|number| number.parse().ok()).fold(0_u64, u64::saturating_add)
        });
        own.unwrap_or_default().max(group.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn only_what_changed_since_the_start_counts_and_links_count_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("old")).unwrap();
        std::fs::write(root.join("old/file"), vec![1; 1 << 20]).unwrap();
        let last = std::fs::metadata(root.join("old/file")).unwrap();
        let nanoseconds = u32::try_from(last.ctime_nsec()).unwrap();
        let last = Duration::new(u64::try_from(last.ctime()).unwrap(), nanoseconds);
        let since = UNIX_EPOCH + last + Duration::from_nanos(1);
        // The clock of file systems is coarse.
        crate::sys::poll_readable([None], Some(Duration::from_millis(50))).unwrap();
        assert_eq!(changed_since(root, since), DiskUse::default());
        std::fs::create_dir(root.join("new")).unwrap();
        let mut file = File::create(root.join("new/file")).unwrap();
        file.write_all(&vec![1; 3 << 20]).unwrap();
        file.sync_all().unwrap();
        // Times of files can be set, but not the time of that.
        file.set_modified(UNIX_EPOCH).unwrap();
        std::fs::hard_link(root.join("new/file"), root.join("new/again")).unwrap();
        File::create(root.join("sparse")).unwrap().set_len(1 << 40).unwrap();
        let none = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o0);
        std::fs::set_permissions(root.join("new"), none).unwrap();
        let used = changed_since(root, since);
        assert!(used.bytes.abs_diff(3 << 20) < 64 << 10, "{used:?}");
        assert_eq!(used.files, 4);
    }

    #[test]
    fn written_bytes_include_those_of_children_and_deleted_files() {
        let mut written = WrittenBytes::open();
        let before = written.total();
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let script = "head -c 20000000 /dev/zero > x; sync x; rm x";
        let shell =
            std::process::Command::new("sh").args(["-c", script]).current_dir(&dir).status();
        assert!(shell.unwrap().success());
        let grown = written.total() - before;
        assert!(grown >= 20_000_000 || before == 0 && grown == 0, "{grown}");
    }
}
