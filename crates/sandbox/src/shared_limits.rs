//! Limits of the Docker host's kernel that all containers share, because it counts per user or for
//! the whole host. Where one container could use up what the others need, `orchestrate doctor` says
//! so.

use crate::api::{Command, SandboxProvider as _, SandboxSpec};
use crate::config::{SandboxSettings, Seccomp};
use crate::error::SandboxError;
use crate::provider::DockerProvider;
use std::time::Duration;

/// Prints each limit as `name value`, as a container sees it. A kernel that does not have one, like
/// gVisor's, prints nothing for it.
const SCRIPT: &str = "cd /proc/sys; for name in fs/pipe-user-pages-soft fs/epoll/max_user_watches \
                      fs/file-max fs/inotify/max_user_instances kernel/pid_max kernel/threads-max \
                      kernel/pty/max; do [ -r $name ] && echo $name $(cat $name); done; \
                      sed -n 's/^Max pending signals *\\([a-z0-9]*\\).*/sigpending \\1/p' /proc/self/limits";
/// Memory that the kernel charges to the container for one of each, in bytes, rounded down.
const EPOLL_WATCH_BYTES: u64 = 184;
const OPEN_FILE_BYTES: u64 = 192;
const QUEUED_SIGNAL_BYTES: u64 = 80;
const TERMINAL_BYTES: u64 = 16 << 10;
/// Largest number of terminals that the kernel accepts.
const MOST_TERMINALS: u64 = 1 << 20;
/// Processes that the host itself may need.
const HOST_PROCESSES: u64 = 4096;

/// A limit of the host that one container can use up for all others.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SharedLimit {
    /// Name as `sysctl` knows it, or a limit of processes.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// What happens to other containers, and how to prevent it.
    pub remedy: String,
}

impl std::fmt::Display for SharedLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} = {}: {}", self.name, self.value, self.remedy)
    }
}

impl DockerProvider {
    /// Reads the limits of the host's kernel, in a sandbox, and returns those that are too low for
    /// the largest number of containers.
    ///
    /// # Errors
    /// Any error of opening, using or closing the sandbox.
    pub async fn shared_limits(
        &self,
        spec: &SandboxSpec,
    ) -> Result<Vec<SharedLimit>, SandboxError> {
        let mut sandbox = self.open(spec).await?;
        let read = sandbox.exec(&Command::shell(SCRIPT, Duration::from_secs(10))).await?;
        sandbox.close().await?;
        Ok(too_low(&read.text(), &self.state.config))
    }
}

/// The value of a limit in the script's output; `None` if it is missing or `unlimited`.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The limits that are too low. A container is limited by its own memory where the kernel charges
/// it, so a shared limit is harmless if it is beyond what all containers' memory allows.
fn too_low(text: &str, config: &SandboxSettings) -> Vec<SharedLimit> {
    let containers = config.max_containers as u64;
    let memory = containers.saturating_mul(config.memory.0);
    let processes = containers.saturating_mul(u64::from(config.pids)) + HOST_PROCESSES;
    let raise = |needed: u64, what: &str| {
        (needed, format!("one container can use up {what} of all others; set it to {needed}"))
    };
    let checks = [
        ("fs.epoll.max_user_watches", raise(memory / EPOLL_WATCH_BYTES, "the epoll watches")),
        ("fs.file-max", raise(memory / OPEN_FILE_BYTES, "the open files")),
        ("kernel.pty.max", raise((memory / TERMINAL_BYTES).min(MOST_TERMINALS), "the terminals")),
        ("kernel.pid_max", raise(processes, "the process ids")),
        ("kernel.threads-max", raise(processes, "the threads")),
    ];
    let mut found: Vec<SharedLimit> = checks
        .into_iter()
        .filter_map(|(name, (needed, remedy))| {
            let value = value(text, &name.replace('.', "/"))?;
            (value < needed).then_some(SharedLimit { name, value, remedy })
        })
        .collect();
    // Zero means that there is no limit; the pages of a pipe are charged to its container.
    if let Some(pages) = value(text, "fs/pipe-user-pages-soft").filter(|pages| *pages > 0) {
        let remedy =
            "one container can use up the pages for pipes of all others, whose pipes then \
                      hold 8 KiB instead of 64; set it to 0, because their memory limits them"
                .to_owned();
        found.push(SharedLimit { name: "fs.pipe-user-pages-soft", value: pages, remedy });
    }
    if let Some(signals) = value(text, "sigpending").filter(|n| *n < memory / QUEUED_SIGNAL_BYTES) {
        let remedy = "one container can use up the queued signals and timers of all others; give \
                      the daemon the limit `infinity` (LimitSIGPENDING of its systemd unit)"
            .to_owned();
        found.push(SharedLimit { name: "pending signals", value: signals, remedy });
    }
    if let Some(count) = value(text, "fs/inotify/max_user_instances")
        && config.seccomp == Seccomp::Daemon
    {
        let remedy = "one container can use up the inotify instances of all others and of the \
                      host; use sandbox.seccomp = \"strict\", which denies inotify"
            .to_owned();
        found.push(SharedLimit { name: "fs.inotify.max_user_instances", value: count, remedy });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_types::ByteSize;

    fn names(text: &str, config: &SandboxSettings) -> Vec<&'static str> {
        too_low(text, config).iter().map(|limit| limit.name).collect()
    }

    #[test]
    fn limits_that_one_container_can_use_up_are_named_with_what_to_do() {
        let config = SandboxSettings {
            max_containers: 16,
            memory: ByteSize::mib(1024),
            pids: 256,
            ..SandboxSettings::default()
        };
        let usual = "fs/pipe-user-pages-soft 16384\nfs/epoll/max_user_watches 5491511\n\
                     fs/file-max 9223372036854775807\nfs/inotify/max_user_instances 128\n\
                     kernel/pid_max 4194304\nkernel/threads-max 192731\nkernel/pty/max 4096\n\
                     sigpending 96365\n";
        let expected = [
            "fs.epoll.max_user_watches",
            "kernel.pty.max",
            "fs.pipe-user-pages-soft",
            "pending signals",
        ];
        assert_eq!(names(usual, &config), expected);
        let remedy = too_low(usual, &config)[0].to_string();
        assert!(remedy.ends_with("set it to 93368854"), "{remedy}");
        let watching = SandboxSettings { seccomp: Seccomp::Daemon, ..config.clone() };
        assert_eq!(names(usual, &watching).last(), Some(&"fs.inotify.max_user_instances"));
        let many = SandboxSettings { max_containers: 4096, ..config.clone() };
        assert!(names(usual, &many).contains(&"kernel.threads-max"));

        let raised = "fs/pipe-user-pages-soft 0\nfs/epoll/max_user_watches 93368854\n\
                      kernel/pty/max 1048576\nsigpending unlimited\n";
        assert_eq!(names(raised, &config), Vec::<&str>::new());
        // A kernel without these limits.
        assert_eq!(names("", &config), Vec::<&str>::new());
    }
}
