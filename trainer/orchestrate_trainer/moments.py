"""AdamW with moments in bf16: 4 bytes per parameter instead of 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Bf16AdamW", "round_stochastically"]


#: Names of the moments in the optimizer's state, those of PyTorch's AdamW.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and stores its moments in bf16, rounded stochastically.

    bf16 has 8 bits, so with rounding to the nearest value a second moment that changes by less than
    0.2 % per step would never change. Stochastic rounding keeps the expected value. Which way a
    value is rounded depends only on ``seed``, the step and the parameter's place, so a run that is
    resumed rounds as one that was not.
    """

    def __init__(self, parameters: Iterable[Tensor], seed: int) -> None:
        """Processes that hold different parts of a parameter should differ in ``seed``."""
        defaults = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(parameters, defaults)
        self._seed = seed
        # PyTorch loads state in the dtype of its parameter.
        self.register_load_state_dict_post_hook(lambda _: self._round_moments())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes one update of all parameters that have a gradient."""
        assert closure is None, "gradients are computed before"
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place += 1
                if parameter.grad is not None:
                    self._update(parameter, group, place)

    def _round_moments(self) -> None:
        for state in self.state.values():
            for name in MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    def _update(self, parameter: Tensor, group: dict[str, Any], place: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        weights, gradient = _local(parameter), _local(parameter.grad)
        first, second = (_local(state[name]) for name in MOMENTS)
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        generator = torch.Generator(weights.device)
        generator.manual_seed((self._seed << 48) ^ (step << 20) ^ place)
        first.copy_(round_stochastically(mean, generator))
        second.copy_(round_stochastically(square, generator))
        weights.mul_(1 - rate * group["weight_decay"])
        scale = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weights.addcdiv_(mean, scale, value=-rate / (1 - beta1**step))


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Float32 values rounded to one of the two neighbours in bf16; the nearer one is likelier, so
    that the expected value is exact. Values must be finite."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(
        1 << 16, bits.shape, generator=generator, dtype=torch.int32, device=bits.device
    )
    # The sign does not matter: adding to the bits increases the magnitude.
    return ((bits + noise) & -(1 << 16)).view(torch.float32).bfloat16()


def _local(tensor: Any) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
