//! One command: how it is started, which part of its output is kept, and when it must end.

use crate::protocol::ExecRequest;
use crate::sys;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Limit of the bytes kept of each end of the output: process 1 shares the container's memory limit.
const MAX_KEEP: usize = 16 << 20;
const READ_BYTES: usize = 256 * 1024;
/// Time between TERM and KILL at a command's deadline.
pub(crate) const TERM_GRACE: Duration = Duration::from_secs(1);
/// How long a command may run after reaching its output cap, so that a merely noisy one can finish.
const FLOOD_GRACE: Duration = Duration::from_secs(1);

/// Variables that override the image's.
const OVERRIDES: [(&str, &str); 5] = [
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONUNBUFFERED", "1"),
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
    ("LANG", "C.UTF-8"),
];
/// Variables for images that do not set them.
const DEFAULTS: [(&str, &str); 2] =
    [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root")];

/// Defaults, then the image's environment, then the overrides, then the command's own variables.
fn environment(extra: &[(String, String)]) -> HashMap<String, String> {
    let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    };
    owned(&DEFAULTS)
        .into_iter()
        .chain(
            std::env::vars_os()
                .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))),
        )
        .chain(owned(&OVERRIDES))
        .chain(extra.iter().cloned())
        .collect()
}

/// The first and last bytes of a stream, and its length.
#[derive(Debug)]
pub(crate) struct KeptOutput {
    keep: usize,
    pub(crate) head: Vec<u8>,
    tail: Vec<u8>,
    pub(crate) total: u64,
}

impl KeptOutput {
    pub(crate) fn new(keep: u64) -> Self {
        let keep = usize::try_from(keep).unwrap_or(MAX_KEEP).min(MAX_KEEP);
        Self { keep, head: Vec::new(), tail: Vec::new(), total: 0 }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = (self.keep - self.head.len()).min(bytes.len());
        let (to_head, rest) = bytes.split_at(room);
        self.head.extend_from_slice(to_head);
        self.tail.extend_from_slice(rest);
        // Trimmed only when it has doubled, so that every byte is moved at most once.
        if self.tail.len() > 2 * self.keep + READ_BYTES {
            self.trim_tail();
        }
    }

    fn trim_tail(&mut self) {
        let excess = self.tail.len().saturating_sub(self.keep);
        self.tail.drain(..excess);
    }

    /// The last `keep` bytes of the output after the head.
    pub(crate) fn tail(&mut self) -> &[u8] {
        self.trim_tail();
        &self.tail
    }
}

/// A running command.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) pid: i32,
    output: Option<File>,
    pub(crate) kept: KeptOutput,
    pub(crate) started: Instant,
    deadline: Instant,
    max_output: u64,
    over_output_since: Option<Instant>,
    pub(crate) status: Option<ExitStatus>,
    buffer: Vec<u8>,
}

/// Why a command did not start.
#[derive(Debug)]
pub(crate) enum StartError {
    /// The command is at fault: missing, not executable, a folder, or with arguments that are too
    /// long.
    Command(String),
    /// The system is at fault: no process or no memory could be allocated.
    System(io::Error),
}

impl Job {
    pub(crate) fn start(request: &ExecRequest, workdir: &str) -> Result<Self, StartError> {
        const ENOEXEC: i32 = 8;
        const ELOOP: i32 = 40;
        let Some((program, args)) = request.argv.split_first() else {
            return Err(StartError::Command("the command is empty".to_owned()));
        };
        if !std::fs::metadata(workdir).is_ok_and(|found| found.is_dir()) {
            return Err(StartError::Command(format!(
                "the working directory {workdir} does not exist"
            )));
        }
        let (reader, writer) = io::pipe().map_err(StartError::System)?;
        sys::make_nonblocking(reader.as_fd()).map_err(StartError::System)?;
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .envs(environment(&request.env))
            .current_dir(workdir)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(StartError::System)?)
            .stderr(writer);
        sys::isolate_command(&mut command);
        let started = Instant::now();
        let child = command.spawn().map_err(|error| {
            let is_commands_fault = matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::IsADirectory
                    | io::ErrorKind::ArgumentListTooLong
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::InvalidFilename
                    | io::ErrorKind::ExecutableFileBusy
            ) || matches!(error.raw_os_error(), Some(ENOEXEC | ELOOP));
            if is_commands_fault {
                StartError::Command(format!("cannot start `{program}`: {error}"))
            } else {
                StartError::System(error)
            }
        })?;
        let pid = i32::try_from(child.id()).map_err(|e| StartError::System(io::Error::other(e)))?;
        // `command` holds the other end of the pipe; while it lives, reads never see the end.
        drop(command);
        Ok(Self {
            pid,
            output: Some(File::from(OwnedFd::from(reader))),
            kept: KeptOutput::new(request.keep),
            started,
            deadline: started + Duration::from_millis(request.timeout_ms),
            max_output: request.max_output,
            over_output_since: None,
            status: None,
            buffer: vec![0; READ_BYTES],
        })
    }

    pub(crate) fn output(&self) -> Option<BorrowedFd<'_>> {
        self.output.as_ref().map(File::as_fd)
    }

    /// Reads available output once. `false` if there was none.
    pub(crate) fn read_available(&mut self) -> io::Result<bool> {
        let Some(output) = &mut self.output else { return Ok(false) };
        match output.read(&mut self.buffer) {
            Ok(0) => {
                self.output = None;
                Ok(false)
            }
            Ok(count) => {
                self.kept.push(self.buffer.get(..count).unwrap_or_default());
                if self.kept.total > self.max_output && self.over_output_since.is_none() {
                    self.over_output_since = Some(Instant::now());
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn timed_out(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    pub(crate) fn exceeded_output(&self, now: Instant) -> bool {
        self.over_output_since.is_some_and(|since| now >= since + FLOOD_GRACE)
    }

    /// When to check again even if nothing happens.
    pub(crate) fn next_check(&self) -> Instant {
        self.over_output_since.map_or(self.deadline, |since| self.deadline.min(since + FLOOD_GRACE))
    }
}

/// Processes of this container that the kernel killed for lack of memory so far (cgroup v1 and v2).
pub(crate) fn oom_kills() -> u32 {
    // Version 1 first: with it, a command could create a file at the path of version 2.
    ["/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .find_map(|text| {
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prop_kept_output_is_both_ends_of_the_stream(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..400), 0..20),
            keep in 0_u64..600,
        ) {
            let mut kept = KeptOutput::new(keep);
            for piece in &pieces {
                kept.push(piece);
            }
            let all: Vec<u8> = pieces.concat();
            let keep = usize::try_from(keep).unwrap();
            let cut = keep.min(all.len());
            let (head, rest) = all.split_at(cut);
            assert_eq!(kept.total, all.len() as u64);
            assert_eq!(kept.head, head);
            assert_eq!(kept.tail(), &rest[rest.len().saturating_sub(keep)..]);
        }
    }

    #[test]
    fn kept_output_of_a_long_stream_is_bounded() {
        let mut kept = KeptOutput::new(1000);
        let piece = vec![7; READ_BYTES];
        for _ in 0..200 {
            kept.push(&piece);
            assert!(kept.tail.len() <= 2 * 1000 + 2 * READ_BYTES);
        }
        assert_eq!(kept.tail().len(), 1000);
    }

    #[test]
    fn variables_of_the_command_override_the_supervisors() {
        let env = environment(&[("LANG".into(), "de".into()), ("X".into(), "1".into())]);
        assert_eq!(env["LANG"], "de");
        assert_eq!(env["PAGER"], "cat");
        assert!(env.contains_key("PATH"));
    }
}
