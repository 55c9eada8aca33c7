"""A layer of SwiGLU experts that executes recorded experts in place of the router's choice.

R3, arXiv 2510.11370: eq (4) to (7) for the router's own choice, (8) and (9) for a replayed one.
With gates g over the chosen set C of a token x, ``y = sum_C g_e E_e(x)`` and
``E_e(x) = W_down (silu(W_gate x) * (W_up x))``. The chosen set is a constant, so an expert outside
it has no gradient; with renormalised gates its row of the router has none either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from basics import Array, sigmoid
from routers import Router


@dataclass(frozen=True)
class Layer:
    """Weights: ``router [E, d]``, ``gate`` and ``up [E, f, d]``, ``down [E, d, f]``."""

    router: Array
    gate: Array
    up: Array
    down: Array


def forward(spec: Router, layer: Layer, x: Array, recorded: list[list[int]] | None = None):
    """Outputs ``[T, d]``, router logits ``[T, E]`` and executed experts of inputs ``[T, d]``."""
    logits = x @ layer.router.T
    chosen = [spec.select(row) for row in logits] if recorded is None else recorded
    y = np.zeros_like(x)
    for t, experts in enumerate(chosen):
        gates = spec.gates(logits[t], experts)
        for weight, e in zip(gates, experts):
            y[t] += weight * _expert(layer, e, x[t])[0]
    return y, logits, chosen


def backward(
    spec: Router, layer: Layer, x: Array, chosen: list[list[int]], upstream: Array
) -> dict[str, Array]:
    """Gradients of ``sum(y * upstream)`` with respect to the inputs and all weights."""
    found = {name: np.zeros_like(getattr(layer, name)) for name in ("router", "gate", "up", "down")}
    found["x"] = np.zeros_like(x)
    logits = x @ layer.router.T
    for t, experts in enumerate(chosen):
        gates = spec.gates(logits[t], experts)
        by_gate = np.zeros(len(experts))
        for k, (weight, e) in enumerate(zip(gates, experts)):
            out, (a, b, hidden) = _expert(layer, e, x[t])
            by_gate[k] = upstream[t] @ out
            # y = W_down h, h = silu(a) b, a = W_gate x, b = W_up x.
            by_out = weight * upstream[t]
            by_hidden = layer.down[e].T @ by_out
            s = sigmoid(a)
            by_a = by_hidden * b * s * (1 + a * (1 - s))
            by_b = by_hidden * a * s
            found["down"][e] += np.outer(by_out, hidden)
            found["gate"][e] += np.outer(by_a, x[t])
            found["up"][e] += np.outer(by_b, x[t])
            found["x"][t] += layer.gate[e].T @ by_a + layer.up[e].T @ by_b
        by_logits = spec.backward(logits[t], experts, by_gate)
        found["router"] += np.outer(by_logits, x[t])
        found["x"][t] += layer.router.T @ by_logits
    return found


def _expert(layer: Layer, e: int, x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    a, b = layer.gate[e] @ x, layer.up[e] @ x
    hidden = a * sigmoid(a) * b
    return layer.down[e] @ hidden, (a, b, hidden)
