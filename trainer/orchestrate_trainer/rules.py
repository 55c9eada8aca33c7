"""Rules that hyperparameters must follow, alone and together.

A run's configuration is checked by the orchestrator; these checks are for requests of other
programs and versions.

Generated from crates/handoff/src/algorithm/declaration.rs. Do not edit: change the declaration, and
run `ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-handoff generated`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .settings import Hyperparameters

__all__ = ["Refusal", "refusals"]

#: Field, its value, and what the value must be.
Refusal = tuple[str, object, str]


def refusals(h: Hyperparameters) -> list[str]:
    """One sentence for each refused hyperparameter; empty if all are accepted."""
    found = (refusal for rule in RULES for refusal in rule(h))
    return [f"`{field}` = {_text(value)}: {remedy}" for field, value, remedy in found]


def _aggregation(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss in ("gspo", "gmpo", "rspo") and h.aggregation != "seq-mean-token-mean":
        yield (
            "aggregation",
            h.aggregation,
            'must be "seq-mean-token-mean": gspo, gmpo and rspo are means over sequences',
        )


def _loss_norm_tokens(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 < h.loss_norm_tokens < math.inf:
        yield "loss_norm_tokens", h.loss_norm_tokens, "must be above 0"


def _router_shift(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "rspo" and h.router_shift == "none":
        remedy = (
            'must be "before_clip" or "after_clip": rspo without router shift is policy_loss = '
            '"gmpo"'
        )
        yield "router_shift", h.router_shift, remedy
    if h.policy_loss == "gmpo" and h.router_shift != "none":
        yield (
            "router_shift",
            h.router_shift,
            'must be "none": gmpo with router shift is policy_loss = "rspo"',
        )
    if h.policy_loss in ("grpo", "gspo", "ppo") and h.router_shift == "after_clip":
        yield (
            "router_shift",
            h.router_shift,
            'must be "before_clip" or "none": only rspo has a form with the weight after the clip',
        )
    if h.policy_loss in ("cispo", "minirl", "sapo") and h.router_shift != "none":
        yield (
            "router_shift",
            h.router_shift,
            'must be "none": it is defined for grpo, gspo, ppo and rspo',
        )


def _router_shift_floor(h: Hyperparameters) -> Iterator[Refusal]:
    if h.router_shift != "none" and not 0 < h.router_shift_floor <= 1:
        yield "router_shift_floor", h.router_shift_floor, "must be above 0 and at most 1"
    if (
        h.policy_loss == "rspo"
        and h.router_shift == "before_clip"
        and 0 < h.router_shift_floor <= 1
        and -math.log(h.router_shift_floor) > h.clip_low + 1e-9
    ):
        remedy = (
            "must be so large, or clip_low so large, that the weight alone does not pass the lower "
            "clip"
        )
        yield "router_shift_floor", h.router_shift_floor, remedy
    if (
        h.policy_loss != "rspo"
        and h.router_shift == "before_clip"
        and 0 < h.router_shift_floor <= 1
        and 1 - h.router_shift_floor > h.clip_low + 1e-9
    ):
        remedy = (
            "must be so large, or clip_low so large, that the weight alone does not pass the lower "
            "clip"
        )
        yield "router_shift_floor", h.router_shift_floor, remedy


def _clip_low(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss in ("grpo", "gspo", "minirl", "ppo") and not 0 < h.clip_low < 1:
        yield "clip_low", h.clip_low, "must be above 0 and below 1"
    if h.policy_loss == "cispo" and not 0 < h.clip_low <= 1:
        yield (
            "clip_low",
            h.clip_low,
            "must be above 0 and at most 1; 1 leaves the ratio without a lower bound",
        )
    if h.policy_loss in ("gmpo", "rspo") and not 0 < h.clip_low < math.inf:
        yield "clip_low", h.clip_low, "must be above 0"


def _clip_high(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss != "sapo" and not 0 < h.clip_high < math.inf:
        yield "clip_high", h.clip_high, "must be above 0"


def _dual_clip(h: Hyperparameters) -> Iterator[Refusal]:
    if h.dual_clip is not None and not 1 < h.dual_clip < math.inf:
        yield "dual_clip", h.dual_clip, "must be above 1; 0 turns it off"
    if h.dual_clip is not None and h.policy_loss not in ("grpo", "ppo"):
        yield (
            "dual_clip",
            h.dual_clip,
            "must be left out: it bounds the clipped surrogate of grpo and ppo",
        )


def _sapo_tau(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "sapo" and not all(0 < part < math.inf for part in h.sapo_tau):
        yield "sapo_tau", h.sapo_tau, "must be above 0"


def _importance_correction(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "minirl" and h.importance_correction != "none":
        remedy = (
            'must be "none": minirl\'s ratio is already that to the sampler, and importance_high '
            "bounds it"
        )
        yield "importance_correction", h.importance_correction, remedy
    if (
        h.policy_loss in ("gmpo", "rspo")
        and h.importance_correction == "icepop"
        and h.importance_level == "token"
    ):
        remedy = (
            'must be "tis", "mis" or "geometric_mask": gmpo and rspo have one factor per sequence, '
            "and icepop looks at each token"
        )
        yield "importance_correction", h.importance_correction, remedy


def _importance_level(h: Hyperparameters) -> Iterator[Refusal]:
    if h.importance_correction == "icepop" and h.importance_level == "sequence":
        remedy = (
            'must be "token": icepop looks at each token; for sequences there is '
            'importance_correction = "geometric_mask"'
        )
        yield "importance_level", h.importance_level, remedy
    if h.importance_correction == "geometric_mask" and h.importance_level == "token":
        yield (
            "importance_level",
            h.importance_level,
            'must be "sequence": geometric_mask looks at whole sequences',
        )
    if (
        h.policy_loss in ("gmpo", "rspo")
        and h.importance_correction in ("tis", "mis")
        and h.importance_level == "token"
    ):
        yield (
            "importance_level",
            h.importance_level,
            'must be "sequence": gmpo and rspo have one factor per sequence',
        )


def _importance_high(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 < h.importance_high < math.inf and (
        h.policy_loss == "minirl" or h.importance_correction != "none"
    ):
        yield "importance_high", h.importance_high, "must be above 0"


def _importance_low(h: Hyperparameters) -> Iterator[Refusal]:
    if (
        h.importance_correction in ("icepop", "geometric_mask")
        and not 0 <= h.importance_low < math.inf
    ):
        yield "importance_low", h.importance_low, "must be at least 0"
    if (
        h.importance_correction in ("icepop", "geometric_mask")
        and not h.importance_high > h.importance_low
    ):
        yield "importance_low", h.importance_low, "must be below importance_high"


def _off_policy_delta(h: Hyperparameters) -> Iterator[Refusal]:
    if h.off_policy_delta is not None and not 0 < h.off_policy_delta < math.inf:
        yield "off_policy_delta", h.off_policy_delta, "must be above 0"
    if h.off_policy_delta is not None and h.policy_loss == "ppo":
        yield (
            "off_policy_delta",
            h.off_policy_delta,
            "must be left out: it needs one advantage per sequence, and ppo has one per token",
        )


def _kl_coefficient(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 <= h.kl_coefficient < math.inf:
        yield "kl_coefficient", h.kl_coefficient, "must be at least 0"


def _kl_estimator(h: Hyperparameters) -> Iterator[Refusal]:
    if h.kl_coefficient > 0 and h.kl_estimator == "k1" and h.policy_loss != "ppo":
        remedy = (
            'must be "k2", "k3" or "k3_plus": k1 is subtracted from the reward of each token, '
            "which only ppo has, and as a loss term its expected gradient is zero"
        )
        yield "kl_estimator", h.kl_estimator, remedy


def _kl_unbiased(h: Hyperparameters) -> Iterator[Refusal]:
    if h.kl_coefficient > 0 and h.kl_unbiased and h.kl_estimator != "k3":
        yield (
            "kl_unbiased",
            h.kl_unbiased,
            'must be false, unless kl_estimator is "k3": the ratio makes its gradient unbiased',
        )


def _gae_gamma(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "ppo" and not 0 <= h.gae_gamma <= 1:
        yield "gae_gamma", h.gae_gamma, "must be from 0 to 1"


def _gae_lambda(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "ppo" and not 0 <= h.gae_lambda <= 1:
        yield "gae_lambda", h.gae_lambda, "must be from 0 to 1"


def _value_clip(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "ppo" and not 0 < h.value_clip < math.inf:
        yield "value_clip", h.value_clip, "must be above 0"


def _value_coefficient(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "ppo" and not 0 < h.value_coefficient < math.inf:
        yield "value_coefficient", h.value_coefficient, "must be above 0"


def _value_rate(h: Hyperparameters) -> Iterator[Refusal]:
    if h.policy_loss == "ppo" and not 0 < h.value_rate < math.inf:
        yield "value_rate", h.value_rate, "must be above 0"


def _predictor_rate(h: Hyperparameters) -> Iterator[Refusal]:
    if h.routing_replay == "predictive" and not 0 < h.predictor_rate < math.inf:
        yield "predictor_rate", h.predictor_rate, "must be above 0"


def _predictor_tokens(h: Hyperparameters) -> Iterator[Refusal]:
    if h.routing_replay == "predictive" and h.predictor_tokens < 1:
        yield "predictor_tokens", h.predictor_tokens, "must be at least 1"


def _mini_steps(h: Hyperparameters) -> Iterator[Refusal]:
    if h.mini_steps < 1:
        yield "mini_steps", h.mini_steps, "must be at least 1"
    if h.routing_replay == "predictive" and h.mini_steps < 2:
        remedy = (
            'must be at least 2 with routing_replay = "predictive": the predictor learns from the '
            "second mini step on"
        )
        yield "mini_steps", h.mini_steps, remedy


def _micro_batch_tokens(h: Hyperparameters) -> Iterator[Refusal]:
    if h.micro_batch_tokens < 1:
        yield (
            "micro_batch_tokens",
            h.micro_batch_tokens,
            "must be at least 1; a longer sequence is a pass by itself",
        )


def _learning_rate(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 <= h.learning_rate <= 100:
        yield "learning_rate", h.learning_rate, "must be from 0 to 100"


def _betas(h: Hyperparameters) -> Iterator[Refusal]:
    if not all(0 <= part < 1 for part in h.betas):
        yield "betas", h.betas, "must be at least 0 and below 1"


def _adam_eps(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 < h.adam_eps < math.inf:
        yield "adam_eps", h.adam_eps, "must be above 0"


def _weight_decay(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 <= h.weight_decay < math.inf:
        yield "weight_decay", h.weight_decay, "must be at least 0"


def _max_grad_norm(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 < h.max_grad_norm < math.inf:
        yield "max_grad_norm", h.max_grad_norm, "must be above 0"


def _temperature(h: Hyperparameters) -> Iterator[Refusal]:
    if not 0 < h.temperature < math.inf:
        yield "temperature", h.temperature, "must be above 0"


RULES = (
    _aggregation,
    _loss_norm_tokens,
    _router_shift,
    _router_shift_floor,
    _clip_low,
    _clip_high,
    _dual_clip,
    _sapo_tau,
    _importance_correction,
    _importance_level,
    _importance_high,
    _importance_low,
    _off_policy_delta,
    _kl_coefficient,
    _kl_estimator,
    _kl_unbiased,
    _gae_gamma,
    _gae_lambda,
    _value_clip,
    _value_coefficient,
    _value_rate,
    _predictor_rate,
    _predictor_tokens,
    _mini_steps,
    _micro_batch_tokens,
    _learning_rate,
    _betas,
    _adam_eps,
    _weight_decay,
    _max_grad_norm,
    _temperature,
)


def _text(value: object) -> str:
    """A value as the orchestrator writes it: whole numbers without a point, no exponents."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return np.format_float_positional(value, trim="-")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
