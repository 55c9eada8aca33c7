"""The optimizer step: gradient clipping, AdamW and the warm-up of the learning rate.

AdamW, Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2, with Adam's moments and bias
correction, Kingma and Ba 2015, arXiv 1412.6980, algorithm 1:

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p (1 - lr decay) - lr (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)

The gradient is scaled to a global L2 norm of at most ``max_norm`` first (Pascanu et al. 2013, with
1e-6 added to the norm, as in PyTorch). The learning rate of step k is ``lr min(1, k / warmup)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from basics import Array


def clipped(gradient: Array, max_norm: float) -> tuple[Array, float]:
    """The clipped gradient, and its norm before clipping."""
    norm = float(np.sqrt((gradient**2).sum()))
    return gradient * min(1.0, max_norm / (norm + 1e-6)), norm


@dataclass
class AdamW:
    """AdamW over parameters ``[n]``, with its state."""

    rate: float
    betas: tuple[float, float]
    eps: float
    decay: float
    warmup: int
    step: int = 0
    first: Array = field(default_factory=lambda: np.zeros(0))
    second: Array = field(default_factory=lambda: np.zeros(0))

    def update(self, parameters: Array, gradient: Array) -> Array:
        """The parameters after one more step."""
        if self.step == 0:
            self.first, self.second = np.zeros_like(parameters), np.zeros_like(parameters)
        self.step += 1
        rate = self.rate * min(1.0, self.step / max(self.warmup, 1))
        b1, b2 = self.betas
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient**2
        m = self.first / (1 - b1**self.step)
        v = self.second / (1 - b2**self.step)
        return parameters * (1 - rate * self.decay) - rate * m / (np.sqrt(v) + self.eps)
