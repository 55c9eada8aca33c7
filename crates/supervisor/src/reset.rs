//! Proving a sandbox clean: what was true when it started is true again, and nothing else is there.

use crate::sys::{self, Ipc, ProcessState};
use crate::{Options, tree};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Folders that Docker leaves writable beside the wiped ones: few entries, none of them plain files,
/// so they are compared one by one. The second is so with control groups of version 1 only.
const COMPARED: [&str; 2] = ["/dev", "/sys/fs/cgroup"];
const IPC_LISTS: [(Ipc, &str); 3] = [
    (Ipc::Shm, "/proc/sysvipc/shm"),
    (Ipc::Sem, "/proc/sysvipc/sem"),
    (Ipc::Msg, "/proc/sysvipc/msg"),
];

/// Type, permissions, owner and target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    mode: u32,
    owner: (u32, u32),
    device: u64,
    target: Option<PathBuf>,
}

/// The state at start, before the first command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Baseline {
    mounts: String,
    process: ProcessState,
    oom_score: String,
    compared: BTreeMap<PathBuf, Entry>,
    roots: BTreeMap<PathBuf, Entry>,
}

fn entry(path: &Path) -> io::Result<Entry> {
    let meta = std::fs::symlink_metadata(path)?;
    let target = if meta.is_symlink() { Some(std::fs::read_link(path)?) } else { None };
    Ok(Entry { mode: meta.mode(), owner: (meta.uid(), meta.gid()), device: meta.rdev(), target })
}

/// The folder and everything below it, without the control groups mounted there: those are
/// read-only, and their content is the kernel's.
fn snapshot(folder: &Path, into: &mut BTreeMap<PathBuf, Entry>) -> io::Result<()> {
    into.insert(folder.to_owned(), entry(folder)?);
    let home = std::fs::symlink_metadata(folder)?.dev();
    for found in std::fs::read_dir(folder)? {
        let path = found?.path();
        let meta = std::fs::symlink_metadata(&path)?;
        if meta.is_dir() && (meta.dev() == home || path.starts_with("/dev")) {
            snapshot(&path, into)?;
        } else {
            into.insert(path.clone(), entry(&path)?);
        }
    }
    Ok(())
}

fn compared() -> io::Result<BTreeMap<PathBuf, Entry>> {
    let mut found = BTreeMap::new();
    for folder in COMPARED.map(Path::new) {
        if folder.exists() {
            snapshot(folder, &mut found)?;
        }
    }
    Ok(found)
}

/// The folders that are wiped: they, and nothing else, may be writable.
fn writable(options: &Options) -> Vec<PathBuf> {
    vec![PathBuf::from(&options.workdir), PathBuf::from("/tmp")]
}

/// Names the first mount that commands could write to and a reset does not wipe, and the root when
/// it is not read-only. A pure function of `/proc/self/mountinfo`.
fn unwiped_mount(mountinfo: &str, wiped: &[PathBuf]) -> Option<String> {
    mountinfo.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (point, flags) = (fields.nth(4)?, fields.next()?);
        let read_only = flags.split(',').any(|flag| flag == "ro");
        let known = wiped.iter().any(|path| path == Path::new(point))
            || COMPARED.contains(&point)
            || Path::new(point).starts_with("/dev")
            || Path::new(point).starts_with("/proc");
        (!read_only && !known).then(|| format!("{point} is writable and would outlive a reset"))
    })
}

impl Baseline {
    /// Looks at the sandbox as it is. Fails where a reusable one is not fit for reuse.
    pub(crate) fn take(options: &Options) -> Result<Self, String> {
        let text = |error: io::Error| error.to_string();
        let wiped = writable(options);
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(text)?;
        if let Some(problem) = unwiped_mount(&mounts, &wiped) {
            return Err(problem);
        }
        let roots = wiped
            .into_iter()
            .map(|path| Ok((path.clone(), entry(&path)?)))
            .collect::<io::Result<_>>()
            .map_err(text)?;
        Ok(Self {
            mounts,
            process: sys::process_state().map_err(text)?,
            oom_score: std::fs::read_to_string("/proc/self/oom_score_adj").map_err(text)?,
            compared: compared().map_err(text)?,
            roots,
        })
    }

    /// Wipes, then compares. Every process but this one must already be dead.
    /// Fails with the first difference; the sandbox must then be thrown away.
    pub(crate) fn restore(&self, options: &Options) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        for path in writable(options) {
            let was = self.roots.get(&path).ok_or("a folder without a baseline")?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))
                .map_err(text)?;
            tree::wipe(&path).map_err(text)?;
            let mode = std::fs::Permissions::from_mode(was.mode & 0o7777);
            std::fs::set_permissions(&path, mode).map_err(text)?;
        }
        let found = compared().map_err(text)?;
        // Children sort after their parents: once a folder is gone, so are they.
        for path in found.keys().filter(|path| !self.compared.contains_key(*path)) {
            if std::fs::symlink_metadata(path).is_ok() {
                tree::remove_entry(path).map_err(text)?;
            }
        }
        for (kind, list) in IPC_LISTS {
            for id in ipc_ids(list)? {
                sys::remove_ipc(kind, id);
            }
        }
        self.verify(options)
    }

    fn verify(&self, options: &Options) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        for found in std::fs::read_dir("/proc").map_err(text)? {
            let name = found.map_err(text)?.file_name();
            if name != "1" && name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                return Err(format!("process {} is alive", name.display()));
            }
        }
        for path in writable(options) {
            if std::fs::read_dir(&path).map_err(text)?.next().is_some() {
                return Err(format!("{} is not empty", path.display()));
            }
        }
        for (_, list) in IPC_LISTS {
            if !ipc_ids(list)?.is_empty() {
                return Err(format!("{list} is not empty"));
            }
        }
        let now = Self::take(options)?;
        let same = [
            ("mounts", now.mounts == self.mounts),
            ("limits, priority or CPUs of process 1", now.process == self.process),
            ("oom score of process 1", now.oom_score == self.oom_score),
            ("/dev or the control groups' folder", now.compared == self.compared),
            ("owner or mode of a writable folder", now.roots == self.roots),
        ];
        match same.iter().find(|(_, same)| !same) {
            Some((what, _)) => Err(format!("changed: {what}")),
            None => Ok(()),
        }
    }
}

/// Ids in a `/proc/sysvipc` list: second column, after one line of titles.
fn ipc_ids(list: &str) -> Result<Vec<i32>, String> {
    match std::fs::read_to_string(list) {
        Ok(text) => text
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().nth(1).and_then(|id| id.parse().ok()))
            .collect::<Option<_>>()
            .ok_or_else(|| format!("{list} has an unknown form")),
        // A kernel without System V objects has none to remove.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("{list}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_volume_makes_a_sandbox_unfit_for_reuse() {
        let wiped = [PathBuf::from("/testbed"), PathBuf::from("/tmp")];
        let clean = "1 2 0:1 / / ro,relatime - overlay overlay rw\n\
                     2 1 0:2 / /proc rw,nosuid - proc proc rw\n\
                     3 1 0:3 / /dev rw - tmpfs tmpfs rw\n\
                     4 1 0:4 / /testbed rw - tmpfs tmpfs rw\n\
                     6 1 0:6 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                     5 1 0:5 / /etc/hosts ro - ext4 /dev/vda rw\n";
        assert_eq!(unwiped_mount(clean, &wiped), None);
        let volume = format!("{clean}7 1 0:7 / /data rw - ext4 /dev/vda rw\n");
        assert!(unwiped_mount(&volume, &wiped).unwrap().starts_with("/data"));
        assert!(unwiped_mount("1 2 0:1 / / rw - overlay overlay rw", &wiped).is_some());
    }

    #[test]
    fn a_snapshot_notices_a_replaced_entry() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("a", dir.path().join("x")).unwrap();
        let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
        snapshot(dir.path(), &mut before).unwrap();
        std::fs::remove_file(dir.path().join("x")).unwrap();
        std::fs::write(dir.path().join("x"), "").unwrap();
        snapshot(dir.path(), &mut after).unwrap();
        assert_ne!(before, after);
    }
}
