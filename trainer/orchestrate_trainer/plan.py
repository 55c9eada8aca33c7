"""How one process runs a step: its micro-batches, grouped into mini steps, and the step's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import Batch
from .data import MicroBatch
from .losses import Totals
from .passes import StepError, own_mini_steps
from .policy import Policy
from .settings import Hyperparameters
from .world import World

__all__ = ["MiniStep", "StepPlan", "plan_step"]


@dataclass(frozen=True)
class MiniStep:
    """One optimizer step."""

    #: Counted from 0.
    number: int
    #: Number of its first micro-batch within the step.
    first: int
    #: This process's micro-batches.
    micros: list[MicroBatch]
    #: Sizes over all processes.
    totals: Totals


@dataclass(frozen=True)
class StepPlan:
    """A step of one or more mini steps."""

    mini_steps: list[MiniStep]
    #: Loss tokens of all mini steps and processes; at least 1.
    loss_tokens: int
    #: Routing rows that should have been recorded but are placeholders, over all processes.
    missing_rows: int
    #: Routing rows that can be recorded: all tokens but the last of each sequence.
    possible_rows: int
    #: Tokens over all processes.
    tokens: int

    @property
    def micros(self) -> list[MicroBatch]:
        """Micro-batches of this process, in the order in which the step runs them."""
        return [micro for mini_step in self.mini_steps for micro in mini_step.micros]


def plan_step(batch: Batch, settings: Hyperparameters, policy: Policy, world: World) -> StepPlan:
    """Reads the batch and plans a step on it.

    Raises :class:`StepError` in all processes if a sequence is invalid or no token has a loss.
    """
    budget = settings.micro_batch_tokens
    parts = own_mini_steps(batch, settings.mini_steps, budget, policy, world)
    own = [[sequence for micro in micros for sequence in micro.sequences] for micros in parts]
    counts = [[len(part), sum(len(s.scored) for s in part)] for part in own]
    sizes = world.sum([float(n) for pair in counts for n in pair])
    totals = [
        Totals(int(sequences), int(tokens), settings.loss_norm_tokens)
        for sequences, tokens in zip(sizes[::2], sizes[1::2], strict=True)
    ]
    loss_tokens = sum(part.loss_tokens for part in totals)
    if loss_tokens == 0:
        raise StepError("the batch has no loss tokens")
    mini_steps = []
    first = 0
    for number, (micros, total) in enumerate(zip(parts, totals, strict=True)):
        mini_steps.append(MiniStep(number, first, micros, total))
        first += len(micros)
    sequences = [sequence for part in own for sequence in part]
    missing = sum(int((~s.valid[:-1]).sum()) for s in sequences)
    tokens = sum(len(s) for s in sequences)
    rows = world.sum([float(missing), float(tokens - len(sequences)), float(tokens)])
    missing, possible, tokens = (int(count) for count in rows)
    return StepPlan(mini_steps, loss_tokens, missing, possible, tokens)
