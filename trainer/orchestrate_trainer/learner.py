"""The state that a step changes: the model, its optimizer, and the heads trained next to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import Heads
from .moments import Bf16AdamW
from .policy import Policy
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
            # One kernel per update on CUDA. It keeps the number of updates on the device too.
            fused = next(policy.parameters()).device.type == "cuda"
            optimizer = torch.optim.AdamW(
                policy.parameters(), lr=0.0, fused=fused, foreach=not fused
            )
        return cls(policy, optimizer, heads)

    def updates(self) -> Tensor:
        """Number of optimizer steps made, where the optimizer keeps it.

        This is the position in the warm-up, so a resumed run continues where it was.
        """
        made = (state["step"] for state in self.optimizer.state.values())
        return torch.as_tensor(next(made, 0.0))
