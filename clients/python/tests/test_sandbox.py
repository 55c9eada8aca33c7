"""Sandboxes, in real containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, is_gone, program, wait_for

import orchestrate
from orchestrate import Sandbox, SandboxLimits
from orchestrate.docker import Daemon

MIB = 1 << 20
#: Processes of commands: all but the container's own, this shell and its commands.
PROCESSES = "cat /proc/[0-9]*/comm | grep -cx sleep"
#: Every process goes on forking.
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
#: Time limit of commands that end by themselves, in seconds.
PATIENT = 300.0


@pytest.fixture
def open_sandbox(image: str) -> Iterator[Callable[..., Sandbox]]:
    opened: list[Sandbox] = []

    def start(**options: object) -> Sandbox:
        opened.append(Sandbox(image, **options))
        return opened[-1]

    yield start
    for sandbox in opened:
        sandbox.close()


Open = Callable[..., Sandbox]


def is_usable(sandbox: Sandbox) -> bool:
    done = sandbox.run("echo fine", timeout=PATIENT)
    return (done.exit_code, done.stdout) == (0, "fine\n")


def test_commands_have_input_output_variables_and_an_exit_code(open_sandbox: Open) -> None:
    sandbox = open_sandbox(workdir="/work/here", env={"A": "1"})
    done = sandbox.run("pwd; echo $A$B; cat; echo e >&2; exit 3", input="in", env={"B": "2"})
    assert done == orchestrate.CommandResult(3, "/work/here\n12\nin", "e\n", False, False)
    # Arguments are not read by a shell, and files of one command are there for the next.
    assert sandbox.run(["touch", "a $A"]).exit_code == 0
    assert sandbox.run("ls").stdout == "a $A\n"
    assert sandbox.run("nosuch").exit_code == 127
    assert sandbox.run("kill -9 $$").exit_code == 137
    # More input than a pipe holds, read and unread.
    data = b"x" * (20 * MIB)
    assert sandbox.run("wc -c", input=data, timeout=PATIENT).stdout == f"{len(data)}\n"
    assert sandbox.run("true", input=data, timeout=PATIENT).exit_code == 0


def test_output_that_is_not_utf8_is_replaced(open_sandbox: Open) -> None:
    done = open_sandbox().run(r"printf 'a\377b'")
    assert (done.exit_code, done.stdout) == (0, "a\N{REPLACEMENT CHARACTER}b")


def test_a_container_has_no_network_capabilities_and_new_privileges(open_sandbox: Open) -> None:
    sandbox = open_sandbox(limits=SandboxLimits(memory=64 * MIB, cpus=0.5, pids=32))
    assert sandbox.run("ls /sys/class/net").stdout.split() == ["lo"]
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    done = sandbox.run(["python3", "-c", connect], timeout=PATIENT)
    assert done.exit_code == 1
    assert "Network is unreachable" in done.stderr
    status = dict(
        line.split(":\t", 1)
        for line in sandbox.run("cat /proc/self/status").stdout.splitlines()
        if ":\t" in line
    )
    sets = [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    assert {int(value, 16) for value in sets} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    host = Daemon().call("GET", f"/containers/{sandbox.id}/json")["HostConfig"]
    limits = (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"])
    assert limits == (64 * MIB, 64 * MIB, 500_000_000, 32)
    assert not (host["Privileged"] or host["Binds"] or host["Devices"])


def test_commands_cannot_end_or_stop_what_keeps_the_container(open_sandbox: Open) -> None:
    sandbox = open_sandbox()
    for name in ("KILL", "STOP", "TERM"):
        others = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = $$ ] || "
        done = sandbox.run(f"{others} kill -{name} $p; done")
        assert done.stderr.count("Operation not permitted") >= 2
        assert is_usable(sandbox)
    assert sandbox.run("echo 0 > /proc/1/oom_score_adj").exit_code != 0


def test_a_read_only_sandbox_can_write_to_tmp_alone(open_sandbox: Open) -> None:
    sandbox = open_sandbox(read_only=True, limits=SandboxLimits(tmp=4 * MIB))
    assert sandbox.run("pwd; echo 1 > a; cat a").stdout == "/tmp\n1\n"
    for path in ("/a", "/root/a", "/usr/a"):
        assert "Read-only file system" in sandbox.run(f"echo > {path}").stderr
    full = sandbox.run("dd if=/dev/zero of=big bs=1M count=8", timeout=PATIENT)
    assert "No space left on device" in full.stderr
    with pytest.raises(orchestrate.AgentFailure, match="No space left"):
        sandbox.write_files({"more": b"x" * MIB})


def test_a_time_limit_ends_all_processes_and_the_sandbox_goes_on(open_sandbox: Open) -> None:
    sandbox = open_sandbox()
    assert sandbox.run("echo kept > file; setsid sleep 1000 >/dev/null 2>&1 &").exit_code == 0
    # The shell may end before the process that it has begun is `sleep`.
    wait_for(lambda: sandbox.run(PROCESSES).stdout == "1\n", "the process outlives its command")
    done = sandbox.run("echo begun; setsid sleep 1000 & sleep 1000", timeout=15)
    assert done == orchestrate.CommandResult(137, "begun\n", "", True, False)
    assert sandbox.run(PROCESSES).stdout == "0\n"
    assert sandbox.run("cat file").stdout == "kept\n"
    # Also if a process ignores what can be ignored.
    stubborn = "import os, signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nwhile 1: 0"
    assert sandbox.run(["python3", "-c", stubborn], timeout=3).timed_out
    assert is_usable(sandbox)


def test_a_background_process_that_holds_the_output_does_not_hold_its_command(
    open_sandbox: Open,
) -> None:
    sandbox = open_sandbox()
    done = sandbox.run("sleep 1000 & echo x", timeout=PATIENT)
    assert done == orchestrate.CommandResult(0, "x\n", "", False, False)
    wait_for(lambda: sandbox.run(PROCESSES).stdout == "1\n", "the process outlives its command")


def test_the_ends_of_long_output_are_kept_and_a_flood_is_killed(open_sandbox: Open) -> None:
    sandbox = open_sandbox(limits=SandboxLimits(output=1000))
    done = sandbox.run("seq 1 100000; echo err >&2", timeout=PATIENT)
    assert (done.exit_code, done.stderr, done.truncated) == (0, "err\n", True)
    assert done.stdout.startswith("1\n2\n3\n")
    assert done.stdout.endswith("\n99999\n100000\n")
    total = sum(len(f"{number}\n") for number in range(1, 100_001))
    assert f"\n[{total - 1000} bytes omitted]\n" in done.stdout
    for command in ("yes", "yes >&2"):
        flood = sandbox.run(command, timeout=PATIENT)
        assert (flood.exit_code, flood.timed_out, flood.truncated) == (137, False, True)
        assert len(flood.stdout + flood.stderr) < 2000
    assert is_usable(sandbox)


def test_a_fork_bomb_is_bounded_and_ended(open_sandbox: Open) -> None:
    sandbox = open_sandbox(limits=SandboxLimits(pids=64))
    done = sandbox.run(["python3", "-c", BOMB], timeout=5)
    assert (done.exit_code, done.timed_out) == (137, True)
    assert is_usable(sandbox)
    assert sandbox.run("cat /proc/[0-9]*/comm | grep -c python3").stdout == "0\n"


def test_a_command_that_uses_up_the_memory_is_killed(open_sandbox: Open) -> None:
    sandbox = open_sandbox(limits=SandboxLimits(memory=64 * MIB))
    done = sandbox.run("exec python3 -c 'x = bytearray(1 << 30)'", timeout=PATIENT)
    assert (done.exit_code, done.timed_out) == (137, False)
    assert is_usable(sandbox)
    # It is not the reason if the container is removed by others later.
    Daemon().call("DELETE", f"/containers/{sandbox.id}", force="1")
    with pytest.raises(orchestrate.SandboxFailure, match=r"ended from outside.*oom.*kill"):
        sandbox.run("true")


def test_files_are_written_and_read_byte_by_byte(open_sandbox: Open) -> None:
    sandbox = open_sandbox(workdir="/work")
    large = bytes(range(256)) * (12 * MIB // 256)
    sandbox.write_files({"a/b.txt": "é", "/etc/own": b"\xff\x00", "large": large})
    assert sandbox.run("cat a/b.txt; wc -c < /etc/own").stdout == "é2\n"
    assert sandbox.read_file("a/b.txt") == "é".encode()
    assert sandbox.read_file("large", max_bytes=len(large)) == large
    sandbox.write_files({"a/b.txt": ""})
    assert sandbox.read_file("/work/a/b.txt") == b""
    sandbox.run("ln -s /nosuch link; mkdir folder; mkfifo pipe")
    for path, why in (
        ("large", "more than 8388608 bytes"),
        ("/dev/zero", "more than 8388608 bytes"),
        ("nosuch", "No such file"),
        ("link", "No such file"),
        ("folder", "Is a directory"),
    ):
        with pytest.raises(orchestrate.AgentFailure, match=why):
            sandbox.read_file(path)
    with pytest.raises(orchestrate.AgentFailure, match="cannot write folder"):
        sandbox.write_files({"folder": "", "folder/x/y": ""})


def test_a_sandbox_that_commands_have_ruined_is_their_result(open_sandbox: Open) -> None:
    sandbox = open_sandbox(workdir="/work")
    sandbox.run("rm -rf /work")
    # Without their folder, commands start elsewhere and can repair it.
    assert "can't cd to /work" in sandbox.run("mkdir /work").stderr
    assert sandbox.run("pwd").stdout == "/work\n"
    sandbox.run("rm -f /bin/sh")
    assert sandbox.run("true").exit_code in (126, 127)
    with pytest.raises(orchestrate.AgentFailure, match="cannot write a"):
        sandbox.write_files({"a": ""})
    with pytest.raises(orchestrate.AgentFailure, match="cannot read a"):
        sandbox.read_file("a")


def test_what_docker_cannot_do_is_a_failure_of_the_environment(image: str) -> None:
    assert issubclass(orchestrate.SandboxFailure, orchestrate.EnvironmentFailure)
    with pytest.raises(orchestrate.SandboxFailure, match=r"run `docker pull orchestrate/nosuch:1`"):
        Sandbox("orchestrate/nosuch:1")
    with pytest.raises(orchestrate.SandboxFailure, match="memory limit"):
        Sandbox(image, limits=SandboxLimits(memory=1))
    refused = pytest.raises(orchestrate.SandboxFailure, match="cannot write /a")
    with Sandbox(image, read_only=True) as sandbox, refused:
        sandbox.write_files({"/a": ""})
    assert is_gone(sandbox.id)
    sandbox.close()
    with pytest.raises(ValueError, match="closed"):
        sandbox.run("true")
    with Sandbox(image) as sandbox:
        sandbox.run("true")
        Daemon().call("DELETE", f"/containers/{sandbox.id}", force="1")
        for use in (lambda: sandbox.run("true"), lambda: sandbox.read_file("/etc/passwd")):
            with pytest.raises(orchestrate.SandboxFailure, match=r"ended from outside.*kill"):
                use()


def test_a_container_that_is_removed_during_a_command_is_an_outside_failure(
    open_sandbox: Open,
) -> None:
    sandbox = open_sandbox()
    sandbox.run("true")
    daemon, path = Daemon(), f"/containers/{sandbox.id}"

    def remove() -> None:
        wait_for(lambda: daemon.call("GET", f"{path}/json")["ExecIDs"], "the command runs")
        daemon.call("DELETE", path, force="1")

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(orchestrate.SandboxFailure, match=r"ended from outside.*kill"):
        sandbox.run("sleep 1000", timeout=PATIENT)
    thread.join()


def test_a_daemon_that_does_not_answer_is_a_failure_of_the_environment(tmp_path: Path) -> None:
    absent = f"unix://{tmp_path / 'absent.sock'}"
    with pytest.raises(orchestrate.SandboxFailure, match=r"absent\.sock does not answer") as raised:
        Sandbox("any", docker_host=absent)
    assert "start it, or set DOCKER_HOST" in str(raised.value)
    with pytest.raises(orchestrate.SandboxFailure, match="need a socket of this machine"):
        Sandbox("any", docker_host="ssh://host")


WORKER = """
import sys, orchestrate
sandbox = orchestrate.Sandbox(sys.argv[1])
sandbox.run("setsid sleep 1000 >/dev/null 2>&1 &")
print(sandbox.id, flush=True)
sandbox.run("sleep 1000", timeout=1000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_no_container(image: str, how: signal.Signals) -> None:
    command = [sys.executable, "-c", WORKER, image]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "clients/python")}
    process = subprocess.Popen(command, env=path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        container = process.stdout.readline().strip()
        assert not is_gone(container)
        process.send_signal(how)
    wait_for(lambda: is_gone(container), "the container is removed")


def test_gc_removes_containers_after_their_deadline_only(image: str) -> None:
    command = [program(), "gc"]
    with Sandbox(image, lifetime=-120.0) as old, Sandbox(image) as current:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert is_gone(old.id)
        assert is_usable(current)


def test_what_no_program_can_be_started_with_is_the_policys_result(open_sandbox: Open) -> None:
    sandbox = open_sandbox()
    for words in (
        "echo a\0b",
        ["echo", "x" * (200 << 10)],
        "echo \ud800",
        ["echo", *["x" * 9999] * 200],
    ):
        done = sandbox.run(words)
        assert (done.exit_code, done.stdout) == (126, ""), done
        assert "argument" in done.stderr
    for path in ("a\0b", "\ud800"):
        with pytest.raises(orchestrate.AgentFailure):
            sandbox.read_file(path)
        with pytest.raises(orchestrate.AgentFailure):
            sandbox.write_files({path: "x"})
    assert is_usable(sandbox)


#: Kills every process that it may kill, as fast as it can.
RESISTANCE = """
import os, signal
while True:
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        pass
"""


def test_commands_that_resist_being_killed_gain_no_attempt(
    open_sandbox: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrate.execution.KILL_S", 10.0)
    sandbox = open_sandbox()
    try:
        done = sandbox.run(["python3", "-c", RESISTANCE], timeout=2.0)
    except orchestrate.AgentFailure:
        return
    assert done.timed_out
    assert is_usable(sandbox)
