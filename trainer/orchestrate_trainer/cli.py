"""Command line of the trainer. Imports PyTorch only after the arguments are known to be valid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["main", "parser"]


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``orchestrate-trainer``. Returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        from . import serve
    except ModuleNotFoundError as error:
        print(
            f"error: package {error.name} is not installed; "
            "pip install 'orchestrate-trainer[train]'",
            file=sys.stderr,
        )
        return 2
    return serve.serve(given)


def _add_network(add: Callable[..., object]) -> None:
    """Adds the options that say who may reach the server."""
    add("--tls-cert", type=Path, help="PEM file with the server's certificate: serve HTTPS")
    add("--tls-key", type=Path, help="PEM file with the private key of --tls-cert")
    add(
        "--tls-client-ca",
        type=Path,
        help="PEM file with authorities: serve only clients with a certificate of one of them",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name by which clients address the server, besides localhost and IP addresses; "
        "may be repeated",
    )
    add(
        "--max-connections",
        type=int,
        default=64,
        help="number of open connections (default: %(default)s)",
    )
    add(
        "--insecure",
        action="store_true",
        help="listen on an address that other hosts reach, without a token or client certificates",
    )


def parser() -> argparse.ArgumentParser:
    """The trainer's options."""
    options = argparse.ArgumentParser(
        prog="orchestrate-trainer",
        description="Serves trainer protocol 1: trains a model on the batches of an orchestrator.",
    )
    add = options.add_argument
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
    add(
        "--batch-root",
        type=Path,
        action="append",
        help="folder that batches must lie in; may be repeated (default: the current folder)",
    )
    _add_network(add)
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
    add(
        "--activation-checkpointing",
        choices=("none", "selective", "full"),
        default="full",
        help="what backward computes again to save memory: nothing, all but matrix products and "
        "attention, or whole layers (default: %(default)s)",
    )
    add(
        "--compile",
        choices=("off", "on"),
        default="off",
        help="compile decoder layers with torch.compile at the start (default: %(default)s)",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="keep parameters and optimizer in host memory (CUDA)",
    )
    add(
        "--experts",
        default="packed",
        help="expert kernel: packed, or a name of transformers such as eager or grouped_mm "
        "(default: %(default)s)",
    )
    add(
        "--attention",
        choices=("auto", "varlen", "flex", "loop"),
        default="auto",
        help="attention kernel (default: the best one for model, dtype and device)",
    )
    add(
        "--moments",
        choices=("f32", "bf16"),
        default="f32",
        help="dtype of the optimizer's moments (default: %(default)s)",
    )
    add(
        "--pack-tokens",
        type=_pack_tokens,
        default="auto",
        metavar="N",
        help="most tokens of a pack: a number, `request` for the orchestrator's "
        "algorithm.micro_batch_tokens, or `auto` for as many as fit in a GPU's free memory, and "
        "`request` on the CPU (default: %(default)s)",
    )
    add("--threads", type=int, default=0, help="CPU threads per process (default: all)")
    return options


def _pack_tokens(text: str) -> int | str:
    """Value of ``--pack-tokens``."""
    if text in ("auto", "request"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, request or a number of at least 1")
    return int(text)
