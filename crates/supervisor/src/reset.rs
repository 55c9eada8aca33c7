//! Resetting a sandbox and verifying that it is clean: its state equals the baseline taken at
//! start, and nothing else is left.

use crate::options::Options;
use crate::sys::{self, Attributes, Ipc, ProcessState, Times};
use crate::tree;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Folders that Docker leaves writable besides the wiped ones. They have few entries, none of them
/// regular files, so they are compared entry by entry. The second is writable with cgroup v1 only.
const COMPARED: [&str; 2] = ["/dev", CONTROL_GROUPS];
const IPC_LISTS: [(Ipc, &str); 3] = [
    (Ipc::Shm, "/proc/sysvipc/shm"),
    (Ipc::Sem, "/proc/sysvipc/sem"),
    (Ipc::Msg, "/proc/sysvipc/msg"),
];

/// Why a sandbox cannot be reset, or is not clean after a reset.
#[derive(Debug)]
pub(crate) enum ResetError {
    /// Commands can write to this mount point, and a reset does not wipe it.
    UnwipedMount(String),
    ProcessAlive(String),
    NotEmpty(PathBuf),
    UnknownFormat(&'static str),
    /// This property differs from the baseline.
    Changed(String),
    NoBaseline(PathBuf),
    ReadList {
        list: &'static str,
        source: io::Error,
    },
    Io(io::Error),
}

impl fmt::Display for ResetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnwipedMount(point) => {
                write!(f, "{point} is writable and would keep its content over a reset")
            }
            Self::ProcessAlive(pid) => write!(f, "process {pid} is alive"),
            Self::NotEmpty(path) => write!(f, "{} is not empty", path.display()),
            Self::UnknownFormat(list) => write!(f, "{list} has an unknown format"),
            Self::Changed(property) => write!(f, "changed: {property}"),
            Self::NoBaseline(path) => write!(f, "{} has no baseline", path.display()),
            Self::ReadList { list, source } => write!(f, "{list}: {source}"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl Error for ResetError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::UnwipedMount(_)
            | Self::ProcessAlive(_)
            | Self::NotEmpty(_)
            | Self::UnknownFormat(_)
            | Self::Changed(_)
            | Self::NoBaseline(_) => None,
            Self::ReadList { source, .. } => Some(source),
            Self::Io(error) => error.source(),
        }
    }
}

impl From<io::Error> for ResetError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Everything that a file system keeps about a path, except for its content and for what a command
/// cannot choose (the time of the last change).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    mode: u32,
    owner: (u32, u32),
    /// Device and inode number of the entry: an equal entry in its place is another one.
    inode: (u64, u64),
    links: u64,
    device: u64,
    target: Option<PathBuf>,
    attributes: Attributes,
    /// `None` where commands cannot choose them: a mounted control group is read-only, and with
    /// user namespaces, devices are those of the host and belong to another user.
    times: Option<Times>,
}

/// The folder of the control groups, a tmpfs with version 1.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";
/// Counters of the network interfaces of this network namespace. They also show whether a later
/// command would find closed connections, which keep their ports for a minute.
const NETWORK: &str = "/proc/net/dev";

/// The state of the sandbox before the first command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Baseline {
    mounts: String,
    network: String,
    process: ProcessState,
    compared: BTreeMap<PathBuf, Entry>,
    roots: BTreeMap<PathBuf, Entry>,
}

fn times(meta: &Metadata) -> Times {
    Times {
        accessed: (meta.atime(), meta.atime_nsec()),
        modified: (meta.mtime(), meta.mtime_nsec()),
    }
}

fn entry(path: &Path) -> io::Result<Entry> {
    let meta = std::fs::symlink_metadata(path)?;
    let target = if meta.is_symlink() { Some(std::fs::read_link(path)?) } else { None };
    let is_mounted_group = match path.parent() {
        Some(parent) if parent == Path::new(CONTROL_GROUPS) => {
            std::fs::symlink_metadata(parent)?.dev() != meta.dev()
        }
        Some(_) | None => false,
    };
    Ok(Entry {
        mode: meta.mode(),
        owner: (meta.uid(), meta.gid()),
        inode: (meta.dev(), meta.ino()),
        links: meta.nlink(),
        device: meta.rdev(),
        target,
        attributes: sys::attributes(path)?,
        times: (!is_mounted_group && meta.uid() == sys::user()).then(|| times(&meta)),
    })
}

/// Records the folder and everything below it, except for the control groups mounted there: those
/// are read-only, and the kernel changes their content.
fn snapshot(folder: &Path, into: &mut BTreeMap<PathBuf, Entry>) -> io::Result<()> {
    // Before the folder is read, which changes its time of access.
    into.insert(folder.to_owned(), entry(folder)?);
    let device = std::fs::symlink_metadata(folder)?.dev();
    for found in std::fs::read_dir(folder)? {
        let path = found?.path();
        let meta = std::fs::symlink_metadata(&path)?;
        if meta.is_dir() && (meta.dev() == device || path.starts_with("/dev")) {
            snapshot(&path, into)?;
        } else {
            into.insert(path.clone(), entry(&path)?);
        }
    }
    Ok(())
}

fn snapshot_compared() -> io::Result<BTreeMap<PathBuf, Entry>> {
    let mut found = BTreeMap::new();
    for folder in COMPARED.map(Path::new) {
        if folder.exists() {
            snapshot(folder, &mut found)?;
        }
    }
    Ok(found)
}

/// The folders that a reset wipes. Nothing else may be writable.
fn wiped_folders(options: &Options) -> Vec<PathBuf> {
    vec![PathBuf::from(&options.workdir), PathBuf::from("/tmp")]
}

/// Finds the first mount in the text of `/proc/self/mountinfo` that commands can write to and that
/// a reset does not wipe. That includes a writable root.
fn unwiped_mount(
    mountinfo: &str,
    wiped: &[PathBuf],
    is_foreign: impl Fn(&Path) -> bool,
) -> Option<String> {
    mountinfo.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (point, flags) = (fields.nth(4)?, fields.next()?);
        let read_only = flags.split(',').any(|flag| flag == "ro");
        let known = wiped.iter().any(|path| path == Path::new(point))
            || COMPARED.contains(&point)
            || Path::new(point).starts_with("/dev")
            || Path::new(point).starts_with("/proc")
            || Path::new(point).starts_with(CONTROL_GROUPS) && is_foreign(Path::new(point));
        (!read_only && !known).then(|| point.to_owned())
    })
}

impl Baseline {
    /// Records the current state. Fails if the sandbox cannot be reset.
    pub(crate) fn take(options: &Options) -> Result<Self, ResetError> {
        let wiped = wiped_folders(options);
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        // With user namespaces, control groups are mounted writable, but belong to the host's root.
        let is_foreign = |path: &Path| {
            std::fs::symlink_metadata(path).is_ok_and(|meta| meta.uid() != sys::user())
        };
        if let Some(point) = unwiped_mount(&mounts, &wiped, is_foreign) {
            return Err(ResetError::UnwipedMount(point));
        }
        let roots = wiped
            .into_iter()
            .map(|path| Ok((path.clone(), entry(&path)?)))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            mounts,
            // A kernel without networks has no such file.
            network: std::fs::read_to_string(NETWORK).unwrap_or_default(),
            process: sys::process_state()?,
            compared: snapshot_compared()?,
            roots,
        })
    }

    /// Wipes, then compares with the baseline. Every other process must already be dead.
    /// Fails with the first difference; the sandbox must then be discarded.
    pub(crate) fn restore(&self, options: &Options) -> Result<(), ResetError> {
        for path in wiped_folders(options) {
            let Some(was) = self.roots.get(&path) else {
                return Err(ResetError::NoBaseline(path));
            };
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))?;
            tree::wipe(&path)?;
            let mode = std::fs::Permissions::from_mode(was.mode & 0o7777);
            std::fs::set_permissions(&path, mode)?;
        }
        let found = snapshot_compared()?;
        // Children sort after their parents, so they may already be removed with them.
        for path in found.keys().filter(|path| !self.compared.contains_key(*path)) {
            if std::fs::symlink_metadata(path).is_ok() {
                tree::remove_entry(path)?;
            }
        }
        for (kind, list) in IPC_LISTS {
            for id in ipc_ids(list)? {
                sys::remove_ipc(kind, id);
            }
        }
        self.restore_times();
        self.verify(options)
    }

    /// Gives all entries the times that they had. This must be the last change.
    fn restore_times(&self) {
        for (path, was) in self.compared.iter().chain(&self.roots) {
            let Some(before) = was.times else { continue };
            // An entry whose times cannot be read or set still differs when it is verified.
            if std::fs::symlink_metadata(path).is_ok_and(|now| times(&now) != before) {
                let _ = sys::set_times(path, before);
            }
        }
    }

    fn verify(&self, options: &Options) -> Result<(), ResetError> {
        for found in std::fs::read_dir("/proc")? {
            let name = found?.file_name();
            if name != "1" && name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                return Err(ResetError::ProcessAlive(name.display().to_string()));
            }
        }
        for (_, list) in IPC_LISTS {
            if !ipc_ids(list)?.is_empty() {
                return Err(ResetError::NotEmpty(PathBuf::from(list)));
            }
        }
        // Before the folders are read, which changes their times of access.
        let now = Self::take(options)?;
        for path in wiped_folders(options) {
            if std::fs::read_dir(&path)?.next().is_some() {
                return Err(ResetError::NotEmpty(path));
            }
        }
        let same = [
            ("mounts", now.mounts == self.mounts),
            ("the counters of the network interfaces", now.network == self.network),
            ("limits, priority, CPUs or memory settings of process 1", now.process == self.process),
        ];
        if let Some((property, _)) = same.iter().find(|(_, same)| !same) {
            return Err(ResetError::Changed((*property).to_owned()));
        }
        compare(&self.compared, &now.compared)?;
        compare(&self.roots, &now.roots)
    }
}

/// Fails with the first path whose entry differs.
fn compare(
    before: &BTreeMap<PathBuf, Entry>,
    now: &BTreeMap<PathBuf, Entry>,
) -> Result<(), ResetError> {
    match before.keys().chain(now.keys()).find(|path| before.get(*path) != now.get(*path)) {
        Some(path) => Err(ResetError::Changed(format!("the attributes of {}", path.display()))),
        None => Ok(()),
    }
}

/// Ids in a `/proc/sysvipc` list: the second column, after a header line.
fn ipc_ids(list: &'static str) -> Result<Vec<i32>, ResetError> {
    match std::fs::read_to_string(list) {
        Ok(text) => text
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().nth(1).and_then(|id| id.parse().ok()))
            .collect::<Option<_>>()
            .ok_or(ResetError::UnknownFormat(list)),
        // The kernel may be built without System V objects.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(ResetError::ReadList { list, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_with_a_writable_volume_or_root_cannot_be_reset() {
        let wiped = [PathBuf::from("/testbed"), PathBuf::from("/tmp")];
        let clean = "1 2 0:1 / / ro,relatime - overlay overlay rw\n\
                     2 1 0:2 / /proc rw,nosuid - proc proc rw\n\
                     3 1 0:3 / /dev rw - tmpfs tmpfs rw\n\
                     4 1 0:4 / /testbed rw - tmpfs tmpfs rw\n\
                     6 1 0:6 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                     5 1 0:5 / /etc/hosts ro - ext4 /dev/vda rw\n";
        let own = |_: &Path| false;
        assert_eq!(unwiped_mount(clean, &wiped, own), None);
        let volume = format!("{clean}7 1 0:7 / /data rw - ext4 /dev/vda rw\n");
        assert_eq!(unwiped_mount(&volume, &wiped, |_| true).as_deref(), Some("/data"));
        let root = unwiped_mount("1 2 0:1 / / rw - overlay overlay rw", &wiped, |_| true);
        assert_eq!(root.as_deref(), Some("/"));
        let group = format!("{clean}8 1 0:8 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw\n");
        assert_eq!(unwiped_mount(&group, &wiped, |_| true), None);
        assert_eq!(unwiped_mount(&group, &wiped, own).as_deref(), Some("/sys/fs/cgroup/cpu"));
    }

    #[test]
    fn snapshots_differ_after_an_entry_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("a", dir.path().join("x")).unwrap();
        let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
        snapshot(dir.path(), &mut before).unwrap();
        std::fs::remove_file(dir.path().join("x")).unwrap();
        std::fs::write(dir.path().join("x"), "").unwrap();
        snapshot(dir.path(), &mut after).unwrap();
        assert_ne!(before, after);
        let error = compare(&before, &after).unwrap_err().to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");
    }

    #[test]
    fn entries_differ_in_every_attribute_that_a_command_can_set() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        let before = entry(&path).unwrap();
        assert_eq!(entry(&path).unwrap(), before);
        let times = Times { accessed: (1, 2), modified: (3, 4) };
        sys::set_times(&path, times).unwrap();
        assert_ne!(entry(&path).unwrap(), before);
        sys::set_times(&path, before.times.unwrap()).unwrap();
        assert_eq!(entry(&path).unwrap(), before);
        for command in [["chattr", "+d"].as_slice(), &["setfattr", "-n", "user.x", "-v", "1"]] {
            let mut set = std::process::Command::new(command[0]);
            // Not every machine has these programs, nor every file system these attributes.
            if set.args(&command[1..]).arg(&path).output().is_ok_and(|set| set.status.success()) {
                assert_ne!(entry(&path).unwrap(), before, "{command:?}");
            }
        }
        // An equal folder in its place is another one.
        std::fs::rename(&path, dir.path().join("aside")).unwrap();
        std::fs::create_dir(&path).unwrap();
        sys::set_times(&path, before.times.unwrap()).unwrap();
        assert_ne!(entry(&path).unwrap(), before);
    }
}
