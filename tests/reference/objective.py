"""The loss of an optimizer step: policy loss, correction, off-policy mask and divergence.

    L = sum_i sum_t f_i (w_it m_i l_it + beta KL_it)

with the factor f of aggregation.py, the weight w and the mask m of corrections.py, the term l of
policy_losses.py and the estimate KL of divergence.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import aggregation
import corrections
import divergence
import policy_losses
from basics import Array, bounded_exp
from policy_losses import Tokens


@dataclass(frozen=True)
class Batch:
    """Sequences of T tokens, ``[S, T]`` each. ``advantage`` is ``[S]``; losses with a value head use
    ``token_advantage`` instead."""

    new: Array
    old: Array
    sampler: Array
    reference: Array
    gamma: Array
    mask: Array
    advantage: Array
    token_advantage: Array


@dataclass(frozen=True)
class Result:
    """Loss of a step, its gradient with respect to ``new``, ``[S, T]``, and its diagnostics."""

    loss: float
    gradient: Array
    weights: Array
    diagnostics: dict[str, float]


def evaluate(settings: dict[str, Any], batch: Batch, held: Array | None = None) -> Result:
    """The step's loss. ``held`` is ``new`` where it is under stop-gradient."""
    held = batch.new if held is None else held
    counts = [int(row.sum()) for row in batch.mask]
    floor = settings["router_shift_floor"]
    loss, gradient, every_weight = 0.0, np.zeros_like(batch.new), np.zeros_like(batch.new)
    low = high = corrected = floored = 0
    ratios, gammas = [], []
    for i, live in enumerate(batch.mask):
        per_token = settings["policy_loss"] == "ppo"
        tokens = Tokens(
            new=batch.new[i, live],
            old=batch.old[i, live],
            sampler=batch.sampler[i, live],
            advantage=(
                batch.token_advantage[i, live]
                if per_token
                else np.full(counts[i], batch.advantage[i])
            ),
            gamma=np.maximum(batch.gamma[i, live], floor),
        )
        terms = policy_losses.terms(settings, tokens, held[i, live])
        weight, changed = corrections.weights(
            settings["importance_correction"],
            settings["importance_level"],
            settings["importance_low"],
            settings["importance_high"],
            tokens.old - tokens.sampler,
        )
        left_out = corrections.is_off_policy(
            settings["off_policy_delta"], batch.advantage[i], held[i, live], tokens.old
        )
        keep = 0.0 if left_out else 1.0
        value, slope = weight * keep * terms.loss, weight * keep * terms.slope
        # k1 is subtracted from the rewards (values.py) and is not part of the loss.
        if settings["kl_coefficient"] > 0 and settings["kl_estimator"] != "k1":
            log_ratio = tokens.new - tokens.old if settings["kl_unbiased"] else None
            kl, kl_slope = divergence.penalty(
                settings["kl_estimator"], tokens.new, batch.reference[i, live], log_ratio
            )
            value = value + settings["kl_coefficient"] * kl
            slope = slope + settings["kl_coefficient"] * kl_slope
        factor = aggregation.factor(
            settings["aggregation"], counts, i, settings["loss_norm_tokens"]
        )
        loss += factor * value.sum()
        gradient[i, live] = factor * slope
        every_weight[i, live] = weight
        low, high = low + int(terms.low.sum()), high + int(terms.high.sum())
        corrected += int(changed.sum())
        floored += int((batch.gamma[i, live] < floor).sum())
        ratios.extend(bounded_exp(tokens.new - tokens.old))
        gammas.extend(tokens.gamma)
    n = sum(counts)
    return Result(
        float(loss),
        gradient,
        every_weight,
        {
            "clipped_low": low / n,
            "clipped_high": high / n,
            "ratio_mean": float(np.mean(ratios)),
            "ratio_max": float(np.max(ratios)),
            "weight_mean": float(every_weight[batch.mask].mean()),
            "corrected": corrected / n,
            "gamma_mean": float(np.mean(gammas)),
            "gamma_floored": floored / n,
        },
    )


def moved(batch: Batch, new: Array) -> Batch:
    """The batch with the log-probs of another policy."""
    return replace(batch, new=new)
