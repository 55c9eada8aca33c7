"""Mismatch between inference engine and trainer, in probabilities and in routes.

R3, arXiv 2510.11370, with ``rho = pi_train / pi_engine`` over the response tokens:

    eq (2)  k3 = mean(rho - 1 - log rho)
    eq (3)  F(tau) = mean 1[max(rho, 1/rho) > tau]

These are measurements, not terms of a loss, so they are not bounded. Route disagreement (section
3.2) counts, per token and layer, the engine's experts that the trainer did not choose.
"""

from __future__ import annotations

import numpy as np

from basics import Array

TAUS = {"1.05": 1.05, "1.2": 1.2, "1.5": 1.5, "2": 2.0, "5": 5.0, "10": 10.0}
#: Bin edges of the histograms, in half decades from 1e-7 to 10.
EDGES = [10.0 ** (n / 2) for n in range(-14, 3)]
#: Largest number of points in a curve of expert use.
CURVE_POINTS = 16


def mismatch(train: list[Array], engine: list[Array]) -> dict:
    """Mismatch over the loss tokens of sequences; log-probs are ``[n]`` per sequence."""
    log_rho = np.concatenate(train) - np.concatenate(engine)
    rho = np.exp(log_rho)
    size = np.abs(log_rho)
    per_sequence = [np.abs(t - e).mean() for t, e in zip(train, engine) if len(t)]
    pairs: dict[tuple[int, int], int] = {}
    for p_engine, p_train in zip(np.concatenate(engine), np.concatenate(train)):
        key = (_bin(p_engine), _bin(p_train))
        pairs[key] = pairs.get(key, 0) + 1
    return {
        "kl_k3": float(np.mean(rho - 1 - log_rho)),
        "mean_abs_logprob_diff": float(size.mean()),
        "mean_abs_prob_diff": float(
            np.abs(np.exp(np.concatenate(train)) - np.exp(np.concatenate(engine))).mean()
        ),
        "extreme_token_fraction": {
            name: float((size > np.log(tau)).mean()) for name, tau in TAUS.items()
        },
        "token_histogram": half_decades(size),
        "sequence_histogram": half_decades(np.array(per_sequence)),
        "probability_grid": [[*pair, count] for pair, count in sorted(pairs.items())],
    }


def rollout_ratio(log_rho: Array) -> dict[str, float]:
    """Moments of rho, and the effective sample fraction ``1 / mean((rho / mean rho)^2)``."""
    rho = np.exp(log_rho)
    return {
        "mean": float(rho.mean()),
        "max": float(rho.max()),
        "effective_share": float(1 / np.mean((rho / rho.mean()) ** 2)),
    }


def disagreement(engine: list[Array], train: list[Array], top_k: int) -> dict:
    """Route disagreement of rows ``[T, L, K]`` per sequence; the order within K does not matter."""
    differing = [
        np.array(
            [
                [len(set(e.tolist()) - set(t.tolist())) for e, t in zip(*rows)]
                for rows in zip(one, other)
            ]
        )
        for one, other in zip(engine, train)
    ]
    all_rows = np.concatenate(differing)
    routers = (all_rows > 0).sum(axis=1)
    layers = all_rows.shape[1]
    return {
        "router": float((all_rows > 0).mean()),
        "token": float((routers > 0).mean()),
        "sequence_mean": float(np.mean([(d > 0).sum(axis=1).mean() for d in differing])),
        "sequence_mean_experts": float(np.mean([d.sum(axis=1).mean() for d in differing])),
        "histogram": [float((all_rows == n).mean()) for n in range(top_k + 1)],
        "by_layer": (all_rows > 0).mean(axis=0).tolist(),
        "token_histogram": [float((routers == n).mean()) for n in range(layers + 1)],
        "sequence_histogram": half_decades(np.array([(d > 0).mean() for d in differing])),
    }


def expert_load(executed: Array, experts: int) -> dict[str, list]:
    """Per layer, from executed experts ``[T, L, K]``: the entropy of the shares over ``log E``, and
    the use of the experts from the busiest to the idlest, 1 = even: the means of at most 16 groups
    of equal size, rounded to three decimals."""
    entropies, curves = [], []
    for layer in range(executed.shape[1]):
        counts = np.bincount(executed[:, layer].ravel(), minlength=experts).astype(float)
        shares = counts[counts > 0] / counts.sum()
        entropies.append(float(-(shares * np.log(shares)).sum() / np.log(experts)))
        ordered = np.sort(counts)[::-1] / (counts.sum() / experts)
        size = -(-experts // CURVE_POINTS)
        groups = [ordered[at : at + size].mean() for at in range(0, experts, size)]
        curves.append([float(np.floor(group * 1e3 + 0.5) / 1e3) for group in groups])
    return {"entropy": entropies, "curve": curves}


def half_decades(values: Array) -> list[int]:
    """18 counts, from below 1e-7 to 10 and above."""
    counts = [0] * (len(EDGES) + 1)
    for value in values:
        counts[sum(edge <= value for edge in EDGES)] += 1
    return counts


def _bin(logp: float) -> int:
    """Bin of a log-prob: bin b of 32 has ``-log p`` from ``(b / 8)^2`` to ``((b + 1) / 8)^2``."""
    return min(int(8 * np.sqrt(-logp)), 31)
