"""Router families: how the logits of a token choose K experts, and how these are weighted.

| family | score | chosen by | weight of expert i in the chosen set C | models |
|---|---|---|---|---|
| ``softmax_renormalised`` | p = softmax(s) | p | p_i / sum_C p | Qwen3-MoE, Mixtral |
| ``logits_then_softmax`` | s | s | softmax over the chosen logits | gpt-oss |
| ``softmax`` | p | p | scale p_i | OLMoE, Qwen2-MoE, DeepSeek-V2 (greedy) |
| ``softmax_grouped`` | p | p within the best groups | scale p_i | DeepSeek-V2 |
| ``sigmoid_bias`` | a = sigmoid(s) | a + b within the best groups | scale a_i / sum_C a | DeepSeek-V3, GLM-4.5 |
| ``sigmoid_bias_plain`` | a | a + b within the best groups | scale a_i | the same without ``norm_topk_prob`` |

DeepSeek-V2, arXiv 2405.04434, section 2.2.2, ranks a group by its best expert; DeepSeek-V3, arXiv
2412.19437, eq (12) to (16), by the sum of its two best, and its bias affects the choice only. Ties
go to the lower expert id, in every engine and trainer of this project.

Routing replay (R3, arXiv 2510.11370, eq (8)) replaces only the choice by recorded experts: weights
still come from the trainer's own logits, and the gradient reaches exactly the logits that the
family's weights depend on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from basics import Array, sigmoid, softmax

FAMILIES = (
    "softmax_renormalised",
    "logits_then_softmax",
    "softmax",
    "softmax_grouped",
    "sigmoid_bias",
    "sigmoid_bias_plain",
)
#: Keeps a sum of sigmoids from dividing by zero, as in the published code of DeepSeek-V3.
SUM_FLOOR = 1e-20


@dataclass(frozen=True)
class Router:
    """A family with its constants; ``bias`` is ``[E]``."""

    family: str
    top_k: int
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    bias: tuple[float, ...] = ()

    def select(self, logits: Array) -> list[int]:
        """Experts that the router itself chooses for one token, best first."""
        if self.family.startswith("sigmoid"):
            keys, best = sigmoid(logits) + np.array(self.bias), 2
        elif self.family == "logits_then_softmax":
            keys, best = logits, 1
        else:
            keys, best = softmax(logits), 1
        if self.groups > 1:
            grouped = keys.reshape(self.groups, -1)
            score = np.sort(grouped, axis=1)[:, -best:].sum(axis=1)
            kept = _largest(score, self.kept_groups)
            outside = [g for g in range(self.groups) if g not in kept]
            grouped = grouped.copy()
            grouped[outside] = -np.inf
            keys = grouped.reshape(-1)
        return _largest(keys, self.top_k)

    def gates(self, logits: Array, chosen: list[int]) -> Array:
        """Weights ``[K]`` of the experts ``chosen``."""
        if self.family in ("softmax_renormalised", "logits_then_softmax"):
            return self.scale * softmax(logits[chosen])
        if self.family in ("softmax", "softmax_grouped"):
            return self.scale * softmax(logits)[chosen]
        scores = sigmoid(logits[chosen])
        if self.family == "sigmoid_bias":
            scores = scores / (scores.sum() + SUM_FLOOR)
        return self.scale * scores

    def backward(self, logits: Array, chosen: list[int], upstream: Array) -> Array:
        """``dL/dlogits`` ``[E]`` from ``dL/dgates`` ``[K]``; the choice is a constant.

        With S the Jacobian ``diag(p) - p p^T`` of a softmax: the renormalised families have S over
        the chosen logits only, the others S over all logits. Sigmoid scores have
        ``da/ds = a (1 - a)``, followed by the quotient rule where they are renormalised.
        """
        gradient = np.zeros_like(logits)
        if self.family in ("softmax_renormalised", "logits_then_softmax"):
            p = softmax(logits[chosen])
            gradient[chosen] = self.scale * (np.diag(p) - np.outer(p, p)) @ upstream
        elif self.family in ("softmax", "softmax_grouped"):
            p = softmax(logits)
            spread = np.zeros_like(logits)
            spread[chosen] = upstream
            gradient = self.scale * (np.diag(p) - np.outer(p, p)) @ spread
        else:
            a = sigmoid(logits[chosen])
            by_score = upstream
            if self.family == "sigmoid_bias":
                total = a.sum() + SUM_FLOOR
                by_score = upstream / total - (upstream @ a) / total**2
            gradient[chosen] = self.scale * by_score * a * (1 - a)
        return gradient

    def distribution(self, logits: Array) -> Array:
        """The router's probabilities of all experts, for the router shift: the softmax, or sigmoid
        scores over their sum."""
        if self.family.startswith("sigmoid"):
            scores = sigmoid(logits)
            return scores / scores.sum(axis=-1, keepdims=True)
        return softmax(logits)


def _largest(keys: Array, count: int) -> list[int]:
    order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
    return order[:count]
