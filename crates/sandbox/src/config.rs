//! The `[sandbox]` section: as written ([`RawSandboxConfig`]), and checked ([`SandboxConfig`]).

use crate::api::Limits;
use orchestrate_types::{ByteSize, ConfigProblem, HumanDuration};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Which system calls a sandbox may make.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Seccomp {
    /// Those of our own list: what Docker allows without capabilities, less `io_uring`, BPF, kernel
    /// keys, performance events, the mount calls, other processes' memory, sockets of rare
    /// families, and everything of foreign instruction sets.
    #[default]
    Strict,
    /// Those that the daemon allows by itself; some versions allow `io_uring`.
    Daemon,
}

/// What happens with an image that is not on the Docker host.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum PullPolicy {
    /// It is pulled.
    #[default]
    Missing,
    /// What needs it fails.
    Never,
}

/// The `[sandbox]` section of a run file; what is absent gets its default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RawSandboxConfig {
    /// Docker daemon, like `unix:///var/run/docker.sock` or `tcp://host:2375`. Default: the
    /// environment's `DOCKER_HOST`, else the usual socket.
    pub docker_host: Option<String>,
    /// Containers alive at once, agent and grader together, idle ones included. Twice the episodes
    /// in flight keeps reusable ones from being restarted. Default 16.
    pub max_containers: Option<usize>,
    /// Containers being started at once; more than two per core only queue. Default 4.
    pub start_parallelism: Option<usize>,
    /// Containers being removed at once. Default 4.
    pub remove_parallelism: Option<usize>,
    /// Longest wait for one answer of the daemon or of a sandbox's supervisor. Default `"60s"`.
    pub call_timeout: Option<HumanDuration>,
    /// Time a command's report may come late, on top of the command's own. Default `"30s"`.
    pub command_grace: Option<HumanDuration>,
    /// Memory of one container, without swap; both tmpfs count against it. Default `"1 GiB"`.
    pub memory: Option<ByteSize>,
    /// CPU share of one container, in thousandths of a core. Default 1000.
    pub cpu_millis: Option<u32>,
    /// Processes and threads of one container. Default 256.
    pub pids: Option<u32>,
    /// Size of each writable tmpfs (working directory, /tmp) of a reusable container. Default `"128 MiB"`.
    pub tmpfs: Option<ByteSize>,
    /// Which system calls are allowed: our own list, or the daemon's. Default `"strict"`.
    pub seccomp: Option<Seccomp>,
    /// Size of /dev/shm. Default `"64 MiB"`.
    pub shm: Option<ByteSize>,
    /// Largest file a command may write. Default `"2 GiB"`.
    pub file_size: Option<ByteSize>,
    /// Open files of one process. Default 4096.
    pub open_files: Option<u32>,
    /// Output after which a command gets one more second, then is killed. Default `"64 MiB"`.
    pub max_output: Option<ByteSize>,
    /// Whether clean reusable containers serve another attempt. Default true.
    pub reuse: Option<bool>,
    /// Age at which a reusable container is replaced. Default `"2h"`.
    pub reuse_lifetime: Option<HumanDuration>,
    /// No container is started with less free disk than this on the Docker host. Default `"2 GiB"`.
    pub min_free_disk: Option<ByteSize>,
    /// Whether images that are not on the Docker host are pulled. Default `"missing"`.
    pub pull: Option<PullPolicy>,
    /// Registry, like `mirror.local:5000`, from which images whose name names no registry are
    /// pulled. Default: Docker's own.
    pub mirror: Option<String>,
    /// Images being pulled at once. Default 2.
    pub pull_parallelism: Option<usize>,
    /// Images of the tasks that come next that are pulled before they are asked for. Default 4.
    pub pull_ahead: Option<usize>,
    /// Bytes of images that this program pulled (on this daemon, in any run) above which those used
    /// longest ago are removed; images in use, those of the next tasks, and such as have a name of
    /// somebody else's stay. Layers that images share count for each. Default: nothing is removed.
    pub image_cache: Option<ByteSize>,
}

/// The checked `[sandbox]` section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxConfig {
    /// Docker daemon; `None` = the environment's or the usual socket.
    pub docker_host: Option<String>,
    /// Containers alive at once, at least 2.
    pub max_containers: usize,
    /// Containers being started at once, at least 1.
    pub start_parallelism: usize,
    /// Containers being removed at once, at least 1.
    pub remove_parallelism: usize,
    /// Deadline of one daemon or supervisor call.
    pub call_timeout: HumanDuration,
    /// Added to a command's own time-out.
    pub command_grace: HumanDuration,
    /// Memory of one container.
    pub memory: ByteSize,
    /// Thousandths of a core.
    pub cpu_millis: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Each writable tmpfs.
    pub tmpfs: ByteSize,
    /// System calls.
    pub seccomp: Seccomp,
    /// /dev/shm.
    pub shm: ByteSize,
    /// Largest file.
    pub file_size: ByteSize,
    /// Open files of one process.
    pub open_files: u32,
    /// Output cap of one command.
    pub max_output: ByteSize,
    /// Whether containers are used again.
    pub reuse: bool,
    /// Age at which a reusable container is replaced.
    pub reuse_lifetime: HumanDuration,
    /// Floor of free disk.
    pub min_free_disk: ByteSize,
    /// Whether absent images are pulled.
    pub pull: PullPolicy,
    /// Registry before names without one.
    pub mirror: Option<String>,
    /// Images being pulled at once, at least 1.
    pub pull_parallelism: usize,
    /// Images pulled before they are asked for.
    pub pull_ahead: usize,
    /// Bytes of images that we pulled, at most; `None`: any.
    pub image_cache: Option<ByteSize>,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        RawSandboxConfig::default().with_defaults()
    }
}

impl RawSandboxConfig {
    /// The section with defaults filled in.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<SandboxConfig, Vec<ConfigProblem>> {
        let config = self.clone().with_defaults();
        let problems = config.problems();
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }

    fn with_defaults(self) -> SandboxConfig {
        SandboxConfig {
            docker_host: self.docker_host,
            max_containers: self.max_containers.unwrap_or(16),
            start_parallelism: self.start_parallelism.unwrap_or(4),
            remove_parallelism: self.remove_parallelism.unwrap_or(4),
            call_timeout: self.call_timeout.unwrap_or(HumanDuration::secs(60)),
            command_grace: self.command_grace.unwrap_or(HumanDuration::secs(30)),
            memory: self.memory.unwrap_or(ByteSize::mib(1024)),
            cpu_millis: self.cpu_millis.unwrap_or(1000),
            pids: self.pids.unwrap_or(256),
            tmpfs: self.tmpfs.unwrap_or(ByteSize::mib(128)),
            seccomp: self.seccomp.unwrap_or_default(),
            shm: self.shm.unwrap_or(ByteSize::mib(64)),
            file_size: self.file_size.unwrap_or(ByteSize::mib(2048)),
            open_files: self.open_files.unwrap_or(4096),
            max_output: self.max_output.unwrap_or(ByteSize::mib(64)),
            reuse: self.reuse.unwrap_or(true),
            reuse_lifetime: self.reuse_lifetime.unwrap_or(HumanDuration::secs(7200)),
            min_free_disk: self.min_free_disk.unwrap_or(ByteSize::mib(2048)),
            pull: self.pull.unwrap_or_default(),
            mirror: self.mirror,
            pull_parallelism: self.pull_parallelism.unwrap_or(2),
            pull_ahead: self.pull_ahead.unwrap_or(4),
            image_cache: self.image_cache,
        }
    }
}

impl SandboxConfig {
    /// The limits of one container, for [`SandboxSpec`](crate::SandboxSpec).
    pub fn limits(&self) -> Limits {
        Limits {
            memory: self.memory,
            cpu_millis: self.cpu_millis,
            pids: self.pids,
            tmpfs: self.tmpfs,
        }
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        let mut demand = |holds: bool, key: &str, value: String, remedy: &str| {
            if !holds {
                let key = format!("sandbox.{key}");
                problems.push(ConfigProblem { key, value, remedy: remedy.to_owned() });
            }
        };
        if let Some(host) = &self.docker_host {
            let known = ["unix://", "tcp://", "http://"].iter().any(|p| host.starts_with(p));
            demand(known, "docker_host", host.clone(), "start it with unix://, tcp:// or http://");
        }
        let count = self.max_containers;
        let fits = (2..=4096).contains(&count);
        demand(
            fits,
            "max_containers",
            count.to_string(),
            "use 2 (an agent and its grader) to 4096",
        );
        for (key, value) in [
            ("start_parallelism", self.start_parallelism),
            ("remove_parallelism", self.remove_parallelism),
            ("pull_parallelism", self.pull_parallelism),
        ] {
            demand((1..=256).contains(&value), key, value.to_string(), "use 1 to 256");
        }
        for (key, value) in [
            ("call_timeout", self.call_timeout),
            ("command_grace", self.command_grace),
            ("reuse_lifetime", self.reuse_lifetime),
        ] {
            let fits = (Duration::from_secs(1)..=Duration::from_hours(720)).contains(&value.0);
            demand(fits, key, value.to_string(), "use \"1s\" to \"720h\"");
        }
        let ahead = self.pull_ahead;
        demand(ahead <= 16, "pull_ahead", ahead.to_string(), "use 0 to 16");
        if let Some(mirror) = &self.mirror {
            let host = mirror.split('/').next().unwrap_or_default();
            let is_host = host.contains(['.', ':']) || host == "localhost";
            demand(
                is_host && !mirror.contains("://") && !mirror.ends_with('/'),
                "mirror",
                mirror.clone(),
                "name a registry as in an image's name, like \"mirror.local:5000\"",
            );
        }
        let fits = self.memory >= ByteSize::mib(32) && self.memory.0 <= 1 << 50;
        demand(fits, "memory", self.memory.to_string(), "use at least \"32 MiB\"");
        demand(self.cpu_millis >= 10, "cpu_millis", self.cpu_millis.to_string(), "use at least 10");
        demand(self.pids >= 8, "pids", self.pids.to_string(), "use at least 8");
        demand(self.open_files >= 64, "open_files", self.open_files.to_string(), "use at least 64");
        let writable = self.tmpfs.0.saturating_mul(2).saturating_add(self.shm.0);
        demand(
            self.tmpfs >= ByteSize::mib(1) && writable <= self.memory.0,
            "tmpfs",
            self.tmpfs.to_string(),
            "use at least \"1 MiB\", and so little that twice it and shm fit into memory, for files there count as memory",
        );
        for (key, value) in
            [("shm", self.shm), ("file_size", self.file_size), ("max_output", self.max_output)]
        {
            let fits = value >= ByteSize::mib(1) && value.0 <= 1 << 50;
            demand(fits, key, value.to_string(), "use at least \"1 MiB\"");
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_have_no_problems() {
        assert_eq!(RawSandboxConfig::default().check(), Ok(SandboxConfig::default()));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let raw = RawSandboxConfig {
            docker_host: Some("ssh://x".into()),
            max_containers: Some(1),
            start_parallelism: Some(0),
            tmpfs: Some(ByteSize::mib(600)),
            call_timeout: Some(HumanDuration::secs(0)),
            pull_parallelism: Some(0),
            mirror: Some("https://mirror.local".into()),
            ..RawSandboxConfig::default()
        };
        let problems = raw.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "sandbox.docker_host",
                "sandbox.max_containers",
                "sandbox.start_parallelism",
                "sandbox.pull_parallelism",
                "sandbox.call_timeout",
                "sandbox.mirror",
                "sandbox.tmpfs"
            ]
        );
    }
}
