//! A host whose disk fills up, simulated by a separate daemon on a small file system.

use crate::common::{Fixture, IMAGE, SHORT};
use orchestrate_e2e::{Daemon, SMALL_DISK_FILES};
use orchestrate_sandbox::{
    Command, DockerHostSection, DockerHosts, ExecResult, ImageHooks, Sandbox, SandboxError,
    SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec, Seccomp,
};
use orchestrate_types::ByteSize;
use std::time::{Duration, Instant};

/// Twice the image must fit, because loading needs that much.
const DISK_MIB: u32 = 1000;
const MIN_FREE: ByteSize = ByteSize::mib(300);
/// Writes more than fits. The file exists as long as its container.
const FILL: &str = "cat /dev/zero > /fill; sleep 15; echo not reported";

fn daemon(test: &str) -> Option<Daemon> {
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return None;
    }
    let Some(daemon) = Daemon::start_small(DISK_MIB).unwrap() else {
        orchestrate_e2e::skip::skip_test(test, "daemons", "no second daemon on a small disk");
        return None;
    };
    daemon.load(IMAGE).unwrap();
    Some(daemon)
}

async fn fixture(daemon: &Daemon) -> Fixture {
    let raw = SandboxSection {
        docker_host: Some(daemon.host()),
        min_free_disk: Some(MIN_FREE),
        ..SandboxSection::default()
    };
    Fixture::with(raw).await.unwrap()
}

/// Opens a sandbox with a writable root for this attempt.
async fn open_writable(fixture: &Fixture, attempt: u32) -> Result<Box<dyn Sandbox>, SandboxError> {
    let mut spec = fixture.spec(false);
    spec.owner.attempt = format!("t000001.00-a{attempt:02}").parse().unwrap();
    fixture.provider.open(&spec).await
}

async fn run(sandbox: &mut Box<dyn Sandbox>, script: &str) -> Result<ExecResult, SandboxError> {
    sandbox.exec(&Command::shell(script, 12 * SHORT)).await
}

/// The message for a sandbox whose own commands filled the disk.
fn own_doing_message(result: Result<ExecResult, SandboxError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::Damaged { .. }), "{error}");
    assert!(error.is_agents_doing() && error.to_string().contains("sandbox.disk"), "{error}");
    error.to_string()
}

fn disk_full_message(result: Result<ExecResult, SandboxError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::DiskFull(_)), "{error}");
    error.to_string()
}

/// Opens a sandbox as soon as there is space again, and writes a file in it.
async fn open_after_recovery(fixture: &Fixture, attempt: u32) -> Box<dyn Sandbox> {
    let start = Instant::now();
    loop {
        let error = match open_writable(fixture, attempt).await {
            Ok(mut sandbox) => {
                match run(&mut sandbox, "head -c 9000000 /dev/zero > /x; wc -c < /x").await {
                    Ok(written) => {
                        assert_eq!(written.text(), "9000000\n");
                        return sandbox;
                    }
                    // The check before a start does not cover inodes.
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        assert!(matches!(error.kind, SandboxErrorKind::DiskFull(_)), "{error}");
        assert!(start.elapsed() < Duration::from_mins(5), "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn docker_results_on_a_full_disk_are_rejected() {
    let Some(daemon) = daemon("docker_results_on_a_full_disk_are_rejected") else { return };
    // Two providers on one daemon, without knowledge of each other.
    let (ours, theirs) = (fixture(&daemon).await, fixture(&daemon).await);
    let mut filler = open_writable(&theirs, 1).await.unwrap();
    let mut agent = open_writable(&ours, 1).await.unwrap();
    let mut writer = open_writable(&ours, 2).await.unwrap();
    let mut in_memory = ours.provider.open(&ours.spec(true)).await.unwrap();
    let witness = daemon.docker(&["run", "-d", "--name=witness", IMAGE, "sleep", "3000"]).unwrap();
    assert!(witness.status.success(), "{}", orchestrate_e2e::stderr(&witness));

    let (start, fill) = (Instant::now(), FILL.replace("15", "600"));
    let (filled, waited, in_memory_result) = tokio::join!(
        run(&mut filler, &fill),
        run(&mut agent, "sleep 600; echo not reported"),
        // Its tmpfs is full after 64 MiB, which does not affect other sandboxes.
        run(&mut in_memory, "sleep 3; cat /dev/zero > full; rm full; echo later > x; cat x"),
    );
    assert!(own_doing_message(filled).contains("MiB free"));
    disk_full_message(waited);
    assert!(start.elapsed() < 6 * SHORT, "only their end stopped the commands");
    let text = in_memory_result.unwrap().text();
    assert!(text.contains("No space left on device") && text.ends_with("later\n"), "{text}");

    // The filler was stopped before nothing at all was free.
    let write = ["exec", "witness", "sh", "-c", "head -c 300000000 /dev/zero > /x; rm /x"];
    let write = daemon.docker(&write).unwrap();
    assert!(orchestrate_e2e::stderr(&write).contains("No space left on device"), "{write:?}");
    let file = orchestrate_sandbox::FileEntry {
        path: "big".into(),
        mode: 0o644,
        content: vec![7; 9_000_000],
    };
    let written = writer.write_files(&[file]).await.unwrap_err();
    assert!(matches!(written.kind, SandboxErrorKind::DiskFull(_)), "{written}");
    let refused = open_writable(&ours, 3).await.unwrap_err();
    assert!(refused.to_string().contains("sandbox.min_free_disk"), "{refused}");
    let again = run(&mut agent, "echo again").await.unwrap_err();
    assert!(again.to_string().contains("disk is full"), "{again}");

    filler.close().await.unwrap();
    open_after_recovery(&ours, 4).await.close().await.unwrap();
    for sandbox in [agent, writer, in_memory] {
        sandbox.close().await.unwrap();
    }
    theirs.finish().await;
    ours.finish().await;
}

#[tokio::test]
async fn docker_disk_filled_by_the_last_write_or_without_inodes_counts_as_full() {
    let test = "docker_disk_filled_by_the_last_write_or_without_inodes_counts_as_full";
    let Some(daemon) = daemon(test) else { return };
    // `fallocate` fills the disk at once, and only the daemon's own list of system calls allows it.
    let raw = SandboxSection {
        docker_host: Some(daemon.host()),
        min_free_disk: Some(MIN_FREE),
        seccomp: Some(Seccomp::Daemon),
        ..SandboxSection::default()
    };
    let fixture = Fixture::with(raw).await.unwrap();
    let at_once = "for n in 9 8 7 6 5 4; do fallocate -l ${n}00M /fill && break; done".to_owned();
    let files = format!("mkdir /many; cd /many; seq {SMALL_DISK_FILES} | xargs touch 2> /dev/null");
    for (attempt, (script, message)) in (1..).zip([(&at_once, "MiB free"), (&files, "inodes")]) {
        let mut sandbox = open_after_recovery(&fixture, attempt).await;
        let error = own_doing_message(run(&mut sandbox, script).await);
        assert!(error.contains(message), "{error}");
        sandbox.close().await.unwrap();
    }
    open_after_recovery(&fixture, 3).await.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_full_disk_is_the_doing_of_the_sandbox_whose_files_are_there() {
    let test = "docker_full_disk_is_the_doing_of_the_sandbox_whose_files_are_there";
    let Some(daemon) = daemon(test) else { return };
    let fixture = fixture(&daemon).await;
    let hidden = [
        "exec 3> /fill; rm /fill; cat /dev/zero >&3; sleep 15",
        // In a folder that this process may not enter at first.
        "mkdir /d; exec 3> /d/fill; chmod 0 /d; cat /dev/zero >&3; sleep 15",
        // Below a path that is longer than system calls accept.
        "n=$(printf %0200d 0); for i in $(seq 30); do mkdir $n; cd $n; done; cat /dev/zero > fill; sleep 15",
        "cat /dev/zero > /etc/hosts; sleep 15",
        // Without writing: denied, so that Python writes instead.
        "python3 -c \"
import os, time
fd = os.open('/fill', os.O_RDWR | os.O_CREAT)
os.unlink('/fill')
os.posix_fallocate(fd, 0, 1800 << 20)
\"; sleep 15",
        "truncate -s 1800M /fill; python3 -c \"
import mmap, os, time
fd = os.open('/fill', os.O_RDWR)
os.unlink('/fill')
map = mmap.mmap(fd, 1800 << 20)
for at in range(0, len(map), 4096):
    map[at] = 1
\"; sleep 15",
    ];
    for (attempt, script) in (1..).zip(hidden) {
        let mut neighbour = open_after_recovery(&fixture, 20 + attempt).await;
        let mut sandbox = open_after_recovery(&fixture, attempt).await;
        let (filled, waited) = tokio::join!(
            run(&mut sandbox, script),
            run(&mut neighbour, "head -c 9000000 /dev/zero > /x; sleep 15"),
        );
        own_doing_message(filled);
        disk_full_message(waited);
        sandbox.close().await.unwrap();
        neighbour.close().await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_full_disk_rejects_results_of_other_sandboxes_on_the_host() {
    let test = "docker_full_disk_rejects_results_of_other_sandboxes_on_the_host";
    let Some(daemon) = daemon(test) else { return };
    let fixture = fixture(&daemon).await;
    let mut neighbour = open_writable(&fixture, 1).await.unwrap();
    let name = neighbour.name().to_owned();
    let inside = |command: &[&str]| {
        daemon.docker(&[&["exec", &name], command].concat()).unwrap().status.success()
    };
    let waiting = "touch /begun; until [ -e /end ]; do sleep 0.1; done; echo fine";
    let (result, ()) = tokio::join!(run(&mut neighbour, waiting), async {
        // Paused during the full disk, so that its own checks find enough space before and after.
        while !inside(&["test", "-e", "/begun"]) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(daemon.docker(&["pause", &name]).unwrap().status.success());
        let mut filler = open_writable(&fixture, 2).await.unwrap();
        own_doing_message(run(&mut filler, FILL).await);
        filler.close().await.unwrap();
        open_after_recovery(&fixture, 3).await.close().await.unwrap();
        assert!(daemon.docker(&["unpause", &name]).unwrap().status.success());
        assert!(inside(&["touch", "/end"]));
    });
    assert!(disk_full_message(result).contains("another sandbox"));
    neighbour.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_min_free_disk_applies_to_hosts_whose_folders_are_not_visible() {
    let test = "docker_min_free_disk_applies_to_hosts_whose_folders_are_not_visible";
    let Some(daemon) = daemon(test) else { return };
    let remote = DockerHostSection {
        url: daemon.tls_host(),
        certificates: Some(daemon.certificates().to_str().unwrap().to_owned()),
        ..DockerHostSection::default()
    };
    let raw = SandboxSection {
        hosts: Some(vec![remote]),
        min_free_disk: Some(ByteSize(1 << 50)),
        ..SandboxSection::default()
    };
    let hosts = DockerHosts::connect(&raw.check().unwrap(), ImageHooks::default()).await.unwrap();
    let fixture = fixture(&daemon).await;
    for reusable in [false, true] {
        let deadline = Duration::from_secs(20);
        let spec = SandboxSpec { deadline, ..fixture.spec(reusable) };
        let error = hosts.open(&spec).await.unwrap_err();
        assert!(error.to_string().contains("sandbox.min_free_disk"), "{error}");
    }
    hosts.shutdown().await.unwrap();
    fixture.finish().await;
}
