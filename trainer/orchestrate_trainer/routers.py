"""Router families: how scores choose experts, and how the chosen ones are weighted.

Replay needs the two apart: it skips :meth:`RouterSpec.select` and weights the recorded experts by
:meth:`RouterSpec.weights` with the trainer's own logits. Gradients therefore reach the logits that
the family's weights depend on, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FAMILIES", "RouterSpec", "UnknownRouter", "log_router_probs", "spec_of"]

Kind = Literal["softmax", "softmax_of_chosen", "sigmoid"]


class UnknownRouter(ValueError):
    """A model without a router that this package can replay."""


@dataclass(frozen=True)
class RouterSpec:
    """One router: ``experts`` scores per token, ``top_k`` of them chosen.

    A softmax over all experts that is renormalised over the chosen is the softmax of the chosen
    logits; computed so, logits of other experts get a gradient of exactly 0.
    """

    kind: Kind
    experts: int
    top_k: int
    #: Factor on the weights.
    scale: float = 1.0
    #: Sigmoid routers: whether the chosen scores are divided by their sum.
    renormalise: bool = True
    #: Choice is limited to the best ``kept_groups`` of ``groups`` equal groups of experts.
    groups: int = 1
    kept_groups: int = 1

    def select(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """Experts that the router itself chooses, int64 ``[T, K]``, best first; the lower id wins
        a tie. ``logits`` is ``[T, E]``, ``bias`` ``[E]`` is added to sigmoid scores and affects
        nothing but this choice."""
        with torch.no_grad():
            key = self._keys(logits, bias)
            if self.groups > 1:
                grouped = key.unflatten(-1, (self.groups, -1))
                # The bias makes sigmoid routers rank a group by two experts, not one.
                best = 2 if self.kind == "sigmoid" else 1
                score = grouped.topk(best, dim=-1).values.sum(-1)
                kept = torch.zeros_like(score, dtype=torch.bool)
                kept.scatter_(-1, _first(score, self.kept_groups), True)
                key = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
            return _first(key, self.top_k)

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Weights ``[T, K]`` of the experts ``chosen`` ``[T, K]``, at least float32."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "softmax_of_chosen":
            return F.softmax(logits.gather(-1, chosen), dim=-1) * self.scale
        if self.kind == "sigmoid":
            weights = logits.sigmoid().gather(-1, chosen)
            if self.renormalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights * self.scale
        return F.softmax(logits, dim=-1).gather(-1, chosen) * self.scale

    def _keys(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "softmax_of_chosen":
            return logits
        if self.kind == "sigmoid":
            scores = logits.sigmoid()
            return scores if bias is None else scores + bias
        return F.softmax(logits, dim=-1)


def log_router_probs(spec: RouterSpec, logits: Tensor, chosen: Tensor) -> Tensor:
    """Log of the full router distribution at ``chosen``, ``[T, K]``: softmax over all experts, or
    a sigmoid router's scores over their sum; probabilities are clamped at 1e-8."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if spec.kind == "sigmoid":
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    else:
        probabilities = F.softmax(logits, dim=-1)
    return probabilities.gather(-1, chosen).clamp(min=1e-8).log()


def _first(key: Tensor, count: int) -> Tensor:
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _softmax(router: nn.Module) -> dict[str, Any]:
    return {"kind": "softmax_of_chosen" if router.norm_topk_prob else "softmax"}


def _deepseek_v2(router: nn.Module) -> dict[str, Any]:
    groups = {"groups": router.num_group, "kept_groups": router.topk_group}
    limited = router.topk_method == "group_limited_greedy"
    fields: dict[str, Any] = {"kind": "softmax", "scale": router.routed_scaling_factor}
    return fields | (groups if limited else {})


def _sigmoid(router: nn.Module) -> dict[str, Any]:
    return {
        "kind": "sigmoid",
        "scale": router.routed_scaling_factor,
        "renormalise": router.norm_topk_prob,
        "groups": router.num_group,
        "kept_groups": router.topk_group,
    }


#: Router classes of transformers, by name, and what distinguishes them.
FAMILIES = {
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": lambda _: {"kind": "softmax_of_chosen"},
    "GptOssTopKRouter": lambda _: {"kind": "softmax_of_chosen"},
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


def spec_of(router: nn.Module) -> RouterSpec | None:
    """The family of a module of transformers; ``None`` where it is no router known here."""
    family = FAMILIES.get(type(router).__name__)
    if family is None:
        return None
    return RouterSpec(experts=router.num_experts, top_k=router.top_k, **family(router))
