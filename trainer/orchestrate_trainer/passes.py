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
from .counts import DeviceSums, read_sums
from .data import MicroBatch, OwnSequence, check, distribute
from .measures import Disagreement, Mismatch
from .packs import plan_packs
from .policy import Policy
from .world import World

__all__ = [
    "ForwardOutput",
    "RouteDisagreement",
    "StepError",
    "forward",
    "measure_logprobs",
    "own_mini_steps",
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
    #: The micro-batch.
    micro: MicroBatch


@contextmanager
def forward(
    policy: Policy,
    micro: MicroBatch,
    temperature: float,
    replay: tuple[Tensor, Tensor | None] | None = None,
    watch: Tensor | bool = False,
    keep: Tensor | None = None,
    compare: bool = False,
) -> Iterator[ForwardOutput]:
    """Runs the forward pass of ``micro``. Its backward pass must run inside the context.

    ``replay`` holds recorded experts ``[T, L, K]``, and the placeholder rows among them, if there
    are any; ``watch``, ``keep`` and ``compare`` are those of
    :meth:`~orchestrate_trainer.replay.Routing.micro_batch`. All tensors are on the device.
    """
    rows, placeholders = (None, None) if replay is None else replay
    with policy.routing.micro_batch(rows, placeholders, watch, keep, compare):
        logp, entropy, hidden = policy(
            micro.tokens, micro.positions, micro.lengths, micro.rows, micro.targets, temperature
        )
        yield ForwardOutput(logp, entropy, hidden, micro)


def own_mini_steps(
    batch: Batch,
    count: int,
    budget: int,
    policy: Policy,
    world: World,
    every_token: bool = False,
) -> list[list[MicroBatch]]:
    """Reads and checks this process's micro-batches of each of ``count`` mini steps, on its device.

    The batch's sequences are distributed over the mini steps by tokens, and those of a mini step
    over the processes by cost (:func:`~orchestrate_trainer.packs.plan_packs`), in micro-batches of
    at most ``budget`` tokens. All processes get the same number of micro-batches; some may have no
    sequences. Raises :class:`StepError` in all processes if any process finds an invalid sequence.
    """
    lengths: list[int] = batch.lengths().tolist()
    problem = None
    own: list[list[list[OwnSequence]]] = []
    try:
        for part in distribute(lengths, min(count, len(lengths))):
            tokens = [lengths[number] for number in part]
            costs = [policy.cost.sequence(n) for n in tokens]
            packs = plan_packs(tokens, costs, world.size, budget)[world.rank]
            numbers = [[part[place] for place in pack] for pack in packs]
            for number in (number for pack in numbers for number in pack):
                check(batch.sequence(number), policy.shape)
            own.append([[OwnSequence.read(batch, n) for n in pack] for pack in numbers])
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = [found for found in world.gather(problem) if found is not None]
    if problems:
        raise StepError(problems[0])
    return [[MicroBatch(pack, every_token).to(world.device) for pack in packs] for packs in own]


class RouteDisagreement(DeviceSums):
    """Accumulates :class:`~orchestrate_trainer.measures.Disagreement` over micro-batches."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        layers, top_k = len(policy.shape["moe_layers"]), policy.shape["top_k"]
        self._sums = Disagreement(layers, top_k, device)

    def add(self, micro: MicroBatch, own: Tensor) -> None:
        """Compares the recorded experts of ``micro`` with the routers' own choice ``own``
        ``[T, L, K]``."""
        if micro.sequences:
            members = Tokens(micro.member, len(micro.sequences))
            self._sums.add(micro.recorded(), own, micro.valid, members)

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
    (micros,) = own_mini_steps(batch, 1, budget, policy, world, every_token=True)
    mismatch, disagreement = Mismatch(), RouteDisagreement(policy, world.device)
    logprobs = []
    with torch.no_grad():
        for micro in micros:
            rows = (micro.recorded(), micro.placeholders) if replay and micro.sequences else None
            with forward(policy, micro, temperature, rows) as out:
                if not replay:
                    disagreement.add(micro, policy.routing.own())
                logprobs.append(out.logp.float())
    read_sums(disagreement)
    found: dict[int, list[float]] = {}
    parts = torch.cat(logprobs).cpu().split([len(logp) for logp in logprobs])
    for micro, logp in zip(micros, parts, strict=True):
        counts = [len(sequence) - 1 for sequence in micro.sequences]
        each = logp[: sum(counts)].split(counts)
        for sequence, scored in zip(micro.sequences, each, strict=True):
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
