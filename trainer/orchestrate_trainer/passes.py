"""Forward passes over a batch: each process's share of it, and what a forward alone can measure.

All processes run the same number of passes, since each pass gathers every layer's parameters from
all of them.
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
from .data import MicroBatch, OwnSequence, check, pack, share_out
from .measures import Disagreement, Mismatch
from .policy import Policy
from .world import World

__all__ = ["Disagreements", "Outcome", "StepError", "forward", "measure", "mini_steps", "packed"]


class StepError(Exception):
    """A step that cannot be done. :attr:`moved` says whether weights were changed before."""

    def __init__(self, problem: str, moved: bool = False) -> None:
        super().__init__(problem)
        self.moved = moved


@dataclass
class Outcome:
    """One micro-batch's forward."""

    logp: Tensor
    entropy: Tensor
    #: Final hidden states that the scored tokens were predicted from, ``[n, d]``.
    hidden: Tensor
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
) -> Iterator[Outcome]:
    """Runs ``micro``; its backward belongs inside the block."""
    at = micro.to(device)
    rows, valid = (None, None) if replay is None else (part.to(device) for part in replay)
    if isinstance(watch, Tensor):
        watch = watch.to(device)
    keep = None if keep is None else keep.to(device)
    with policy.routing.micro_batch(rows, valid, watch, keep):
        logp, entropy, hidden = policy(
            at.tokens, at.positions, at.lengths, at.rows, at.targets, temperature
        )
        yield Outcome(logp, entropy, hidden, at)


def mini_steps(batch: Batch, count: int, policy: Policy, world: World) -> list[list[OwnSequence]]:
    """This process's sequences of each mini step, read and checked.

    Mini steps share out the batch's sequences, processes those of a mini step. Raises
    :class:`StepError`, alike in all processes.
    """
    lengths = batch.lengths().tolist()
    problem, own = None, []
    try:
        for part in share_out(lengths, min(count, len(lengths))):
            mine = share_out([lengths[number] for number in part], world.size)[world.rank]
            for place in mine:
                check(batch.sequence(part[place]), policy.shape)
            own.append([OwnSequence.read(batch, part[place]) for place in mine])
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = [found for found in world.gather(problem) if found is not None]
    if problems:
        raise StepError(problems[0])
    return own


def packed(
    own: list[OwnSequence], budget: int, world: World, every_token: bool = False
) -> list[MicroBatch]:
    """Micro-batches of this process, filled up to the number of those that have most."""
    micros = pack(own, budget, every_token)
    count = world.most(len(micros))
    return micros + [MicroBatch([], every_token) for _ in range(count - len(micros))]


class Disagreements:
    """Splits a micro-batch's own routes into sequences for :class:`Disagreement`."""

    def __init__(self, policy: Policy) -> None:
        self._sums = Disagreement(len(policy.shape["moe_layers"]), policy.shape["top_k"])

    def add(self, micro: MicroBatch, own: Tensor) -> None:
        for sequence, chosen in zip(micro.sequences, own.cpu().split(micro.lengths)):
            self._sums.add(sequence.routes[sequence.valid], chosen[sequence.valid])

    def finish(self, world: World) -> dict[str, Any]:
        return self._sums.finish(world)


def measure(
    policy: Policy, batch: Batch, replay: bool, temperature: float, budget: int, world: World
) -> dict[str, Any]:
    """Log-probs of every token, with the batch's routes replayed or not: the protocol's
    ``LogprobsReply`` without its version, complete in the leader. Nothing changes."""
    (own,) = mini_steps(batch, 1, policy, world)
    mismatch, disagreements = Mismatch(), Disagreements(policy)
    found: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro in packed(own, budget, world, every_token=True):
            rows = micro.recorded() if replay and micro.sequences else None
            with forward(policy, micro, temperature, world.device, rows) as out:
                disagreements.add(micro, policy.routing.own())
                logp = out.logp.float().cpu()
            for number, sequence in enumerate(micro.sequences):
                scored = logp[micro.owner == number] if micro.live else logp[:0]
                padded = torch.cat([torch.zeros(1), scored])
                places = sequence.scored
                whose = Tokens(torch.zeros_like(places), 1)
                mismatch.add(padded[places], sequence.rollout[places], whose)
                found[sequence.index] = padded.tolist()
    merged = {index: values for share in world.gather(found) for index, values in share.items()}
    return {
        "logprobs": [merged[index] for index in sorted(merged)],
        "mismatch": mismatch.finish(world)[0],
        "disagreement": None if replay else disagreements.finish(world),
    }
