//! Two Docker hosts: the usual daemon through its socket, and a second one over TCP with TLS.

use crate::common::{IMAGE, check_alive};
use crate::registry::Registry;
use crate::ssh_server::Sshd;
use futures::FutureExt as _;
use futures::future::join_all;
use orchestrate_e2e::Daemon;
use orchestrate_sandbox::{
    Command, DockerHostSection, DockerHosts, HostUsage, ImageHooks, Owner, PullPolicy, Purpose,
    Sandbox, SandboxErrorKind, SandboxLimits, SandboxProvider as _, SandboxSection, SandboxSpec,
};
use orchestrate_types::{ByteSize, HumanDuration, RunId};
use std::time::{Duration, Instant};

const LOCAL: &str = "local";
const REMOTE: &str = "remote";

/// URL of the usual daemon.
fn usual_url() -> String {
    let host = std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty());
    host.unwrap_or_else(|| "unix:///var/run/docker.sock".to_owned())
}

struct Fixture {
    daemon: Daemon,
    run: RunId,
}

impl Fixture {
    fn new(test: &str) -> Option<Self> {
        if !orchestrate_e2e::docker_or_skip(test).unwrap() {
            return None;
        }
        let Some(daemon) = Daemon::start_with_tls().unwrap() else {
            orchestrate_e2e::skip::skip_test(test, "daemons", "no second daemon with TLS");
            return None;
        };
        Some(Self { daemon, run: RunId::generate() })
    }

    /// Settings with capacity for three agents on the local host and seven on the remote one.
    fn raw(&self) -> SandboxSection {
        let local = DockerHostSection {
            url: Some(usual_url()),
            name: Some(LOCAL.into()),
            max_containers: Some(4),
            ..DockerHostSection::default()
        };
        let remote = DockerHostSection {
            url: self.daemon.tls_host(),
            name: Some(REMOTE.into()),
            certificates: Some(self.daemon.certificates().to_str().unwrap().to_owned()),
            ..DockerHostSection::default()
        };
        SandboxSection {
            hosts: Some(vec![local, remote]),
            max_containers: Some(8),
            pull: Some(PullPolicy::Never),
            call_timeout: Some(HumanDuration::secs(60)),
            ..SandboxSection::default()
        }
    }

    async fn hosts(&self) -> DockerHosts {
        let config = self.raw().check().unwrap();
        DockerHosts::connect(&config, ImageHooks::default()).await.unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        spec(self.run, Purpose::Agent)
    }

    /// Names of the run's containers: on the local host, and on the remote one.
    fn containers(&self) -> [Vec<String>; 2] {
        let label = format!("orchestrate.run={}", self.run);
        [None, Some(self.daemon.host())]
            .map(|host| orchestrate_e2e::containers(host.as_deref(), Some(&label)).unwrap())
    }

    /// Creates a leftover container of an earlier coordinator, which was never started.
    fn create_leftover(&self, epoch: &str, host: Option<&Daemon>) -> String {
        let name = format!("orch-left-{}-{epoch}", self.run.short());
        let (run, epoch) =
            (format!("orchestrate.run={}", self.run), format!("orchestrate.epoch={epoch}"));
        let arguments = [
            "create",
            "--name",
            &name,
            "--network=none",
            "--label",
            &run,
            "--label",
            &epoch,
            IMAGE,
        ];
        let host = host.map(Daemon::host);
        let output = orchestrate_e2e::docker(host.as_deref(), &arguments).unwrap();
        assert!(output.status.success(), "{}", orchestrate_e2e::stderr(&output));
        name
    }

    /// Shuts down and checks that no container is left on either host.
    async fn finish(self, hosts: DockerHosts) {
        hosts.shutdown().await.unwrap();
        assert_eq!(self.containers(), [Vec::<String>::new(), Vec::new()]);
    }
}

fn spec(run: RunId, purpose: Purpose) -> SandboxSpec {
    SandboxSpec {
        image: IMAGE.into(),
        purpose,
        owner: Owner { run, epoch: 1, attempt: "t000001.00-a01".parse().unwrap() },
        workdir: "/testbed".into(),
        limits: SandboxLimits {
            memory: ByteSize::mib(256),
            cpu_millis: 2000,
            pids: 64,
            tmpfs: ByteSize::mib(64),
        },
        deadline: Duration::from_mins(10),
        reusable: true,
    }
}

fn host(hosts: &DockerHosts, name: &str) -> HostUsage {
    hosts.hosts().into_iter().find(|host| host.host == name).unwrap()
}

fn open(hosts: &DockerHosts) -> [usize; 2] {
    [LOCAL, REMOTE].map(|name| host(hosts, name).open)
}

/// Waits until a host is in service, or out of service.
async fn wait_for_service(hosts: &DockerHosts, name: &str, wanted: bool) {
    let start = Instant::now();
    while host(hosts, name).in_service != wanted {
        assert!(start.elapsed() < Duration::from_mins(5), "{:?}", hosts.hosts());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_sandboxes_open_on_hosts_with_image_and_free_slots() {
    let Some(fixture) = Fixture::new("docker_sandboxes_open_on_hosts_with_image_and_free_slots")
    else {
        return;
    };
    let (hosts, spec) = (fixture.hosts().await, fixture.spec());

    // Only one host has the image, and the other must not pull it: the other is skipped, no sandbox
    // fails, and a request without a free slot waits for the first host.
    let mut local = Vec::new();
    for _ in 0..3 {
        local.push(hosts.open(&spec).await.unwrap());
    }
    assert_eq!(open(&hosts), [3, 0]);
    let mut waiting = hosts.open(&spec);
    let waited = tokio::time::timeout(Duration::from_secs(3), &mut waiting).await;
    assert!(waited.is_err(), "no slot is free for a fourth agent");
    // A grader does not queue behind an agent.
    let grader = hosts.open(&self::spec(fixture.run, Purpose::Grader)).await.unwrap();
    grader.close().await.unwrap();
    local.pop().unwrap().close().await.unwrap();
    let mut fourth = waiting.await.unwrap();
    check_alive(&mut fourth).await;
    local.push(fourth);
    assert_eq!(host(&hosts, REMOTE).started, 0);
    for sandbox in local {
        sandbox.close().await.unwrap();
    }
    hosts.shutdown().await.unwrap();

    // Both have the image: they share the load by capacity and together open exactly their
    // capacity.
    fixture.daemon.load(IMAGE).unwrap();
    let hosts = fixture.hosts().await;
    for name in [LOCAL, REMOTE] {
        wait_for_service(&hosts, name, true).await;
    }
    let mut all = Vec::new();
    for count in 1..=10 {
        all.push(hosts.open(&spec).await.unwrap());
        let [local, remote] = open(&hosts);
        let even = f64::from(u32::try_from(local).unwrap()) * 2.0
            - f64::from(u32::try_from(remote).unwrap());
        assert!(local + remote == count && even.abs() <= 2.0, "{local} and {remote} of 4 and 8");
    }
    assert_eq!(open(&hosts), [3, 7]);
    let [here, there] = fixture.containers();
    assert_eq!((here.len(), there.len()), (3, 7));
    assert!(hosts.open(&spec).now_or_never().is_none());
    for sandbox in &mut all {
        check_alive(sandbox).await;
    }
    // Requests are served in order of arrival, and an idle container is reused instead of started.
    let started: u64 = hosts.hosts().iter().map(|host| host.started).sum();
    let mut first = hosts.open(&spec);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut first).await.is_err());
    let mut second = hosts.open(&spec);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut second).await.is_err());
    all.pop().unwrap().close().await.unwrap();
    let given = first.await.unwrap();
    assert!((&mut second).now_or_never().is_none());
    all.extend([given]);
    all.pop().unwrap().close().await.unwrap();
    all.push(second.await.unwrap());
    assert_eq!(hosts.hosts().iter().map(|host| host.started).sum::<u64>(), started);
    join_all(all.into_iter().map(Sandbox::close)).await;
    fixture.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_host_that_dies_is_out_of_service_until_it_returns() {
    let Some(mut fixture) = Fixture::new("docker_host_that_dies") else { return };
    fixture.daemon.load(IMAGE).unwrap();
    let left =
        [fixture.create_leftover("0", None), fixture.create_leftover("0", Some(&fixture.daemon))];
    let (hosts, spec) = (fixture.hosts().await, fixture.spec());
    // A host that is slow to connect is swept once it is in service.
    for name in [LOCAL, REMOTE] {
        wait_for_service(&hosts, name, true).await;
    }
    let mut swept = hosts.sweep(fixture.run, 1).await.unwrap();
    swept.removed.sort();
    let all = [format!("{} on {LOCAL}", left[0]), format!("{} on {REMOTE}", left[1])];
    assert_eq!(swept.removed, all, "{swept:?}");

    let mut sandboxes = Vec::new();
    for _ in 0..6 {
        sandboxes.push(hosts.open(&spec).await.unwrap());
    }
    let [local, remote] = open(&hosts);
    assert!(local > 0 && remote > 0, "{local} and {remote}");
    fixture.daemon.kill().unwrap();
    // Sandboxes on the dead host fail with an error, never with a result. The others keep working.
    let look = Command::shell("echo alive", Duration::from_mins(1));
    let mut lost = 0;
    let mut alive = Vec::new();
    for mut sandbox in sandboxes {
        match sandbox.exec(&look).await {
            Ok(result) => {
                assert_eq!(result.text(), "alive\n");
                alive.push(sandbox);
            }
            Err(error) => {
                assert!(matches!(error.kind, SandboxErrorKind::Gone(_)), "{error}");
                lost += 1;
            }
        }
    }
    assert_eq!((alive.len(), lost), (local, remote));
    // New sandboxes open on the other host.
    while alive.len() < 3 {
        let opened = host(&hosts, LOCAL).open;
        alive.push(hosts.open(&spec).await.unwrap());
        assert_eq!(host(&hosts, LOCAL).open, opened + 1);
    }
    wait_for_service(&hosts, REMOTE, false).await;
    assert_eq!(host(&hosts, REMOTE).taken_out, 1);
    let mut next = hosts.open(&spec);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut next).await.is_err());

    // It returns and serves the waiting request.
    assert!(fixture.daemon.spawn().unwrap() || fixture.daemon.spawn().unwrap());
    wait_for_service(&hosts, REMOTE, true).await;
    let mut next = next.await.unwrap();
    check_alive(&mut next).await;
    assert_eq!(host(&hosts, REMOTE).started, remote as u64 + 1);
    alive.push(next);
    join_all(alive.into_iter().map(Sandbox::close)).await;
    fixture.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_host_that_starts_late_is_swept_and_used() {
    let Some(mut fixture) = Fixture::new("docker_host_that_starts_late") else { return };
    fixture.daemon.load(IMAGE).unwrap();
    fixture.create_leftover("0", Some(&fixture.daemon));
    fixture.daemon.kill().unwrap();
    let hosts = fixture.hosts().await;
    assert!(host(&hosts, LOCAL).in_service && !host(&hosts, REMOTE).in_service);
    assert_eq!(hosts.sweep(fixture.run, 1).await.unwrap().removed, Vec::<String>::new());
    let mut sandbox = hosts.open(&fixture.spec()).await.unwrap();
    check_alive(&mut sandbox).await;
    assert!(fixture.daemon.spawn().unwrap() || fixture.daemon.spawn().unwrap());
    wait_for_service(&hosts, REMOTE, true).await;
    let start = Instant::now();
    while !fixture.containers()[1].is_empty() {
        assert!(start.elapsed() < Duration::from_mins(2), "{:?}", fixture.containers());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The load is one quarter on the local host and zero on the remote one.
    let mut other = hosts.open(&fixture.spec()).await.unwrap();
    check_alive(&mut other).await;
    assert_eq!(open(&hosts), [1, 1]);
    sandbox.close().await.unwrap();
    other.close().await.unwrap();

    // Without a certificate, the connection fails.
    let mut raw = fixture.raw();
    raw.hosts = raw.hosts.map(|hosts| {
        let plain = |host| DockerHostSection { certificates: None, ..host };
        hosts.into_iter().skip(1).map(plain).collect()
    });
    let refused = DockerHosts::connect(&raw.check().unwrap(), ImageHooks::default()).await;
    let error = refused.unwrap_err();
    assert!(
        matches!(error.kind, SandboxErrorKind::NoDaemon(_) | SandboxErrorKind::Refused { .. }),
        "{error}"
    );
    fixture.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_image_is_the_same_on_all_hosts() {
    let test = "docker_image_is_the_same_on_all_hosts";
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return;
    }
    let (Some(first), Some(second)) = (Daemon::start().unwrap(), Daemon::start().unwrap()) else {
        orchestrate_e2e::skip::skip_test(test, "daemons", "no further daemons");
        return;
    };
    let registry = Registry::start(&[&first, &second]);
    let image = |name: &str| format!("{}/team/{name}:1", registry.host);
    let at = |daemon: &Daemon| DockerHostSection { url: Some(daemon.host()), ..Default::default() };
    // Capacity for one agent on each host.
    let raw = SandboxSection {
        hosts: Some(vec![at(&first), at(&second)]),
        max_containers: Some(2),
        ..SandboxSection::default()
    };
    let config = raw.check().unwrap();
    let hosts = DockerHosts::connect(&config, ImageHooks::default()).await.unwrap();
    let run = RunId::generate();
    let spec = |name: &str| SandboxSpec {
        image: image(name),
        reusable: false,
        ..spec(run, Purpose::Agent)
    };
    let images = |daemon: &Daemon| {
        let ids = daemon.docker(&["ps", "-q", "--no-trunc"]).unwrap().stdout;
        let ids = String::from_utf8(ids).unwrap();
        let of = |id: &str| daemon.docker(&["inspect", "-f", "{{.Image}}", id]).unwrap().stdout;
        ids.lines()
            .map(|id| String::from_utf8(of(id)).unwrap().trim().to_owned())
            .collect::<Vec<_>>()
    };

    // The tag moves after the first host pulled it: the second host pulls the image of the first.
    let pushed = registry.push("team/moved", "1", 10);
    let here = hosts.open(&spec("moved")).await.unwrap();
    let other = registry.push("team/moved", "1", 20);
    assert_ne!(pushed.id, other.id);
    let there = hosts.open(&spec("moved")).await.unwrap();
    assert_eq!([images(&first), images(&second)], [[pushed.id.clone()], [pushed.id]]);
    here.close().await.unwrap();
    there.close().await.unwrap();

    // The hosts have different images under one name: only the host that was used first provides
    // it.
    registry.push("team/twice", "1", 10);
    second.docker(&["pull", "-q", &image("twice")]).unwrap();
    let used = registry.push("team/twice", "1", 20);
    first.docker(&["pull", "-q", &image("twice")]).unwrap();
    let here = hosts.open(&spec("twice")).await.unwrap();
    let next = spec("twice");
    let mut next = hosts.open(&next);
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut next).await.is_err());
    here.close().await.unwrap();
    let next = next.await.unwrap();
    assert_eq!([images(&first), images(&second)], [vec![used.id], Vec::new()]);
    next.close().await.unwrap();
    hosts.shutdown().await.unwrap();
    assert_eq!([images(&first), images(&second)], [Vec::<String>::new(), Vec::new()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_ssh_host_reconnects_after_its_connection_broke() {
    let test = "docker_ssh_host";
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return;
    }
    let Some(server) = Sshd::start() else {
        orchestrate_e2e::skip::skip_test(test, "ssh", "no SSH server can be started");
        return;
    };
    let host = DockerHostSection {
        url: Some(format!("ssh://daemon-host{}", usual_url().trim_start_matches("unix://"))),
        ssh_config: Some(server.config()),
        ..DockerHostSection::default()
    };
    let raw = SandboxSection {
        hosts: Some(vec![host]),
        pull: Some(PullPolicy::Never),
        ..SandboxSection::default()
    };
    let config = raw.check().unwrap();
    let hosts = DockerHosts::connect(&config, ImageHooks::default()).await.unwrap();
    let run = RunId::generate();
    let spec = spec(run, Purpose::Agent);
    let opened = join_all((0..8).map(|_| hosts.open(&spec))).await;
    let mut sandboxes: Vec<Box<dyn Sandbox>> = opened.into_iter().map(Result::unwrap).collect();
    assert_eq!(server.connections(), 1, "all sandboxes share one connection");
    let mut echo = Command::shell("seq 1 1000000", Duration::from_mins(2));
    echo.keep_bytes = 8 << 20;
    let result = sandboxes[0].exec(&echo).await.unwrap();
    assert_eq!(result.text().lines().count(), 1_000_000);

    // When the connection breaks, open sandboxes fail, and the next one makes a new connection.
    server.break_connections();
    for sandbox in &mut sandboxes {
        let error =
            sandbox.exec(&Command::shell("true", Duration::from_mins(1))).await.unwrap_err();
        assert!(matches!(error.kind, SandboxErrorKind::Gone(_)), "{error}");
    }
    drop(sandboxes);
    let mut next = hosts.open(&spec).await.unwrap();
    check_alive(&mut next).await;
    next.close().await.unwrap();
    hosts.shutdown().await.unwrap();
    drop(hosts);
    let start = Instant::now();
    while server.connections() > 0 {
        assert!(start.elapsed() < Duration::from_mins(5), "a connection outlives its provider");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let label = format!("orchestrate.run={run}");
    assert_eq!(orchestrate_e2e::containers(None, Some(&label)).unwrap(), Vec::<String>::new());

    // An unknown key is refused with the message of `ssh`.
    server.revoke_keys();
    let error = DockerHosts::connect(&config, ImageHooks::default()).await.unwrap_err();
    assert!(error.to_string().contains("Permission denied"), "{error}");
}
