//! Settings of the operating system and the allocator that a program makes when it starts.

use crate::error::OutputError;
use crate::{exit, output};
use rustix::fs::Mode;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use std::process::ExitCode;
use std::time::Duration;

/// jemalloc's options, zero-terminated, for the symbol `_rjem_malloc_conf` of a program.
///
/// Routing rows are allocated and freed by the gigabyte, in blocks of about ten KiB. The C library's
/// allocator returns such memory to the system at once, and faulting in a fresh page costs more than
/// all the work on the rows in it. jemalloc keeps freed pages; here for a minute, because turns are
/// seconds apart and its default of ten seconds would return most pages only to take them again.
/// Transparent huge pages are not requested: the system clears each of them in one go, and more than
/// one turn in a hundred waited some milliseconds for that, without any gain for the work on routing
/// rows. Blocks that are freed together merge into one large extent, and by default jemalloc takes
/// new pages rather than split an extent 64 times larger than the request: that limit is lifted.
pub const JEMALLOC_OPTIONS: &[u8] =
    b"background_thread:true,lg_extent_max_active_fit:16,dirty_decay_ms:60000\0";

/// Entries that the kernel's file descriptor table has from the start, 8 bytes each.
const DESCRIPTORS: u64 = 65_536;

/// Time that blocking tasks get to end after the command has ended.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// Runs a command on the async runtime, reports its error on standard error, and returns the exit
/// code. Call it once, before there are other threads.
pub fn block_on(command: impl Future<Output = anyhow::Result<ExitCode>>) -> ExitCode {
    keep_files_private();
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(async_threads())
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = anyhow::Error::from(error).context("failed to start the async runtime");
            return exit::report(&error);
        }
    };
    let result = runtime.block_on(Box::pin(command));
    // Engine and trainer threads may still be in a blocking task, and nothing waits for it.
    runtime.shutdown_timeout(SHUTDOWN);
    let result = match output::lost() {
        Some(error) => result.and(Err(OutputError::stdout(error).into())),
        None => result,
    };
    match result {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// Makes every file and folder that this process creates readable by its user alone: 0600 and 0700. Run
/// folders hold prompts, patches and logs of code that belongs to others, and the process's mask applies
/// to what libraries create as well, such as the journal and its write-ahead log. Files in sandboxes
/// have modes of their own.
fn keep_files_private() {
    umask(Mode::RWXG | Mode::RWXO);
}

/// Threads for tasks that mostly wait: a quarter of the processors. A turn is several hundred small
/// polls, and with one thread per processor the polls migrate: each starts on a cold cache, after
/// waking a thread. With 4,096 open episodes on two processors one thread took 390 and 470 µs of
/// CPU time per turn, two took 540 and 610. Computation has threads of its own.
fn async_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| processors.get().div_ceil(4))
}

/// Raises the limit of open files to what the system allows: every generation in flight is a
/// connection, and the usual limit is 1,024.
///
/// The kernel doubles the descriptor table when it is full, and in a process with several threads
/// it waits for an RCU grace period on all processors: 10 to 18 ms in which the event loop that
/// opened one connection too many stands still. So the table is made large while there is only one
/// thread; it never shrinks.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of open files was not raised");
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = i32::try_from(DESCRIPTORS.min(allowed).saturating_sub(1)).unwrap_or(0);
    // The descriptor is closed again at once; the table keeps its size.
    if let Err(error) = fcntl_dupfd_cloexec(rustix::stdio::stderr(), last) {
        tracing::debug!(%error, "the descriptor table was not enlarged");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_table_is_enlarged_at_start() {
        raise_open_files();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        let status = fs_err::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let size: u64 = size.trim().parse().unwrap();
        assert!(size >= DESCRIPTORS.min(limit.current.unwrap_or(u64::MAX)), "{size}");
    }
}
