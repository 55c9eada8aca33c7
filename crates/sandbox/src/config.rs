//! The `[sandbox]` section: as written ([`RawSandboxConfig`]), and checked ([`SandboxConfig`]).

use crate::api::SandboxLimits;
use crate::host::{DockerHost, RawDockerHost};
use crate::isolation::UserNamespace;
use orchestrate_types::{ByteSize, ConfigProblem, HumanDuration};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Containers alive at once on one host.
const CONTAINERS: RangeInclusive<usize> = 2..=4096;
const CONTAINERS_REMEDY: &str = "use 2 (an agent and its grader) to 4096";

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
    /// Docker daemon, where there is one: `unix:///var/run/docker.sock`, `tcp://host:2375`,
    /// `ssh://user@host`. Default: the environment's `DOCKER_HOST`, else the usual socket.
    pub docker_host: Option<String>,
    /// Several Docker hosts, in place of `docker_host`.
    pub hosts: Option<Vec<RawDockerHost>>,
    /// Containers alive at once on each Docker host, agent and grader together, idle ones included.
    /// Twice the episodes in flight, over all hosts, keeps reusable ones from being restarted.
    /// Default 16.
    pub max_containers: Option<usize>,
    /// Containers being started at once on each host; more than two per core only queue. Default 4.
    pub start_parallelism: Option<usize>,
    /// Containers being removed at once on each host. Default 4.
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
    /// What runs containers, by the daemon's own name for it: `runc`, or one with a kernel of its
    /// own, like gVisor's `runsc`. A daemon without it is refused. Default: the daemon's default.
    pub runtime: Option<String>,
    /// Whether a daemon is refused whose containers' root is root of the host (no userns-remap, not
    /// rootless). Default `"optional"`: it is not, and `orchestrate doctor` warns.
    pub user_namespace: Option<UserNamespace>,
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
    /// What runs in a writable root while less than 256 MiB are free has no result all the same.
    pub min_free_disk: Option<ByteSize>,
    /// Whether images that are not on the Docker host are pulled. Default `"missing"`.
    pub pull: Option<PullPolicy>,
    /// Registry, like `mirror.local:5000`, from which images whose name names no registry are
    /// pulled. Default: Docker's own.
    pub mirror: Option<String>,
    /// Images being pulled at once by each host. Default 2.
    pub pull_parallelism: Option<usize>,
    /// Images of the tasks that come next that each host pulls before they are asked for. Default 4.
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
    /// The Docker hosts; none: the one above.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<DockerHost>,
    /// Containers alive at once on each host that does not say otherwise, at least 2.
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
    /// What runs containers; `None`: the daemon's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Whether users must be mapped.
    pub user_namespace: UserNamespace,
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
        let mut problems = Vec::new();
        let hosts = self.hosts.iter().flatten().enumerate();
        let hosts =
            hosts.map(|(at, host)| host.check(&format!("sandbox.hosts[{at}]"), &mut problems));
        let hosts = hosts.collect();
        let config = SandboxConfig { hosts, ..self.clone().with_defaults() };
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }

    /// Without its hosts, which have no defaults.
    fn with_defaults(self) -> SandboxConfig {
        SandboxConfig {
            docker_host: self.docker_host,
            hosts: Vec::new(),
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
            runtime: self.runtime,
            user_namespace: self.user_namespace.unwrap_or_default(),
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
    pub fn limits(&self) -> SandboxLimits {
        SandboxLimits {
            memory: self.memory,
            cpu_millis: self.cpu_millis,
            pids: self.pids,
            tmpfs: self.tmpfs,
        }
    }

    /// The Docker hosts, at least one.
    pub fn docker_hosts(&self) -> Vec<DockerHost> {
        if self.hosts.is_empty() {
            return vec![DockerHost::single(self.docker_host.as_deref())];
        }
        self.hosts.clone()
    }

    /// The same settings for one of the hosts alone.
    #[must_use]
    pub fn on(&self, host: &DockerHost) -> Self {
        Self {
            docker_host: None,
            max_containers: host.max_containers.unwrap_or(self.max_containers),
            hosts: vec![DockerHost { max_containers: None, ..host.clone() }],
            ..self.clone()
        }
    }

    /// Containers alive at once on all hosts.
    pub fn capacity(&self) -> usize {
        self.docker_hosts().iter().map(|host| self.on(host).max_containers).sum()
    }

    fn host_problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        if let Some(host) = &self.docker_host {
            if !self.hosts.is_empty() {
                let remedy = "name hosts here or in sandbox.hosts, not in both (sandbox.hosts=[] \
                              takes an earlier list back)";
                problems.push(ConfigProblem::new("sandbox.docker_host", host, remedy));
            } else if let Err(remedy) = DockerHost::single(Some(host)).transport() {
                problems.push(ConfigProblem::new("sandbox.docker_host", host, remedy.to_string()));
            }
        }
        let (mut titles, mut urls) = (HashSet::new(), HashSet::new());
        for (at, host) in self.hosts.iter().enumerate() {
            let mut wrong = |key: &str, value: String, remedy: &str| {
                let key = format!("sandbox.hosts[{at}].{key}");
                problems.push(ConfigProblem { key, value, remedy: remedy.to_owned() });
            };
            if !urls.insert(&host.url) {
                // Two schedulers on one daemon would each think it theirs.
                wrong("url", host.url.clone(), "name each daemon once");
            } else if !titles.insert(host.title()) {
                wrong("name", host.title().to_owned(), "give each host a name of its own");
            }
            if let Some(count) = host.max_containers.filter(|count| !CONTAINERS.contains(count)) {
                wrong("max_containers", count.to_string(), CONTAINERS_REMEDY);
            }
        }
        problems
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        let mut problems = self.host_problems();
        let mut demand = |holds: bool, key: &str, value: String, remedy: &str| {
            if !holds {
                let key = format!("sandbox.{key}");
                problems.push(ConfigProblem { key, value, remedy: remedy.to_owned() });
            }
        };
        let count = self.max_containers;
        demand(CONTAINERS.contains(&count), "max_containers", count.to_string(), CONTAINERS_REMEDY);
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
            docker_host: Some("fd://x".into()),
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
    fn hosts(hosts: Vec<RawDockerHost>) -> RawSandboxConfig {
        RawSandboxConfig { hosts: Some(hosts), max_containers: Some(8), ..Default::default() }
    }

    fn at(url: &str) -> RawDockerHost {
        RawDockerHost { url: Some(url.into()), ..RawDockerHost::default() }
    }

    #[test]
    fn hosts_have_a_capacity_of_their_own_or_that_of_the_section() {
        let large = RawDockerHost { max_containers: Some(32), ..at("ssh://me@large") };
        let config = hosts(vec![large, at("unix:///run/docker.sock")]).check().unwrap();
        let each: Vec<usize> =
            config.docker_hosts().iter().map(|host| config.on(host).max_containers).collect();
        assert_eq!((each.as_slice(), config.capacity()), ([32, 8].as_slice(), 40));
        let alone = config.on(&config.hosts[0]);
        assert_eq!((alone.capacity(), alone.docker_hosts().len()), (32, 1));
        assert_eq!(SandboxConfig::default().docker_hosts().len(), 1);
    }

    #[test]
    fn hosts_that_cannot_be_told_apart_or_reached_are_named() {
        let named = |name: &str, url| RawDockerHost { name: Some(name.into()), ..at(url) };
        let raw = RawSandboxConfig {
            docker_host: Some("unix:///x".into()),
            ..hosts(vec![
                at("tcp://a:1"),
                at("tcp://a:1"),
                named("tcp://a:1", "tcp://b:1"),
                at("https://c:1"),
                RawDockerHost::default(),
                RawDockerHost { max_containers: Some(1), ..at("tcp://d:1") },
            ])
        };
        let problems = raw.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "sandbox.hosts[3].url",
                "sandbox.hosts[4].url",
                "sandbox.docker_host",
                "sandbox.hosts[1].url",
                "sandbox.hosts[2].name",
                "sandbox.hosts[5].max_containers",
            ]
        );
    }
}
