//! Properties of this process that commands of the same user can change.
#![expect(unsafe_code, reason = "limits and scheduling need system calls that std does not wrap")]

use super::check;
use std::ffi::c_int;
use std::io;

/// Number of `RLIMIT_*` kinds on Linux.
const RLIMITS: c_int = 16;
/// Properties that are text files of the process: how likely the kernel kills it when memory runs
/// out, and what a core dump of it contains. Commands can write both.
const FILES: [&str; 2] = ["/proc/self/oom_score_adj", "/proc/self/coredump_filter"];

#[repr(C)]
struct RLimit {
    soft: u64,
    hard: u64,
}

#[repr(C)]
struct SchedParam {
    priority: c_int,
}

// SAFETY: the signatures are those of the C library on 64-bit Linux, whose structures are declared above.
unsafe extern "C" {
    fn getrlimit(kind: c_int, limit: *mut RLimit) -> c_int;
    fn setrlimit(kind: c_int, limit: *const RLimit) -> c_int;
    fn getpriority(which: c_int, who: u32) -> c_int;
    fn setpriority(which: c_int, who: u32, priority: c_int) -> c_int;
    fn sched_getaffinity(pid: c_int, size: usize, mask: *mut u64) -> c_int;
    fn sched_setaffinity(pid: c_int, size: usize, mask: *const u64) -> c_int;
    fn sched_getscheduler(pid: c_int) -> c_int;
    fn sched_setscheduler(pid: c_int, policy: c_int, parameter: *const SchedParam) -> c_int;
}

/// Limits, priority, scheduling policy, CPUs, and the values of [`FILES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessState {
    limits: Vec<(u64, u64)>,
    priority: i32,
    scheduler: i32,
    cpus: [u64; 64],
    files: Vec<String>,
}

/// The current state of this process.
pub(crate) fn process_state() -> io::Result<ProcessState> {
    let mut limits = Vec::new();
    for kind in 0..RLIMITS {
        let mut limit = RLimit { soft: 0, hard: 0 };
        // SAFETY: `limit` can hold the result.
        check(unsafe { getrlimit(kind, &raw mut limit) })?;
        limits.push((limit.soft, limit.hard));
    }
    let mut cpus = [0; 64];
    // SAFETY: the mask has the given size; the other calls take plain integers.
    let (priority, scheduler) = unsafe {
        check(sched_getaffinity(0, size_of_val(&cpus), cpus.as_mut_ptr()))?;
        (getpriority(0, 0), sched_getscheduler(0))
    };
    let files = FILES.iter().map(read_if_present).collect::<io::Result<_>>()?;
    Ok(ProcessState { limits, priority, scheduler, cpus, files })
}

/// The text of a file; empty if this kernel does not have it.
fn read_if_present(path: &&str) -> io::Result<String> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        result => result,
    }
}

impl ProcessState {
    /// Gives this process back the properties that it had when this state was taken. Returns
    /// whether any had changed.
    ///
    /// # Errors
    /// A property cannot be read or restored. A lowered hard limit, for example, needs a
    /// capability that a sandbox does not have.
    pub(crate) fn restore(&self) -> io::Result<bool> {
        if process_state().is_ok_and(|now| now == *self) {
            return Ok(false);
        }
        self.set()?;
        let now = process_state()?;
        match self.difference(&now) {
            Some(property) => Err(io::Error::other(format!("{property} cannot be restored"))),
            None => Ok(true),
        }
    }

    /// Sets all properties. What could not be set is found when they are read again.
    fn set(&self) -> io::Result<()> {
        // The limits come first, because without open files nothing else can be restored.
        for (kind, &(soft, hard)) in (0..RLIMITS).zip(&self.limits) {
            let limit = RLimit { soft, hard };
            // SAFETY: the limit is only read.
            unsafe { setrlimit(kind, &raw const limit) };
        }
        let parameter = SchedParam { priority: 0 };
        // SAFETY: the parameter and the mask are only read, the mask has the given size, and the
        // other arguments are plain integers.
        unsafe {
            sched_setscheduler(0, self.scheduler, &raw const parameter);
            setpriority(0, 0, self.priority);
            sched_setaffinity(0, size_of_val(&self.cpus), self.cpus.as_ptr());
        }
        for (path, text) in FILES.iter().zip(&self.files).filter(|(_, text)| !text.is_empty()) {
            // The kernel prints the filter of core dumps in hexadecimal, without a prefix.
            let prefix = if path.ends_with("filter") { "0x" } else { "" };
            std::fs::write(path, format!("{prefix}{}", text.trim()))?;
        }
        Ok(())
    }

    /// The first property in which `other` differs.
    fn difference(&self, other: &Self) -> Option<&'static str> {
        let same = [
            ("a resource limit of process 1", self.limits == other.limits),
            ("the priority of process 1", self.priority == other.priority),
            ("the scheduling policy of process 1", self.scheduler == other.scheduler),
            ("the CPUs of process 1", self.cpus == other.cpus),
            ("the memory settings of process 1", self.files == other.files),
        ];
        same.into_iter().find(|(_, same)| !same).map(|(property, _)| property)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_state_is_restored_or_named() {
        let before = process_state().unwrap();
        assert!(!before.restore().unwrap());
        // The kernel does not know this policy.
        let mut other = before.clone();
        other.scheduler = 77;
        let error = other.restore().unwrap_err();
        assert_eq!(error.to_string(), "the scheduling policy of process 1 cannot be restored");
        assert_eq!(process_state().unwrap(), before);
    }
}
