"""Commands in a container: output, time limits, exit codes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .container import Container, variables
from .docker import SandboxFailure, Stream
from .wire import AgentFailure

#: Changes to the folder $0 if it exists, and becomes the command.
ENTER = 'cd -- "$0"; exec "$@"'

#: Output of one command, in bytes, after which it is killed.
FLOOD_BYTES = 64 << 20

#: Interval at which a command without output is polled, and how long its output is awaited after
#: its end, because other processes may hold it open. In seconds.
POLL_S = 1.0
DRAIN_S = 5.0

#: Time limit for killed processes to be gone, in seconds.
KILL_S = 60.0

#: Exit code of a process that was killed, and of one that cannot be started.
KILLED = 137
NOT_STARTED = 126

#: Limits of Linux for the arguments of a program, in bytes: of one, and of all together (with room
#: for its environment).
ARGUMENT_BYTES = (128 << 10) - 1
ARGUMENTS_BYTES = 1 << 20


def obstacle(words: Sequence[str]) -> str | None:
    """Why no program can be started with these arguments, or ``None``. They may be the policy's, so
    that Docker's refusal of them would not be a failure of Docker."""
    total = 0
    for word in words:
        try:
            size = len(word.encode())
        except UnicodeEncodeError:
            return "an argument is not valid text"
        if "\0" in word:
            return "an argument has a NUL character"
        if size > ARGUMENT_BYTES:
            return f"an argument has more than {ARGUMENT_BYTES} bytes"
        total += size + 1
    return (
        f"the arguments have more than {ARGUMENTS_BYTES} bytes" if total > ARGUMENTS_BYTES else None
    )


class Output:
    """The first and the last bytes of a stream."""

    def __init__(self, first: int, last: int) -> None:
        self.head = bytearray()
        self.total = 0
        self._tail = bytearray()
        self._first = first
        self._last = last

    def add(self, data: bytes) -> None:
        """Adds the next bytes."""
        self.total += len(data)
        room = self._first - len(self.head)
        self.head += data[:room]
        self._tail += data[room:]
        # Not at each call, because that moves everything kept.
        if len(self._tail) > 2 * self._last + (1 << 16):
            self._trim()

    @property
    def omitted(self) -> int:
        """The number of bytes that are not kept."""
        self._trim()
        return self.total - len(self.head) - len(self._tail)

    def text(self) -> str:
        """What is kept, as text."""
        gap = f"\n[{self.omitted} bytes omitted]\n".encode() if self.omitted else b""
        return (self.head + gap + self._tail).decode(errors="replace")

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._last)]


class Execution:
    """A command in a container, and how it ended.

    Raises:
        AgentFailure: Commands have ended the container.
        SandboxFailure: Docker failed, or the first command in the container cannot be started.
    """

    def __init__(
        self,
        container: Container,
        words: Sequence[str],
        *,
        timeout: float,
        data: bytes = b"",
        env: Mapping[str, str] | None = None,
        stdout: Output,
        stderr: Output,
    ) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.timed_out = False
        self.is_flood = False
        self._container = container
        self._daemon = container.daemon
        end = time.monotonic() + timeout
        body = {
            "AttachStdin": bool(data),
            "AttachStdout": True,
            "AttachStderr": True,
            "User": "0:0",
            # Not the folder itself: commands may have removed it.
            "WorkingDir": "/",
            "Env": variables(env or {}),
            "Cmd": ["/bin/sh", "-c", ENTER, container.workdir, *words],
        }
        with container.losses():
            reply = self._daemon.call("POST", f"/containers/{container.id}/exec", body)
            self._id = reply["Id"]
            start = {"Detach": False, "Tty": False}
            stream = self._daemon.open_stream(f"/exec/{self._id}/start", start)
            try:
                if data:
                    stream.feed(data)
                self._read(stream, end)
                if self.timed_out or self.is_flood:
                    self._kill(stream)
            finally:
                stream.close()
            state = self._ended()
            was_started, was_ended = state["Pid"] != 0, self.timed_out or self.is_flood
            if not was_started or (state["ExitCode"] == KILLED and not was_ended):
                container.check_alive()
        self.exit_code: int = KILLED if self.timed_out else state["ExitCode"]
        if not was_started:
            self._check_start(self.exit_code)

    @property
    def truncated(self) -> bool:
        """Whether parts of the output are missing."""
        return self.is_flood or self.stdout.omitted + self.stderr.omitted > 0

    def _read(self, stream: Stream, end: float) -> None:
        """Reads output until it ends, or until the command is to be killed."""
        drained = None
        while True:
            now = time.monotonic()
            if now >= end:
                # If the command ended in time, only its output is still held open by others.
                self.timed_out = self._is_running()
                return
            pieces = stream.read(min(POLL_S, end - now))
            if pieces is None:
                return
            for which, data in pieces:
                (self.stderr if which == 2 else self.stdout).add(data)
            if self.stdout.total + self.stderr.total > FLOOD_BYTES:
                self.is_flood = True
                return
            if not pieces and drained is None and not self._is_running():
                drained = time.monotonic() + DRAIN_S
            if drained is not None and time.monotonic() >= drained:
                return

    def _kill(self, stream: Stream) -> None:
        """Kills every process in the container, again if one of them killed the killer.

        Raises:
            AgentFailure: They resisted, so the container was removed.
        """
        end = time.monotonic() + KILL_S
        while True:
            refusal = ""
            try:
                self._container.kill_all()
            except SandboxFailure as error:
                # Processes may have killed the killer while it was started.
                if error.status == 0:
                    raise
                refusal = str(error)
            # Unread output would delay the end.
            pause = time.monotonic() + POLL_S
            while time.monotonic() < pause and stream.read(POLL_S):
                pass
            if not self._is_running():
                return
            if time.monotonic() > end:
                if "no space left on device" in refusal:
                    raise SandboxFailure(refusal)
                self._container.remove()
                raise AgentFailure("processes in the sandbox resisted being killed")

    def _ended(self) -> Any:
        """The state after the end, which Docker reports shortly after the end of the output."""
        end = time.monotonic() + KILL_S
        while self._is_running():
            if time.monotonic() > end:
                raise SandboxFailure("Docker does not report the end of a command")
            time.sleep(0.01)
        return self._state()

    def _check_start(self, code: int) -> None:
        """Raises if a command that was not started is not the result of earlier ones. The output is
        Docker's own then."""
        text = self.stdout.text().strip()
        if not self._container.has_run or "no space left on device" in text:
            raise SandboxFailure(
                f"a command cannot be started in the sandbox (exit {code}): {text}"
            )

    def _is_running(self) -> bool:
        # Shortly after the request, it is not running yet and has no exit code.
        state = self._state()
        return bool(state["Running"]) or state["ExitCode"] is None

    def _state(self) -> Any:
        return self._daemon.call("GET", f"/exec/{self._id}/json")
