//! The section `[sandbox]`.

use crate::api::SandboxLimits;
use crate::host::{DockerHost, containers};
use orchestrate_settings::{
    Problems, Range, at_least, at_most, between, satisfies, setting_types, settings,
};
use orchestrate_types::{ByteSize, HumanDuration};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Which system calls a sandbox may make.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Seccomp {
    /// Those of this program's list: what Docker allows without capabilities, without `io_uring`,
    /// BPF, kernel keys, performance events, mounts, other processes' memory, rare socket families
    /// and foreign instruction sets.
    #[default]
    Strict,
    /// Those that the daemon allows by default; some versions allow `io_uring`.
    Daemon,
}

/// What happens with an image that is not on the Docker host.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum PullPolicy {
    /// The image is pulled.
    #[default]
    Missing,
    /// Sandboxes that need the image fail.
    Never,
}

/// Whether root in a container must be an unprivileged user of the host.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum UserNamespace {
    /// The daemon's configuration decides.
    #[default]
    Optional,
    /// A daemon that does not map users is refused.
    Required,
}

setting_types!(Seccomp, PullPolicy, UserNamespace);

settings! {
    /// Containers, and the Docker hosts that run them.
    #[derive(Eq)]
    [sandbox] pub SandboxSection -> SandboxSettings, check: check_together;

    /// Docker daemon, as in `DOCKER_HOST`: `unix:///var/run/docker.sock`, `tcp://host:2375` or
    /// `ssh://user@host`.
    docker_host: Option<String> = None => "the environment's `DOCKER_HOST`, else the usual socket";
    /// Several Docker hosts, instead of `docker_host`; see `[[sandbox.hosts]]`.
    hosts: Vec<DockerHost> = Vec::new();
    /// Containers alive at once on each Docker host, agents and graders together, idle ones
    /// included. Twice the episodes in flight, over all hosts, avoids restarting reusable ones.
    max_containers: usize = 16, containers();
    /// Containers being started at once on each host; more than two per core only queue.
    start_parallelism: usize = 4, between(1, 256);
    /// Containers being removed at once on each host.
    remove_parallelism: usize = 4, between(1, 256);
    /// Time limit of one call to the daemon or to a sandbox's supervisor.
    call_timeout: HumanDuration = HumanDuration::secs(60), times();
    /// Time that a command's result may take beyond the time limit of the command itself.
    command_grace: HumanDuration = HumanDuration::secs(30), times();
    /// Memory of one container, without swap. Both tmpfs count towards it.
    memory: ByteSize = ByteSize::mib(1024), between(ByteSize::mib(32), LARGEST);
    /// CPU share of one container, in thousandths of a core.
    cpu_millis: u32 = 1000, at_least(10);
    /// Processes and threads of one container.
    pids: u32 = 256, at_least(8);
    /// Size of each writable tmpfs (working directory and /tmp) of a reusable container.
    tmpfs: ByteSize = ByteSize::mib(128), at_least(ByteSize::mib(1));
    /// Which system calls are allowed.
    seccomp: Seccomp = Seccomp::default();
    /// Container runtime, as the daemon names it: `runc`, or one with its own kernel, like gVisor's
    /// `runsc`. A daemon without this runtime is refused.
    runtime: Option<String> = None => "the daemon's default";
    /// Whether a daemon is refused if root in its containers is root of the host (neither
    /// userns-remap nor rootless). With `optional` it is not refused, and `orchestrate doctor`
    /// warns.
    user_namespace: UserNamespace = UserNamespace::default();
    /// Size of /dev/shm.
    shm: ByteSize = ByteSize::mib(64), between(ByteSize::mib(1), LARGEST);
    /// Largest file that a command may write.
    file_size: ByteSize = ByteSize::mib(2048), between(ByteSize::mib(1), LARGEST);
    /// Open files of one process.
    open_files: u32 = 4096, at_least(64);
    /// Output after which a command gets one more second, and is then killed.
    max_output: ByteSize = ByteSize::mib(64), between(ByteSize::mib(1), LARGEST);
    /// Whether clean reusable containers serve another attempt.
    reuse: bool = true;
    /// Age at which a reusable container is replaced.
    reuse_lifetime: HumanDuration = HumanDuration::secs(7200), times();
    /// Free disk space on the Docker host below which no container is started there. An attempt that
    /// ran in a writable root while less than 256 MiB were free counts as broken, unless its own commands
    /// had put more than `disk` there.
    min_free_disk: ByteSize = ByteSize::mib(2048);
    /// What the commands of one container may put on the host's disk if that becomes full: those that put
    /// more are the reason, and the attempt has no reward and is not repeated. One file counts as 16 KiB at
    /// least. A host whose disk has room for this many bytes per container in addition to
    /// `min_free_disk` is not filled by containers that stay below.
    disk: Option<ByteSize> = None => "half of min_free_disk", at_least(ByteSize::mib(1));
    /// What happens if an image is not on the Docker host.
    pull: PullPolicy = PullPolicy::default();
    /// Registry from which images are pulled whose name does not start with a registry, e.g.
    /// `mirror.local:5000`.
    mirror: Option<String> = None => "Docker Hub",
        satisfies(
            is_registry,
            "a registry as in the name of an image",
            "must be a registry as in the name of an image, like \"mirror.local:5000\"",
        );
    /// Images being pulled at once by each host.
    pull_parallelism: usize = 2, between(1, 256);
    /// Images of the next tasks that each host pulls before they are needed.
    pull_ahead: usize = 4, at_most(16);
    /// Total size of the images that this program pulled (on this daemon, in any run) above which
    /// the least recently used are removed. Images that are in use, belong to the next tasks or
    /// were named by others stay. Layers that several images share count for each of them.
    image_cache: Option<ByteSize> = None => "no image is removed";
}

/// Largest size that is accepted: 1 PiB.
const LARGEST: ByteSize = ByteSize(1 << 50);

fn times() -> Range<HumanDuration> {
    between(HumanDuration::secs(1), HumanDuration::secs(720 * 3600))
}

fn is_registry(name: &str) -> bool {
    let host = name.split('/').next().unwrap_or_default();
    let is_host = host.contains(['.', ':']) || host == "localhost";
    is_host && !name.contains("://") && !name.ends_with('/')
}

fn check_together(written: &SandboxSection, settings: &SandboxSettings, problems: &mut Problems) {
    check_hosts(settings, problems);
    if !settings.reuse {
        problems.refuse_unread(
            written,
            &["reuse_lifetime"],
            "only applies with sandbox.reuse = true",
        );
    }
    if settings.pull == PullPolicy::Never {
        let keys = ["mirror", "pull_parallelism", "pull_ahead", "image_cache"];
        problems.refuse_unread(written, &keys, "only applies with sandbox.pull = \"missing\"");
    }
    let writable = settings.tmpfs.0.saturating_mul(2).saturating_add(settings.shm.0);
    if !problems.has("tmpfs") && !problems.has("shm") && !problems.has("memory") {
        problems.require(
            writable <= settings.memory.0,
            "tmpfs",
            settings.tmpfs,
            "must be small enough that twice it and shm fit into memory: files there count as \
             memory",
        );
    }
}

fn check_hosts(settings: &SandboxSettings, problems: &mut Problems) {
    if let Some(host) = &settings.docker_host {
        if !settings.hosts.is_empty() {
            let remedy = "must be left out when sandbox.hosts is set (sandbox.hosts=[] removes an \
                          earlier list)";
            problems.refuse("docker_host", host, remedy.to_string());
        } else if let Err(remedy) = DockerHost::single(Some(host)).transport() {
            problems.refuse("docker_host", host, remedy.to_string());
        }
    }
    let (mut titles, mut urls) = (HashSet::new(), HashSet::new());
    for (index, host) in settings.hosts.iter().enumerate() {
        problems.within(&format!("hosts[{index}]"), |problems| {
            if host.url.is_empty() {
                problems.missing("url", "must be the daemon's address, like \"ssh://user@host\"");
            } else if let Err(remedy) = host.transport() {
                problems.refuse("url", &host.url, remedy.to_string());
            }
            if !urls.insert(&host.url) {
                // Two schedulers on one daemon would each use its whole capacity.
                problems.refuse("url", &host.url, "must be another daemon than the hosts above");
            } else if !titles.insert(host.title()) {
                problems.refuse("name", host.title(), "must differ from those of the hosts above");
            }
        });
    }
}

impl SandboxSettings {
    /// The limits of one container, for [`SandboxSpec`](crate::SandboxSpec).
    pub fn limits(&self) -> SandboxLimits {
        SandboxLimits {
            memory: self.memory,
            cpu_millis: self.cpu_millis,
            pids: self.pids,
            tmpfs: self.tmpfs,
        }
    }

    /// The checked [`SandboxSettings::disk`], or its default.
    pub fn disk_limit(&self) -> ByteSize {
        self.disk.unwrap_or(ByteSize(self.min_free_disk.0 / 2))
    }

    /// The Docker hosts, at least one.
    pub fn docker_hosts(&self) -> Vec<DockerHost> {
        if self.hosts.is_empty() {
            return vec![DockerHost::single(self.docker_host.as_deref())];
        }
        self.hosts.clone()
    }

    /// The same settings with `host` as the only host.
    #[must_use]
    pub fn on(&self, host: &DockerHost) -> Self {
        Self {
            docker_host: None,
            max_containers: host.max_containers.unwrap_or(self.max_containers),
            hosts: vec![DockerHost { max_containers: None, ..host.clone() }],
            ..self.clone()
        }
    }

    /// Largest number of containers alive at once on all hosts together.
    pub fn capacity(&self) -> usize {
        self.docker_hosts().iter().map(|host| self.on(host).max_containers).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::DockerHostSection;
    use orchestrate_settings::SectionKeys as _;

    #[test]
    fn defaults_have_no_problems() {
        assert_eq!(SandboxSection::default().check(), Ok(SandboxSettings::default()));
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let raw = SandboxSection {
            docker_host: Some("fd://x".into()),
            max_containers: Some(1),
            start_parallelism: Some(0),
            tmpfs: Some(ByteSize::mib(600)),
            call_timeout: Some(HumanDuration::secs(0)),
            pull_parallelism: Some(0),
            mirror: Some("https://mirror.local".into()),
            ..SandboxSection::default()
        };
        let problems = raw.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "sandbox.max_containers",
                "sandbox.start_parallelism",
                "sandbox.call_timeout",
                "sandbox.mirror",
                "sandbox.pull_parallelism",
                "sandbox.docker_host",
                "sandbox.tmpfs"
            ]
        );
    }

    #[test]
    fn keys_that_nothing_reads_are_refused_by_name() {
        let refused = |section: SandboxSection| -> Vec<String> {
            let problems = section.check().err().unwrap_or_default();
            assert!(problems.iter().all(|p| p.remedy.starts_with("only applies with sandbox.")));
            problems.into_iter().map(|problem| problem.key).collect()
        };
        let all = SandboxSection {
            reuse_lifetime: Some(HumanDuration::secs(60)),
            mirror: Some("m:5000".into()),
            pull_parallelism: Some(3),
            pull_ahead: Some(3),
            image_cache: Some(ByteSize::mib(1024)),
            ..SandboxSection::default()
        };
        assert_eq!(refused(all.clone()), [""; 0]);
        let once = SandboxSection { reuse: Some(false), ..all.clone() };
        assert_eq!(refused(once), ["sandbox.reuse_lifetime"]);
        let never = SandboxSection { pull: Some(PullPolicy::Never), ..all };
        assert_eq!(
            refused(never),
            ["mirror", "pull_parallelism", "pull_ahead", "image_cache"]
                .map(|key| format!("sandbox.{key}"))
        );
        // Defaults, as a plan has them written out.
        let defaults =
            SandboxSettings { reuse: false, pull: PullPolicy::Never, ..SandboxSettings::default() };
        assert_eq!(refused(SandboxSection::from_values(&defaults)), [""; 0]);
    }

    fn hosts(hosts: Vec<DockerHostSection>) -> SandboxSection {
        SandboxSection { hosts: Some(hosts), max_containers: Some(8), ..Default::default() }
    }

    fn at(url: &str) -> DockerHostSection {
        DockerHostSection { url: Some(url.into()), ..DockerHostSection::default() }
    }

    #[test]
    fn hosts_without_a_capacity_have_that_of_the_section() {
        let large = DockerHostSection { max_containers: Some(32), ..at("ssh://me@large") };
        let config = hosts(vec![large, at("unix:///run/docker.sock")]).check().unwrap();
        let each: Vec<usize> =
            config.docker_hosts().iter().map(|host| config.on(host).max_containers).collect();
        assert_eq!((each.as_slice(), config.capacity()), ([32, 8].as_slice(), 40));
        let alone = config.on(&config.hosts[0]);
        assert_eq!((alone.capacity(), alone.docker_hosts().len()), (32, 1));
        assert_eq!(SandboxSettings::default().docker_hosts().len(), 1);
    }

    #[test]
    fn hosts_with_invalid_or_equal_addresses_are_refused() {
        let named = |name: &str, url| DockerHostSection { name: Some(name.into()), ..at(url) };
        let raw = SandboxSection {
            docker_host: Some("unix:///x".into()),
            ..hosts(vec![
                at("tcp://a:1"),
                at("tcp://a:1"),
                named("tcp://a:1", "tcp://b:1"),
                at("https://c:1"),
                DockerHostSection::default(),
                DockerHostSection { max_containers: Some(1), ..at("tcp://d:1") },
            ])
        };
        let problems = raw.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "sandbox.hosts[5].max_containers",
                "sandbox.docker_host",
                "sandbox.hosts[1].url",
                "sandbox.hosts[2].name",
                "sandbox.hosts[3].url",
                "sandbox.hosts[4].url",
            ]
        );
    }
}
