//! Hostile commands on a real daemon: the self-test of `doctor`, many tries to outlive a deadline,
//! endless writers, and all system calls that must be refused.

use crate::common::{Fixture, IMAGE, SHORT, check_alive, run};
use orchestrate_sandbox::{
    Command, Exit, SandboxSection, Seccomp, SelfTestResult, run_self_test, self_test_cases,
};
use orchestrate_types::ByteSize;
use std::time::Duration;

/// Number of tries: `default` unless `ORCHESTRATE_TRIES` is set.
fn tries(default: usize) -> usize {
    let requested = std::env::var("ORCHESTRATE_TRIES").ok();
    requested.and_then(|count| count.parse().ok()).unwrap_or(default)
}

#[tokio::test]
async fn docker_self_test_passes() {
    let Some(fixture) = Fixture::new().await else { return };
    let config = fixture.provider.config().clone();
    let report = |result: &SelfTestResult| {
        let SelfTestResult { name, elapsed_ms, outcome, .. } = result;
        eprintln!("{name}: {elapsed_ms} ms, {outcome}");
    };
    let results = run_self_test(&config, IMAGE, |_| true, report).await.unwrap();
    assert_eq!(results.len(), self_test_cases().len());
    assert!(results.len() >= 35);
    let wrong: Vec<_> = results.iter().filter(|result| !result.ok).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    // `replaced` tells cases that lose the container from those that do not.
    for (name, replaced) in [("sleep_past_deadline", false), ("removed", true), ("paused", true)] {
        let result = results.iter().find(|result| result.name == name).unwrap();
        assert_eq!(result.replaced, replaced, "{name}");
    }
    fixture.finish().await;
}

/// Commands that try to outlive their deadline in different ways.
const LINGERING: [(&str, &str); 5] = [
    ("plain", "sleep 100"),
    ("deaf", "trap '' TERM INT HUP; while :; do sleep 0.05; done"),
    ("setsid", "setsid sh -c 'trap \"\" TERM; sleep 100' & sleep 100"),
    ("double_fork", "(setsid sh -c '(trap \"\" TERM HUP; sleep 100) & sleep 100' &); sleep 100"),
    ("storm", "(f() { f | f & }; f) & while :; do :; done"),
];

#[tokio::test]
async fn docker_commands_are_dead_two_seconds_after_their_deadline() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let (mut latest, count) = (Duration::ZERO, tries(25));
    for number in 0..count {
        // Many tries take longer than the lifetime of a container.
        if number % 100 == 99 {
            sandbox.close().await.unwrap();
            sandbox = fixture.open().await;
        }
        let (name, script) = LINGERING[number % LINGERING.len()];
        let deadline = Duration::from_millis(50 + 37 * (number as u64 % 7));
        let result = sandbox.exec(&Command::shell(script, deadline)).await.unwrap();
        // Measured by process 1, which reports the end when all processes are dead.
        let over = result.elapsed.saturating_sub(deadline);
        assert_eq!(result.exit, Exit::TimedOut, "{name} in try {number}");
        assert!(over < Duration::from_secs(2), "{name} in try {number}: {over:?}");
        latest = latest.max(over);
        check_alive(&mut sandbox).await;
    }
    eprintln!("{count} tries; the slowest was dead {latest:?} after its deadline");
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

/// Highest resident memory of this process so far, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn docker_endless_writer_is_killed_soon_without_using_memory() {
    let cap = ByteSize::mib(1);
    let raw = SandboxSection { max_output: Some(cap), ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    let mut sandbox = fixture.open().await;
    run(&mut sandbox, "seq 1 100000").await;
    let before = peak();
    for script in ["yes", "cat /dev/zero", "while :; do echo x; done", "setsid yes & sleep 100"] {
        let result = run(&mut sandbox, script).await;
        let elapsed = result.elapsed;
        assert_eq!(result.exit, Exit::Signal(9), "{script}");
        assert!(result.total_bytes > cap.0, "{script}: {} bytes", result.total_bytes);
        assert!(result.head.len() + result.tail.len() <= 128 << 10, "{script}");
        eprintln!("{script}: dead after {elapsed:?} and {} bytes", result.total_bytes);
        // The slow writer needs time to reach the cap; the others reach it at once.
        let slow = if script.starts_with("while") { 10_000 } else { 1_500 };
        assert!(elapsed < Duration::from_millis(slow), "{script}: {elapsed:?}");
        check_alive(&mut sandbox).await;
    }
    let more = peak().saturating_sub(before);
    eprintln!("memory grew by {} KiB", more >> 10);
    assert!(more <= 8 << 20, "memory grew by {more} bytes");
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

/// System calls by name, with their numbers on x86-64 and on other architectures.
const REFUSED: [(&str, u32, u32); 28] = [
    ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426),
    ("io_uring_register", 427, 427),
    ("inotify_init1", 294, 26),
    ("mq_open", 240, 180),
    ("io_setup", 206, 0),
    ("bpf", 321, 280),
    ("perf_event_open", 298, 241),
    ("userfaultfd", 323, 282),
    ("add_key", 248, 217),
    ("request_key", 249, 218),
    ("keyctl", 250, 219),
    ("open_tree", 428, 428),
    ("move_mount", 429, 429),
    ("fsopen", 430, 430),
    ("fsconfig", 431, 431),
    ("fsmount", 432, 432),
    ("fspick", 433, 433),
    ("mount_setattr", 442, 442),
    ("mount", 165, 40),
    ("umount2", 166, 39),
    ("unshare", 272, 97),
    ("setns", 308, 268),
    ("process_vm_readv", 310, 270),
    ("kexec_load", 246, 104),
    ("init_module", 175, 105),
    ("open_by_handle_at", 304, 265),
    ("pidfd_getfd", 438, 438),
];

/// Makes the system calls given as arguments, and prints the error number of each.
const CALLER: &str = "import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    print(ctypes.get_errno() if result < 0 else 0)
";

fn python(code: &str, arguments: impl Iterator<Item = String>) -> Command {
    let mut command = Command::shell("", SHORT);
    command.argv = ["python3", "-c", code].map(str::to_owned).to_vec();
    command.argv.extend(arguments);
    command
}

#[tokio::test]
async fn docker_privileged_system_calls_are_refused() {
    const NOT_PERMITTED: u32 = 1;
    const NOT_IMPLEMENTED: u32 = 38;
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let numbers = REFUSED.map(|(_, x86_64, other)| {
        (if cfg!(target_arch = "x86_64") { x86_64 } else { other }).to_string()
    });
    let answer = sandbox.exec(&python(CALLER, numbers.into_iter())).await.unwrap().text();
    let errors: Vec<u32> = answer.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(errors.len(), REFUSED.len(), "{answer}");
    for ((name, ..), error) in REFUSED.iter().zip(errors) {
        assert!([NOT_PERMITTED, NOT_IMPLEMENTED].contains(&error), "{name}: error {error}");
    }
    // Allowed calls succeed, so the errors above are not caused by the caller: a process may trace
    // its own child but not process 1, and sockets of common families can be created.
    let trace = "import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def attach(pid):
    return 'traced' if libc.ptrace(16, pid, 0, 0) == 0 else os.strerror(ctypes.get_errno())
child = os.fork()
if child == 0:
    while True: pass
print(attach(child), attach(1))
for family in (1, 2, 10, 16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_DGRAM if family != 16 else socket.SOCK_RAW).close()
        print(family, end=' ')
    except OSError:
        pass
os.kill(child, 9)
";
    let answer = sandbox.exec(&python(trace, std::iter::empty())).await.unwrap().text();
    assert_eq!(answer, "traced Operation not permitted\n1 2 10 16 ");
    // `getpid` through the 32-bit entry point kills the caller.
    let gate = "import ctypes, mmap
code = bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3])
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
entry = ctypes.addressof(ctypes.c_char.from_buffer(page))
print('answered', ctypes.CFUNCTYPE(ctypes.c_int)(entry)())
";
    if cfg!(target_arch = "x86_64") {
        let result = sandbox.exec(&python(gate, std::iter::empty())).await.unwrap();
        assert!(matches!(result.exit, Exit::Signal(_)), "{result:?}");
    }
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_seccomp_setting_selects_the_daemons_own_profile() {
    let raw = SandboxSection { seccomp: Some(Seccomp::Daemon), ..SandboxSection::default() };
    let Some(fixture) = Fixture::with(raw).await else { return };
    let mut sandbox = fixture.open().await;
    // `remap_file_pages`, which Docker's profile allows and ours does not: there, an invalid
    // argument.
    let number = if cfg!(target_arch = "x86_64") { 216 } else { 234 };
    let call = python(CALLER, std::iter::once(number.to_string()));
    assert_eq!(sandbox.exec(&call).await.unwrap().text(), "22\n");
    let Some(strict) = Fixture::new().await else { return };
    let mut other = strict.open().await;
    assert_eq!(other.exec(&call).await.unwrap().text(), "1\n");
    other.close().await.unwrap();
    strict.finish().await;
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    fixture.finish().await;
}
