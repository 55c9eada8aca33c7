"""What a step changes: the model, its optimizer, and the weights beside the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .policy import Policy
from .settings import Hyperparameters
from .side import Side
from .world import World

__all__ = ["Learner"]


@dataclass
class Learner:
    """Everything that a checkpoint holds and a failed step puts back."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    side: Side

    @classmethod
    def of(cls, policy: Policy, world: World) -> "Learner":
        """A model that has not been trained here yet."""
        shape = policy.shape
        layers, experts = len(shape["moe_layers"]), shape["experts"]
        side = Side(layers, experts, policy.model.config.hidden_size, world.device)
        return cls(policy, torch.optim.AdamW(policy.parameters(), lr=0.0, foreach=True), side)

    def next_rate(self, settings: Hyperparameters) -> float:
        """Learning rate of the next optimizer step. The optimizer's own count places it in the
        warm-up, so that a resumed run goes on where it was."""
        made = (int(state["step"]) for state in self.optimizer.state.values())
        return settings.rate(next(made, 0) + 1)
