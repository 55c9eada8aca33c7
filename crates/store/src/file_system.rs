//! The kind of file system that a folder is on, for messages.

use camino::{Utf8Path, Utf8PathBuf};

/// The name that the kernel gives the file system of `path`, such as `nfs4` or `fuse.sshfs`, and
/// where it is mounted; `None` if that cannot be found out.
pub(crate) fn of(path: &Utf8Path) -> Option<FileSystem> {
    let path = path.canonicalize_utf8().ok()?;
    in_table(&fs_err::read_to_string("/proc/self/mountinfo").ok()?, &path)
}

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) kind: String,
    pub(crate) mounted_at: Utf8PathBuf,
}

/// The mount of `path` in a table in the format of `/proc/PID/mountinfo`: the last one of the longest
/// mount point, because a later mount covers an earlier one.
fn in_table(table: &str, path: &Utf8Path) -> Option<FileSystem> {
    let mounts = table.lines().filter_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        let mounted_at = Utf8PathBuf::from(unescaped(mount.split(' ').nth(4)?));
        let kind = rest.split(' ').next()?.to_owned();
        path.starts_with(&mounted_at).then_some(FileSystem { kind, mounted_at })
    });
    mounts.max_by_key(|mount| mount.mounted_at.components().count())
}

/// A path of the table, in which spaces, tabs, line ends and backslashes are octal numbers.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (code, text)| path.replace(code, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_and_last_mount_counts() {
        let table = "\
            22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            30 22 0:40 / /mnt rw - nfs4 server:/export rw\n\
            31 22 0:41 / /mnt/a\\040b rw master:2 shared:3 - fuse.sshfs host: rw\n\
            32 22 0:42 / /mnt rw - cifs //server/share rw\n\
            a line of another form\n";
        let kind = |path: &str| in_table(table, Utf8Path::new(path)).map(|found| found.kind);
        assert_eq!(kind("/home/run").as_deref(), Some("ext4"));
        assert_eq!(kind("/mnt/run").as_deref(), Some("cifs"));
        assert_eq!(kind("/mnt/a b/run").as_deref(), Some("fuse.sshfs"));
        assert_eq!(kind("/mntrun").as_deref(), Some("ext4"));
        assert_eq!(in_table("", Utf8Path::new("/x")), None);
    }

    #[test]
    fn the_file_system_of_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let folder = Utf8Path::from_path(folder.path()).unwrap();
        let found = of(folder).unwrap();
        assert!(!found.kind.is_empty() && found.mounted_at.is_absolute(), "{found:?}");
        assert_eq!(of(&folder.join("absent")), None);
    }
}
