//! How a sandbox is described to Docker: options, labels and names.

use crate::api::{Owner, Purpose, SandboxSpec};
use crate::config::{SandboxSettings, Seccomp};
use crate::error::{SandboxError, SandboxErrorKind};
use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigLogConfig, ResourcesUlimits,
};
use orchestrate_supervisor::{INSTALL_PATH, Options};
use orchestrate_types::unix_micros;
use std::collections::HashMap;
use std::time::Duration;

pub(crate) const LABEL_RUN: &str = "orchestrate.run";
pub(crate) const LABEL_ATTEMPT: &str = "orchestrate.attempt";
pub(crate) const LABEL_EPOCH: &str = "orchestrate.epoch";
/// Unix time in seconds after which the container cannot be in use any more.
pub(crate) const LABEL_DEADLINE: &str = "orchestrate.deadline";
pub(crate) const LABEL_PURPOSE: &str = "orchestrate.purpose";
/// Value of [`LABEL_ATTEMPT`] for a container that serves several attempts.
const POOLED: &str = "pooled";
/// Time between the deadline at which process 1 ends by itself and the one after which `gc` removes
/// it.
const DEADLINE_SLACK: Duration = Duration::from_mins(1);

/// Seccomp profile with the allowed system calls. Any other call fails; a call of another
/// instruction set kills the caller.
const SECCOMP: &str = include_str!("seccomp.json");

/// The letter for this purpose in container names.
pub(crate) fn purpose_letter(purpose: Purpose) -> char {
    match purpose {
        Purpose::Agent => 'a',
        Purpose::Grader => 'g',
    }
}

fn purpose_name(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Agent => "agent",
        Purpose::Grader => "grader",
    }
}

/// Name of the container of one attempt.
pub(crate) fn attempt_name(owner: &Owner, purpose: Purpose) -> String {
    format!("orch-{}-{}-{}", owner.run.short(), owner.attempt, purpose_letter(purpose))
}

/// Name of a container that serves several attempts, one after the other.
pub(crate) fn pooled_name(owner: &Owner, purpose: Purpose, number: u32) -> String {
    let letter = purpose_letter(purpose);
    format!("orch-{}-e{}-{letter}-{number:03}", owner.run.short(), owner.epoch)
}

/// Refuses specs that Docker would accept but that cannot work as a sandbox.
pub(crate) fn check_spec(spec: &SandboxSpec) -> Result<(), SandboxError> {
    let path = spec.workdir.strip_prefix('/').unwrap_or_default();
    let reserved = ["tmp", "dev", "proc", "sys"];
    let first = path.split('/').next().unwrap_or_default();
    if orchestrate_supervisor::protocol::is_safe_path(path)
        && !reserved.contains(&first)
        && !path.contains([':', ','])
    {
        return Ok(());
    }
    let message = format!(
        "the working directory `{}` must be a plain absolute path outside /tmp, /dev, /proc and /sys",
        spec.workdir
    );
    let sandbox = attempt_name(&spec.owner, spec.purpose);
    Err(SandboxError { sandbox, kind: SandboxErrorKind::Refused { call: "open", message } })
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn labels(spec: &SandboxSpec, lifetime: Duration) -> HashMap<String, String> {
    let now = unix_micros() / 1_000_000;
    let deadline = now.saturating_add(signed((lifetime + DEADLINE_SLACK).as_secs()));
    let attempt = if spec.reusable { POOLED.to_owned() } else { spec.owner.attempt.to_string() };
    [
        (LABEL_RUN, spec.owner.run.to_string()),
        (LABEL_ATTEMPT, attempt),
        (LABEL_EPOCH, spec.owner.epoch.to_string()),
        (LABEL_DEADLINE, deadline.to_string()),
        (LABEL_PURPOSE, purpose_name(spec.purpose).to_owned()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

fn ulimit(name: &str, value: i64) -> ResourcesUlimits {
    ResourcesUlimits { name: Some(name.to_owned()), soft: Some(value), hard: Some(value) }
}

/// The request that creates the container. It has no bind mounts, no network and no devices, so
/// nothing of the host is visible inside.
pub(crate) fn create_body(
    spec: &SandboxSpec,
    config: &SandboxSettings,
    image: &str,
    lifetime: Duration,
) -> ContainerCreateBody {
    let options = Options { workdir: spec.workdir.clone(), lifetime, reusable: spec.reusable };
    let memory = signed(spec.limits.memory.0);
    let tmpfs = spec.reusable.then(|| {
        let mount =
            |mode: &str| format!("rw,exec,nosuid,nodev,size={},mode={mode}", spec.limits.tmpfs.0);
        HashMap::from([(spec.workdir.clone(), mount("0755")), ("/tmp".to_owned(), mount("1777"))])
    });
    let mut security = vec!["no-new-privileges".to_owned()];
    match config.seccomp {
        Seccomp::Strict => security.push(format!("seccomp={SECCOMP}")),
        Seccomp::Daemon => {}
    }
    let host = HostConfig {
        runtime: config.runtime.clone(),
        network_mode: Some("none".to_owned()),
        ipc_mode: Some("private".to_owned()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(security),
        memory: Some(memory),
        memory_swap: Some(memory),
        nano_cpus: Some(i64::from(spec.limits.cpu_millis) * 1_000_000),
        pids_limit: Some(i64::from(spec.limits.pids)),
        shm_size: Some(signed(config.shm.0)),
        ulimits: Some(vec![
            ulimit("core", 0),
            ulimit("nofile", i64::from(config.open_files)),
            ulimit("fsize", signed(config.file_size.0)),
            // POSIX message queues of all containers together count towards this.
            ulimit("msgqueue", 0),
        ]),
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        readonly_rootfs: Some(spec.reusable),
        tmpfs,
        // Process 1 ends with its stream, so nothing stays behind if this program is killed.
        auto_remove: Some(true),
        init: Some(false),
        ..HostConfig::default()
    };
    ContainerCreateBody {
        image: Some(image.to_owned()),
        entrypoint: Some(vec![INSTALL_PATH.to_owned()]),
        cmd: Some(options.to_args()),
        user: Some("0:0".to_owned()),
        working_dir: Some("/".to_owned()),
        open_stdin: Some(true),
        stdin_once: Some(true),
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        tty: Some(false),
        healthcheck: Some(HealthConfig {
            test: Some(vec!["NONE".to_owned()]),
            ..HealthConfig::default()
        }),
        labels: Some(labels(spec, lifetime)),
        host_config: Some(host),
        ..ContainerCreateBody::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::SandboxLimits;
    use orchestrate_types::{ByteSize, RunId};

    fn spec(workdir: &str, reusable: bool) -> SandboxSpec {
        SandboxSpec {
            image: "image".into(),
            purpose: Purpose::Agent,
            owner: Owner {
                run: RunId::generate(),
                epoch: 3,
                attempt: "t000001.02-a01".parse().unwrap(),
            },
            workdir: workdir.into(),
            limits: SandboxSettings::default().limits(),
            deadline: Duration::from_mins(1),
            reusable,
        }
    }

    #[test]
    fn names_contain_run_attempt_and_purpose() {
        let spec = spec("/w", false);
        let short = spec.owner.run.short();
        assert_eq!(
            attempt_name(&spec.owner, Purpose::Grader),
            format!("orch-{short}-t000001.02-a01-g")
        );
        assert_eq!(pooled_name(&spec.owner, Purpose::Agent, 7), format!("orch-{short}-e3-a-007"));
    }

    #[test]
    fn working_directories_that_a_reset_cannot_wipe_are_refused() {
        for good in ["/testbed", "/srv/space"] {
            assert!(check_spec(&spec(good, true)).is_ok(), "{good}");
        }
        for bad in ["", "/", "w", "/tmp", "/tmp/x", "/dev/shm", "/a/../b", "/a:b", "/proc"] {
            assert!(check_spec(&spec(bad, true)).is_err(), "{bad}");
        }
    }

    #[test]
    fn seccomp_profile_allows_no_privileged_system_call() {
        let profile: serde_json::Value = serde_json::from_str(SECCOMP).unwrap();
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        let rules = profile["syscalls"].as_array().unwrap();
        let allowed: Vec<&str> = rules
            .iter()
            .filter(|rule| rule["action"] == "SCMP_ACT_ALLOW" && rule.get("args").is_none())
            .flat_map(|rule| rule["names"].as_array().unwrap())
            .map(|name| name.as_str().unwrap())
            .collect();
        assert!(allowed.is_sorted() && allowed.contains(&"execve") && allowed.len() > 250);
        let refused = [
            "add_key",
            "bpf",
            "clone",
            "clone3",
            "delete_module",
            "finit_module",
            "fsconfig",
            "fsmount",
            "fsopen",
            "fspick",
            "init_module",
            "inotify_init",
            "inotify_init1",
            "io_setup",
            "io_uring_enter",
            "io_uring_register",
            "io_uring_setup",
            "kexec_load",
            "keyctl",
            "mount",
            "mount_setattr",
            "move_mount",
            "mq_open",
            "open_by_handle_at",
            "open_tree",
            "perf_event_open",
            "personality",
            "pivot_root",
            "prlimit64",
            "process_vm_readv",
            "process_vm_writev",
            "quotactl",
            "reboot",
            "request_key",
            "sched_setattr",
            "sched_setparam",
            "sched_setscheduler",
            "setns",
            "setpriority",
            "setxattr",
            "socket",
            "swapon",
            "syslog",
            "umount2",
            "unshare",
            "userfaultfd",
        ];
        for name in refused {
            assert!(!allowed.contains(&name), "{name}");
        }
    }

    #[test]
    fn container_has_no_network_capabilities_mounts_or_devices() {
        let spec = SandboxSpec {
            limits: SandboxLimits {
                memory: ByteSize::mib(64),
                ..SandboxSettings::default().limits()
            },
            ..spec("/w", true)
        };
        let body = create_body(&spec, &SandboxSettings::default(), "x", Duration::from_secs(9));
        let host = body.host_config.unwrap();
        assert_eq!(host.network_mode.as_deref(), Some("none"));
        assert_eq!(host.cap_drop.unwrap(), ["ALL"]);
        assert_eq!(host.memory, host.memory_swap);
        assert_eq!(host.readonly_rootfs, Some(true));
        assert!(host.binds.is_none() && host.mounts.is_none() && host.devices.is_none());
        assert!(host.tmpfs.unwrap()["/w"].contains("size=134217728"));
        assert_eq!(body.tty, Some(false));
    }
}
