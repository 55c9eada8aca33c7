"""Containers: how they are created, killed, and why they end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .docker import Daemon, SandboxFailure, Stream
from .wire import AgentFailure

#: Memory in bytes and processes of the container that kills the processes of another one, which
#: might take it over.
KILLER_BYTES = 32 << 20
KILLER_PIDS = 16

#: User of the container's own processes. Commands are root without capabilities, which cannot
#: signal or trace the processes of another user, so they cannot keep the container alive.
KEEPER = "65534:65534"

#: The main process: it ends with its input, which this process holds open. A worker that is killed
#: therefore leaves no container.
KEEP = "while read -r _; do :; done"

#: Time after a sandbox's lifetime at which `orchestrate gc` removes its container, in seconds.
SLACK_S = 60.0

#: Time that a container takes at most from the end of its processes to its own, in seconds.
ENDING_S = 3.0

#: Time limit for Docker to report why a container ended, in seconds.
EVENTS_S = 5.0


@dataclass(frozen=True)
class SandboxLimits:
    """What the commands of a sandbox may use. Sizes are in bytes."""

    #: Memory without swap, including files in /dev/shm, and in /tmp if the root is read-only.
    memory: int = 1 << 30
    #: CPU time per second.
    cpus: float = 1.0
    #: Processes and threads.
    pids: int = 256
    #: Size of one file.
    file_size: int = 2 << 30
    #: Open files of one process.
    open_files: int = 4096
    #: Size of /tmp if the root is read-only.
    tmp: int = 128 << 20
    #: What is kept of each output stream of a command: its first and its last half.
    output: int = 1 << 20


class Container:
    """A container without network, capabilities and privileges that runs until it is removed or
    this process ends.

    Raises:
        SandboxFailure: The daemon does not answer, or does not have the image.
    """

    def __init__(
        self,
        daemon: Daemon,
        image: str,
        limits: SandboxLimits,
        *,
        workdir: str,
        read_only: bool,
        env: Mapping[str, str],
        lifetime: float,
    ) -> None:
        self.daemon = daemon
        self.image = image
        #: Whether a command was run in it. Until then, every error is a failure of Docker.
        self.has_run = False
        self._deadline = int(time.time() + lifetime + SLACK_S)
        self._lifeline: Stream | None = None
        self.id = ""
        try:
            self.id = self._create(self._body(limits, workdir, read_only, env))
            self._created = time.time()
            self._lifeline = daemon.open_stream(f"/containers/{self.id}/attach?stream=1&stdin=1")
            daemon.call("POST", f"/containers/{self.id}/start")
            with self.losses():
                config = daemon.call("GET", f"/containers/{self.id}/json")["Config"]
        except BaseException:
            self.remove()
            raise
        #: Folder in which commands start.
        self.workdir: str = config["WorkingDir"] or "/"

    def remove(self) -> str | None:
        """Removes the container and everything in it. Returns why it could not be removed."""
        problem = None
        if self.id:
            try:
                self.daemon.call("DELETE", f"/containers/{self.id}", force="1", v="1")
            except SandboxFailure as error:
                # It may be gone, or being removed.
                if error.status not in (404, 409):
                    problem = str(error)
        if self._lifeline is not None:
            self._lifeline.close()
        return problem

    def kill_all(self) -> None:
        """Kills every process but the container's own. A process outside the container's limits
        does it, because a fork bomb leaves no room for another one inside."""
        body = self._base("kill -9 -1", "0:0")
        body["HostConfig"] = {
            **_isolation(),
            "PidMode": f"container:{self.id}",
            "Memory": KILLER_BYTES,
            "MemorySwap": KILLER_BYTES,
            "PidsLimit": KILLER_PIDS,
            "ReadonlyRootfs": True,
        }
        killer = self._create(body)
        try:
            with self.losses():
                self.daemon.call("POST", f"/containers/{killer}/start")
        except BaseException:
            # It never ran, so nothing else removes it.
            self.daemon.call("DELETE", f"/containers/{killer}", force="1")
            raise
        try:
            self.daemon.call("POST", f"/containers/{killer}/wait")
        except SandboxFailure as error:
            # It has ended, and is removed.
            if error.status != 404:
                raise

    def check_alive(self) -> None:
        """Raises if the container is being killed: that a command was killed, or not started, is
        not its result then.

        Raises:
            AgentFailure: Commands have ended it.
            SandboxFailure: Something else has, or the daemon does not answer.
        """
        body = {"User": "0:0", "WorkingDir": "/", "Cmd": ["/bin/sh", "-c", ":"]}
        end = time.monotonic() + ENDING_S
        try:
            probe = self.daemon.call("POST", f"/containers/{self.id}/exec", body)["Id"]
            # While the container ends, the kernel starts no process in it.
            self.daemon.call("POST", f"/exec/{probe}/start", {"Detach": True})
        except SandboxFailure as error:
            if error.status == 0:
                raise
            # Commands may also have made it unable to start processes.
            while self._is_running():
                if time.monotonic() > end:
                    return
                time.sleep(0.05)
            raise self._loss() from error

    @contextlib.contextmanager
    def losses(self) -> Iterator[None]:
        """Replaces a refusal by its reason if the container has ended.

        Raises:
            AgentFailure: Commands have ended it.
            SandboxFailure: Something else has, or the daemon does not answer.
        """
        try:
            yield
        except SandboxFailure as error:
            if error.status == 0 or self._is_running():
                raise
            raise self._loss() from error

    def _is_running(self) -> bool:
        try:
            state = self.daemon.call("GET", f"/containers/{self.id}/json")["State"]
        except SandboxFailure as error:
            if error.status == 404:
                return False
            raise
        return bool(state["Running"])

    def _loss(self) -> Exception:
        actions: list[str] = []
        end = time.monotonic() + EVENTS_S
        while "die" not in actions and time.monotonic() < end:
            found = self.daemon.events(self.id, self._created - 1, time.time())
            actions = [action for action in found if not action.startswith("exec_")]
            time.sleep(0.05)
        if "oom" in actions and "kill" not in actions:
            return AgentFailure("the sandbox ended because its commands used up its memory")
        if not self.has_run and "kill" not in actions:
            return SandboxFailure(
                f"the container of image `{self.image}` ended at its start; the image must have "
                "/bin/sh"
            )
        return SandboxFailure(
            f"the sandbox was ended from outside (events: {', '.join(actions) or 'none'})"
        )

    def _create(self, body: Mapping[str, Any]) -> str:
        try:
            return str(self.daemon.call("POST", "/containers/create", body)["Id"])
        except SandboxFailure as error:
            if error.status != 404:
                raise
            raise SandboxFailure(
                f"image `{self.image}` is not on the Docker host {self.daemon.host}; build it "
                f"there, or run `docker pull {self.image}`"
            ) from error

    def _base(self, script: str, user: str) -> dict[str, Any]:
        return {
            "Image": self.image,
            "Entrypoint": ["/bin/sh", "-c", script],
            "User": user,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {
                # `orchestrate gc` removes containers with these two labels after the deadline.
                "orchestrate.run": "none",
                "orchestrate.deadline": str(self._deadline),
                "orchestrate.worker": f"{socket.gethostname()}-{os.getpid()}",
            },
        }

    def _body(
        self, limits: SandboxLimits, workdir: str, read_only: bool, env: Mapping[str, str]
    ) -> dict[str, Any]:
        ulimits = {"core": 0, "nofile": limits.open_files, "fsize": limits.file_size}
        tmp = f"rw,exec,nosuid,nodev,mode=1777,size={limits.tmp}"
        return {
            **self._base(KEEP, KEEPER),
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "WorkingDir": workdir,
            "Env": variables(env),
            "HostConfig": {
                **_isolation(),
                "Init": True,
                "IpcMode": "private",
                "Memory": limits.memory,
                "MemorySwap": limits.memory,
                "NanoCpus": int(limits.cpus * 1e9),
                "PidsLimit": limits.pids,
                "ReadonlyRootfs": read_only,
                "Tmpfs": {"/tmp": tmp} if read_only else {},
                "Ulimits": [{"Name": n, "Soft": v, "Hard": v} for n, v in ulimits.items()],
            },
        }


def _isolation() -> dict[str, Any]:
    return {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "LogConfig": {"Type": "none"},
        "AutoRemove": True,
    }


def variables(env: Mapping[str, str]) -> list[str]:
    """Environment variables as Docker takes them."""
    return [f"{name}={value}" for name, value in env.items()]
