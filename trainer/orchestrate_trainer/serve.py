"""Starts the trainer: ``torchrun -m orchestrate_trainer.serve`` or ``orchestrate-trainer``."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from .policy import ModelOptions, UnusableModel
from .routers import UnknownRouter
from .server import Server
from .service import Desk, Trainer, work
from .store import CheckpointStore
from .world import World

__all__ = ["main"]

log = logging.getLogger("orchestrate_trainer")


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT: the step under way then stops at its next phase."""
    given = _parser().parse_args(arguments)
    token = os.environ.get(given.token_env, "") if given.token_env else None
    if token == "":
        print(f"error: set {given.token_env} to the trainer's token", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if given.threads:
        torch.set_num_threads(given.threads)
    world = World.join(given.device)
    options = ModelOptions(
        compute=given.compute,
        activation_checkpointing=not given.keep_activations,
        cpu_offload=given.cpu_offload,
        experts=given.experts,
    )
    exported = {"bf16": torch.bfloat16, "f32": torch.float32}
    dtype = exported.get(given.export, options.dtype(world))
    store = CheckpointStore(given.checkpoint_dir, world, given.keep, dtype)
    _end_with_launcher()
    try:
        store.claim()
        trainer = Trainer.open(given.model, store, options, world)
    except (OSError, UnusableModel, UnknownRouter) as error:
        if world.leads:
            print(f"error: cannot start the trainer: {error}", file=sys.stderr)
        world.leave()
        return 2
    devices = world.describe()
    desk = server = None
    if world.leads:
        desk = Desk(trainer, devices, given.batch_root)
        server = Server(desk, given.host, given.port, token)
        log.info("listening on http://%s:%d", given.host, server.port)
    # Only the leader decides when to stop; the others hear it from the leader.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: desk.stopping.set() if desk else None)
    work(trainer, desk)
    if server is not None:
        server.close()
    world.leave()
    return 0


def _end_with_launcher() -> None:
    """Has this process told to end when ``torchrun`` dies without a word, which would leave it
    behind: a session of its own keeps it from the launcher's signals."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrate-trainer", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="starting model, Hugging Face layout")
    add(
        "--checkpoint-dir",
        type=Path,
        required=True,
        help="folder of checkpoints, shared by all nodes and readable by the inference servers",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=30100, help="port; 0 = any free one (default: %(default)s)")
    add("--token-env", help="environment variable with the bearer token; none = open")
    add("--batch-root", type=Path, help="folder that batches must lie in; none = anywhere")
    add("--keep", type=int, default=3, help="newest checkpoints to keep (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--compute",
        choices=("auto", "bf16", "f32"),
        default="auto",
        help="dtype of layers; routers are f32 always (default: bf16 on CUDA, f32 on the CPU)",
    )
    add(
        "--export",
        choices=("auto", "bf16", "f32"),
        default="auto",
        help="dtype of the weights that inference servers load (default: that of --compute)",
    )
    add("--keep-activations", action="store_true", help="no activation checkpointing")
    add("--cpu-offload", action="store_true", help="parameters and optimizer in host memory")
    add("--experts", help="expert kernel, as transformers names it (eager, grouped_mm, …)")
    add("--threads", type=int, default=0, help="threads per process on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
