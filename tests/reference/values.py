"""PPO with a value model: advantages, returns and the clipped value loss.

GAE, Schulman et al. 2016, arXiv 1506.02438, eq (16), over the loss tokens of a sequence. Tokens of
tools and prompts between them are skipped, so the discount counts only loss tokens:

    delta_t = R_t + g V_{t+} - V_t,   A_t = delta_t + g lambda A_{t+},   V_return = A + V

with t+ the next loss token and V = A = 0 after the last. Advantages are whitened over all loss
tokens of the batch: mean 0, unbiased variance 1, with 1e-8 added to the variance. The value loss is
that of PPO's published code, ``1/2 max((V - R)^2, (clip(V, V_old ± c) - R)^2)``.
"""

from __future__ import annotations

import numpy as np

from basics import Array


def estimates(
    rewards: Array, values: Array, mask: Array, discount: float, decay: float
) -> tuple[Array, Array]:
    """Advantages and returns of one sequence ``[T]``; 0 where the mask is 0."""
    live = np.flatnonzero(mask)
    v, r = values[live], rewards[live]
    after = np.append(v[1:], 0.0)
    delta = r + discount * after - v
    # The sum of eq (16), term by term.
    n = len(live)
    advantage = np.array(
        [sum((discount * decay) ** (j - i) * delta[j] for j in range(i, n)) for i in range(n)]
    )
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantages[live], returns[live] = advantage, advantage + v
    return advantages, returns


def whiten(advantages: Array) -> Array:
    """Advantages ``[n]`` of all loss tokens of a batch, shifted and scaled."""
    return (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)


def value_loss(value: Array, old: Array, returns: Array, clip: float) -> tuple[Array, Array]:
    """Loss of each token and its derivative with respect to the value."""
    held = np.clip(value, old - clip, old + clip)
    free, clipped = (value - returns) ** 2, (held - returns) ** 2
    # Where the clipped value has the larger error, it is at the bound and therefore constant.
    slope = np.where(clipped > free, 0.0, value - returns)
    return np.maximum(free, clipped) / 2, slope


def explained_variance(returns: Array, values: Array) -> float:
    """Share of the returns' variance that the values explain."""
    return float(1 - np.var(returns - values) / np.var(returns))
