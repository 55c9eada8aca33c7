"""Router families: how scores choose experts, and how the chosen experts are weighted.

The two are separate functions because replay needs only the second: it skips
:meth:`RouterSpec.select` and weights the recorded experts by :meth:`RouterSpec.weights`, using the
trainer's own logits. Gradients therefore reach exactly the logits that the family's weights depend
on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FAMILIES", "RouterSpec", "UnknownRouterError", "log_router_probs", "spec_of"]

Kind = Literal["softmax", "softmax_of_chosen", "sigmoid"]


class UnknownRouterError(ValueError):
    """A model whose routers this package cannot replay."""


@dataclass(frozen=True)
class RouterSpec:
    """How a router turns the scores of ``experts`` experts into ``top_k`` chosen ones.

    ``softmax_of_chosen`` is a softmax over all experts that is renormalised over the chosen ones.
    Computing it as the softmax of the chosen logits gives the logits of all other experts a
    gradient of exactly 0.
    """

    kind: Kind
    experts: int
    top_k: int
    #: Factor on the weights.
    scale: float = 1.0
    #: Sigmoid routers: whether the chosen scores are divided by their sum.
    renormalise: bool = True
    #: The choice is limited to the best ``kept_groups`` of ``groups`` groups of equal size.
    groups: int = 1
    #: See ``groups``.
    kept_groups: int = 1

    def select(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """The router's own choice of experts, int64 ``[T, K]``, best first.

        The lower id wins a tie. ``logits`` is ``[T, E]``; ``bias`` ``[E]`` is added to sigmoid
        scores and affects only this choice, not the weights.
        """
        with torch.no_grad():
            key = self._keys(logits, bias)
            if self.groups > 1:
                grouped = key.unflatten(-1, (self.groups, -1))
                # Sigmoid routers rank a group by the sum of its two best experts, others by one.
                best = 2 if self.kind == "sigmoid" else 1
                score = grouped.topk(best, dim=-1).values.sum(-1)
                kept = torch.zeros_like(score, dtype=torch.bool)
                kept.scatter_(-1, _top(score, self.kept_groups), True)
                key = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
            return _top(key, self.top_k)

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Weights ``[T, K]`` of the experts ``chosen`` ``[T, K]``, in float32 or wider."""
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
    """Log-probs of the experts ``chosen`` ``[T, K]`` in the router's full distribution.

    The distribution is the softmax over all experts, or a sigmoid router's scores divided by their
    sum. Probabilities are clamped to at least 1e-8.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if spec.kind == "sigmoid":
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    else:
        probabilities = F.softmax(logits, dim=-1)
    return probabilities.gather(-1, chosen).clamp(min=1e-8).log()


def _top(key: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of finite or infinite values, int64; the lower index wins a
    tie.

    ``topk`` leaves ties open. For float32, value and index are therefore combined to one integer:
    the bits of a float in the order of its values, and below them the index, counted from the end.
    """
    if key.dtype != torch.float32:
        return key.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    # Adding 0 turns -0 into 0. The bits of negative values are in reverse order.
    bits = (key + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    width = key.shape[-1]
    from_end = torch.arange(width - 1, -1, -1, device=key.device)
    return (bits * width + from_end).topk(count, dim=-1).indices


def _softmax(router: Any) -> dict[str, Any]:
    return {"kind": "softmax_of_chosen" if router.norm_topk_prob else "softmax"}


def _deepseek_v2(router: Any) -> dict[str, Any]:
    groups = {"groups": router.num_group, "kept_groups": router.topk_group}
    limited = router.topk_method == "group_limited_greedy"
    fields: dict[str, Any] = {"kind": "softmax", "scale": router.routed_scaling_factor}
    return fields | (groups if limited else {})


def _sigmoid(router: Any) -> dict[str, Any]:
    return {
        "kind": "sigmoid",
        "scale": router.routed_scaling_factor,
        "renormalise": router.norm_topk_prob,
        "groups": router.num_group,
        "kept_groups": router.topk_group,
    }


#: Router classes of transformers by name, each with a function that reads the fields of its
#: :class:`RouterSpec` from a module.
FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": lambda _: {"kind": "softmax_of_chosen"},
    "GptOssTopKRouter": lambda _: {"kind": "softmax_of_chosen"},
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


def spec_of(module: nn.Module) -> RouterSpec | None:
    """The spec of a transformers module, or ``None`` if it is not a known router."""
    family = FAMILIES.get(type(module).__name__)
    if family is None:
        return None
    router: Any = module
    return RouterSpec(experts=router.num_experts, top_k=router.top_k, **family(router))
