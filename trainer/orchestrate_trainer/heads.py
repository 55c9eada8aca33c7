"""Weights that are trained next to the model: PPO's value head and PR2's router predictor.

Each has its own optimizer and its own file in a checkpoint, and is not part of the model. They are
small, so every process holds them whole; gradients are summed over the processes and all processes
make the same update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .settings import Hyperparameters
from .world import World

__all__ = ["Head", "HeadFileError", "Heads"]

PREDICTOR, VALUE_HEAD = "router_predictor", "value_head"
MOMENTS = ("exp_avg", "exp_avg_sq")


class HeadFileError(ValueError):
    """A head's file that is damaged or belongs to another model."""


class Head:
    """One float32 tensor, initially zero, with its own AdamW optimizer."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Zeros of ``shape`` on ``device``."""
        self.weights = torch.zeros(shape, device=device, requires_grad=True)
        self._optimizer = torch.optim.AdamW([self.weights], lr=0.0)

    def update(self, settings: Hyperparameters, rate: float, world: World) -> None:
        """Makes one optimizer step with learning rate ``rate`` and no weight decay.

        The gradient is summed over all processes and clipped by itself.
        """
        gradient = self.weights.grad
        if gradient is None:
            gradient = self.weights.grad = torch.zeros_like(self.weights)
        if world.size > 1:
            dist.all_reduce(gradient)
        torch.nn.utils.clip_grad_norm_([self.weights], settings.max_grad_norm)
        for group in self._optimizer.param_groups:
            group.update(lr=rate, betas=settings.betas, eps=settings.adam_eps, weight_decay=0.0)
        self._optimizer.step()

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient accumulated in this process."""
        if self.weights.grad is not None:
            self.weights.grad *= factor

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Weights, moments and number of updates, under the names used in the file of head
        ``name``."""
        state: dict[str, Any] = self._optimizer.state.get(self.weights, {})
        zeros = torch.zeros_like(self.weights)
        held = {name: self.weights.detach()}
        held |= {f"{moment}.{name}": state.get(moment, zeros) for moment in MOMENTS}
        step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1)
        return {key: tensor.cpu() for key, tensor in (held | {"step": step}).items()}

    def load(self, name: str, path: Path) -> None:
        """Restores what :meth:`tensors` returned. Raises :class:`HeadFileError`."""
        try:
            held = load_file(path)
        except (OSError, SafetensorError) as error:
            raise HeadFileError(f"{path} cannot be read: {error}") from error
        shape = tuple(self.weights.shape)
        expected: dict[str, tuple[int, ...]] = {name: shape, "step": (1,)}
        expected |= {f"{moment}.{name}": shape for moment in MOMENTS}
        for key, wanted in expected.items():
            if key not in held or tuple(held[key].shape) != wanted:
                raise HeadFileError(
                    f"{path}: tensor `{key}` is missing or has the wrong shape; start from a "
                    "checkpoint of this model, or remove the file to start from zeros"
                )
        with torch.no_grad():
            self.weights.copy_(held[name])
        state = {moment: held[f"{moment}.{name}"].to(self.weights.device) for moment in MOMENTS}
        self._optimizer.state[self.weights] = state | {"step": held["step"][0]}


class Heads:
    """The heads of a trainer. Each is created when it is first used."""

    def __init__(self, layers: int, experts: int, hidden: int, device: torch.device) -> None:
        """Heads of a model with ``layers`` MoE layers of ``experts`` experts each and hidden states
        of ``hidden`` values."""
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {
            PREDICTOR: (layers, experts, hidden),
            VALUE_HEAD: (hidden + 1,),
        }
        self._held: dict[str, Head] = {}

    def predictor(self) -> Head:
        """The router predictor ``[layers, experts, hidden]``. Zeros predict no change."""
        return self._get(PREDICTOR)

    def value_head(self) -> Head:
        """The value head ``[hidden + 1]``; the bias is last."""
        return self._get(VALUE_HEAD)

    def clear_gradients(self) -> None:
        """Discards the gradients after an update."""
        for held in self._held.values():
            held.weights.grad = None

    def write(self, folder: Path) -> None:
        """Writes a file for each head that was used. Only the leader calls this."""
        for name, held in self._held.items():
            save_file(held.tensors(name), folder / _file(name))

    def clear(self) -> None:
        """Discards all heads."""
        self._held.clear()

    def load(self, folder: Path) -> None:
        """Replaces all heads by those that :meth:`write` wrote. Raises :class:`HeadFileError`."""
        self.clear()
        for name in self._shapes:
            if (folder / _file(name)).exists():
                self._get(name).load(name, folder / _file(name))

    def _get(self, name: str) -> Head:
        if name not in self._held:
            self._held[name] = Head(self._shapes[name], self._device)
        return self._held[name]


def _file(name: str) -> str:
    # Safetensors files, but not named so: inference servers load every *.safetensors of a folder.
    return f"{name}.state"
