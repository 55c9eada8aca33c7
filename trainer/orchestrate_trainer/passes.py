"""Forward passes over a batch: how processes split them, and measurements that need no gradient.

All processes run the same number of passes, because each pass gathers every layer's parameters
from all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .corrections import Tokens
from .data import MicroBatch, OwnSequence, check, distribute, pack
from .measures import Disagreement, Mismatch
from .policy import Policy
from .world import World

__all__ = [
    "ForwardOutput",
    "RouteDisagreement",
    "StepError",
    "forward",
    "measure_logprobs",
    "own_mini_steps",
    "pack_equally",
]


class StepError(Exception):
    """A step that cannot be applied."""

    def __init__(self, problem: str, moved: bool = False) -> None:
        """``moved`` says whether the weights were changed before the error."""
        super().__init__(problem)
        self.moved = moved


@dataclass
class ForwardOutput:
    """Result of one micro-batch's forward pass, on the device; ``n`` tokens are scored."""

    #: Log-probs of the scored tokens, nats, float32 ``[n]``.
    logp: Tensor
    #: Entropies where they are predicted, nats, float32 ``[n]``.
    entropy: Tensor
    #: Final hidden states that they are predicted from, ``[n, d]``.
    hidden: Tensor
    #: The micro-batch, on the device.
    micro: MicroBatch


@contextmanager
def forward(
    policy: Policy,
    micro: MicroBatch,
    temperature: float,
    device: torch.device,
    replay: tuple[Tensor, Tensor] | None = None,
    watch: Tensor | bool = False,
    keep: Tensor | None = None,
) -> Iterator[ForwardOutput]:
    """Runs the forward pass of ``micro``. Its backward pass must run inside the context.

    ``replay`` holds recorded experts ``[T, L, K]`` and which rows were recorded, bool ``[T]``;
    ``watch`` and ``keep`` are those of
    :meth:`~orchestrate_trainer.replay.Routing.micro_batch`.
    """
    on_device = micro.to(device)
    rows, valid = (None, None) if replay is None else (part.to(device) for part in replay)
    if isinstance(watch, Tensor):
        watch = watch.to(device)
    keep = None if keep is None else keep.to(device)
    with policy.routing.micro_batch(rows, valid, watch, keep):
        logp, entropy, hidden = policy(
            on_device.tokens,
            on_device.positions,
            on_device.lengths,
            on_device.rows,
            on_device.targets,
            temperature,
        )
        yield ForwardOutput(logp, entropy, hidden, on_device)


def own_mini_steps(
    batch: Batch, count: int, policy: Policy, world: World
) -> list[list[OwnSequence]]:
    """Reads and checks this process's sequences of each of ``count`` mini steps.

    The batch's sequences are distributed over the mini steps, and those of a mini step over the
    processes. Raises :class:`StepError` in all processes if any process finds an invalid sequence.
    """
    lengths: list[int] = batch.lengths().tolist()
    problem = None
    own: list[list[OwnSequence]] = []
    try:
        for part in distribute(lengths, min(count, len(lengths))):
            mine = distribute([lengths[number] for number in part], world.size)[world.rank]
            for place in mine:
                check(batch.sequence(part[place]), policy.shape)
            own.append([OwnSequence.read(batch, part[place]) for place in mine])
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = [found for found in world.gather(problem) if found is not None]
    if problems:
        raise StepError(problems[0])
    return own


def pack_equally(
    own: list[OwnSequence], budget: int, world: World, every_token: bool = False
) -> list[MicroBatch]:
    """Micro-batches of this process's sequences, followed by ones without sequences so that every
    process has the same number."""
    micros = pack(own, budget, every_token)
    count = world.max(len(micros))
    return micros + [MicroBatch([], every_token) for _ in range(count - len(micros))]


class RouteDisagreement:
    """Accumulates :class:`~orchestrate_trainer.measures.Disagreement` over micro-batches."""

    def __init__(self, policy: Policy) -> None:
        self._sums = Disagreement(len(policy.shape["moe_layers"]), policy.shape["top_k"])

    def add(self, micro: MicroBatch, own: Tensor) -> None:
        """Compares the recorded experts of ``micro`` with the routers' own choice ``[T, L, K]``."""
        # A micro-batch without sequences has a placeholder token, which is left out here.
        for sequence, chosen in zip(micro.sequences, own.cpu().split(micro.lengths), strict=False):
            self._sums.add(sequence.routes[sequence.valid], chosen[sequence.valid])

    def finish(self, world: World) -> dict[str, Any]:
        """The protocol's ``Disagreement``, over all processes."""
        return self._sums.finish(world)


def measure_logprobs(
    policy: Policy, batch: Batch, replay: bool, temperature: float, budget: int, world: World
) -> dict[str, Any]:
    """Log-probs of every token, with the batch's routes replayed or not.

    Returns the protocol's ``LogprobsReply`` without its version, complete in every process. The
    weights do not change. A micro-batch has at most ``budget`` tokens. Raises :class:`StepError`.
    """
    (own,) = own_mini_steps(batch, 1, policy, world)
    mismatch, disagreement = Mismatch(), RouteDisagreement(policy)
    found: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro in pack_equally(own, budget, world, every_token=True):
            rows = micro.recorded() if replay and micro.sequences else None
            with forward(policy, micro, temperature, world.device, rows) as out:
                disagreement.add(micro, policy.routing.own())
                logp = out.logp.float().cpu()
            for number, sequence in enumerate(micro.sequences):
                scored = logp[micro.owner == number] if micro.live else logp[:0]
                padded = torch.cat([torch.zeros(1), scored])
                places = sequence.scored
                tokens = Tokens(torch.zeros_like(places), 1)
                mismatch.add(padded[places], sequence.rollout[places], tokens)
                found[sequence.index] = padded.tolist()
    merged = {index: values for part in world.gather(found) for index, values in part.items()}
    return {
        "logprobs": [merged[index] for index in sorted(merged)],
        "mismatch": mismatch.finish(world)[0],
        "disagreement": None if replay else disagreement.finish(world),
    }
