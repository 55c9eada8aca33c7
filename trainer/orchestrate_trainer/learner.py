"""The state that a step changes: the model, its optimizer, and the heads trained next to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .heads import Heads
from .moments import Bf16AdamW
from .policy import Policy
from .settings import Hyperparameters
from .world import World

__all__ = ["Learner"]


@dataclass
class Learner:
    """Everything that a checkpoint stores and a failed step restores."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    heads: Heads

    @classmethod
    def of(cls, policy: Policy, world: World, moments: str = "f32") -> Learner:
        """A learner for a model that has not been trained yet.

        ``moments`` is the dtype of the optimizer's moments, ``f32`` or ``bf16``.
        """
        shape = policy.shape
        layers, experts = len(shape["moe_layers"]), shape["experts"]
        heads = Heads(layers, experts, policy.model.config.hidden_size, world.device)
        optimizer: torch.optim.Optimizer
        if moments == "bf16":
            optimizer = Bf16AdamW(policy.parameters(), seed=world.rank)
        else:
            optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, foreach=True)
        return cls(policy, optimizer, heads)

    def next_rate(self, settings: Hyperparameters) -> float:
        """Learning rate of the next optimizer step.

        The optimizer's own step count is the position in the warm-up, so a resumed run continues
        where it was.
        """
        made = (int(state["step"]) for state in self.optimizer.state.values())
        return settings.rate(next(made, 0) + 1)
