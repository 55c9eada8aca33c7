"""Starts the trainer: ``orchestrate-trainer``, or ``torchrun -m orchestrate_trainer.serve``."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from .cli import parser
from .network import NetworkOptions
from .policy import ModelError, ModelOptions
from .routers import UnknownRouterError
from .server import Server
from .service import Trainer, TrainerService, run_jobs
from .store import CheckpointStore
from .world import World

__all__ = ["serve"]

log = logging.getLogger("orchestrate_trainer")


def serve(given: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT, on which a running step stops at its next phase.

    ``given`` are the options of :func:`orchestrate_trainer.cli.parser`. Returns the exit status: 0,
    or 2 if the trainer cannot be started.
    """
    token = os.environ.get(given.token_env, "") if given.token_env else None
    if token == "":
        print(
            f"error: environment variable {given.token_env} is unset or empty; set it to the token",
            file=sys.stderr,
        )
        return 2
    network = NetworkOptions(
        host=given.host,
        port=given.port,
        token=token,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        tls_client_ca=given.tls_client_ca,
        allowed_hosts=tuple(given.allowed_host),
        insecure=given.insecure,
        max_connections=given.max_connections,
    )
    try:
        network.check()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if given.threads:
        torch.set_num_threads(given.threads)
    world = World.join(given.device)
    options = ModelOptions(
        compute=given.compute,
        activation_checkpointing=given.activation_checkpointing,
        cpu_offload=given.cpu_offload,
        compile=given.compile == "on",
        experts=given.experts,
        attention=given.attention,
        moments=given.moments,
        pack_tokens=given.pack_tokens,
    )
    exported = {"bf16": torch.bfloat16, "f32": torch.float32}
    dtype = exported.get(given.export, options.dtype(world))
    store = CheckpointStore(given.checkpoint_dir, world, given.keep, dtype)
    _exit_with_launcher()
    try:
        store.lock()
        trainer = Trainer.open(given.model, store, options, world)
    except (OSError, ModelError, UnknownRouterError) as error:
        if world.is_leader:
            print(f"error: cannot start the trainer: {error}", file=sys.stderr)
        world.leave()
        return 2
    devices = world.device_names()
    service = server = None
    roots = given.batch_root or [Path.cwd()]
    if world.is_leader:
        service = TrainerService(trainer, devices, roots)
        try:
            server = Server(service, network)
        except (OSError, ValueError) as error:
            # uvicorn itself ends the process when the address is in use.
            print(f"error: cannot serve: {error}", file=sys.stderr)
            world.leave()
            return 2
        scheme = "http" if network.tls_cert is None else "https"
        log.info("listening on %s://%s:%d", scheme, given.host, server.port)
    # Only the leader decides when to stop; it tells the others.
    stop = stop_once(threading.Event() if service is None else service.stopping)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    run_jobs(trainer, service)
    if server is not None:
        server.close()
    world.leave()
    return 0


def stop_once(stopping: threading.Event) -> Callable[..., None]:
    """A signal handler that sets ``stopping`` on the first signal and ignores further ones.

    A second signal may interrupt the handler while it holds the event's lock, for which it would
    then wait forever. A launcher that dies can send several.
    """
    asked = False

    def handle(*_: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            stopping.set()

    return handle


def _exit_with_launcher() -> None:
    """Has the kernel terminate this process when ``torchrun`` dies.

    ``torchrun`` starts its processes in sessions of their own, so a signal to its process group
    does not reach them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(serve(parser().parse_args()))
