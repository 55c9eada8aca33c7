//! What a file system keeps about a path besides its content: extended attributes, access control
//! lists, flags, project and times.
#![expect(unsafe_code, reason = "std does not wrap extended attributes, file flags and link times")]

use super::{O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK, check};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

const O_DIRECTORY: c_int =
    if cfg!(any(target_arch = "aarch64", target_arch = "arm")) { 0o40_000 } else { 0o200_000 };
/// Largest list of names, and largest value, that Linux returns.
const LARGEST: usize = 64 << 10;
const ENOTTY: i32 = 25;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

#[repr(C)]
struct TimeSpec {
    seconds: i64,
    nanoseconds: i64,
}

// SAFETY: the signatures are those of the C library on 64-bit Linux, whose structures are declared above.
unsafe extern "C" {
    fn llistxattr(path: *const c_char, list: *mut c_char, size: usize) -> isize;
    fn lgetxattr(
        path: *const c_char,
        name: *const c_char,
        value: *mut c_void,
        size: usize,
    ) -> isize;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn utimensat(folder: c_int, path: *const c_char, times: *const TimeSpec, flags: c_int)
    -> c_int;
}

/// Times of the last access and of the last modification, each in seconds and nanoseconds since
/// 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Times {
    pub(crate) accessed: (i64, i64),
    pub(crate) modified: (i64, i64),
}

/// Attributes that a plain `stat` does not show. Empty where the file system has none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Attributes {
    /// Extended attributes, which include access control lists.
    extended: BTreeMap<CString, Vec<u8>>,
    /// Flags (immutable, append-only, not dumped, …) of a folder.
    flags: Option<c_ulong>,
    /// Extended flags, extent size and project of a folder, as the kernel returns them.
    project: Option<[u32; 7]>,
}

/// Reads the attributes of a path itself, even if it is a symlink.
pub(crate) fn attributes(path: &Path) -> io::Result<Attributes> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let mut found = Attributes { extended: extended(&name)?, ..Attributes::default() };
    // Only folders are opened: opening a device can have effects of its own.
    if std::fs::symlink_metadata(path)?.is_dir() {
        const GET_FLAGS: c_ulong = request(b'f', 1, size_of::<c_long>());
        const GET_EXTENDED_FLAGS: c_ulong = request(b'X', 31, size_of::<[u32; 7]>());
        let (mut flags, mut project) = (0, [0_u32; 7]);
        let options = O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
        let folder = OpenOptions::new().read(true).custom_flags(options).open(path)?;
        // SAFETY: the descriptor is open, and both variables have the size that the requests name.
        let (flags_read, project_read) = unsafe {
            (
                check(ioctl(folder.as_raw_fd(), GET_FLAGS, &raw mut flags)),
                check(ioctl(folder.as_raw_fd(), GET_EXTENDED_FLAGS, project.as_mut_ptr())),
            )
        };
        found.flags = if_supported(flags_read)?.map(|_| flags);
        found.project = if_supported(project_read)?.map(|_| project);
    }
    Ok(found)
}

/// The number of a request that returns `size` bytes.
const fn request(group: u8, number: u8, size: usize) -> c_ulong {
    const READ: c_ulong = 2 << 30;
    READ | (size as c_ulong) << 16 | (group as c_ulong) << 8 | number as c_ulong
}

fn if_supported<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(error.raw_os_error(), Some(ENOTTY | EINVAL | ENOSYS | EOPNOTSUPP)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn length(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn extended(path: &CStr) -> io::Result<BTreeMap<CString, Vec<u8>>> {
    // Almost always there are none, which needs no buffer.
    // SAFETY: with size 0 the kernel writes nothing.
    let size = length(unsafe { llistxattr(path.as_ptr(), std::ptr::null_mut(), 0) });
    if if_supported(size)?.unwrap_or(0) == 0 {
        return Ok(BTreeMap::new());
    }
    let mut names = vec![0_u8; LARGEST];
    // SAFETY: the buffer has the given size.
    let size = length(unsafe { llistxattr(path.as_ptr(), names.as_mut_ptr().cast(), LARGEST) })?;
    names.truncate(size);
    let mut found = BTreeMap::new();
    let mut value = vec![0_u8; LARGEST];
    for name in names.split_inclusive(|byte| *byte == 0) {
        let name = CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
        // SAFETY: both strings end with a NUL, and the buffer has the given size.
        let size = length(unsafe {
            lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), LARGEST)
        })?;
        found.insert(name.to_owned(), value.get(..size).unwrap_or_default().to_vec());
    }
    Ok(found)
}

/// Sets the times of a path itself, even if it is a symlink.
pub(crate) fn set_times(path: &Path, times: Times) -> io::Result<()> {
    const AT_FDCWD: c_int = -100;
    const AT_SYMLINK_NOFOLLOW: c_int = 0x100;
    let name = CString::new(path.as_os_str().as_bytes())?;
    let time = |(seconds, nanoseconds): (i64, i64)| TimeSpec { seconds, nanoseconds };
    let values = [time(times.accessed), time(times.modified)];
    // SAFETY: the path ends with a NUL, and two times are given.
    check(unsafe { utimensat(AT_FDCWD, name.as_ptr(), values.as_ptr(), AT_SYMLINK_NOFOLLOW) })
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;
    use std::process::Command;

    /// A folder on a tmpfs, if there is one, and else in the usual place.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
    }

    #[test]
    fn attributes_differ_after_a_flag_was_set() {
        let dir = folder();
        let before = attributes(dir.path()).unwrap();
        let set = Command::new("chattr").arg("+d").arg(dir.path()).output();
        if set.is_ok_and(|set| set.status.success()) {
            assert_ne!(attributes(dir.path()).unwrap(), before);
        }
    }

    #[test]
    fn times_of_a_symlink_are_its_own() {
        let dir = folder();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let times = Times { accessed: (5, 6), modified: (7, 8) };
        set_times(&link, times).unwrap();
        let meta = std::fs::symlink_metadata(&link).unwrap();
        assert_eq!((meta.atime(), meta.atime_nsec()), times.accessed);
        assert_eq!((meta.mtime(), meta.mtime_nsec()), times.modified);
        assert_ne!(std::fs::metadata(dir.path()).unwrap().mtime(), 7);
        assert!(set_times(&dir.path().join("absent"), times).is_err());
    }
}
