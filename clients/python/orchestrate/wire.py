"""Messages between workers and the gateway, without I/O."""

from __future__ import annotations

import json
import math
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .codes import ATTRIBUTION

#: Maximum seconds that one request waits for an episode.
WAIT_S = 25.0

#: Maximum number of characters sent of a failure's message.
MESSAGE_CHARS = 4000


class OrchestrateError(Exception):
    """Base class of the errors that this package raises."""


class Refused(OrchestrateError):
    """The gateway refuses a request; sending it again would not help."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{message} ({code}, status {status})")
        self.status = status
        self.code = code


class Unreachable(OrchestrateError):
    """The gateway does not answer. The run may have ended, or not have started yet."""


class LeaseOver(OrchestrateError):
    """The episode is no longer this worker's, so a result that is returned now does not count.

    One that was returned before counts; without one, the run repeats the episode. Stop working on
    it and take another one.
    """


class RunOver(OrchestrateError):
    """The run has ended: there are no more episodes."""


class EpisodeEnded(OrchestrateError):
    """The policy has no turns, tokens or time left. Grade the work so far."""


class AgentFailure(Exception):
    """Raised by an environment: the policy made it impossible to continue. The reward is 0."""


class MalformedCall(AgentFailure):
    """The arguments of a call are not a JSON object.

    If an environment does not catch it, this is the policy's result: reward 0.
    """


class EnvironmentFailure(Exception):
    """Raised by an environment that failed. The attempt is retried, never rewarded."""


@dataclass(frozen=True)
class Task:
    """A task as workers see it, without hidden tests and solutions."""

    id: str
    environment: str
    family: str
    #: The prompt for the policy.
    prompt: str
    #: The container image; empty for plain rows.
    image: str
    #: The folder of the repository in the image; empty for plain rows.
    workdir: str
    #: Contents of files in `workdir`, by path.
    files: Mapping[str, str]
    #: All columns of a plain row; empty for other tasks.
    row: Mapping[str, Any]


def _refuse_constant(name: str) -> None:
    """`NaN` and the like, which Python reads as numbers."""
    raise ValueError(f"{name} is not a JSON value")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply."""

    id: str
    name: str
    #: The arguments as the policy wrote them, which need not be a JSON object.
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments.

        Raises:
            MalformedCall: They are not a JSON object.
        """
        try:
            arguments = json.loads(self.text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"{self._start()} are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise MalformedCall(f"{self._start()} are not a JSON object")
        return arguments

    def _start(self) -> str:
        return f"the arguments of the call of {self.name[:100]!r}"


@dataclass(frozen=True)
class Reply:
    """A reply of the policy."""

    content: str
    tool_calls: list[ToolCall]
    #: `stop`, `length` or `tool_calls`.
    finish_reason: str
    #: The reply as a message for the history of the next request.
    message: dict[str, Any]


@dataclass(frozen=True)
class Taken:
    """An episode that was taken."""

    lease: str
    attempt: str
    task: Task
    model: str
    context: int
    api_key: str
    openai_path: str
    anthropic_path: str
    lease_s: float
    time_s: float

    @staticmethod
    def read(body: Mapping[str, Any]) -> Taken:
        """Reads the gateway's answer. Unknown fields are ignored."""
        task = {name: body["task"][name] for name in Task.__dataclass_fields__}
        rest = {name: body[name] for name in Taken.__dataclass_fields__ if name != "task"}
        return Taken(task=Task(**task), **rest)


@dataclass
class TakeRequest:
    """A request for one episode. Repeating it never takes a second one."""

    worker: str
    take_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def body(self, wait_s: float) -> dict[str, Any]:
        """The body of the request."""
        return {"worker": self.worker, "take_id": self.take_id, "wait_s": max(0.0, wait_s)}


def default_worker() -> str:
    """The default worker name: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"[:100]


def number_of(value: Any, name: str) -> float:
    """A value as a number. Text is refused, also if it reads like one: which number a function
    means by it is not known.

    Raises:
        ValueError: It is not a number.
    """
    if isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{name} = {value!r}: must be a number, not text")
    return float(value)


def finish_body(reward: float, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """The body of a result.

    Raises:
        ValueError: The reward is not from 0 to 1, a metric is not finite, or two have one name.
    """
    reward = number_of(reward, "reward")
    if not 0.0 <= reward <= 1.0:  # False for NaN, too.
        raise ValueError(f"reward = {reward}: must be from 0 to 1")
    given = (metrics or {}).items()
    numbers = {str(name): number_of(value, f"metric {name}") for name, value in given}
    if len(numbers) < len(given):
        raise ValueError(f"two metrics have one name: {', '.join(map(repr, metrics or {}))}")
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} = {value}: must be finite")
    return {"reward": reward, "metrics": numbers}


def failure_body(kind: str, message: str) -> dict[str, Any]:
    """The body of a failure: `kind` is `environment`, `agent` or `timeout`."""
    return {"failure": {"kind": kind, "message": message[-MESSAGE_CHARS:]}}


def encoded(request: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a request with its `json` as ASCII.

    What an environment printed may hold lone surrogates, which cannot be written in UTF-8; the
    gateway reads them as U+FFFD.
    """
    content = json.dumps(request["json"], allow_nan=False).encode("ascii")
    headers = {"content-type": "application/json", **request.get("headers", {})}
    others = {key: value for key, value in request.items() if key != "json"}
    return {**others, "content": content, "headers": headers}


def check(status: int, text: str) -> Any:
    """The body of a reply; `None` if it is empty.

    Raises:
        LeaseOver: The lease is over.
        RunOver: The run has ended.
        Refused: The request is invalid, or not allowed.
    """
    if status < 300:
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None
    code, message = error_of(text)
    if code == "run_over":
        raise RunOver(message)
    if ATTRIBUTION.get(code) == "lease":
        raise LeaseOver(message)
    raise Refused(status, code, message)


def error_of(text: str) -> tuple[str, str]:
    """The code and the message of an error. The code alone says what it means."""
    try:
        error = json.loads(text)["error"]
        return str(error.get("code", "unknown")), str(error.get("message", text[:300]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unknown", text[:300]


def read_reply(body: Mapping[str, Any]) -> Reply:
    """Parses a reply of Chat Completions."""
    choice = body["choices"][0]
    message = choice["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    history = {key: value for key, value in message.items() if value is not None}
    return Reply(message.get("content") or "", calls, str(choice["finish_reason"]), history)


def check_reply(status: int, text: str) -> Reply:
    """A reply of the policy.

    Raises:
        EpisodeEnded: The policy cannot be asked any more.
        LeaseOver: The episode is no longer this worker's.
        Refused: The request is invalid, or not allowed: a failure of the environment.
    """
    if status < 300:
        return read_reply(json.loads(text))
    code, message = error_of(text)
    whose = ATTRIBUTION.get(code)
    if whose == "policy":
        raise EpisodeEnded(message)
    if whose == "lease":
        raise LeaseOver(message)
    raise Refused(status, code, message)
