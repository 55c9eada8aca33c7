//! Two Docker hosts behind one scheduler: the usual daemon by its socket, and one of the test's own
//! over TCP with TLS.

use crate::common::{IMAGE, check_alive};
use crate::registry::Registry;
use crate::ssh_server::Sshd;
use futures::FutureExt as _;
use futures::future::join_all;
use orchestrate_e2e::Daemon;
use orchestrate_sandbox::{
    Command, DockerHostSection, DockerHosts, HostUse, Limits, Owner, PullPolicy, Purpose, Sandbox,
    SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec, Surroundings,
};
use orchestrate_types::{ByteSize, HumanDuration, RunId};
use std::time::{Duration, Instant};

const NEAR: &str = "near";
const FAR: &str = "far";

/// The usual daemon's socket.
fn usual() -> String {
    let host = std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty());
    host.unwrap_or_else(|| "unix:///var/run/docker.sock".to_owned())
}

struct World {
    daemon: Daemon,
    run: RunId,
}

impl World {
    fn new(test: &str) -> Option<Self> {
        if !orchestrate_e2e::docker_or_skip(test).unwrap() {
            return None;
        }
        let Some(daemon) = Daemon::start_with_tls().unwrap() else {
            orchestrate_e2e::say(&format!("skipped: {test} (no second daemon with TLS here)"));
            return None;
        };
        Some(Self { daemon, run: RunId::generate() })
    }

    /// Room for three agents here, and for seven there.
    fn raw(&self) -> SandboxSection {
        let near = DockerHostSection {
            url: Some(usual()),
            name: Some(NEAR.into()),
            max_containers: Some(4),
            ..DockerHostSection::default()
        };
        let far = DockerHostSection {
            url: self.daemon.tls_host(),
            name: Some(FAR.into()),
            certificates: Some(self.daemon.certificates().to_str().unwrap().to_owned()),
            ..DockerHostSection::default()
        };
        SandboxSection {
            hosts: Some(vec![near, far]),
            max_containers: Some(8),
            pull: Some(PullPolicy::Never),
            call_timeout: Some(HumanDuration::secs(20)),
            ..SandboxSection::default()
        }
    }

    async fn hosts(&self) -> DockerHosts {
        let config = self.raw().check().unwrap();
        DockerHosts::connect(&config, Surroundings::default()).await.unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        spec(self.run, Purpose::Agent)
    }

    /// Names of the run's containers: on the usual daemon, and on the other one.
    fn containers(&self) -> [Vec<String>; 2] {
        let label = format!("orchestrate.run={}", self.run);
        [None, Some(self.daemon.host())]
            .map(|host| orchestrate_e2e::containers(host.as_deref(), Some(&label)).unwrap())
    }

    /// A container that an earlier coordinator created and never started.
    fn leave_behind(&self, epoch: &str, host: Option<&Daemon>) -> String {
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

    /// Ends the test: nothing may be left on either.
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
        limits: Limits {
            memory: ByteSize::mib(256),
            cpu_millis: 2000,
            pids: 64,
            tmpfs: ByteSize::mib(64),
        },
        deadline: Duration::from_mins(10),
        reusable: true,
    }
}

fn host(hosts: &DockerHosts, name: &str) -> HostUse {
    hosts.hosts().into_iter().find(|host| host.host == name).unwrap()
}

fn open(hosts: &DockerHosts) -> [usize; 2] {
    [NEAR, FAR].map(|name| host(hosts, name).open)
}

/// Waits until a host is in service, or is not.
async fn until_in_service(hosts: &DockerHosts, name: &str, wanted: bool) {
    let began = Instant::now();
    while host(hosts, name).in_service != wanted {
        assert!(began.elapsed() < Duration::from_mins(1), "{:?}", hosts.hosts());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_sandboxes_go_where_the_image_and_room_are() {
    let Some(world) = World::new("docker_sandboxes_go_where_the_image_and_room_are") else {
        return;
    };
    let (hosts, spec) = (world.hosts().await, world.spec());

    // Only one host has the image. The other cannot bring it: it is passed over, and no sandbox
    // breaks; who finds no room waits for the first.
    let mut near = Vec::new();
    for _ in 0..3 {
        near.push(hosts.open(&spec).await.unwrap());
    }
    assert_eq!(open(&hosts), [3, 0]);
    let mut waiting = hosts.open(&spec);
    let waited = tokio::time::timeout(Duration::from_secs(3), &mut waiting).await;
    assert!(waited.is_err(), "there is no room for a fourth");
    // A grader does not wait behind an agent.
    let grader = hosts.open(&self::spec(world.run, Purpose::Grader)).await.unwrap();
    grader.close().await.unwrap();
    near.pop().unwrap().close().await.unwrap();
    let mut fourth = waiting.await.unwrap();
    check_alive(&mut fourth).await;
    near.push(fourth);
    assert_eq!(host(&hosts, FAR).started, 0);
    for sandbox in near {
        sandbox.close().await.unwrap();
    }
    hosts.shutdown().await.unwrap();

    // Both have it: each takes its part, and together exactly what they have room for.
    world.daemon.load(IMAGE).unwrap();
    let hosts = world.hosts().await;
    let mut all = Vec::new();
    for count in 1..=10 {
        all.push(hosts.open(&spec).await.unwrap());
        let [near, far] = open(&hosts);
        let even =
            f64::from(u32::try_from(near).unwrap()) * 2.0 - f64::from(u32::try_from(far).unwrap());
        assert!(near + far == count && even.abs() <= 2.0, "{near} and {far} of 4 and 8");
    }
    assert_eq!(open(&hosts), [3, 7]);
    let [here, there] = world.containers();
    assert_eq!((here.len(), there.len()), (3, 7));
    assert!(hosts.open(&spec).now_or_never().is_none());
    for sandbox in &mut all {
        check_alive(sandbox).await;
    }
    // Who came first gets what becomes free, and a clean container is not started anew.
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
    world.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_a_host_that_dies_is_left_out_until_it_returns() {
    let Some(mut world) = World::new("docker_a_host_that_dies_is_left_out") else { return };
    world.daemon.load(IMAGE).unwrap();
    let left = [world.leave_behind("0", None), world.leave_behind("0", Some(&world.daemon))];
    let (hosts, spec) = (world.hosts().await, world.spec());
    // A host that is slow to answer is swept when it does.
    for name in [NEAR, FAR] {
        until_in_service(&hosts, name, true).await;
    }
    let mut swept = hosts.sweep(world.run, 1).await.unwrap();
    swept.removed.sort();
    let all = [format!("{} on {FAR}", left[1]), format!("{} on {NEAR}", left[0])];
    assert_eq!(swept.removed, all, "{swept:?}");

    let mut sandboxes = Vec::new();
    for _ in 0..6 {
        sandboxes.push(hosts.open(&spec).await.unwrap());
    }
    let [near, far] = open(&hosts);
    assert!(near > 0 && far > 0, "{near} and {far}");
    world.daemon.kill().unwrap();
    // Those that were open there break, each with an error and never with a result; those here do not.
    let look = Command::shell("echo alive", Duration::from_secs(20));
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
    assert_eq!((alive.len(), lost), (near, far));
    // New ones go to the other, at once.
    while alive.len() < 3 {
        let began = Instant::now();
        alive.push(hosts.open(&spec).await.unwrap());
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
    until_in_service(&hosts, FAR, false).await;
    assert_eq!(host(&hosts, FAR).taken_out, 1);
    let mut next = hosts.open(&spec);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut next).await.is_err());

    // It returns, and serves who waits.
    assert!(world.daemon.spawn().unwrap() || world.daemon.spawn().unwrap());
    until_in_service(&hosts, FAR, true).await;
    let mut next = next.await.unwrap();
    check_alive(&mut next).await;
    assert_eq!(host(&hosts, FAR).started, far as u64 + 1);
    alive.push(next);
    join_all(alive.into_iter().map(Sandbox::close)).await;
    world.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_a_host_that_comes_late_is_swept_and_serves() {
    let Some(mut world) = World::new("docker_a_host_that_comes_late") else { return };
    world.daemon.load(IMAGE).unwrap();
    world.leave_behind("0", Some(&world.daemon));
    world.daemon.kill().unwrap();
    let hosts = world.hosts().await;
    assert!(host(&hosts, NEAR).in_service && !host(&hosts, FAR).in_service);
    assert_eq!(hosts.sweep(world.run, 1).await.unwrap().removed, Vec::<String>::new());
    let mut sandbox = hosts.open(&world.spec()).await.unwrap();
    check_alive(&mut sandbox).await;
    assert!(world.daemon.spawn().unwrap() || world.daemon.spawn().unwrap());
    until_in_service(&hosts, FAR, true).await;
    let began = Instant::now();
    while !world.containers()[1].is_empty() {
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", world.containers());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The load here is a fourth, and there nothing.
    let mut other = hosts.open(&world.spec()).await.unwrap();
    check_alive(&mut other).await;
    assert_eq!(open(&hosts), [1, 1]);
    sandbox.close().await.unwrap();
    other.close().await.unwrap();

    // Who has no certificate of this authority gets no answer.
    let mut raw = world.raw();
    raw.hosts = raw.hosts.map(|hosts| {
        let plain = |host| DockerHostSection { certificates: None, ..host };
        hosts.into_iter().skip(1).map(plain).collect()
    });
    let refused = DockerHosts::connect(&raw.check().unwrap(), Surroundings::default()).await;
    let error = refused.unwrap_err();
    assert!(
        matches!(error.kind, SandboxErrorKind::NoDaemon(_) | SandboxErrorKind::Refused { .. }),
        "{error}"
    );
    world.finish(hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_an_image_is_the_same_on_all_hosts() {
    let test = "docker_an_image_is_the_same_on_all_hosts";
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return;
    }
    let (Some(first), Some(second)) = (Daemon::start().unwrap(), Daemon::start().unwrap()) else {
        orchestrate_e2e::say(&format!("skipped: {test} (no further daemons can be started here)"));
        return;
    };
    let registry = Registry::start().await;
    let image = |name: &str| format!("{}/team/{name}:1", registry.host);
    let at = |daemon: &Daemon| DockerHostSection { url: Some(daemon.host()), ..Default::default() };
    // Room for one agent on each.
    let raw = SandboxSection {
        hosts: Some(vec![at(&first), at(&second)]),
        max_containers: Some(2),
        ..SandboxSection::default()
    };
    let config = raw.check().unwrap();
    let hosts = DockerHosts::connect(&config, Surroundings::default()).await.unwrap();
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

    // The tag moves after the first host pulled it: the second pulls what the first has.
    let pushed = registry.push("team/moved", "1", 10);
    let here = hosts.open(&spec("moved")).await.unwrap();
    let other = registry.push("team/moved", "1", 20);
    assert_ne!(pushed.id, other.id);
    let there = hosts.open(&spec("moved")).await.unwrap();
    assert_eq!([images(&first), images(&second)], [[pushed.id.clone()], [pushed.id]]);
    here.close().await.unwrap();
    there.close().await.unwrap();

    // Each has another image under the name already: only the one that was used first serves it.
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
async fn docker_a_host_by_ssh_serves_and_survives_its_connection() {
    let test = "docker_a_host_by_ssh";
    if !orchestrate_e2e::docker_or_skip(test).unwrap() {
        return;
    }
    let Some(server) = Sshd::start() else {
        orchestrate_e2e::say(&format!("skipped: {test} (no ssh server can be started here)"));
        return;
    };
    let host = DockerHostSection {
        url: Some(format!("ssh://daemon-host{}", usual().trim_start_matches("unix://"))),
        ssh_config: Some(server.config()),
        ..DockerHostSection::default()
    };
    let raw = SandboxSection {
        hosts: Some(vec![host]),
        pull: Some(PullPolicy::Never),
        ..SandboxSection::default()
    };
    let config = raw.check().unwrap();
    let hosts = DockerHosts::connect(&config, Surroundings::default()).await.unwrap();
    let run = RunId::generate();
    let spec = spec(run, Purpose::Agent);
    let opened = join_all((0..8).map(|_| hosts.open(&spec))).await;
    let mut sandboxes: Vec<Box<dyn Sandbox>> = opened.into_iter().map(Result::unwrap).collect();
    assert_eq!(server.connections(), 1, "one connection for all");
    let mut echo = Command::shell("seq 1 1000000", Duration::from_secs(30));
    echo.keep_bytes = 8 << 20;
    let result = sandboxes[0].exec(&echo).await.unwrap();
    assert_eq!(result.text().lines().count(), 1_000_000);

    // The connection breaks: what was open breaks with it, and the next one makes another.
    server.break_connections();
    for sandbox in &mut sandboxes {
        let error =
            sandbox.exec(&Command::shell("true", Duration::from_secs(5))).await.unwrap_err();
        assert!(matches!(error.kind, SandboxErrorKind::Gone(_)), "{error}");
    }
    drop(sandboxes);
    let mut next = hosts.open(&spec).await.unwrap();
    check_alive(&mut next).await;
    next.close().await.unwrap();
    hosts.shutdown().await.unwrap();
    drop(hosts);
    let began = Instant::now();
    while server.connections() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "a connection outlives its provider");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let label = format!("orchestrate.run={run}");
    assert_eq!(orchestrate_e2e::containers(None, Some(&label)).unwrap(), Vec::<String>::new());

    // A stranger's key is refused, in the words of `ssh`.
    server.forget_clients();
    let error = DockerHosts::connect(&config, Surroundings::default()).await.unwrap_err();
    assert!(error.to_string().contains("Permission denied"), "{error}");
}
