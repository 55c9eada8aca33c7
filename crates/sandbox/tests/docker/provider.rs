//! The provider on a real Docker daemon. Hostile commands are in `self_test.rs`.

use crate::common::{Fixture, IMAGE, SHORT, check_alive, docker, run};
use orchestrate_sandbox::{
    Command, DockerProvider, Exit, FileEntry, GcScope, PullPolicy, Purpose, Sandbox,
    SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec,
};
use orchestrate_types::{ByteSize, HumanDuration};
use std::time::{Duration, Instant};

#[tokio::test]
async fn docker_ordinary_commands_report_how_they_ended() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    assert_eq!(run(&mut sandbox, "true").await.exit, Exit::Code(0));
    assert_eq!(run(&mut sandbox, "exit 3").await.exit, Exit::Code(3));
    assert_eq!(run(&mut sandbox, "kill -9 $$").await.exit, Exit::Signal(9));
    let both = run(&mut sandbox, "pwd; id -u; echo err >&2; echo $PAGER $LANG").await;
    assert_eq!(both.text(), "/testbed\n0\nerr\ncat C.UTF-8\n");
    let mut direct = Command::shell("", SHORT);
    direct.argv = vec!["no-such-program".into()];
    let absent = sandbox.exec(&direct).await.unwrap();
    assert_eq!(absent.exit, Exit::NotStarted);
    assert!(absent.text().contains("no-such-program"), "{}", absent.text());
    direct.argv = vec!["/etc".into()];
    assert_eq!(sandbox.exec(&direct).await.unwrap().exit, Exit::NotStarted);
    direct.argv = vec!["printenv".into(), "X".into()];
    direct.env = vec![("X".into(), "a b".into())];
    assert_eq!(sandbox.exec(&direct).await.unwrap().text(), "a b\n");
    let python = run(
        &mut sandbox,
        "python3 -c 'import json,re,datetime,collections,importlib,unittest,hashlib,subprocess; print(1+1)'",
    )
    .await;
    assert_eq!(python.text(), "2\n");
    // Reads of stdin end at once.
    assert_eq!(run(&mut sandbox, "cat; read x; echo $?").await.text(), "1\n");
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_both_ends_of_the_output_are_kept_and_all_is_counted() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let bytes = run(&mut sandbox, "printf '\\377\\000\\376end'").await;
    assert_eq!(bytes.head, b"\xff\0\xfeend");
    let random = run(&mut sandbox, "head -c 100000 /dev/urandom").await;
    assert_eq!((random.head.len(), random.tail.len()), (65536, 34464));
    let mut long = Command::shell("seq 1 1000000", SHORT);
    long.keep_bytes = 4 << 20;
    let kept = sandbox.exec(&long).await.unwrap();
    assert_eq!((kept.total_bytes, kept.head.len()), (6_888_896, 4 << 20));
    assert_eq!(kept.head.len() + kept.tail.len(), 6_888_896);
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_trees_contain_regular_files_only_and_are_capped() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let file = |path: &str, mode, content: &[u8]| FileEntry {
        path: path.into(),
        mode,
        content: content.to_vec(),
    };
    let big = vec![7; 700_000];
    let files = [
        file("a.py", 0o644, b"print(1)\n"),
        file("deep/er/run.sh", 0o755, b"#!/bin/sh\n"),
        file("z", 0o600, &big),
    ];
    sandbox.write_files(&files).await.unwrap();
    let script = "ln -s /etc/passwd link; mkfifo fifo; mkdir __pycache__; echo x > __pycache__/x; \
                  echo secret > closed; chmod 000 closed; ln a.py hard; ls -l deep/er/run.sh";
    assert!(run(&mut sandbox, script).await.text().starts_with("-rwxr-xr-x"));
    let tree = sandbox.read_tree(ByteSize::mib(8)).await.unwrap();
    let names: Vec<&str> = tree.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(names, ["a.py", "closed", "deep/er/run.sh", "hard", "z"]);
    assert_eq!((&tree[0], &tree[2], &tree[4]), (&files[0], &files[1], &files[2]));
    assert_eq!((tree[1].content.as_slice(), tree[1].mode), (b"secret\n".as_slice(), 0));

    run(&mut sandbox, "truncate -s 1G sparse").await;
    let refused = sandbox.read_tree(ByteSize::mib(8)).await.unwrap_err();
    assert!(
        matches!(refused.kind, SandboxErrorKind::TooLarge { ref what, .. } if what == "sparse")
    );
    // The sandbox remains usable after a refusal.
    for path in ["../x", "/etc/x", "link/../x", "deep"] {
        let refused = sandbox.write_files(&[file(path, 0o644, b"x")]).await.unwrap_err();
        assert!(matches!(refused.kind, SandboxErrorKind::Refused { .. }), "{path}: {refused}");
    }
    run(&mut sandbox, "ln -s /tmp outside").await;
    assert!(sandbox.write_files(&[file("outside/x", 0o644, b"x")]).await.is_err());
    assert_eq!(run(&mut sandbox, "ls /tmp").await.text(), "");
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_reused_sandbox_contains_nothing_of_the_previous_attempt() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    let dirty = "mkdir -p a/b; echo x > a/b/c; chmod 000 a; chmod 777 .; echo x > /tmp/x; echo x > /dev/shm/x; \
                 echo x > /dev/hidden; mkdir -p /tmp/d/e; \
                 python3 -c 'import ctypes; l=ctypes.CDLL(None); print(l.shmget(1234,4096,0o1666)>=0, l.semget(1234,1,0o1666)>=0, l.msgget(1234,0o1666)>=0)'; \
                 setsid sleep 1000 & echo ok";
    let result = run(&mut sandbox, dirty).await;
    assert!(
        result.text().contains("ok") && result.text().contains("True True True"),
        "{}",
        result.text()
    );
    sandbox.close().await.unwrap();

    let mut again = fixture.open().await;
    assert_eq!(again.name(), name);
    let look = "find /testbed /tmp /dev/shm -mindepth 1; ls /dev/hidden; stat -c %a /testbed; \
                cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | wc -l";
    let seen = run(&mut again, look).await.text();
    assert_eq!(seen, "ls: cannot access '/dev/hidden': No such file or directory\n755\n3\n");
    check_alive(&mut again).await;
    again.close().await.unwrap();
    assert_eq!((fixture.provider.stats().started, fixture.provider.stats().reused), (1, 1));

    // Agent and grader never share a container.
    let grader = SandboxSpec { purpose: Purpose::Grader, ..fixture.spec(true) };
    let other = fixture.provider.open(&grader).await.unwrap();
    assert_ne!(other.name(), name);
    other.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_changes_that_a_reset_cannot_undo_discard_the_container() {
    let Some(fixture) = Fixture::new().await else { return };
    for (count, script) in [
        "rm /dev/null; echo x > /dev/null",
        "chmod 777 /dev/shm",
        "echo 900 > /proc/1/oom_score_adj",
        "chmod 755 /dev/mqueue",
    ]
    .into_iter()
    .enumerate()
    {
        let mut sandbox = fixture.open().await;
        let name = sandbox.name().to_owned();
        let result = run(&mut sandbox, script).await;
        assert_eq!(result.exit, Exit::Code(0), "{script}: {}", result.text());
        sandbox.close().await.unwrap();
        assert_eq!(fixture.provider.stats().resets_refused, count as u64 + 1, "{script}");
        let next = fixture.open().await;
        assert_ne!(next.name(), name);
        next.close().await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_lost_container_is_an_error_and_never_a_result() {
    let Some(fixture) = Fixture::new().await else { return };
    for (args, reusable) in [(["kill"].as_slice(), true), (["rm", "-f"].as_slice(), false)] {
        let mut sandbox = fixture.provider.open(&fixture.spec(reusable)).await.unwrap();
        let name = sandbox.name().to_owned();
        let started = Instant::now();
        let command = Command::shell("echo partial; touch started; sleep 1000", 12 * SHORT);
        let args: Vec<String> = args.iter().map(ToString::to_string).chain([name]).collect();
        let kill = tokio::task::spawn_blocking(move || {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            docker(&args)
        });
        let (ended, _) = tokio::join!(sandbox.exec(&command), kill);
        assert!(matches!(ended.unwrap_err().kind, SandboxErrorKind::Gone(_)));
        assert!(started.elapsed() < 6 * SHORT, "only its time limit ended the command");
        let next = sandbox.exec(&Command::shell("true", SHORT)).await.unwrap_err();
        assert!(matches!(next.kind, SandboxErrorKind::Gone(_)), "{next}");
        sandbox.close().await.unwrap();
        let mut replacement = fixture.provider.open(&fixture.spec(reusable)).await.unwrap();
        check_alive(&mut replacement).await;
        replacement.close().await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_idle_sandbox_that_died_is_replaced() {
    let Some(fixture) = Fixture::new().await else { return };
    let sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    sandbox.close().await.unwrap();
    docker(&["rm", "-f", &name]);
    let mut next = fixture.open().await;
    check_alive(&mut next).await;
    assert_ne!(next.name(), name);
    next.close().await.unwrap();
    fixture.finish().await;
}

/// Opens a sandbox with a deadline of a few seconds: one that leaves three quarters of it after the opening,
/// however slow the machine is.
async fn open_briefly(fixture: &Fixture, reusable: bool) -> (Box<dyn Sandbox>, Duration) {
    let mut deadline = Duration::from_secs(2);
    loop {
        let (spec, started) = (SandboxSpec { deadline, ..fixture.spec(reusable) }, Instant::now());
        match fixture.provider.open(&spec).await {
            Ok(sandbox) if started.elapsed() < deadline / 4 => return (sandbox, deadline),
            Ok(sandbox) => drop(sandbox),
            Err(error) => assert!(deadline < 4 * SHORT, "{error}"),
        }
        deadline *= 2;
    }
}

#[tokio::test]
async fn docker_deadline_ends_the_container_by_itself() {
    let Some(fixture) = Fixture::new().await else { return };
    let endless = Command::shell("sleep 1000", 12 * SHORT);
    let (mut sandbox, _) = open_briefly(&fixture, false).await;
    let ended = sandbox.exec(&endless).await.unwrap_err();
    let text = ended.to_string();
    assert!(matches!(ended.kind, SandboxErrorKind::Gone(_)) && text.contains("deadline"), "{text}");
    drop(sandbox);
    // A pooled container has the deadline of its attempt while it serves one, else its own
    // lifetime.
    let (sandbox, deadline) = open_briefly(&fixture, true).await;
    let name = sandbox.name().to_owned();
    sandbox.close().await.unwrap();
    let mut again = fixture.open().await;
    assert_eq!(again.name(), name);
    let past = Command::shell(format!("sleep {}", 2 * deadline.as_secs()), 12 * SHORT);
    assert_eq!(again.exec(&past).await.unwrap().exit, Exit::Code(0));
    again.close().await.unwrap();
    let (mut hurried, _) = open_briefly(&fixture, true).await;
    let ended = hurried.exec(&endless).await.unwrap_err();
    assert!(ended.to_string().contains("deadline"), "{ended}");
    drop(hurried);
    fixture.finish().await;
}

#[tokio::test]
async fn docker_dropped_sandboxes_and_dropped_calls_leave_no_container() {
    let Some(fixture) = Fixture::new().await else { return };
    drop(fixture.open().await);
    let mut sandbox = fixture.open().await;
    let long = Command::shell("sleep 100", SHORT);
    let abandoned = tokio::time::timeout(Duration::from_millis(200), sandbox.exec(&long)).await;
    assert!(abandoned.is_err());
    let next = sandbox.exec(&Command::shell("true", SHORT)).await.unwrap_err();
    assert!(matches!(next.kind, SandboxErrorKind::Protocol(_)), "{next}");
    sandbox.close().await.unwrap();
    // Starts that are dropped at different points.
    for millis in [0, 5, 20, 60, 120, 200] {
        let spec = fixture.spec(millis % 2 == 0);
        let open = fixture.provider.open(&spec);
        let _ = tokio::time::timeout(Duration::from_millis(millis), open).await;
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_containers_end_with_their_provider() {
    let Some(fixture) = Fixture::new().await else { return };
    let Some(witness) = Fixture::new().await else { return };
    let mut open = fixture.open().await;
    check_alive(&mut open).await;
    let run = fixture.run;
    let name = open.name().to_owned();
    drop((open, fixture));
    // The provider does not remove it: process 1 ends with its stream, and then the daemon removes
    // it.
    tokio::task::spawn_blocking(move || docker(&["wait", &name])).await.unwrap();
    let mut left = 1;
    let started = Instant::now();
    while left > 0 && started.elapsed() < 5 * SHORT {
        let all = witness.provider.list().await.unwrap();
        left = all.iter().filter(|info| info.run == Some(run)).count();
    }
    assert_eq!(left, 0);
    witness.finish().await;
}

#[tokio::test]
async fn docker_sweep_removes_older_epochs_of_its_run_only() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut spec = fixture.spec(false);
    let old = fixture.provider.open(&spec).await.unwrap();
    spec.owner.epoch = 2;
    spec.owner.attempt = "t000001.01-a01".parse().unwrap();
    let mut current = fixture.provider.open(&spec).await.unwrap();
    let report = fixture.provider.sweep(fixture.run, 2).await.unwrap();
    assert_eq!(report.removed, [old.name()]);
    assert!(report.kept.iter().any(|(name, _)| name == current.name()));
    check_alive(&mut current).await;
    let report = fixture.provider.sweep_all_orphans(GcScope::Run(fixture.run)).await.unwrap();
    assert!(report.removed.contains(&current.name().to_owned()), "{report:?}");
    drop((old, current));
    fixture.finish().await;
}

#[tokio::test]
async fn docker_leftover_container_of_the_same_name_is_replaced() {
    let Some(fixture) = Fixture::new().await else { return };
    let short = fixture.run.short();
    let name = format!("orch-{short}-t000001.00-a01-a");
    docker(&["create", "--name", &name, IMAGE, "true"]);
    let mut sandbox = fixture.provider.open(&fixture.spec(false)).await.unwrap();
    assert_eq!(sandbox.name(), name);
    check_alive(&mut sandbox).await;
    // A second sandbox of the same attempt does not replace the first.
    let mut second = fixture.provider.open(&fixture.spec(false)).await.unwrap();
    assert_eq!(second.name(), format!("{name}-2"));
    check_alive(&mut second).await;
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    second.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_missing_image_and_unreachable_daemon_errors_say_what_to_do() {
    let raw = SandboxSection { pull: Some(PullPolicy::Never), ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    for reusable in [true, false] {
        let spec = SandboxSpec { image: "orchestrate/no-such:1".into(), ..fixture.spec(reusable) };
        let error = fixture.provider.open(&spec).await.unwrap_err();
        assert!(matches!(error.kind, SandboxErrorKind::ImageMissing(_)), "{error}");
    }
    fixture.finish().await;
    for host in ["unix:///no/such/socket", "tcp://127.0.0.1:1"] {
        let raw = SandboxSection {
            docker_host: Some(host.into()),
            call_timeout: Some(HumanDuration::secs(5)),
            ..SandboxSection::default()
        };
        let error = DockerProvider::connect(raw.check().unwrap()).await.unwrap_err();
        assert!(matches!(error.kind, SandboxErrorKind::NoDaemon(_)), "{error}");
        assert!(error.to_string().contains("start Docker"), "{error}");
    }
}

#[tokio::test]
async fn docker_nothing_starts_below_min_free_disk() {
    let min_free_disk = Some(ByteSize(1 << 50));
    let raw = SandboxSection { min_free_disk, ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    let error = fixture.provider.open(&fixture.spec(true)).await.unwrap_err();
    assert!(error.to_string().contains("sandbox.min_free_disk"), "{error}");
    fixture.finish().await;
}

#[tokio::test]
async fn docker_idle_sandbox_of_another_kind_is_evicted() {
    let raw = SandboxSection { max_containers: Some(2), ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    let grader = SandboxSpec { purpose: Purpose::Grader, ..fixture.spec(true) };
    fixture.open().await.close().await.unwrap();
    fixture.provider.open(&grader).await.unwrap().close().await.unwrap();
    assert_eq!(fixture.provider.stats().idle, 2);
    let other = SandboxSpec { workdir: "/other".into(), ..fixture.spec(true) };
    let mut sandbox = fixture.provider.open(&other).await.unwrap();
    assert_eq!(run(&mut sandbox, "pwd").await.text(), "/other\n");
    let stats = fixture.provider.stats();
    assert_eq!((stats.open, stats.idle, stats.removed), (1, 1, 1));
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_twenty_sandboxes_work_at_once_within_max_containers() {
    let raw = SandboxSection { max_containers: Some(8), ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    let works = (0..20).map(|number| {
        let fixture = &fixture;
        async move {
            let purpose = if number % 2 == 0 { Purpose::Agent } else { Purpose::Grader };
            let spec = SandboxSpec { purpose, ..fixture.spec(number % 3 != 0) };
            let mut sandbox = fixture.provider.open(&spec).await.unwrap();
            let stats = fixture.provider.stats();
            assert!(stats.open + stats.idle <= 8, "{stats:?}");
            let text =
                run(&mut sandbox, &format!("echo {number} > f; cat f; ls | wc -l")).await.text();
            assert_eq!(text, format!("{number}\n1\n"));
            sandbox.close().await.unwrap();
        }
    });
    futures::future::join_all(works).await;
    fixture.finish().await;
}

#[tokio::test]
async fn docker_opening_and_commands_take_milliseconds() {
    let Some(fixture) = Fixture::new().await else { return };
    eprintln!("{:?}", fixture.provider.doctor().await.unwrap());
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let mut starts = Vec::new();
    for _ in 0..11 {
        let started = Instant::now();
        let sandbox = fixture.provider.open(&fixture.spec(false)).await.unwrap();
        starts.push(started.elapsed());
        sandbox.close().await.unwrap();
    }
    fixture.open().await.close().await.unwrap();
    let (mut commands, mut cycles, mut probes) = (Vec::new(), Vec::new(), Vec::new());
    let mut execs = Vec::new();
    for round in 0..100 {
        let started = Instant::now();
        let mut sandbox = fixture.open().await;
        let opened = Instant::now();
        sandbox.exec(&Command::shell(":", SHORT)).await.unwrap();
        let ran = Instant::now();
        if round % 10 == 0 {
            for name in fixture.names().await {
                let began = Instant::now();
                docker(&["exec", &name, "true"]);
                execs.push(began.elapsed());
            }
        }
        let closing = Instant::now();
        sandbox.close().await.unwrap();
        commands.push(ran - opened);
        cycles.push((opened - started) + closing.elapsed());
    }
    probes.push(fixture.provider.probe(&fixture.spec(true)).await.unwrap());
    let (start, command, cycle) = (median(starts), median(commands), median(cycles));
    let exec = median(execs);
    eprintln!(
        "p50: start {start:?}, command {command:?} (docker exec {exec:?}), open and close with reuse \
         {cycle:?}; {probes:?}"
    );
    // The machine's other work slows both.
    assert!(command < exec / 2, "{command:?}, docker exec {exec:?}");
    fixture.finish().await;
}

#[tokio::test]
async fn docker_configured_runtime_is_used_or_named_if_missing() {
    let Some(fixture) = Fixture::new().await else { return };
    let report = fixture.provider.doctor().await.unwrap();
    assert!(report.runtimes.contains(&report.runtime), "{report:?}");
    fixture.finish().await;
    let with = |runtime: &str| {
        let runtime = Some(runtime.to_owned());
        SandboxSection { runtime, ..SandboxSection::default() }
    };
    for runtime in &report.runtimes {
        // Docker lists this old runtime even if it is not installed.
        if runtime.contains("runtime.v1") {
            continue;
        }
        let fixture = Fixture::with(with(runtime)).await.unwrap();
        let mut sandbox = fixture.open().await;
        check_alive(&mut sandbox).await;
        let used = docker(&["inspect", "-f", "{{.HostConfig.Runtime}}", sandbox.name()]);
        assert_eq!(used.trim(), runtime);
        sandbox.close().await.unwrap();
        fixture.finish().await;
    }
    let absent = with("no-such-runtime").check().unwrap();
    let error = DockerProvider::connect(absent).await.unwrap_err();
    let message = error.to_string();
    let names_both = message.contains("no-such-runtime") && message.contains(&report.runtime);
    assert!(names_both, "{message}");
}
