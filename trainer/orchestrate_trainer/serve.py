"""Starts the trainer: ``orchestrate-trainer``, or ``torchrun -m orchestrate_trainer.serve``."""

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

from .policy import ModelError, ModelOptions
from .routers import UnknownRouterError
from .server import Server
from .service import Trainer, TrainerService, run_jobs
from .store import CheckpointStore
from .world import World

__all__ = ["main"]

log = logging.getLogger("orchestrate_trainer")


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, on which a running step stops at its next phase.

    Returns the exit status: 0, or 2 if the trainer cannot be started.
    """
    given = _parser().parse_args(arguments)
    token = os.environ.get(given.token_env, "") if given.token_env else None
    if token == "":
        print(
            f"error: environment variable {given.token_env} is empty; set it to the bearer token",
            file=sys.stderr,
        )
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
    if world.is_leader:
        service = TrainerService(trainer, devices, given.batch_root)
        server = Server(service, given.host, given.port, token)
        log.info("listening on http://%s:%d", given.host, server.port)
    # Only the leader decides when to stop; it tells the others.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stopping.set() if service else None)
    run_jobs(trainer, service)
    if server is not None:
        server.close()
    world.leave()
    return 0


def _exit_with_launcher() -> None:
    """Has the kernel terminate this process when ``torchrun`` dies.

    ``torchrun`` starts its processes in sessions of their own, so a signal to its process group
    does not reach them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrate-trainer", description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        help="folder of the starting model, in the Hugging Face layout",
    )
    add(
        "--checkpoint-dir",
        type=Path,
        required=True,
        help="folder of checkpoints, shared by all machines and readable by the inference servers",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=30100, help="port; 0 chooses a free one (default: %(default)s)")
    add("--token-env", help="environment variable that holds the bearer token (default: no token)")
    add("--batch-root", type=Path, help="folder that batches must lie in (default: any folder)")
    add(
        "--keep",
        type=int,
        default=3,
        help="number of newest checkpoints to keep (default: %(default)s)",
    )
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="device to train on (default: cuda if available)",
    )
    add(
        "--compute",
        choices=("auto", "bf16", "f32"),
        default="auto",
        help="dtype of layers; routers always use f32 (default: bf16 on CUDA, f32 on the CPU)",
    )
    add(
        "--export",
        choices=("auto", "bf16", "f32"),
        default="auto",
        help="dtype of the weights that inference servers load (default: that of --compute)",
    )
    add("--keep-activations", action="store_true", help="turn off activation checkpointing")
    add(
        "--cpu-offload",
        action="store_true",
        help="keep parameters and optimizer in host memory (CUDA)",
    )
    add("--experts", help="name of the expert kernel in transformers, e.g. eager or grouped_mm")
    add("--threads", type=int, default=0, help="CPU threads per process (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
