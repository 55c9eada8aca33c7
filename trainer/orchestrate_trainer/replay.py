"""Routing replay: every router of a model runs recorded experts instead of its own choice.

The hook replaces ``forward`` of the router modules and nothing else; experts, attention and layers
are the code of transformers. Routers always compute in float32 at least.

The choice of a micro-batch is made in its first forward and kept until the next micro-batch
begins, so the forward that activation checkpointing runs again inside backward uses the same
experts whatever its rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .routers import FAMILIES, RouterSpec, UnknownRouter, log_router_probs, spec_of

__all__ = ["Routing"]


class _Router:
    """Stands in for one router's ``forward``."""

    def __init__(self, module: nn.Module, spec: RouterSpec, layer: int) -> None:
        self.module = module
        self.spec = spec
        self.layer = layer
        self.begin()

    def begin(
        self,
        recorded: tuple[Tensor, Tensor] | None = None,
        watch: Tensor | bool = False,
        keep: Tensor | None = None,
    ) -> None:
        self.recorded, self.watch, self.keep = recorded, watch, keep
        self.kept: tuple[Tensor, Tensor] | None = None
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None
        self.log_probs: Tensor | None = None

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
        return logits, self.spec.weights(logits, self.chosen), self.chosen

    def _choose(self, logits: Tensor) -> None:
        correction = getattr(self.module, "e_score_correction_bias", None)
        self.own = own = self.spec.select(logits, correction)
        if self.recorded is None:
            self.chosen = own
        else:
            rows, valid = self.recorded
            self.chosen = torch.where(valid.unsqueeze(-1), rows.to(own), own)
        if self.watch is not False:
            watched = self.chosen if self.watch is True else self.watch.to(own)
            with torch.no_grad():
                self.log_probs = log_router_probs(self.spec, logits, watched)


class Routing:
    """The routers of a model of transformers, in network order. Constructing it installs the hook.

    Raises :class:`UnknownRouter` for a model whose routers are of no family known here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = []
        for name, module in model.named_modules():
            spec = spec_of(module)
            if spec is not None:
                router = _Router(module, spec, _layer_number(name))
                module.forward = router
                self._routers.append(router)
        self._routers.sort(key=lambda router: router.layer)
        specs = {router.spec for router in self._routers}
        if len(specs) != 1:
            kind = type(model).__name__
            found = f"routers of {len(specs)} kinds" if specs else "no router known here"
            names = ", ".join(name.removesuffix("Router") for name in FAMILIES)
            raise UnknownRouter(f"{kind} has {found}; replay knows models with one of {names}")
        (self.spec,) = specs
        #: Global numbers of the MoE layers, ascending.
        self.layers = tuple(router.layer for router in self._routers)

    @contextmanager
    def micro_batch(
        self,
        rows: Tensor | None = None,
        valid: Tensor | None = None,
        watch: Tensor | bool = False,
        keep: Tensor | None = None,
    ) -> Iterator[None]:
        """Forward and backward passes of one micro-batch of ``T`` tokens.

        ``rows`` ``[T, L, K]`` are recorded experts, used where ``valid`` bool ``[T]`` is set;
        elsewhere, and everywhere without rows, the routers choose. ``watch`` also keeps the
        routers' log-probs: ``True`` those of the experts that run, ``[T, L, K]`` those of these.
        ``keep`` int64 ``[R]`` are rows whose inputs and logits are kept.
        """
        for place, router in enumerate(self._routers):
            router.begin(
                None if rows is None else (rows[:, place], valid),
                watch if isinstance(watch, bool) else watch[:, place],
                keep,
            )
        try:
            yield
        finally:
            for router in self._routers:
                router.begin()

    def executed(self) -> Tensor:
        """Experts of this micro-batch's first forward, int16 ``[T, L, K]``."""
        return torch.stack([router.chosen.to(torch.int16) for router in self._routers], dim=1)

    def own(self) -> Tensor:
        """Experts that the routers themselves would have chosen in it, int16 ``[T, L, K]``."""
        return torch.stack([router.own.to(torch.int16) for router in self._routers], dim=1)

    def watched(self) -> Tensor:
        """Log-probs of the watched experts in the routers' full distributions, ``[T, L, K]``."""
        return torch.stack([router.log_probs for router in self._routers], dim=1)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Inputs ``[R, L, d]`` and logits ``[R, L, E]`` of the rows that are kept."""
        inputs, logits = zip(*(router.kept for router in self._routers))
        return torch.stack(inputs, dim=1), torch.stack(logits, dim=1)

    def parameters(self) -> list[nn.Parameter]:
        """The routers' own weights."""
        return [p for router in self._routers for p in router.module.parameters()]


def _layer_number(name: str) -> int:
    found = re.search(r"\blayers\.(\d+)\.", name)
    if found is None:
        raise UnknownRouter(f"router `{name}` is in no numbered layer")
    return int(found.group(1))
