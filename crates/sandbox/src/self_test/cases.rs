//! The cases of the self-test. Their scripts need only a POSIX shell and coreutils.

use super::case::Action::{
    Argument, Argv, CloseAfter, DropCall, Expire, Kill, Pause, ReadTree, Remove, RemoveIdle, Shell,
    Spoil, Write,
};
use super::case::Expected::{
    Bytes, Contains, Ends, Fails, OutOfMemory, OutputKilled, Replaced, Text, Tree,
};
use super::case::{Action, Case, ErrorClass, Expected};
use crate::api::Exit;

/// How late a command's report may arrive before its sandbox is given up, in milliseconds. A
/// command has one second of it between TERM and KILL.
pub(super) const GRACE_MS: u64 = 4_000;

const OK: Exit = Exit::Code(0);
/// Deadline in milliseconds of commands that end by themselves.
const LONG_DEADLINE_MS: u64 = 8_000;
/// Deadline in milliseconds of commands that must be killed at it.
const SHORT_DEADLINE_MS: u64 = 500;

const fn case(name: &'static str, action: Action, expected: Expected) -> Case {
    Case { name, action, expected, deadline_ms: LONG_DEADLINE_MS }
}

const fn timeout(name: &'static str, script: &'static str) -> Case {
    let expected = Ends(Exit::TimedOut);
    Case { name, action: Shell(script), expected, deadline_ms: SHORT_DEADLINE_MS }
}

/// All cases, in the order in which they run.
pub(super) const CASES: &[Case] = &[
    // Ordinary commands.
    case("true", Argv(&["true"]), Text(OK, "")),
    case("exit_3", Shell("exit 3"), Text(Exit::Code(3), "")),
    case("own_signal", Shell("kill -9 $$"), Ends(Exit::Signal(9))),
    case(
        "absent_program",
        Argv(&["no-such-program"]),
        Contains(Exit::NotStarted, "no-such-program"),
    ),
    case("folder_as_program", Argv(&["/etc"]), Contains(Exit::NotStarted, "/etc")),
    case("not_executable", Argv(&["/etc/passwd"]), Contains(Exit::NotStarted, "/etc/passwd")),
    case("exit_126_is_the_commands_own", Shell("exit 126"), Ends(Exit::Code(126))),
    case("stdin_is_empty", Shell("cat; read x; echo $?"), Text(OK, "1\n")),
    case("large_argument", Argument(100_000), Text(OK, "100000\n")),
    case(
        "too_large_argument",
        Argument(200_000),
        Contains(Exit::NotStarted, "rgument list too long"),
    ),
    // Deadlines.
    timeout("sleep_past_deadline", "sleep 100"),
    timeout("busy_past_deadline", "while :; do :; done"),
    timeout("term_ignored", "trap '' TERM INT HUP; while :; do sleep 0.1; done"),
    timeout("stopped", "kill -STOP $$"),
    timeout("setsid_past_deadline", "setsid sh -c 'trap \"\" TERM; sleep 100' & sleep 100"),
    timeout("deaf_grandchildren", "(trap '' TERM; (trap '' TERM; sleep 100) & sleep 100) & wait"),
    // Processes that a command leaves behind are killed and do not delay its end.
    case("background_child", Shell("sleep 100 & echo done"), Text(OK, "done\n")),
    case("setsid_child", Shell("setsid sleep 100 & echo done"), Text(OK, "done\n")),
    case(
        "double_fork",
        Shell(
            "(setsid sh -c 'trap \"\" TERM HUP; (sleep 100; echo late) & sleep 100' &); echo done",
        ),
        Text(OK, "done\n"),
    ),
    case(
        "sixty_orphans",
        Shell("for i in $(seq 60); do (sleep 100 &); done; echo made"),
        Contains(OK, "made"),
    ),
    // Output.
    case("yes", Argv(&["yes"]), OutputKilled),
    case("gibibytes_of_zeros", Shell("cat /dev/zero"), OutputKilled),
    case("flood_of_a_child", Shell("setsid yes & sleep 100"), OutputKilled),
    case("both_streams", Shell("seq 1 100000; seq 1 100000 >&2; echo last"), Bytes(OK, 1_177_795)),
    case(
        "raw_bytes",
        Shell("printf '\\377\\000\\376end' | od -An -tx1; printf '\\377\\000'"),
        Text(OK, " ff 00 fe 65 6e 64\n\u{fffd}\0"),
    ),
    // Process 1 cannot be killed, impersonated or inspected.
    case("kill_everybody", Shell("sh -c 'kill -9 -1; :'; sleep 5"), Ends(Exit::Signal(9))),
    case(
        "kill_1",
        Shell("kill -TERM 1; kill -9 1; kill -INT 1; kill -HUP 1; kill -STOP 1; kill -SEGV 1"),
        Ends(OK),
    ),
    case(
        "write_to_channel",
        Shell("echo FORGED > /proc/1/fd/1"),
        Contains(Exit::Code(2), "Permission denied"),
    ),
    case(
        "read_process_1",
        Shell("cat /proc/1/environ /proc/1/mem > /dev/null"),
        Contains(Exit::Code(1), "Permission denied"),
    ),
    case(
        "forged_frames",
        Shell("printf '\\001\\000\\000\\000\\001\\000\\000\\000\\000\\000\\000\\000\\102x'; echo"),
        Text(OK, "\u{1}\0\0\0\u{1}\0\0\0\0\0\0\0Bx\n"),
    ),
    // Resource exhaustion.
    Case {
        name: "fork_storm",
        // The first shell stops forking, so it lives until its deadline.
        action: Shell("(f() { f | f & }; f) & while :; do :; done"),
        expected: Ends(Exit::TimedOut),
        deadline_ms: 1500,
    },
    case("memory_hog", Argv(&["tail", "/dev/zero"]), OutOfMemory(Exit::Signal(9))),
    case("memory_hog_under_a_shell", Shell("tail /dev/zero; echo rc=$?"), OutOfMemory(OK)),
    case(
        "full_workdir",
        Shell("head -c 1G /dev/zero > big; rm big"),
        Contains(OK, "No space left"),
    ),
    case(
        "full_tmp",
        Shell("head -c 1G /dev/zero > /tmp/big; rm /tmp/big"),
        Contains(OK, "No space left"),
    ),
    case(
        "full_shm",
        Shell("head -c 1G /dev/zero > /dev/shm/big; rm /dev/shm/big"),
        Contains(OK, "No space left"),
    ),
    case("many_files", Shell("seq 1 5000 | xargs touch; ls | wc -l"), Text(OK, "5000\n")),
    case(
        "file_size",
        Shell("ulimit -f 8; head -c 1M /dev/zero > f; ls -s f | cut -d' ' -f1"),
        Contains(OK, "4"),
    ),
    case(
        "limits_stay",
        Shell(
            "for l in f n; do (ulimit -$l unlimited) 2> /dev/null && echo raised; done; ulimit -c",
        ),
        Text(OK, "0\n"),
    ),
    // Isolation from the host.
    case(
        "read_only_root",
        Shell(
            "for d in / /etc /root /usr/bin /var/lib; do touch $d/x 2> /dev/null && echo $d; done; echo",
        ),
        Text(OK, "\n"),
    ),
    case(
        "no_capabilities",
        Shell(
            "grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t 0'",
        ),
        Text(OK, "CapPrm:\nCapEff:\nCapBnd:\nNoNewPrivs:1\nSeccomp:2\n"),
    ),
    case(
        "no_network",
        Shell(
            "grep -cE 'eth|enp|ens|wl|docker' /proc/net/dev; tail -n +2 /proc/net/route; tail -n +2 /proc/net/unix",
        ),
        Text(OK, "0\n"),
    ),
    case(
        "no_mounts",
        Shell(
            "mount -t tmpfs none /mnt || unshare -Ur true || unshare -m true || mknod /tmp/disk b 8 0 || echo none",
        ),
        Contains(OK, "none\n"),
    ),
    case(
        "no_host",
        Shell(
            "dmesg || head -c 1 /proc/kcore || echo 1 > /proc/sys/kernel/panic || ls /run/docker.sock /var/run/docker.sock || echo none",
        ),
        Contains(OK, "none\n"),
    ),
    case(
        "no_disks",
        Shell(
            "find /dev -type b | wc -l; ls /dev | grep -E '^(kvm|fuse|mem|vd|sd|nvme|nvidia)' | wc -l",
        ),
        Text(OK, "0\n0\n"),
    ),
    case(
        "no_secrets",
        Shell(
            "env | cut -d= -f1 | grep -viE '^(path|home|hostname|pwd|oldpwd|_|lang|pager|git_pager|python.*|shlvl)$' | grep -iE 'key|token|secret|docker|orch' | wc -l",
        ),
        Text(OK, "0\n"),
    ),
    // Files.
    case(
        "tree_of_regular_files",
        ReadTree(
            "ln -s /etc/passwd link; mkfifo fifo; echo x > a; ln a hard; mkdir -p d; echo y > d/closed; chmod 0 d/closed d",
        ),
        Tree(&["a", "d/closed", "hard"]),
    ),
    case("sparse_giant", ReadTree("truncate -s 1G sparse"), Fails(ErrorClass::TooLarge)),
    case(
        "deep_tree",
        ReadTree("d=.; for i in $(seq 200); do d=$d/d; done; mkdir -p $d"),
        Fails(ErrorClass::TooLarge),
    ),
    case("write_above", Write("", "../x"), Fails(ErrorClass::Refused)),
    case("write_absolute", Write("", "/etc/x"), Fails(ErrorClass::Refused)),
    case(
        "write_through_symlink",
        Write("ln -s /tmp outside", "outside/x"),
        Fails(ErrorClass::Refused),
    ),
    case("write_over_folder", Write("mkdir folder", "folder"), Fails(ErrorClass::Refused)),
    // Reuse.
    case(
        "used_again_clean",
        CloseAfter(
            "mkdir -p a/b; echo x > a/b/c; chmod 0 a; chmod 777 .; touch /tmp/x /dev/shm/x /dev/hidden; setsid sleep 1000 &",
        ),
        Text(OK, "755\n0\n0\n"),
    ),
    case("device_replaced", Spoil("rm /dev/stdin; echo x > /dev/stdin"), Replaced),
    case("shm_opened", Spoil("chmod 777 /dev/shm"), Replaced),
    case("process_1_first_to_die", Spoil("echo 900 > /proc/1/oom_score_adj"), Replaced),
    // A container that is lost never yields a result.
    Case {
        name: "paused",
        action: Pause,
        expected: Fails(ErrorClass::TimedOut),
        // Longer than the daemon needs to pause it.
        deadline_ms: LONG_DEADLINE_MS + GRACE_MS,
    },
    case("killed", Kill, Fails(ErrorClass::Gone)),
    case("removed", Remove, Fails(ErrorClass::Gone)),
    case("expired", Expire, Fails(ErrorClass::Gone)),
    case("forgotten_call", DropCall, Fails(ErrorClass::Protocol)),
    case("gone_while_idle", RemoveIdle, Replaced),
];
