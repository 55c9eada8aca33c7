"""Routing replay: the routers of a model execute recorded experts in place of their own choice.

Replay replaces the ``forward`` of the router modules; layers remain the code of transformers.
Routers compute in float32 or wider, and their weights are rounded to the dtype of the hidden states
that they are multiplied with. In bf16 transformers differs by family: the routers of DeepSeek and
GLM-4.5 also compute in float32, the others' products are in bf16, and gpt-oss' softmax too. The
weights of Mixtral, DeepSeek and GLM-4.5 stay in float32 there; those of the others are rounded.

The choice is made in a micro-batch's first forward and kept until the next micro-batch starts. The
forward that activation checkpointing runs again during backward therefore uses the same experts,
even if it rounds differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compilation import uncompiled
from .experts import ExpertOrder
from .routers import FAMILIES, RouterSpec, UnknownRouterError, log_router_probs, spec_of

__all__ = ["Routing"]

T = TypeVar("T")


class _Router:
    """Replacement for one router's ``forward``, with the state of the current micro-batch."""

    def __init__(self, module: nn.Module, spec: RouterSpec, layer: int) -> None:
        self.module: Any = module
        self.spec = spec
        self.layer = layer
        self.start()

    def start(
        self,
        recorded: tuple[Tensor, Tensor | None] | None = None,
        watch: Tensor | bool = False,
        keep: Tensor | None = None,
        compare: bool = False,
    ) -> None:
        """Starts a micro-batch. ``recorded`` holds this layer's experts ``[T, K]`` and the
        placeholder rows among them, if any; the others are those of :meth:`Routing.micro_batch`."""
        self.recorded, self.watch, self.keep = recorded, watch, keep
        self.compare = compare
        self.kept: tuple[Tensor, Tensor] | None = None
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None
        self.log_probs: Tensor | None = None
        self._order: ExpertOrder | None = None

    @uncompiled
    def order(self, experts: int) -> ExpertOrder:
        """The order of the chosen ones of ``experts`` experts, sorted once per micro-batch."""
        if self._order is None:
            self._order = ExpertOrder.of(_require(self.chosen), experts)
        return self._order

    @uncompiled
    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        hidden = hidden.reshape(-1, hidden.shape[-1])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = getattr(module, "bias", None)
        logits = F.linear(
            hidden.to(dtype), module.weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        if self.chosen is None:
            self._choose(logits)
            if self.keep is not None:
                with torch.no_grad():
                    self.kept = hidden[self.keep], logits[self.keep]
        chosen = _require(self.chosen)
        return logits, self.spec.weights(logits, chosen).to(hidden.dtype), chosen

    def _choose(self, logits: Tensor) -> None:
        correction = getattr(self.module, "e_score_correction_bias", None)
        if self.compare or self.recorded is None:
            self.own = self.spec.select(logits, correction)
        if self.recorded is None:
            self.chosen = chosen = _require(self.own)
        else:
            rows, placeholders = self.recorded
            self.chosen = chosen = rows.to(torch.int64, copy=True)
            if placeholders is not None and len(placeholders):
                # Activation checkpointing runs without this part, so nothing may be saved here.
                free = logits.detach()[placeholders]
                chosen[placeholders] = self.spec.select(free, correction)
        if self.watch is not False:
            watched = chosen if isinstance(self.watch, bool) else self.watch.long()
            with torch.no_grad():
                self.log_probs = log_router_probs(self.spec, logits, watched)


class Routing:
    """The routers of a transformers model, in network order."""

    def __init__(self, model: nn.Module) -> None:
        """Replaces the routers' ``forward`` in ``model``.

        Raises :class:`UnknownRouterError` if the model has no router of a known family.
        """
        self._routers: list[_Router] = []
        for name, module in model.named_modules():
            spec = spec_of(module)
            if spec is not None:
                router = _Router(module, spec, _layer_number(name))
                module.forward = router
                # The experts are another part of the router's parent.
                experts: Any = model.get_submodule(f"{name.rpartition('.')[0]}.experts")
                experts.replayed_router = router
                self._routers.append(router)
        self._routers.sort(key=lambda router: router.layer)
        specs = {router.spec for router in self._routers}
        if len(specs) != 1:
            kind = type(model).__name__
            found = f"routers of {len(specs)} different kinds" if specs else "no supported router"
            names = ", ".join(name.removesuffix("Router") for name in FAMILIES)
            raise UnknownRouterError(f"{kind} has {found}; replay supports one of {names}")
        (self.spec,) = specs
        #: Global numbers of the MoE layers, ascending.
        self.layers = tuple(router.layer for router in self._routers)

    @contextmanager
    def micro_batch(
        self,
        rows: Tensor | None = None,
        placeholders: Tensor | None = None,
        watch: Tensor | bool = False,
        keep: Tensor | None = None,
        compare: bool = False,
    ) -> Iterator[None]:
        """Context for the forward and backward passes of one micro-batch of ``T`` tokens.

        ``rows`` ``[T, L, K]`` are recorded experts, in any integer dtype. They are executed, except
        in the rows ``placeholders`` int64 ``[P]``, where the routers choose, as they do for all
        tokens if ``rows`` is ``None``.

        ``watch`` records log-probs of the routers for :meth:`watched`: those of the executed
        experts if ``True``, or those of the experts in a tensor ``[T, L, K]``.

        ``keep`` int64 ``[R]`` are rows whose router inputs and logits are recorded for
        :meth:`kept`.

        ``compare`` has the routers choose for every token even if recorded experts are executed,
        for :meth:`own`.
        """
        for place, router in enumerate(self._routers):
            router.start(
                None if rows is None else (rows[:, place], placeholders),
                watch if isinstance(watch, bool) else watch[:, place],
                keep,
                compare,
            )
        try:
            yield
        finally:
            for router in self._routers:
                router.start()

    def executed(self) -> Tensor:
        """Experts executed in this micro-batch, ``[T, L, K]``: uint8 if the model has at most 256
        experts, else int16."""
        dtype = torch.uint8 if self.spec.experts <= 256 else torch.int16
        chosen = [_require(router.chosen).to(dtype) for router in self._routers]
        return torch.stack(chosen, dim=1)

    def own(self) -> Tensor:
        """The routers' own choice in this micro-batch, executed or not, int16 ``[T, L, K]``.

        It is known if ``compare`` was set, or if nothing is replayed.
        """
        own = [_require(router.own).to(torch.int16) for router in self._routers]
        return torch.stack(own, dim=1)

    def watched(self) -> Tensor:
        """Log-probs of the watched experts in the routers' full distributions, ``[T, L, K]``."""
        return torch.stack([_require(router.log_probs) for router in self._routers], dim=1)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Router inputs ``[R, L, d]`` and logits ``[R, L, E]`` of the kept rows."""
        inputs, logits = zip(*(_require(router.kept) for router in self._routers), strict=True)
        return torch.stack(inputs, dim=1), torch.stack(logits, dim=1)

    def parameters(self) -> list[nn.Parameter]:
        """The routers' parameters."""
        return [p for router in self._routers for p in router.module.parameters()]


def _require(value: T | None) -> T:
    """State of the current micro-batch, which its first forward sets if it was asked for."""
    if value is None:
        raise RuntimeError("no forward pass has run in this micro-batch, or it did not record this")
    return value


def _layer_number(name: str) -> int:
    """Number of the layer in a module's name."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    if found is None:
        raise UnknownRouterError(f"router `{name}` is not inside a numbered layer")
    return int(found.group(1))
