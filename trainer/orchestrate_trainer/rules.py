"""Which hyperparameters make sense, alone and together: the orchestrator's own rules, in its words.

A configuration is checked by the orchestrator before a run; these are for requests of other
programs and versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .settings import Hyperparameters

__all__ = ["Refusal", "refusals"]

#: Field, its value, why it cannot be used and what to write instead.
Refusal = tuple[str, Any, str]

SURROGATES = ("grpo", "ppo")
PER_SEQUENCE = ("gspo", "gmpo", "rspo")
ABOVE_ZERO = "use a number above 0"


def refusals(h: "Hyperparameters") -> list[str]:
    """A sentence for each setting that cannot be used; none if all can."""
    found: Iterator[Refusal] = (
        refusal
        for rule in (_clips, _sums, _shift, _importance, _divergence, _values, _routes, _optimizer)
        for refusal in rule(h)
    )
    return [f"`{field}` = {_text(value)} is not usable: {why}" for field, value, why in found]


def _positive(h: "Hyperparameters", *fields: str) -> Iterator[Refusal]:
    for field in fields:
        value = getattr(h, field)
        if not (math.isfinite(value) and value > 0):
            yield field, value, ABOVE_ZERO


def _not_negative(h: "Hyperparameters", *fields: str) -> Iterator[Refusal]:
    for field in fields:
        value = getattr(h, field)
        if not (math.isfinite(value) and value >= 0):
            yield field, value, "use 0 or a number above"


def _clips(h: "Hyperparameters") -> Iterator[Refusal]:
    loss, low = h.policy_loss, h.clip_low
    if loss in ("grpo", "gspo", "minirl", "ppo") and not 0 < low < 1:
        yield "clip_low", low, "use a number between 0 and 1"
    if loss == "cispo" and not 0 < low <= 1:
        why = "use a number above 0; 1 leaves the ratio without a lower bound"
        yield "clip_low", low, why
    if loss in ("gmpo", "rspo"):
        yield from _positive(h, "clip_low")
    if loss == "sapo":
        if not all(math.isfinite(tau) and tau > 0 for tau in h.sapo_tau):
            yield "sapo_tau", h.sapo_tau, "use two numbers above 0"
    else:
        yield from _positive(h, "clip_high")
    if h.dual_clip is not None:
        if not h.dual_clip > 1:
            yield "dual_clip", h.dual_clip, "use a number above 1, or 0 to turn it off"
        if loss not in SURROGATES:
            why = "it bounds the clipped surrogate of grpo and ppo; leave it out with others"
            yield "dual_clip", h.dual_clip, why


def _sums(h: "Hyperparameters") -> Iterator[Refusal]:
    yield from _positive(h, "loss_norm_tokens")
    if h.policy_loss in PER_SEQUENCE and h.aggregation != "seq-mean-token-mean":
        why = 'gspo, gmpo and rspo are means over sequences: use "seq-mean-token-mean"'
        yield "aggregation", h.aggregation, why


def _shift(h: "Hyperparameters") -> Iterator[Refusal]:
    loss, shift, floor = h.policy_loss, h.router_shift, h.router_shift_floor
    if shift == "none":
        if loss == "rspo":
            why = (
                'rspo is gmpo with router shift: use "before_clip" or "after_clip", or '
                'policy_loss = "gmpo"'
            )
            yield "router_shift", shift, why
        return
    if loss == "gmpo":
        yield "router_shift", shift, 'gmpo with router shift is policy_loss = "rspo"'
    if loss in ("grpo", "gspo", "ppo") and shift == "after_clip":
        why = 'only rspo has a form with the weight after the clip: use "before_clip"'
        yield "router_shift", shift, why
    if loss in ("cispo", "minirl", "sapo"):
        why = 'it is defined for grpo, gspo, ppo and rspo; use "none"'
        yield "router_shift", shift, why
    if not 0 < floor <= 1:
        yield "router_shift_floor", floor, "use a number above 0, at most 1"
        return
    reach = -math.log(floor) if loss == "rspo" else 1 - floor
    if shift == "before_clip" and reach > h.clip_low + 1e-9:
        why = "a weight at the floor alone would pass the lower clip: raise the floor or clip_low"
        yield "router_shift_floor", floor, why


def _importance(h: "Hyperparameters") -> Iterator[Refusal]:
    correction, level = h.importance_correction, h.importance_level
    if correction != "none" or h.policy_loss == "minirl":
        yield from _positive(h, "importance_high")
    if correction in ("icepop", "geometric_mask"):
        yield from _not_negative(h, "importance_low")
        if not h.importance_low < h.importance_high:
            yield "importance_low", h.importance_low, "use a number below importance_high"
    if correction == "none":
        return
    if h.policy_loss == "minirl":
        why = (
            'minirl\'s ratio is already that to the sampler: use "none", and bound it by '
            "importance_high"
        )
        yield "importance_correction", correction, why
    by_sequence = h.policy_loss in ("gmpo", "rspo")
    if correction == "icepop" and level == "sequence":
        why = 'icepop looks at each token: use "token", or the correction "geometric_mask"'
        yield "importance_level", level, why
    elif correction == "geometric_mask" and level == "token":
        why = 'geometric_mask looks at whole sequences: use "sequence"'
        yield "importance_level", level, why
    elif correction == "icepop" and by_sequence:
        why = (
            "icepop looks at each token, gmpo and rspo have one factor per sequence: use tis, mis "
            "or geometric_mask"
        )
        yield "importance_correction", correction, why
    elif level == "token" and by_sequence:
        why = 'gmpo and rspo have one factor per sequence: use "sequence"'
        yield "importance_level", level, why


def _divergence(h: "Hyperparameters") -> Iterator[Refusal]:
    if h.off_policy_delta is not None:
        yield from _positive(h, "off_policy_delta")
        if h.policy_loss == "ppo":
            why = "it needs one advantage per sequence, ppo has one per token: leave it out"
            yield "off_policy_delta", h.off_policy_delta, why
    yield from _not_negative(h, "kl_coefficient")
    if not h.kl_coefficient > 0:
        return
    if h.kl_estimator == "k1" and h.policy_loss != "ppo":
        why = (
            "k1 is taken off the reward of each token, which only ppo has; in a loss its gradient "
            'says nothing: use "k3" or "k2"'
        )
        yield "kl_estimator", h.kl_estimator, why
    if h.kl_unbiased and h.kl_estimator != "k3":
        why = 'the ratio makes the gradient of k3 unbiased; use it with kl_estimator = "k3"'
        yield "kl_unbiased", h.kl_unbiased, why


def _values(h: "Hyperparameters") -> Iterator[Refusal]:
    if h.policy_loss != "ppo":
        return
    for field in ("gae_gamma", "gae_lambda"):
        if not 0 <= getattr(h, field) <= 1:
            yield field, getattr(h, field), "use a number from 0 to 1"
    yield from _positive(h, "value_clip", "value_coefficient", "value_rate")


def _routes(h: "Hyperparameters") -> Iterator[Refusal]:
    if h.routing_replay != "predictive":
        return
    if h.mini_steps < 2:
        why = (
            "the predictor learns from the second mini step on: use at least 2, or "
            'routing_replay = "rollout"'
        )
        yield "mini_steps", h.mini_steps, why
    yield from _positive(h, "predictor_rate")
    if h.predictor_tokens < 1:
        yield "predictor_tokens", h.predictor_tokens, "use at least 1"


def _optimizer(h: "Hyperparameters") -> Iterator[Refusal]:
    if h.mini_steps < 1:
        yield "mini_steps", h.mini_steps, "use at least 1"
    if not all(0 <= beta < 1 for beta in h.betas):
        yield "betas", h.betas, "use two numbers from 0 to below 1"
    yield from _not_negative(h, "weight_decay")
    if h.micro_batch_tokens < 1:
        why = "use at least 1; a longer sequence forms a pass of its own"
        yield "micro_batch_tokens", h.micro_batch_tokens, why
    yield from _not_negative(h, "learning_rate")
    yield from _positive(h, "adam_eps", "max_grad_norm", "temperature")


def _text(value: Any) -> str:
    """A value as the orchestrator writes it: whole numbers without a point, no exponents."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return np.format_float_positional(value, trim="-")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
