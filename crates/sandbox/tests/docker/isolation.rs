//! Attacks from one attempt on the next one in the same container, on process 1, and on neighbours
//! through what the kernel shares.

use crate::common::{Fixture, SHORT, check_alive, run};
use orchestrate_sandbox::{
    Command, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind, SandboxSection, Seccomp,
};

/// Sandboxes whose only protection is the reset: the daemon's list allows most of these attacks.
async fn without_own_seccomp() -> Option<Fixture> {
    let raw = SandboxSection { seccomp: Some(Seccomp::Daemon), ..SandboxSection::default() };
    Fixture::with(raw).await
}

/// Runs Python code and returns what it printed.
async fn python(sandbox: &mut Box<dyn Sandbox>, code: &str) -> String {
    let mut command = Command::shell("", SHORT);
    command.argv = ["python3", "-c", code].map(str::to_owned).to_vec();
    let result = sandbox.exec(&command).await.unwrap();
    assert_eq!(result.exit, Exit::Code(0), "{}", result.text());
    result.text()
}

fn file(path: &str) -> FileEntry {
    FileEntry { path: path.to_owned(), mode: 0o644, content: b"x".to_vec() }
}

/// Folders that a reusable sandbox leaves writable.
const WRITABLE: [&str; 5] = ["/testbed", "/tmp", "/dev", "/dev/shm", "/dev/mqueue"];

/// Python statements that leave something on the folder `PATH`, each with the error number when
/// this program's list of system calls denies it.
const LEAVE: [(&str, &str, Option<i32>); 4] = [
    (
        "a default access control list",
        "acl = struct.pack('<I', 2)
for tag, bits, who in ((1, 7, -1), (2, 0, 0), (4, 0, -1), (16, 0, -1), (32, 0, -1)):
    acl += struct.pack('<HHi', tag, bits, who)
os.setxattr(PATH, 'system.posix_acl_default', acl)",
        Some(95),
    ),
    ("an attribute", "os.setxattr(PATH, 'user.note', b'answer')", Some(95)),
    (
        "an attribute through a descriptor",
        "os.setxattr(os.open(PATH, os.O_RDONLY), 'user.note', b'answer')",
        Some(95),
    ),
    (
        "a flag",
        "fd = os.open(PATH, os.O_RDONLY)
flags = struct.unpack('l', fcntl.ioctl(fd, 0x80086601, bytes(8)))[0]
fcntl.ioctl(fd, 0x40086602, struct.pack('l', flags | 0x40))",
        None,
    ),
];

/// The code of an attack: prints `left`, or the number of the error.
fn attack(path: &str, code: &str) -> String {
    let body = code.replace('\n', "\n    ");
    format!(
        "import fcntl, os, struct\nPATH = '{path}'\ntry:\n    {body}\n    print('left')\n\
         except OSError as error:\n    print(error.errno)\n"
    )
}

#[tokio::test]
async fn docker_attributes_cannot_be_left_for_the_next_attempt() {
    let Some(fixture) = Fixture::new().await else { return };
    for path in WRITABLE {
        for (what, code, denied) in LEAVE {
            let mut sandbox = fixture.open().await;
            let name = sandbox.name().to_owned();
            let answer = python(&mut sandbox, &attack(path, code)).await;
            if let Some(errno) = denied {
                assert_eq!(answer.trim(), errno.to_string(), "{what} on {path}");
            }
            sandbox.close().await.unwrap();
            let mut next = fixture.open().await;
            // A container in which something was left is gone.
            assert_eq!(next.name() != name, answer == "left\n", "{what} on {path}");
            next.write_files(&[file("setup")]).await.unwrap();
            next.close().await.unwrap();
        }
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_attributes_that_were_left_discard_the_container() {
    let Some(fixture) = without_own_seccomp().await else { return };
    let mut left = Vec::new();
    for path in WRITABLE {
        for (what, code, _) in LEAVE {
            let mut sandbox = fixture.open().await;
            let name = sandbox.name().to_owned();
            let answer = python(&mut sandbox, &attack(path, code)).await;
            sandbox.close().await.unwrap();
            let mut next = fixture.open().await;
            assert_eq!(next.name() != name, answer == "left\n", "{what} on {path}: {answer}");
            if answer == "left\n" {
                left.push((what, path));
            }
            // The next attempt can be set up, and reads nothing of the last one.
            next.write_files(&[file("setup")]).await.unwrap();
            let look = format!("import os; print(os.listxattr('{path}'))");
            assert_eq!(python(&mut next, &look).await, "[]\n", "{what} on {path}");
            next.close().await.unwrap();
        }
    }
    // Older kernels keep fewer attributes on a tmpfs, but lists of access on all.
    assert!(left.contains(&(LEAVE[0].0, "/testbed")), "{left:?}");
    assert_eq!(fixture.provider.stats().resets_refused, left.len() as u64);
    fixture.finish().await;
}

#[tokio::test]
async fn docker_times_of_folders_and_devices_are_those_of_a_new_container() {
    let Some(fixture) = Fixture::new().await else { return };
    let paths = format!("{} /dev/null /dev/pts /dev/pts/ptmx", WRITABLE.join(" "));
    let look = format!("stat -c '%n %X %Y' {paths}");
    let mut sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    let before = run(&mut sandbox, &look).await.text();
    let set = format!("touch -d @1234567 {paths}; touch -h -d @7654321 /dev/fd");
    // With user namespaces, devices belong to the host, and their times cannot be set.
    run(&mut sandbox, &set).await;
    sandbox.close().await.unwrap();
    let mut next = fixture.open().await;
    assert_eq!(next.name(), name);
    let after = run(&mut next, &look).await.text();
    let modified = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect()
    };
    assert_eq!(modified(&after), modified(&before));
    assert!(!after.contains("1234567"), "{after}");
    let link = run(&mut next, "stat -c %Y /dev/fd").await.text();
    assert_ne!(link, "7654321\n");
    next.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_container_whose_network_was_used_is_discarded() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    // The connection stays in the kernel's table, and its bytes in the counters of the interface.
    let code = "import socket
server = socket.create_server(('127.0.0.1', 4321))
client = socket.create_connection(('127.0.0.1', 4321))
server.accept()[0].close()
client.close()";
    python(&mut sandbox, code).await;
    sandbox.close().await.unwrap();
    let next = fixture.open().await;
    assert_ne!(next.name(), name);
    next.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_sandbox_in_which_a_call_failed_is_never_reused() {
    let Some(fixture) = Fixture::new().await else { return };
    for step in ["write_files", "read_tree"] {
        let mut sandbox = fixture.open().await;
        let name = sandbox.name().to_owned();
        run(&mut sandbox, "mkdir folder; truncate -s 1G sparse").await;
        let error = match step {
            "write_files" => sandbox.write_files(&[file("folder")]).await.unwrap_err(),
            _ => sandbox.read_tree(orchestrate_types::ByteSize::mib(8)).await.unwrap_err(),
        };
        // It still answers, and a reset would succeed.
        check_alive(&mut sandbox).await;
        sandbox.close().await.unwrap();
        let next = fixture.open().await;
        assert_ne!(next.name(), name, "{step}: {error}");
        next.close().await.unwrap();
    }
    // A path that is not even sent says nothing about the sandbox.
    let mut sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    sandbox.write_files(&[file("../x")]).await.unwrap_err();
    sandbox.close().await.unwrap();
    let next = fixture.open().await;
    assert_eq!(next.name(), name);
    next.close().await.unwrap();
    fixture.finish().await;
}

/// Attacks on process 1, each of which prints `done` or the number of the error.
const ON_PROCESS_1: [(&str, &str); 5] = [
    ("limit", "resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"),
    ("priority", "os.setpriority(os.PRIO_PROCESS, 1, 19)"),
    ("priority of the user", "os.setpriority(os.PRIO_USER, 0, 19)"),
    ("policy", "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))"),
    (
        "input and output",
        "ctypes.CDLL(None, use_errno=True).syscall(251, 1, 1, 3 << 13) and fail()",
    ),
];

fn on_process_1(code: &str) -> String {
    format!(
        "import ctypes, os, resource\ndef fail(): raise OSError(ctypes.get_errno(), '')\n\
         try:\n    {code}\n    print('done')\nexcept OSError as error:\n    print(error.errno)\n"
    )
}

#[tokio::test]
async fn docker_process_1_cannot_be_limited_or_slowed_down() {
    const NOT_PERMITTED: &str = "1\n";
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let name = sandbox.name().to_owned();
    let attacks = if cfg!(target_arch = "x86_64") { &ON_PROCESS_1[..] } else { &ON_PROCESS_1[..4] };
    for (what, code) in attacks {
        assert_eq!(python(&mut sandbox, &on_process_1(code)).await, NOT_PERMITTED, "{what}");
        // The upper half of an argument, which the kernel ignores, does not help.
        check_alive(&mut sandbox).await;
    }
    if cfg!(target_arch = "x86_64") {
        let upper = "ctypes.CDLL(None, use_errno=True).syscall(302, ctypes.c_long(1 << 32 | 1), 7, \
                     ctypes.byref((ctypes.c_ulong * 2)(3, 3)), None) and fail()";
        assert_eq!(python(&mut sandbox, &on_process_1(upper)).await, NOT_PERMITTED);
    }
    // A process may still change itself, as `nice`, `ulimit` and `taskset` do.
    let own = "import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print(os.nice(5))";
    assert_eq!(python(&mut sandbox, own).await, "5\n");
    sandbox.close().await.unwrap();
    let next = fixture.open().await;
    assert_eq!(next.name(), name);
    next.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_process_1_restores_itself_before_the_next_call() {
    let Some(fixture) = Fixture::new().await else { return };
    let look =
        "cat /proc/1/oom_score_adj /proc/1/coredump_filter; grep Cpus_allowed: /proc/1/status";
    for change in [
        "echo 1000 > /proc/1/oom_score_adj",
        "echo 0 > /proc/1/coredump_filter",
        "python3 -c 'import os; os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})'",
    ] {
        let mut sandbox = fixture.open().await;
        let name = sandbox.name().to_owned();
        let before = run(&mut sandbox, look).await.text();
        let changed = run(&mut sandbox, &format!("{change}; {look}")).await.text();
        assert_eq!(run(&mut sandbox, look).await.text(), before, "{change}");
        sandbox.close().await.unwrap();
        let next = fixture.open().await;
        // On a machine with one CPU the last change has no effect.
        assert_eq!(next.name() != name, changed != before, "{change}: {changed}");
        next.close().await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test]
async fn docker_damage_that_cannot_be_undone_is_the_agents_doing() {
    let Some(fixture) = without_own_seccomp().await else { return };
    for (what, code) in &ON_PROCESS_1[..2] {
        let mut sandbox = fixture.open().await;
        let name = sandbox.name().to_owned();
        // The command itself has a result.
        assert_eq!(python(&mut sandbox, &on_process_1(code)).await, "done\n", "{what}");
        let next = sandbox.exec(&Command::shell("true", SHORT)).await.unwrap_err();
        assert_damaged(&next);
        sandbox.close().await.unwrap();
        let other = fixture.open().await;
        assert_ne!(other.name(), name);
        other.close().await.unwrap();
    }
    // A limit that a process may raise again is restored.
    let mut sandbox = fixture.open().await;
    let soft = "resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 4096))";
    assert_eq!(python(&mut sandbox, &on_process_1(soft)).await, "done\n");
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

fn assert_damaged(error: &SandboxError) {
    assert!(matches!(error.kind, SandboxErrorKind::Damaged { .. }), "{error}");
    assert!(error.is_agents_doing());
}

#[tokio::test]
async fn docker_process_1_killed_for_lack_of_memory_is_the_agents_doing() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    // Process 1 becomes the kernel's first choice: the two others use less than all memory each.
    let kill = "echo 1000 > /proc/1/oom_score_adj; echo 0 > /proc/self/oom_score_adj; \
                tail /dev/zero & exec tail /dev/zero";
    let error = sandbox.exec(&Command::shell(kill, SHORT)).await.unwrap_err();
    assert_damaged(&error);
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_container_filled_with_shared_memory_is_the_agents_doing() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    // Shared memory outlives its processes. Blocks of decreasing size leave no page free.
    let fill = "import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
open('/proc/self/oom_score_adj', 'w').write('1000')
for size in [4 << 20] * 64 + [4 << 10] * 4096:
    if os.fork() == 0:
        address = libc.shmat(libc.shmget(0, size, 0o600), None, 0)
        ctypes.memset(address, 1, size)
        os._exit(0)
    if os.wait()[1]: continue";
    let mut fill_up = Command::shell("", SHORT);
    fill_up.argv = ["python3", "-c", fill].map(str::to_owned).to_vec();
    // Whatever happens first: a command is killed, none can be started, or process 1 is killed.
    for command in [&fill_up, &fill_up, &fill_up, &Command::shell("true", SHORT)] {
        if let Err(error) = sandbox.exec(command).await {
            assert_damaged(&error);
            break;
        }
    }
    sandbox.close().await.unwrap();
    let mut next = fixture.open().await;
    check_alive(&mut next).await;
    next.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_neighbours_keep_what_the_kernel_limits_per_user() {
    const NOT_IMPLEMENTED: &str = "38";
    let Some(fixture) = Fixture::new().await else { return };
    let Some(open) = without_own_seccomp().await else { return };
    let mut attacker = fixture.open().await;
    let mut neighbour = open.open().await;
    let hold = |calls: &str, hold: &str| {
        format!(
            "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\ncount = 0\n\
             while count < 100000 and {calls} >= 0: count += 1\n\
             print(count, ctypes.get_errno(), flush=True)\n{hold}"
        )
    };
    let queue = "libc.mq_open(b'/q%d' % count, 66, 0o600, None)";
    let events = "libc.syscall(206, 60000, ctypes.byref(ctypes.c_ulong(0)))";
    for call in ["libc.inotify_init()", queue, events] {
        if call == events && cfg!(not(target_arch = "x86_64")) {
            continue;
        }
        let denied = python(&mut attacker, &hold(call, "")).await;
        assert_eq!(denied.trim(), format!("0 {NOT_IMPLEMENTED}"), "{call}");
    }
    // Where the daemon's list allows it, message queues have no room.
    assert_eq!(python(&mut neighbour, &hold(queue, "")).await.trim(), "0 24");
    // A neighbour that may watch files still can, while the attacker tries.
    let endless = hold("libc.inotify_init()", "time.sleep(2)");
    let one = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)";
    let (_, watched) = tokio::join!(python(&mut attacker, &endless), python(&mut neighbour, one));
    assert_eq!(watched, "True\n");
    attacker.close().await.unwrap();
    neighbour.close().await.unwrap();
    fixture.finish().await;
    open.finish().await;
}

#[tokio::test]
async fn docker_ordinary_tools_work_without_attributes_and_inotify() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let tools = "set -e; mkdir -p a/b; echo x > a/b/c; chmod 640 a/b/c; ln -s b a/link; \
                 cp -a a copy; cp -p a/b/c kept; cp --preserve=all a/b/c all; mv copy /tmp/moved; \
                 tar cpf a.tar a; mkdir out; tar xpf a.tar -C out; install -m 600 a/b/c installed; \
                 sed -i s/x/y/ a/b/c; stat -c %a out/a/b/c kept all installed; \
                 python3 -c 'import shutil; shutil.copytree(\"a\", \"tree\"); shutil.copy2(\"kept\", \"k2\")'; \
                 diff -r a/link tree/link; \
                 if command -v git > /dev/null; then git init -q r; cp kept r; git -C r add -A; \
                 git -C r -c user.name=a -c user.email=a@a commit -qm m; git clone -q r s; fi; echo ok";
    assert_eq!(run(&mut sandbox, tools).await.text(), "640\n640\n640\n600\nok\n");
    // `tail` falls back to polling.
    let follow = "echo one > log; timeout 3 tail -f log > seen 2> /dev/null & sleep 0.3; \
                  echo two >> log; wait; cat seen";
    assert_eq!(run(&mut sandbox, follow).await.text(), "one\ntwo\n");
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_limits_that_containers_share_are_read_from_inside() {
    let Some(fixture) = Fixture::new().await else { return };
    let limits = fixture.provider.shared_limits(&fixture.spec(true)).await.unwrap();
    let soft = std::fs::read_to_string("/proc/sys/fs/pipe-user-pages-soft").unwrap();
    let named = limits.iter().find(|limit| limit.name == "fs.pipe-user-pages-soft");
    // The daemon of these tests runs on the same kernel.
    assert_eq!(named.map_or(0, |limit| limit.value), soft.trim().parse::<u64>().unwrap());
    fixture.finish().await;
}
