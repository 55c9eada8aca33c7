"""Sandboxes: containers without network, for code that the policy wrote."""

from __future__ import annotations

import io
import logging
import posixpath
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .container import Container, SandboxLimits
from .docker import Daemon, SandboxFailure
from .execution import NOT_STARTED, Execution, Output, obstacle
from .wire import AgentFailure, Task

logger = logging.getLogger("orchestrate")

#: Largest file that is read by default, in bytes.
FILE_BYTES = 8 << 20

#: Time limit for reading or writing files, in seconds.
FILE_S = 60.0

#: What is kept of the messages of programs that read and write files, in bytes.
MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    #: 137 if it was killed, by a limit or by itself; 126 to 128 if it could not be started.
    exit_code: int
    #: Output, with replacement characters for bytes that are not UTF-8.
    stdout: str
    stderr: str
    #: Whether it was killed because of its time limit.
    timed_out: bool
    #: Whether parts of the output are missing.
    truncated: bool


class Sandbox:
    """A container without network, capabilities and privileges, for code that the policy wrote.

    What commands do is a result: exit codes, time limits, memory, floods of output, fork bombs. A
    sandbox that commands have made unusable raises `AgentFailure`: the policy's result, reward 0.
    What Docker fails to do raises `SandboxFailure`, and the attempt is retried.

    The container is removed by `close`, and by Docker when this process ends in any way.

    Args:
        image: An image on the Docker host with `/bin/sh`, `tar` and `head`.
        limits: What commands may use.
        workdir: Folder in which commands start and to which paths are relative; created if it is
            missing. By default the image's, or /tmp if the root is read-only.
        read_only: Whether only /tmp, in memory, can be written.
        env: Environment variables of all commands.
        lifetime: Seconds after which `orchestrate gc` may remove the container.
        docker_host: `unix://` and the path of the daemon's socket; by default the variable
            `DOCKER_HOST`, or the usual socket.

    Raises:
        SandboxFailure: The daemon does not answer, or does not have the image.
    """

    def __init__(
        self,
        image: str,
        *,
        limits: SandboxLimits | None = None,
        workdir: str = "",
        read_only: bool = False,
        env: Mapping[str, str] | None = None,
        lifetime: float = 3600.0,
        docker_host: str | None = None,
    ) -> None:
        self.image = image
        self.limits = limits or SandboxLimits()
        self._is_open = True
        self._daemon = Daemon(docker_host)
        try:
            self._container = Container(
                self._daemon,
                image,
                self.limits,
                workdir=workdir or ("/tmp" if read_only else ""),
                read_only=read_only,
                env=env or {},
                lifetime=lifetime,
            )
        except BaseException:
            self._daemon.close()
            raise

    @property
    def id(self) -> str:
        """Docker's id of the container."""
        return self._container.id

    @property
    def workdir(self) -> str:
        """Folder in which commands start."""
        return self._container.workdir

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        input: str | bytes = b"",  # noqa: A002
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs a command as root without capabilities: a line for `/bin/sh`, or a program with its
        arguments. The command ends when its first process ends; others go on in the background.
        After `timeout` seconds, or 64 MiB of output, every process in the container is killed. A
        command that no program can be started with (a NUL character, an argument of 128 KiB) has
        exit code 126; surrogates in `input` are replaced.

        Raises:
            AgentFailure: Commands have ended the sandbox.
            SandboxFailure: Docker failed.
        """
        half = self.limits.output // 2
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        container = self._open_container()
        why = obstacle(words)
        if why is not None:
            return CommandResult(NOT_STARTED, "", why, timed_out=False, truncated=False)
        done = Execution(
            container,
            words,
            timeout=timeout,
            data=input.encode(errors="replace") if isinstance(input, str) else input,
            env=env,
            stdout=Output(half, half),
            stderr=Output(half, half),
        )
        self._container.has_run = True
        stdout, stderr = done.stdout.text(), done.stderr.text()
        return CommandResult(done.exit_code, stdout, stderr, done.timed_out, done.truncated)

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Writes files, with the folders that are missing. Paths are relative to `workdir`.

        Raises:
            AgentFailure: They cannot be written after commands have run.
            SandboxFailure: They cannot be written in a new sandbox, or Docker failed.
        """
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, content in files.items():
                why = obstacle([path])
                if why is not None:
                    raise AgentFailure(f"a file cannot be written in the sandbox: {why}")
                data = content.encode(errors="replace") if isinstance(content, str) else content
                info = tarfile.TarInfo(posixpath.join(self.workdir, path).lstrip("/"))
                info.size = len(data)
                info.mtime = int(time.time())
                tar.addfile(info, io.BytesIO(data))
        words = ["tar", "-xof", "-", "-C", "/"]
        try:
            self._move("write", ", ".join(files), words, data=archive.getvalue())
        except AgentFailure as error:
            if self._container.has_run:
                raise
            raise SandboxFailure(str(error)) from error

    def read_file(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """The content of a file. The path is relative to `workdir`.

        Raises:
            AgentFailure: It is missing, cannot be read, or has more than `max_bytes` bytes.
            SandboxFailure: Docker failed.
        """
        words = ["head", "-c", str(max_bytes + 1), "--", path]
        content = self._move("read", path, words, keep=max_bytes + 1)
        if len(content) > max_bytes:
            raise AgentFailure(f"{path} in the sandbox has more than {max_bytes} bytes")
        return content

    def close(self) -> None:
        """Removes the container and everything in it. Calling it again does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        problem = self._container.remove()
        if problem is not None:
            logger.warning("the container %s was not removed: %s", self.id[:12], problem)
        self._daemon.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_container(self) -> Container:
        if not self._is_open:
            raise ValueError("the sandbox is closed")
        return self._container

    def _move(
        self, verb: str, what: str, words: Sequence[str], *, data: bytes = b"", keep: int = 0
    ) -> bytes:
        """Runs a program that reads or writes files. Returns the first `keep` bytes of its output.

        Raises:
            AgentFailure: It failed.
            SandboxFailure: Docker failed.
        """
        why = obstacle(words)
        if why is not None:
            raise AgentFailure(f"cannot {verb} a file in the sandbox: {why}")
        done = Execution(
            self._open_container(),
            words,
            timeout=FILE_S,
            data=data,
            stdout=Output(max(keep, MESSAGE_BYTES), 0),
            stderr=Output(MESSAGE_BYTES, 0),
        )
        if done.exit_code == 0 and not done.timed_out:
            return bytes(done.stdout.head)
        text = done.stderr.text().strip() or f"exit code {done.exit_code}"
        why = f"not within {FILE_S} s" if done.timed_out else text
        raise AgentFailure(f"cannot {verb} {what[:200]} in the sandbox: {why}")


@dataclass(frozen=True)
class SandboxOptions:
    """How the sandboxes of an environment are made."""

    #: Empty for the image of the task.
    image: str = ""
    limits: SandboxLimits | None = None
    read_only: bool = False
    lifetime: float = 3600.0

    def open(self, task: Task) -> Sandbox:
        """A sandbox with the task's files.

        Raises:
            SandboxFailure: No image is named, or Docker failed.
        """
        image = self.image or task.image
        if not image:
            raise SandboxFailure(
                f"task {task.id} has no image; name one: @orchestrate.environment(image=...)"
            )
        sandbox = Sandbox(
            image,
            limits=self.limits,
            workdir=task.workdir,
            read_only=self.read_only,
            lifetime=self.lifetime,
        )
        try:
            if task.files:
                sandbox.write_files(task.files)
        except BaseException:
            sandbox.close()
            raise
        return sandbox
