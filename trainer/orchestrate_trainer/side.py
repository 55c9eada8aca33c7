"""Weights beside the model, each with an optimizer of its own: PPO's value head and PR2's router
predictor. They lie in files of their own in a checkpoint and are no part of the model.

They are small, so every process holds them whole; gradients are summed over the processes and all
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

__all__ = ["Side", "SideWeights", "UnusableSide"]

PREDICTOR, VALUE_HEAD = "router_predictor", "value_head"
MOMENTS = ("exp_avg", "exp_avg_sq")


class UnusableSide(ValueError):
    """A file of weights beside the model that is damaged, or of another model."""


class SideWeights:
    """One float32 tensor, zeros at first, and its moments."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.weights = torch.zeros(shape, device=device, requires_grad=True)
        self._optimizer = torch.optim.AdamW([self.weights], lr=0.0)

    def update(self, settings: Hyperparameters, rate: float, world: World) -> None:
        """One step along the gradient, summed over all processes and clipped by itself; ``rate`` is
        its learning rate. There is no decay."""
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
        """Multiplies what was accumulated in this process."""
        if self.weights.grad is not None:
            self.weights.grad *= factor

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What its file holds."""
        state: dict[str, Any] = self._optimizer.state.get(self.weights, {})
        still = torch.zeros_like(self.weights)
        held = {name: self.weights.detach()}
        held |= {f"{moment}.{name}": state.get(moment, still) for moment in MOMENTS}
        step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1)
        return {key: tensor.cpu() for key, tensor in (held | {"step": step}).items()}

    def fill(self, name: str, path: Path) -> None:
        """Takes over what :meth:`tensors` gave. Raises :class:`UnusableSide`."""
        try:
            held = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UnusableSide(f"{path} cannot be read: {error}") from error
        shape = tuple(self.weights.shape)
        expected = {name: shape, "step": (1,)} | {f"{m}.{name}": shape for m in MOMENTS}
        for key, wanted in expected.items():
            if key not in held or tuple(held[key].shape) != wanted:
                raise UnusableSide(
                    f"{path}: `{key}` is missing or misshapen: start from a checkpoint of this "
                    "model, or move the file away to begin it anew"
                )
        with torch.no_grad():
            self.weights.copy_(held[name])
        state = {moment: held[f"{moment}.{name}"].to(self.weights.device) for moment in MOMENTS}
        self._optimizer.state[self.weights] = state | {"step": held["step"][0]}


class Side:
    """What a trainer has of them; made when first needed."""

    def __init__(self, layers: int, experts: int, hidden: int, device: torch.device) -> None:
        """For a model with so many MoE layers, experts in each, and hidden values."""
        self._device = device
        self._shapes = {PREDICTOR: (layers, experts, hidden), VALUE_HEAD: (hidden + 1,)}
        self._held: dict[str, SideWeights] = {}

    def predictor(self) -> SideWeights:
        """``[layers, experts, hidden]``; zeros predict that nothing moves."""
        return self._get(PREDICTOR)

    def value_head(self) -> SideWeights:
        """``[hidden + 1]``, the bias last."""
        return self._get(VALUE_HEAD)

    def forget_gradients(self) -> None:
        """Ends an update."""
        for held in self._held.values():
            held.weights.grad = None

    def write(self, folder: Path) -> None:
        """Writes what there is; the leader does."""
        for name, held in self._held.items():
            save_file(held.tensors(name), folder / _file(name))

    def clear(self) -> None:
        """Forgets what there is."""
        self._held.clear()

    def load(self, folder: Path) -> None:
        """Becomes what :meth:`write` wrote, and nothing else. Raises :class:`UnusableSide`."""
        self.clear()
        for name in self._shapes:
            if (folder / _file(name)).exists():
                self._get(name).fill(name, folder / _file(name))

    def _get(self, name: str) -> SideWeights:
        if name not in self._held:
            self._held[name] = SideWeights(self._shapes[name], self._device)
        return self._held[name]


def _file(name: str) -> str:
    # Not as the form would have it: inference servers load every *.safetensors of a folder.
    return f"{name}.state"
