//! C library calls that the standard library does not wrap. All unsafe code is in this module.
#![expect(unsafe_code, reason = "process control needs system calls that std does not wrap")]

mod attributes;
mod process;

pub(crate) use attributes::{Attributes, Times, attributes, set_times};
pub(crate) use process::{ProcessState, process_state};

use crate::disk::FreeSpace;
use std::ffi::{CStr, c_char, c_int, c_long, c_short, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::time::Duration;

pub(crate) const SIGTERM: c_int = 15;
pub(crate) const SIGKILL: c_int = 9;
pub(crate) const O_NOFOLLOW: c_int =
    if cfg!(any(target_arch = "aarch64", target_arch = "arm")) { 0o100_000 } else { 0o400_000 };
pub(crate) const O_NONBLOCK: c_int = 0o4000;
const SIGHUP: c_int = 1;
const SIGINT: c_int = 2;
const SIGCHLD: c_int = 17;
const O_CLOEXEC: c_int = 0o2_000_000;
const O_WRONLY: c_int = 1;
const SIG_DFL: usize = 0;
const SIG_IGN: usize = 1;
const ESRCH: i32 = 3;
const ECHILD: i32 = 10;
const EINTR: i32 = 4;

/// As large as glibc's and musl's `sigset_t`.
#[repr(C)]
struct SigSet([u64; 16]);

static NO_SIGNALS: SigSet = SigSet([0; 16]);
static CHILD_SIGNAL: SigSet =
    SigSet([1 << (SIGCHLD - 1), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: c_short,
    revents: c_short,
}

/// The first fields of `statvfs` in the C libraries of 64-bit platforms.
#[repr(C)]
#[derive(Default)]
struct StatVfs {
    block: u64,
    fragment: u64,
    blocks: u64,
    blocks_free: u64,
    blocks_available: u64,
    files: u64,
    files_free: u64,
    files_available: u64,
    rest: [u64; 16],
}

// SAFETY: the signatures are those of the C library on 64-bit Linux, whose structures are declared above.
unsafe extern "C" {
    fn prctl(option: c_int, ...) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn kill(pid: c_int, number: c_int) -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn signalfd(fd: c_int, mask: *const SigSet, flags: c_int) -> c_int;
    fn sigprocmask(how: c_int, set: *const SigSet, old: *mut SigSet) -> c_int;
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn statvfs(path: *const c_char, into: *mut StatVfs) -> c_int;
    fn setsid() -> c_int;
    fn geteuid() -> u32;
    fn open(path: *const u8, flags: c_int, ...) -> c_int;
    fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    fn shmctl(id: c_int, command: c_int, ...) -> c_int;
    fn msgctl(id: c_int, command: c_int, ...) -> c_int;
    fn semctl(id: c_int, index: c_int, command: c_int, ...) -> c_int;
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The user that this process and its commands run as.
pub(crate) fn user() -> u32 {
    // SAFETY: the call has no arguments and always succeeds.
    unsafe { geteuid() }
}

/// Protects this process from the commands: it is not dumpable (so that they cannot open
/// `/proc/1/fd` and `mem`), ignores the usual signals, and becomes the parent of every orphan.
pub(crate) fn harden_process() -> io::Result<()> {
    const PR_SET_DUMPABLE: c_int = 4;
    const PR_SET_CHILD_SUBREAPER: c_int = 36;
    const ON: c_ulong = 1;
    const OFF: c_ulong = 0;
    // SAFETY: these operations take plain integers.
    unsafe {
        check(prctl(PR_SET_DUMPABLE, OFF, OFF, OFF, OFF))?;
        check(prctl(PR_SET_CHILD_SUBREAPER, ON, OFF, OFF, OFF))?;
    }
    for number in [SIGTERM, SIGINT, SIGHUP] {
        // SAFETY: SIG_IGN is a valid disposition and installs no handler.
        unsafe { signal(number, SIG_IGN) };
    }
    Ok(())
}

/// Opens a descriptor that becomes readable when a child has ended. The signal itself is blocked.
pub(crate) fn open_child_signal() -> io::Result<File> {
    // SAFETY: the mask is as large as the C library's type; nothing else owns the new descriptor.
    unsafe {
        check(sigprocmask(0, &raw const CHILD_SIGNAL, std::ptr::null_mut()))?;
        let fd = check(signalfd(-1, &raw const CHILD_SIGNAL, O_CLOEXEC | O_NONBLOCK))?;
        Ok(File::from_raw_fd(fd))
    }
}

/// Makes the command start in its own session, with default signals, and as the kernel's first
/// choice when memory runs out (so that process 1 is not the one that is killed).
pub(crate) fn isolate_command(command: &mut Command) {
    let setup = || {
        // SAFETY: only async-signal-safe calls, on constants with a final NUL, between fork and
        // exec.
        unsafe {
            check(setsid())?;
            for number in [SIGTERM, SIGINT, SIGHUP] {
                signal(number, SIG_DFL);
            }
            check(sigprocmask(2, &raw const NO_SIGNALS, std::ptr::null_mut()))?;
            let fd = open(c"/proc/self/oom_score_adj".as_ptr().cast(), O_WRONLY | O_CLOEXEC);
            if fd >= 0 {
                write(fd, b"1000".as_ptr().cast(), 4);
                close(fd);
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes async-signal-safe calls only and allocates nothing.
    unsafe { command.pre_exec(setup) };
}

/// Sends a signal to a process group. A group that no longer exists is ignored.
pub(crate) fn signal_group(group: i32, number: c_int) {
    // SAFETY: plain integers.
    unsafe { kill(-group, number) };
}

/// Kills every process but this one. `false` if there was none.
pub(crate) fn kill_all() -> io::Result<bool> {
    // SAFETY: plain integers. Only process 1 of a pid namespace gets here, so -1 means the
    // container.
    match check(unsafe { kill(-1, SIGKILL) }) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(ESRCH) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reaps one ended child, if there is one.
pub(crate) fn reap() -> io::Result<Option<(i32, ExitStatus)>> {
    let mut status = 0;
    // SAFETY: `status` can hold the call's result; 1 is WNOHANG.
    match check(unsafe { waitpid(-1, &raw mut status, 1) }) {
        Ok(0) => Ok(None),
        Ok(pid) => Ok(Some((pid, ExitStatus::from_raw(status)))),
        Err(error) if error.raw_os_error() == Some(ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A descriptor to wait for. One that is waited for neither way is skipped, even if it is closed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watched<'a> {
    pub(crate) fd: BorrowedFd<'a>,
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// What a descriptor is ready for. If it failed or was closed, everything that was waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// Waits until a descriptor is ready. Returns what each is ready for; nothing after a timeout.
pub(crate) fn wait(fds: &[Watched<'_>], timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
    const POLLIN: c_short = 1;
    const POLLOUT: c_short = 4;
    let entry = |watched: &Watched<'_>| PollFd {
        // A negative descriptor is skipped.
        fd: if watched.read || watched.write { watched.fd.as_raw_fd() } else { -1 },
        events: if watched.read { POLLIN } else { 0 } | if watched.write { POLLOUT } else { 0 },
        revents: 0,
    };
    let mut polled: Vec<PollFd> = fds.iter().map(entry).collect();
    // One millisecond is added so that a wait never ends early.
    let millis = timeout.map_or(-1, |t| c_int::try_from(t.as_millis() + 1).unwrap_or(c_int::MAX));
    // SAFETY: the list is valid for its number of entries while the call runs.
    match check(unsafe { poll(polled.as_mut_ptr(), polled.len() as c_ulong, millis) }) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(EINTR) => {
            return Ok(vec![Ready::default(); fds.len()]);
        }
        Err(error) => return Err(error),
    }
    let ready = |(entry, watched): (&PollFd, &Watched<'_>)| {
        let failed = entry.revents & !(POLLIN | POLLOUT) != 0;
        Ready {
            read: watched.read && (failed || entry.revents & POLLIN != 0),
            write: watched.write && (failed || entry.revents & POLLOUT != 0),
        }
    };
    Ok(polled.iter().zip(fds).map(ready).collect())
}

/// Waits until a descriptor is readable or closed. Returns which are; all `false` after a timeout.
pub(crate) fn poll_readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let watched: Vec<Watched<'_>> =
        fds.iter().flatten().map(|&fd| Watched { fd, read: true, write: false }).collect();
    let mut ready = wait(&watched, timeout)?.into_iter();
    Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or_default().read))
}

/// Makes a pipe non-blocking. Its size stays as it is: the kernel limits the pipes of all
/// containers of one user together, and 64 enlarged ones would use that up.
pub(crate) fn make_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    const F_SETFL: c_int = 4;
    // SAFETY: the descriptor is borrowed and therefore open; the arguments are plain integers.
    check(unsafe { fcntl(fd.as_raw_fd(), F_SETFL, O_NONBLOCK) }).map(|_| ())
}

/// Free space on the file system of a path.
pub(crate) fn free_space(path: &CStr) -> io::Result<FreeSpace> {
    let mut stat = StatVfs::default();
    // SAFETY: the path ends with a NUL, and `stat` is larger than the C library's type.
    check(unsafe { statvfs(path.as_ptr(), &raw mut stat) })?;
    let counted = |total: u64, free: u64| if total == 0 { u64::MAX } else { free };
    Ok(FreeSpace {
        bytes: counted(stat.blocks, stat.blocks_available.saturating_mul(stat.fragment)),
        files: counted(stat.files, stat.files_available),
    })
}

/// Kinds of System V objects, which outlive the processes that create them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ipc {
    Shm,
    Sem,
    Msg,
}

/// Removes an object. Failures are ignored, because the list is read again afterwards.
pub(crate) fn remove_ipc(kind: Ipc, id: c_int) {
    const IPC_RMID: c_int = 0;
    const UNUSED: c_long = 0;
    // SAFETY: plain integers; a removal reads no further argument.
    unsafe {
        match kind {
            Ipc::Shm => shmctl(id, IPC_RMID, UNUSED),
            Ipc::Sem => semctl(id, 0, IPC_RMID, UNUSED),
            Ipc::Msg => msgctl(id, IPC_RMID, UNUSED),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_agrees_with_df() {
        let df = |what: &str| -> u64 {
            let output = Command::new("df").args(["--block-size=1", what, "/"]).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().nth(1).unwrap().trim().parse().unwrap()
        };
        let free = free_space(c"/").unwrap();
        // Other programs write at the same time.
        assert!(free.bytes.abs_diff(df("--output=avail")) < 4 << 30, "{free:?}");
        let inodes = df("--output=iavail");
        assert!(inodes == 0 || free.files.abs_diff(inodes) < 1 << 20, "{free:?} {inodes}");
        assert!(free_space(c"/no/such/path").is_err());
    }
}
