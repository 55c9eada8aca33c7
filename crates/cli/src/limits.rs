//! What the system allows this process.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that the kernel's table has room for from the beginning: 8 bytes each.
const ROOM: u64 = 65_536;

/// Lets this process open as many files as the system allows it: every generation under way is a
/// connection, and the usual limit is 1,024.
///
/// The kernel doubles the table of descriptors when it is full, and where a process has several
/// threads it waits for all processors to have noticed: 10 to 18 ms, in which the event loop that
/// opened one connection too many does nothing. So the table is made large before there are
/// others; it never shrinks.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = i32::try_from(ROOM.min(allowed).saturating_sub(1)).unwrap_or(0);
    // The descriptor is closed at once; the table stays.
    if let Err(error) = fcntl_dupfd_cloexec(rustix::stdio::stderr(), last) {
        tracing::debug!(%error, "the table of descriptors grows when it is needed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_descriptors_has_room() {
        raise_open_files();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        let status = fs_err::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let size: u64 = size.trim().parse().unwrap();
        assert!(size >= ROOM.min(limit.current.unwrap_or(u64::MAX)), "{size}");
    }
}
