//! A host whose disk fills up: a daemon of the test's own, on a small file system.

use crate::common::{Bench, IMAGE, SHORT};
use orchestrate_e2e::{Daemon, SMALL_DISK_FILES};
use orchestrate_sandbox::{
    Command, DockerHostSection, DockerHosts, ExecResult, Sandbox, SandboxError, SandboxErrorKind,
    SandboxProvider as _, SandboxSection, SandboxSpec, Surroundings,
};
use orchestrate_types::ByteSize;
use std::time::{Duration, Instant};

/// Room for the image twice, as while it is loaded.
const DISK_MIB: u32 = 1000;
const FLOOR: ByteSize = ByteSize::mib(300);
/// More than there is; the file stays while its container does.
const FILL: &str = "cat /dev/zero > /fill; sleep 15; echo not told";

fn daemon(test: &str) -> Option<Daemon> {
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return None;
    }
    let Some(daemon) = Daemon::start_small(DISK_MIB).unwrap() else {
        orchestrate_e2e::say(&format!("skipped: {test} (no second daemon on a small disk here)"));
        return None;
    };
    daemon.load(IMAGE).unwrap();
    Some(daemon)
}

async fn bench(daemon: &Daemon) -> Bench {
    let raw = SandboxSection {
        docker_host: Some(daemon.host()),
        min_free_disk: Some(FLOOR),
        ..SandboxSection::default()
    };
    Bench::with(raw).await.unwrap()
}

/// A sandbox whose root can be written, for this attempt.
async fn on_disk(bench: &Bench, attempt: u32) -> Result<Box<dyn Sandbox>, SandboxError> {
    let mut spec = bench.spec(false);
    spec.owner.attempt = format!("t000001.00-a{attempt:02}").parse().unwrap();
    bench.provider.open(&spec).await
}

async fn run(sandbox: &mut Box<dyn Sandbox>, script: &str) -> Result<ExecResult, SandboxError> {
    sandbox.exec(&Command::shell(script, SHORT)).await
}

fn full(result: Result<ExecResult, SandboxError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::DiskFull(_)), "{error}");
    error.to_string()
}

/// Opens a sandbox as soon as there is room again, and shows that there is.
async fn recovered(bench: &Bench, attempt: u32) -> Box<dyn Sandbox> {
    let began = Instant::now();
    loop {
        let error = match on_disk(bench, attempt).await {
            Ok(mut sandbox) => {
                match run(&mut sandbox, "head -c 9000000 /dev/zero > /x; wc -c < /x").await {
                    Ok(written) => {
                        assert_eq!(written.text(), "9000000\n");
                        return sandbox;
                    }
                    // Of inodes a start knows nothing.
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        assert!(matches!(error.kind, SandboxErrorKind::DiskFull(_)), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30), "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn docker_nothing_counts_that_ran_on_a_full_disk() {
    let Some(daemon) = daemon("docker_nothing_counts_that_ran_on_a_full_disk") else { return };
    // Two programs on one daemon: they know nothing of each other.
    let (ours, theirs) = (bench(&daemon).await, bench(&daemon).await);
    let mut filler = on_disk(&theirs, 1).await.unwrap();
    let mut agent = on_disk(&ours, 1).await.unwrap();
    let mut writer = on_disk(&ours, 2).await.unwrap();
    let mut in_memory = ours.provider.open(&ours.spec(true)).await.unwrap();
    let witness = daemon.docker(&["run", "-d", "--name=witness", IMAGE, "sleep", "300"]).unwrap();
    assert!(witness.status.success(), "{}", orchestrate_e2e::stderr(&witness));

    let began = Instant::now();
    let (filled, waited, in_memory_result) = tokio::join!(
        run(&mut filler, FILL),
        run(&mut agent, "sleep 15; echo not told"),
        // Its own folder is full after 64 MiB, and that is its own business.
        run(&mut in_memory, "sleep 3; cat /dev/zero > full; rm full; echo later > x; cat x"),
    );
    assert!(full(filled).contains("MiB free"));
    full(waited);
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    let text = in_memory_result.unwrap().text();
    assert!(text.contains("No space left on device") && text.ends_with("later\n"), "{text}");

    let write = ["exec", "witness", "sh", "-c", "head -c 9000000 /dev/zero > /x"];
    let write = daemon.docker(&write).unwrap();
    assert!(orchestrate_e2e::stderr(&write).contains("No space left on device"), "{write:?}");
    let file = orchestrate_sandbox::FileEntry {
        path: "big".into(),
        mode: 0o644,
        content: vec![7; 9_000_000],
    };
    let written = writer.write_files(&[file]).await.unwrap_err();
    assert!(matches!(written.kind, SandboxErrorKind::DiskFull(_)), "{written}");
    let refused = on_disk(&ours, 3).await.unwrap_err();
    assert!(refused.to_string().contains("sandbox.min_free_disk"), "{refused}");
    let again = run(&mut agent, "echo again").await.unwrap_err();
    assert!(again.to_string().contains("disk is full"), "{again}");

    filler.close().await.unwrap();
    recovered(&ours, 4).await.close().await.unwrap();
    for sandbox in [agent, writer, in_memory] {
        sandbox.close().await.unwrap();
    }
    theirs.finish().await;
    ours.finish().await;
}

#[tokio::test]
async fn docker_a_disk_that_is_full_at_the_end_or_without_inodes_is_full() {
    let test = "docker_a_disk_that_is_full_at_the_end_or_without_inodes_is_full";
    let Some(daemon) = daemon(test) else { return };
    let bench = bench(&daemon).await;
    let at_once = "for n in 9 8 7 6 5 4; do fallocate -l ${n}00M /fill && break; done".to_owned();
    let files = format!("mkdir /many; cd /many; seq {SMALL_DISK_FILES} | xargs touch 2> /dev/null");
    for (attempt, (script, words)) in (1..).zip([(&at_once, "MiB free"), (&files, "inodes")]) {
        let mut sandbox = recovered(&bench, attempt).await;
        let error = full(run(&mut sandbox, script).await);
        assert!(error.contains(words), "{error}");
        sandbox.close().await.unwrap();
    }
    recovered(&bench, 3).await.close().await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn docker_a_full_disk_that_one_sandbox_met_breaks_the_work_of_its_neighbours() {
    let test = "docker_a_full_disk_that_one_sandbox_met_breaks_the_work_of_its_neighbours";
    let Some(daemon) = daemon(test) else { return };
    let bench = bench(&daemon).await;
    let mut neighbour = on_disk(&bench, 1).await.unwrap();
    let name = neighbour.name().to_owned();
    let (result, ()) = tokio::join!(run(&mut neighbour, "sleep 1; echo fine"), async {
        // It sleeps through all of it, and its own looks find room before and after.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(daemon.docker(&["pause", &name]).unwrap().status.success());
        let mut filler = on_disk(&bench, 2).await.unwrap();
        full(run(&mut filler, FILL).await);
        filler.close().await.unwrap();
        recovered(&bench, 3).await.close().await.unwrap();
        assert!(daemon.docker(&["unpause", &name]).unwrap().status.success());
    });
    assert!(full(result).contains("another sandbox"));
    neighbour.close().await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn docker_the_floor_holds_on_a_host_whose_folders_are_not_ours() {
    let test = "docker_the_floor_holds_on_a_host_whose_folders_are_not_ours";
    let Some(daemon) = daemon(test) else { return };
    let far = DockerHostSection {
        url: daemon.tls_host(),
        certificates: Some(daemon.certificates().to_str().unwrap().to_owned()),
        ..DockerHostSection::default()
    };
    let raw = SandboxSection {
        hosts: Some(vec![far]),
        min_free_disk: Some(ByteSize(1 << 50)),
        ..SandboxSection::default()
    };
    let hosts = DockerHosts::connect(&raw.check().unwrap(), Surroundings::default()).await.unwrap();
    let bench = bench(&daemon).await;
    for reusable in [false, true] {
        let spec = SandboxSpec { deadline: SHORT, ..bench.spec(reusable) };
        let error = hosts.open(&spec).await.unwrap_err();
        assert!(error.to_string().contains("sandbox.min_free_disk"), "{error}");
    }
    hosts.shutdown().await.unwrap();
    bench.finish().await;
}
