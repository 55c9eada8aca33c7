"""Workers: take episodes and run a function on each."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import ssl
import sys
import threading
import time
import types

from .client import Episode, Gateway
from .environment import (
    Child,
    Environment,
    Function,
    Verdict,
    grade_apart,
    return_verdict,
    run_here,
)
from .shared import PATIENCE_S
from .wire import LeaseOver, OrchestrateError, RunOver

logger = logging.getLogger("orchestrate")

#: Why an episode ends whose environment was told that it is no longer this worker's.
NOT_SERVED = (
    "the gateway no longer serves this episode, and the run repeats it unless it has a result; "
    "this worker takes another one"
)

#: Seconds for which workers may give back their episodes after an interrupt.
STOP_S = 10.0


def work(
    function: Function | Environment,
    gateway: Gateway,
    *,
    workers: int = 1,
    episodes: int | None = None,
    in_process: bool | None = None,
) -> int:
    """Runs `function` on episodes with `workers` workers, until the run ends or `episodes` were
    returned. Returns the number of returned episodes.

    An `Environment` runs in child processes, one for each worker, and its script needs the usual
    `if __name__ == "__main__":`. Any other function runs in threads of this process, without a time
    limit. `in_process=True` runs an environment in the same way, for notebooks.

    Raises:
        Unreachable: The gateway does not answer.
        Refused: The gateway refuses a request, e.g. because the secret is wrong.
    """
    if in_process is None:
        in_process = not isinstance(function, Environment)
    if not in_process and isinstance(gateway.connection.verify, ssl.SSLContext):
        raise TypeError(
            "an environment runs in processes of its own, which cannot be given an SSLContext: "
            "pass Gateway(…, verify=FILE) with the path of a PEM file"
        )
    pool = _Pool(function, gateway, episodes, in_process)
    threads = [threading.Thread(target=pool.run, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:
        pool.stop.set()
        end = time.monotonic() + STOP_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        raise
    finally:
        # The interpreter waits for every child that is left, e.g. of a thread that still asks a
        # gateway that is away.
        pool.kill()
    if pool.error is not None:
        raise pool.error
    return pool.returned


class _Pool:
    def __init__(
        self,
        function: Function | Environment,
        gateway: Gateway,
        episodes: int | None,
        in_process: bool,
    ) -> None:
        self.function = function
        self.gateway = gateway
        self.left = episodes
        self.in_process = in_process
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.returned = 0
        self.error: BaseException | None = None
        self._children: list[Child] = []

    def run(self) -> None:
        """The loop of one worker."""
        child: Child | None = None
        try:
            while not self.stop.is_set() and self._may_take():
                if not self.in_process and (child is None or not child.is_alive):
                    # Before an episode is taken, whose time limit runs from then on.
                    child = self._start()
                self._one(child)
        except RunOver:
            pass
        except BaseException as error:
            self.error = self.error or error
            self.stop.set()
        finally:
            if child is not None:
                child.kill()

    def _may_take(self) -> bool:
        with self.lock:
            if self.left == 0:
                return False
            if self.left is not None:
                self.left -= 1
            return True

    def _start(self) -> Child:
        assert isinstance(self.function, Environment)
        child = Child(self.function, self.gateway.connection, self.gateway.url)
        with self.lock:
            self._children = [*(other for other in self._children if other.is_alive), child]
        return child

    def kill(self) -> None:
        """Kills the children that are left."""
        with self.lock:
            for child in self._children:
                child.kill()

    def _one(self, child: Child | None) -> None:
        """Runs an episode, in `child` if there is one."""
        episode = self._take()
        if episode is None:
            return
        try:
            with episode:
                if child is None:
                    return_verdict(episode, run_here(self.function, episode))
                else:
                    assert isinstance(self.function, Environment)
                    verdict = self._run_apart(child, self.function, episode)
                    if verdict is not None:
                        return_verdict(episode, verdict)
                    elif self.stop.is_set():
                        episode.abandon()
                    else:
                        raise LeaseOver(episode.lost or NOT_SERVED)
            with self.lock:
                self.returned += 1
        except LeaseOver as error:
            logger.warning("episode %s: %s", episode.taken.attempt, error)

    def _run_apart(
        self, child: Child, environment: Environment, episode: Episode
    ) -> Verdict | None:
        """Runs an environment in `child`, and its reward function in another process."""
        verdict = child.run(episode.taken, environment.timeout, self.stop)
        if verdict is None or verdict.kind != "work":
            return verdict
        gateway = self.gateway
        return grade_apart(
            environment, gateway.connection, gateway.url, episode.taken, verdict, self.stop
        )

    def _take(self) -> Episode | None:
        while not self.stop.is_set():
            with contextlib.suppress(TimeoutError):
                return self.gateway.take(timeout=5.0)
        return None


def main(function: Function | Environment) -> None:
    """Runs workers as a program, which exits when the run ends.

    Options: `--url` (or the variable `ORCHESTRATE_URL`), `--workers`, `--patience` (see `Gateway`),
    `--secret-env`, the name of the variable that holds the secret (by default
    `ORCHESTRATE_SECRET`), and for TLS `--tls-ca`, `--tls-cert` and `--tls-key`.
    """
    parser = argparse.ArgumentParser(description=function.__doc__)
    default = os.environ.get("ORCHESTRATE_URL", "http://127.0.0.1:4170")
    parser.add_argument("--url", default=default, help=f"the run's gateway [{default}]")
    parser.add_argument("--workers", type=int, default=1, help="episodes at the same time [1]")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help=f"how long a gateway that does not answer is asked again [{PATIENCE_S:g}]",
    )
    parser.add_argument(
        "--secret-env",
        default="ORCHESTRATE_SECRET",
        metavar="NAME",
        help="environment variable with the gateway's secret [ORCHESTRATE_SECRET]",
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="PEM file with the authorities of the gateway's certificate [those of certifi]",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="PEM file with a certificate of this worker, for a gateway that asks for one",
    )
    parser.add_argument(
        "--tls-key", metavar="FILE", help="PEM file with the private key of --tls-cert"
    )
    options = parser.parse_args()
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key belong together")
    for file in filter(None, (options.tls_ca, options.tls_cert, options.tls_key)):
        if not os.path.isfile(file):
            parser.error(f"{file} is not a file")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    secret = os.environ.get(options.secret_env)
    cert = (options.tls_cert, options.tls_key) if options.tls_cert else None
    verify = options.tls_ca or True
    try:
        with Gateway(
            options.url, secret, patience=options.patience, verify=verify, cert=cert
        ) as gateway:
            returned = work(function, gateway, workers=options.workers)
    except OrchestrateError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{returned} episodes returned", file=sys.stderr)


def _interrupt(_signal: int, _frame: types.FrameType | None) -> None:
    # The next one ends the process at once; its children end with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
